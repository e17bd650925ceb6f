// SPDX-License-Identifier: BSD-3-Clause
// Which GPUs a build has code for.
#pragma once

#include <sstream>
#include <string>

namespace dualkv {

// `archs`: of the machine code, such as "80;90"; `ptx`: of the embedded PTX; `capability`: the
// GPU's, such as 86. Machine code runs on GPUs of its own generation that are no older, PTX on all
// that are no older.
inline bool is_built_for(int capability, const std::string& archs, const std::string& ptx) {
  std::istringstream words(archs);
  for (std::string arch; std::getline(words, arch, ';');) {
    const int built = std::stoi(arch);
    if (built / 10 == capability / 10 && built <= capability) return true;
  }
  return std::stoi(ptx) <= capability;
}

}  // namespace dualkv
