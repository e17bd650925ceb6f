#include "sm90/launch.h"

DUALKV_SM90_BACKWARD(__nv_bfloat16, 512);
