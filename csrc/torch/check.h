// The checked door: whatever comes from Python is looked at here, once. Behind it, code trusts its
// arguments. Messages name the argument, the value, and what was expected.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "../core/layout.h"

namespace edit_ext {

inline DType dtype_of(const at::Tensor& t, const std::string& name) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      TORCH_CHECK_TYPE(false, name, " has dtype ", t.scalar_type(),
                       "; expected float32, bfloat16 or float16");
  }
}

inline void check_on(const at::Tensor& t, const std::string& name, at::Device device) {
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, name, " has layout ", t.layout(),
                    "; expected a strided (dense) tensor");
  TORCH_CHECK_VALUE(t.device() == device, name, " is on ", t.device(), "; expected ", device);
}

// A flat buffer of ours: contiguous, one-dimensional, of the given dtype and at least `least`
// elements.
inline void check_flat(const at::Tensor& t, const std::string& name, at::Device device,
                       at::ScalarType dtype, int64_t least) {
  check_on(t, name, device);
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, name, " has dtype ", t.scalar_type(), "; expected ",
                   dtype);
  TORCH_CHECK_VALUE(t.dim() == 1 && t.is_contiguous(), name, " has shape ", t.sizes(),
                    " and strides ", t.strides(), "; expected a contiguous vector");
  TORCH_CHECK_VALUE(!t.requires_grad(), name, " requires grad; expected a plain buffer");
  TORCH_CHECK_VALUE(t.numel() >= least, name, " has ", t.numel(), " elements; expected at least ",
                    least);
}

// The same of exactly `n` elements.
inline void check_vector(const at::Tensor& t, const std::string& name, at::Device device,
                         at::ScalarType dtype, int64_t n) {
  check_flat(t, name, device, dtype, n);
  TORCH_CHECK_VALUE(t.numel() == n, name, " has ", t.numel(), " elements; expected ", n);
}

// A parameter that the call is going to write: only where autograd is not looking.
inline void check_written(const at::Tensor& t, const std::string& name) {
  TORCH_CHECK_VALUE(!(t.requires_grad() && c10::GradMode::is_enabled()), name,
                    " requires grad; write to it inside torch.no_grad()");
}

// What was written behind torch's back: a graph that has saved it must notice.
inline void written(const at::Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

inline Wire wire_of(const at::Tensor& t, const std::string& name) {
  const DType type = dtype_of(t, name);
  TORCH_CHECK_TYPE(type != DType::f16, name,
                   " has dtype Half; wire formats are float32 and "
                   "bfloat16");
  return type == DType::f32 ? Wire::f32 : Wire::bf16;
}

// Parameters whose memory can be walked in order: no gaps, no overlaps.
inline Layout layout_of(at::TensorList params, const std::string& name, at::Device device) {
  Layout layout;
  for (size_t i = 0; i < params.size(); ++i) {
    const std::string item = name + "[" + std::to_string(i) + "]";
    check_on(params[i], item, device);
    const DType type = dtype_of(params[i], item);
    TORCH_CHECK_VALUE(params[i].is_non_overlapping_and_dense(), item, " has strides ",
                      params[i].strides(), "; expected dense storage without gaps");
    layout.add(params[i].data_ptr(), params[i].numel(), type);
  }
  return layout;
}

}  // namespace edit_ext
