// What a cooperative launch adds: a barrier of the whole grid, and shared memory as long as asked.
#pragma once

#include <cstdint>

#include "runtime.h"

namespace edit_ext::cuda {

inline __device__ char* dynamic_shared() {
#if defined(EDIT_EXT_EMULATED)
  return emu::machine.dynamic;
#else
  extern __shared__ float4 dynamic_memory[];
  return reinterpret_cast<char*>(dynamic_memory);
#endif
}

// All blocks of the grid run at a time, so one may wait for the others. The counter is zero at the
// launch and only grows, so that nobody has to set it back between two barriers.
struct GridBarrier {
  uint32_t* arrived;
  uint32_t expected;  // 0 before the first barrier

  // What any thread has written before is seen by all threads afterwards.
  __device__ void wait() {
    __syncthreads();
    expected += gridDim.x;
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(arrived, 1u);
      while (*static_cast<volatile uint32_t*>(arrived) < expected) __nanosleep(32);
      __threadfence();
    }
    __syncthreads();
  }
};

}  // namespace edit_ext::cuda
