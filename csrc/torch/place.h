// Where an operator or a layer computes: the CPU, or a CUDA device on torch's current stream.
#pragma once

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

#include "policy.h"
#if defined(EDIT_EXT_CUDA)
#if !defined(EDIT_EXT_EMULATED)
#include <c10/cuda/CUDAStream.h>
#endif

#include "../cuda/device.h"
#endif

namespace edit_ext {

#if defined(EDIT_EXT_EMULATED)
// The tests' build: the CUDA part under the emulator, on the memory of the CPU.
inline bool on_cuda(at::Device) { return true; }
inline cudaStream_t current_stream(at::Device) { return emu::current_stream; }
inline at::Tensor emulated_bytes(int64_t n, bool pinned) {
  void* const at = emu::memory().lend(static_cast<size_t>(n), pinned);
  return at::from_blob(at, {n}, [](void* p) { emu::memory().reclaim(p); }, at::kByte);
}
#elif defined(EDIT_EXT_CUDA)
inline bool on_cuda(at::Device device) { return device.is_cuda(); }
inline cudaStream_t current_stream(at::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}
#else
inline bool on_cuda(at::Device) { return false; }
#endif

// The device that all tensors of a call must be on, from one of them.
inline at::Device place_of(const at::Tensor& t, const std::string& name) {
  const at::Device device = t.device();
  TORCH_CHECK_VALUE(device.is_cpu() || on_cuda(device), name, " is on ", device,
                    ", and the CUDA part of edit_ext is ", EDIT_EXT_CUDA_REASON,
                    "; build it with: EDIT_EXT_CUDA=1 pip install --no-build-isolation .");
  return device;
}

// f(Device&) where the memory is: at once on the CPU, enqueued on the current stream of a GPU.
template <class F>
void run_on(at::Device device, F f) {
#if defined(EDIT_EXT_CUDA)
  if (on_cuda(device)) {
    const c10::DeviceGuard guard(device);
    cuda::CudaDevice passes(current_stream(device));
    f(static_cast<Device&>(passes));
    return;
  }
#endif
  (void)device;
  f(static_cast<Device&>(cpu_device()));
}

// Working memory and scalars there; zeros, where a struct must begin as zeros.
inline at::Tensor bytes_on(at::Device device, int64_t n) {
#if defined(EDIT_EXT_EMULATED)
  (void)device;
  return emulated_bytes(n, false);
#else
  return at::empty({n}, at::TensorOptions(device).dtype(at::kByte));
#endif
}
inline at::Tensor zeros_on(at::Device device, int64_t n) { return bytes_on(device, n).zero_(); }

// Memory of the host that a GPU copies to and from without stopping anybody.
inline at::Tensor pinned_bytes(int64_t n) {
#if defined(EDIT_EXT_EMULATED)
  return emulated_bytes(n, true);
#elif defined(EDIT_EXT_CUDA)
  return at::empty({n}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
#else
  return at::empty({n}, at::kByte);
#endif
}

inline at::Tensor pinned_zeros(int64_t floats) {
  return pinned_bytes(floats * 4).zero_().view(at::kFloat);
}

// Copies from pinned memory when the current stream gets there.
inline void copy_up(const at::Tensor& to, const at::Tensor& pinned) {
#if defined(EDIT_EXT_EMULATED)
  cudaMemcpyAsync(to.data_ptr(), pinned.data_ptr(), pinned.nbytes(), cudaMemcpyHostToDevice,
                  current_stream(to.device()));
#else
  to.copy_(pinned, /*non_blocking=*/true);
#endif
}

// Copies to pinned memory when the current stream gets there.
inline void copy_down(const at::Tensor& pinned, const at::Tensor& from) {
#if defined(EDIT_EXT_EMULATED)
  // torch's own copy would run at once, before what the stream still has to do.
  cudaMemcpyAsync(pinned.data_ptr(), from.data_ptr(), from.nbytes(), cudaMemcpyDeviceToHost,
                  current_stream(from.device()));
#else
  pinned.copy_(from, /*non_blocking=*/true);
#endif
}

// Bytes of the table of tensors that a kernel may want.
inline int64_t table_bytes([[maybe_unused]] size_t tensors) {
#if defined(EDIT_EXT_CUDA)
  return static_cast<int64_t>(tensors) * cuda::kTableBytes;
#else
  return 0;
#endif
}

template <class T>
T* as(const at::Tensor& bytes) {
  return reinterpret_cast<T*>(bytes.data_ptr());
}

// Views of decided scalars where they lie: nothing is read back.
inline at::Tensor per_replica_field(const at::Tensor& decided, at::ScalarType type, size_t offset) {
  const auto words = static_cast<int64_t>(sizeof(PerReplica) / elementSize(type));
  return decided.view(type)
      .view({-1, words})
      .select(1, static_cast<int64_t>(offset / elementSize(type)));
}
inline at::Tensor weights_in(const at::Tensor& decided) {
  return per_replica_field(decided, at::kFloat, offsetof(PerReplica, weight)).clone();
}
inline at::Tensor flags_in(const at::Tensor& decided) {
  return per_replica_field(decided, at::kInt, offsetof(PerReplica, flagged)).ne(0);
}
inline at::Tensor norms_in(const at::Tensor& decided) {
  return per_replica_field(decided, at::kDouble, offsetof(PerReplica, norm)).clone();
}
inline at::Tensor skip_in(const at::Tensor& decision) {
  return decision.view(at::kInt).narrow(0, offsetof(Decision, skip) / 4, 1).ne(0);
}
// fp64 {merged norm, clip, skip}
inline at::Tensor scalars_in(const at::Tensor& decision) {
  const at::Tensor numbers = decision.view(at::kDouble);
  return at::cat({numbers.narrow(0, offsetof(Decision, merged_norm) / 8, 1),
                  numbers.narrow(0, offsetof(Decision, clip) / 8, 1),
                  skip_in(decision).to(at::kDouble)});
}

}  // namespace edit_ext
