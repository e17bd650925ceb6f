// SPDX-License-Identifier: BSD-3-Clause
#include "decode/sm90_launch.h"

DUALKV_SM90_DECODE(576, 512);
