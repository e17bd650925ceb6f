// SPDX-License-Identifier: BSD-3-Clause
#include "sm80/launch.h"

DUALKV_SM80_DECODE(64);
