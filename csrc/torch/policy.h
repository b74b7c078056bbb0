// A checked Policy from the names and numbers that Python uses, and what decisions look like there.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "../core/policy.h"
#include "../cpu/device.h"

namespace edit_ext {

// None (nullopt) switches clipping or the z-test off. Throws ValueError naming the field.
Policy make_policy(const std::string& outer, double outer_lr, double outer_momentum, bool nesterov,
                   std::optional<double> clip_norm, const std::string& weighting,
                   double temperature, std::optional<double> z_threshold, double ema_alpha,
                   int64_t ema_warmup, int64_t max_flags_in_a_row, int64_t min_steps = 0,
                   std::optional<double> clip_value = std::nullopt, double staleness = 1.0,
                   std::optional<double> gap_scale = std::nullopt);

void check_detector(const at::Tensor& detector, int64_t replicas, at::Device device);

// The CPU on the calling thread with torch's own threads.
cpu::CpuDevice& cpu_device();

}  // namespace edit_ext
