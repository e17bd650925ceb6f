#include "sm90/launch.h"

DUALKV_SM90_BACKWARD_DQ(__nv_bfloat16, 512);
