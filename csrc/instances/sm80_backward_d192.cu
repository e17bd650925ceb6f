#include "sm80/launch.h"

DUALKV_SM80_BACKWARD(192);
