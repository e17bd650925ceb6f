#include "sm90/launch.h"

DUALKV_SM90_BACKWARD(__half, 512);
