#include "stacked.h"

#include <ATen/Functions.h>

#include "../cpu/stacked.h"
#include "check.h"
#include "policy.h"

namespace edit_ext {
namespace {

using at::Tensor;

// The R equal replicas, checked, as one list of tensors with R addresses each.
struct Stack {
  std::vector<StackedTensor> tensors;
  int64_t size = 0, chunks = 0;  // of the flat buffers

  Stack(at::TensorList params, int64_t count) {
    TORCH_CHECK_VALUE(count >= 1 && count <= kMaxStacked, "replicas is ", count, "; expected 1 to ",
                      kMaxStacked);
    const auto total = static_cast<int64_t>(params.size());
    TORCH_CHECK_VALUE(total > 0 && total % count == 0, "params has ", total,
                      " tensors; expected the same number for each of ", count, " replicas");
    const int64_t each = total / count;
    for (int64_t i = 0; i < total; ++i) {
      const Tensor &t = params[i], &first = params[i % each];
      const std::string item = "params[" + std::to_string(i) + "]";
      TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, item, " has dtype ", t.scalar_type(),
                       "; expected float32");
      TORCH_CHECK_VALUE(t.sizes() == first.sizes() && t.strides() == first.strides(), item,
                        " has shape ", t.sizes(), " and strides ", t.strides(),
                        "; expected those of replica 0, ", first.sizes(), " and ", first.strides());
    }
    const Layout layout = layout_of(params, "params");
    for (int64_t i = 0; i < each; ++i) {
      StackedTensor t{{}, params[i].numel(), size, chunks};
      for (int64_t r = 0; r < count; ++r) {
        t.data[r] = static_cast<float*>(layout.tensors[r * each + i].data);
      }
      size += round_up(t.size, kGroup);
      chunks += (t.size + kChunk - 1) / kChunk;
      if (t.size > 0) tensors.push_back(t);
    }
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> stacked_outer_step(
    at::TensorList params, int64_t replicas, const Tensor& anchor, const Tensor& momentum,
    const Tensor& detector, double outer_lr, double outer_momentum, bool nesterov,
    std::optional<double> clip_norm, c10::string_view weighting, double temperature,
    std::optional<double> z_threshold, double ema_alpha, int64_t ema_warmup,
    int64_t max_flags_in_a_row) {
  const Stack stack(params, replicas);
  check_flat(anchor, "anchor", at::kFloat, stack.size);
  check_flat(momentum, "momentum", at::kFloat, stack.size);
  check_detector(detector, replicas);
  const Policy p =
      make_policy("sgd", outer_lr, outer_momentum, nesterov, clip_norm, std::string(weighting),
                  temperature, z_threshold, ema_alpha, ema_warmup, max_flags_in_a_row);
  const int count = static_cast<int>(replicas);
  std::vector<float> partials(stack.chunks * pairs_of(count));
  std::vector<PerReplica> decided(replicas);
  Decision d{};
  double merged2 = 0.0;
  const Tensor weights = at::empty({replicas}, at::kFloat);
  const StackedView v{count,
                      stack.chunks,
                      anchor.data_ptr<float>(),
                      momentum.data_ptr<float>(),
                      reinterpret_cast<Detector*>(detector.data_ptr<double>()),
                      partials.data(),
                      decided.data(),
                      weights.data_ptr<float>(),
                      &merged2,
                      &d};
  cpu::stacked_sync(cpu_device(), stack.tensors, v, p);
  Tensor norms = at::empty({replicas}, at::kDouble), scalars = at::empty({3}, at::kDouble);
  for (int r = 0; r < count; ++r) norms.data_ptr<double>()[r] = decided[r].norm;
  const double numbers[3] = {d.merged_norm, d.clip, static_cast<double>(d.skip)};
  std::copy(numbers, numbers + 3, scalars.data_ptr<double>());
  return {norms, weights, flags_of(decided), scalars};
}

}  // namespace edit_ext
