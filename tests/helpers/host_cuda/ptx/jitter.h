// csrc/ptx/jitter.h on the host, where all threads are late at times.
#pragma once
