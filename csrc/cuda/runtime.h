// The CUDA runtime: nvcc's, or the emulator that the tests compile these sources with.
#pragma once

#if defined(EDIT_EXT_EMULATED)
#include EDIT_EXT_EMULATED
#else
#include <cuda_runtime.h>
#endif
