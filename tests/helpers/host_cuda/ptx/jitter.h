// SPDX-License-Identifier: BSD-3-Clause
// csrc/ptx/jitter.h on the host, where all threads are late at times.
#pragma once
