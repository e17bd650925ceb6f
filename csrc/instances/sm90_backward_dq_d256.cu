#include "sm90/launch.h"

DUALKV_SM90_BACKWARD_DQ(256);
