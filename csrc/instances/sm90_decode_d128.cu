// SPDX-License-Identifier: BSD-3-Clause
#include "sm90/launch.h"

DUALKV_SM90_DECODE(128);
