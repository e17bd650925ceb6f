#include "sm80/launch.h"

DUALKV_SM80_BACKWARD_DQ(64, __nv_bfloat16);
