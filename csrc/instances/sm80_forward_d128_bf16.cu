#include "sm80/launch.h"

DUALKV_SM80_FORWARD(128, __nv_bfloat16);
