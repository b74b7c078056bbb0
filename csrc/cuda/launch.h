// How a kernel is launched: through a function, with every status looked at.
#pragma once

#include <stdexcept>
#include <string>

#include "runtime.h"

namespace edit_ext::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// What the kernel declares decides, so that an argument is converted as in any call.
template <class T>
struct Same {
  using type = T;
};

template <class... Parameters>
void launch(const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads,
            cudaStream_t stream, typename Same<Parameters>::type... arguments) {
  if (blocks == 0) return;
  const dim3 grid(static_cast<unsigned>(blocks)), block(static_cast<unsigned>(threads));
#if defined(EDIT_EXT_EMULATED)
  (void)name;
  emu::enqueue(stream, [=] { emu::launch(kernel, grid, block, arguments...); });
#else
  void* pointers[] = {&arguments...};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers, 0, stream),
        name);
#endif
}

// All blocks at a time, with `shared` bytes each, on a device that can. `largest`, the same in
// every launch of this kernel on one device, is what the kernel may be given: threads may launch it
// with different lengths at a time, and the permission is the kernel's.
template <class... Parameters>
void launch_cooperative(const char* name, void (*kernel)(Parameters...), int blocks, int threads,
                        int shared, int largest, cudaStream_t stream,
                        typename Same<Parameters>::type... arguments) {
  const dim3 grid(static_cast<unsigned>(blocks)), block(static_cast<unsigned>(threads));
#if defined(EDIT_EXT_EMULATED)
  (void)name, (void)largest;
  emu::enqueue(stream, [=] {
    emu::launch_cooperative(kernel, grid, block, static_cast<size_t>(shared), arguments...);
  });
#else
  const void* function = reinterpret_cast<const void*>(kernel);
  check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, largest),
        "cudaFuncSetAttribute");
  void* pointers[] = {&arguments...};
  check(cudaLaunchCooperativeKernel(function, grid, block, pointers, static_cast<size_t>(shared),
                                    stream),
        name);
#endif
}

// Blocks of a persistent grid: as many as run at a time, and no more than there are chunks.
inline int64_t blocks_for(int64_t chunks) {
  constexpr int kBlocksPerProcessor = 8;  // 2048 threads, all that a Hopper SM holds
  int device = 0, processors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  const int64_t most = static_cast<int64_t>(processors) * kBlocksPerProcessor;
  return chunks < most ? chunks : most;
}

}  // namespace edit_ext::cuda
