// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#define CUDART_INF_F __builtin_inff()
