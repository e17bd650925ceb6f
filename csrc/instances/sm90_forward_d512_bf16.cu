#include "sm90/launch.h"

DUALKV_SM90_FORWARD(__nv_bfloat16, 512);
