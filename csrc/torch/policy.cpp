#include "policy.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

namespace edit_ext {

Policy make_policy(const std::string& outer, double outer_lr, double outer_momentum, bool nesterov,
                   std::optional<double> clip_norm, const std::string& weighting,
                   double temperature, std::optional<double> z_threshold, double ema_alpha,
                   int64_t ema_warmup, int64_t max_flags_in_a_row, int64_t min_steps,
                   std::optional<double> clip_value, double staleness,
                   std::optional<double> gap_scale) {
  Policy p;
  TORCH_CHECK_VALUE(outer == "sgd" || outer == "replace", "outer is '", outer,
                    "'; expected 'sgd' or 'replace'");
  p.outer = outer == "sgd" ? Outer::sgd : Outer::replace;
  if (weighting == "softmax") {
    p.weighting = Weighting::softmax;
  } else if (weighting == "uniform") {
    p.weighting = Weighting::uniform;
  } else {
    TORCH_CHECK_VALUE(weighting == "steps", "weighting is '", weighting,
                      "'; expected 'softmax', 'uniform' or 'steps'");
    p.weighting = Weighting::steps;
  }
  TORCH_CHECK_VALUE(outer_lr > 0.0 && finite(outer_lr), "outer_lr is ", outer_lr,
                    "; expected a number above 0");
  TORCH_CHECK_VALUE(outer_momentum >= 0.0 && outer_momentum < 1.0, "outer_momentum is ",
                    outer_momentum, "; expected a number in [0, 1)");
  TORCH_CHECK_VALUE(!clip_norm || *clip_norm > 0.0, "clip_norm is ", clip_norm.value_or(0),
                    "; expected a number above 0, or None for no clipping");
  TORCH_CHECK_VALUE(temperature > 0.0, "temperature is ", temperature,
                    "; expected a number above 0");
  TORCH_CHECK_VALUE(!z_threshold || *z_threshold > 0.0, "z_threshold is ", z_threshold.value_or(0),
                    "; expected a number above 0, or None for no z-test");
  TORCH_CHECK_VALUE(ema_alpha > 0.0 && ema_alpha < 1.0, "ema_alpha is ", ema_alpha,
                    "; expected a number in (0, 1)");
  TORCH_CHECK_VALUE(ema_warmup >= 2, "ema_warmup is ", ema_warmup,
                    "; expected at least 2 syncs: one norm has no variance");
  TORCH_CHECK_VALUE(max_flags_in_a_row >= 1, "max_flags_in_a_row is ", max_flags_in_a_row,
                    "; expected at least 1");
  TORCH_CHECK_VALUE(min_steps >= 0, "min_steps is ", min_steps, "; expected at least 0");
  for (const auto& [name, given] :
       {std::pair{"clip_value", clip_value}, {"gap_scale", gap_scale}}) {
    TORCH_CHECK_VALUE(!given || (*given > 0.0 && finite(*given)), name, " is ", given.value_or(0),
                      "; expected a number above 0, or None for none");
  }
  TORCH_CHECK_VALUE(staleness >= 1.0 && finite(staleness), "staleness is ", staleness,
                    "; expected a number of at least 1");
  p.outer_lr = outer_lr;
  p.outer_momentum = outer_momentum;
  p.nesterov = nesterov;
  p.clip_norm = clip_norm.value_or(0.0);
  p.temperature = temperature;
  p.z_test = z_threshold.has_value();
  p.z_threshold = z_threshold.value_or(0.0);
  p.ema_alpha = ema_alpha;
  p.ema_warmup = static_cast<int32_t>(ema_warmup);
  p.max_flags_in_a_row = static_cast<int32_t>(max_flags_in_a_row);
  p.min_steps = min_steps;
  p.clip_value = clip_value.value_or(0.0);
  p.staleness = staleness;
  p.gap_scale = gap_scale.value_or(0.0);
  return p;
}

void check_detector(const at::Tensor& detector, int64_t replicas, at::Device device) {
  TORCH_CHECK_VALUE(detector.scalar_type() == at::kDouble && detector.is_contiguous() &&
                        detector.device() == device && detector.dim() == 2 &&
                        detector.size(0) == replicas && detector.size(1) == 5,
                    "detector has shape ", detector.sizes(), " on ", detector.device(),
                    "; expected contiguous fp64 [", replicas, ", 5] on ", device);
}

#ifndef _OPENMP
#error "edit_ext needs OpenMP (-fopenmp): at::parallel_for would run on one thread"
#endif

cpu::CpuDevice& cpu_device() {
  static auto* device = new cpu::CpuDevice([](int64_t n, const cpu::Body& body) {
    at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) { body(begin, end); });
  });
  return *device;
}

}  // namespace edit_ext
