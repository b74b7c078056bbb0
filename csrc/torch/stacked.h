// All replicas on one device: one sync in two passes over memory, no communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace edit_ext {

// params: replicas x tensors, replica by replica, fp32 and dense; anchor, momentum: flat fp32 in
// the layout of core/layout.h; detector: fp64 [replicas, 5].
// Returns norms fp64 [R], weights fp32 [R], flags bool [R], and fp64 {merged norm, clip, skip}.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> stacked_outer_step(
    at::TensorList params, int64_t replicas, const at::Tensor& anchor, const at::Tensor& momentum,
    const at::Tensor& detector, double outer_lr, double outer_momentum, bool nesterov,
    std::optional<double> clip_norm, c10::string_view weighting, double temperature,
    std::optional<double> z_threshold, double ema_alpha, int64_t ema_warmup,
    int64_t max_flags_in_a_row);

}  // namespace edit_ext
