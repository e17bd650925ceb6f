#include "sm90/launch.h"

DUALKV_SM90_BACKWARD(128);
