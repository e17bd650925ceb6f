// SPDX-License-Identifier: BSD-3-Clause
// How functions of the C interface end: with a status, and with the text of an error.
#pragma once

#include <stdexcept>
#include <string>

#include "api.h"

namespace dualkv {

// Of the thread's last failure; it outlives the call.
inline std::string& last_error() {
  thread_local std::string text;
  return text;
}

// No exception crosses the interface: it may have been made by another C++ library.
template <class Body>
int guarded(Body body) {
  try {
    body();
    return DUALKV_SUCCESS;
  } catch (const std::invalid_argument& error) {
    last_error() = error.what();
    return DUALKV_INVALID_VALUE;
  } catch (const std::exception& error) {
    last_error() = error.what();
    return DUALKV_FAILURE;
  }
}

}  // namespace dualkv
