// SPDX-License-Identifier: BSD-3-Clause
#include "decode/sm80_launch.h"

DUALKV_SM80_DECODE(576, 512);
