#include "stacked.h"

#include <ATen/Functions.h>

#include "../cpu/stacked.h"
#include "check.h"
#include "place.h"
#if defined(EDIT_EXT_CUDA)
#include "../cuda/stacked.h"
#endif

namespace edit_ext {
namespace {

using at::Tensor;

// The R equal replicas, checked, as one list of tensors with R addresses each.
struct Stack {
  std::vector<StackedTensor> tensors;
  int64_t size = 0, chunks = 0, runs = 0;  // of the flat buffers

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
    const Layout layout = layout_of(params, "params", params[0].device());
    for (int64_t i = 0; i < each; ++i) {
      StackedTensor t{{}, params[i].numel(), size, chunks, runs};
      for (int64_t r = 0; r < count; ++r) {
        t.data[r] = static_cast<float*>(layout.tensors[r * each + i].data);
      }
      size += round_up(t.size, kGroup);
      chunks += (t.size + kChunk - 1) / kChunk;
      runs += runs_of(t.size);
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
  const at::Device device = place_of(params[0], "params[0]");
  check_flat(anchor, "anchor", device, at::kFloat, stack.size);
  check_flat(momentum, "momentum", device, at::kFloat, stack.size);
  check_detector(detector, replicas, device);
  for (size_t i = 0; i < params.size(); ++i) {
    check_written(params[i], "params[" + std::to_string(i) + "]");
  }
  const Policy p =
      make_policy("sgd", outer_lr, outer_momentum, nesterov, clip_norm, std::string(weighting),
                  temperature, z_threshold, ema_alpha, ema_warmup, max_flags_in_a_row);
  const int count = static_cast<int>(replicas);
  const Tensor partials = bytes_on(device, stack.chunks * pairs_of(count) * 4);
  const Tensor decided = zeros_on(device, replicas * sizeof(PerReplica));
  const Tensor decision = zeros_on(device, sizeof(Decision));
  const Tensor merged2 = zeros_on(device, 16);  // and, behind it, the counter `arrived`
  const Tensor weights = at::empty({replicas}, at::TensorOptions(device).dtype(at::kFloat));
  StackedView v{count,
                stack.chunks,
                anchor.data_ptr<float>(),
                momentum.data_ptr<float>(),
                reinterpret_cast<Detector*>(detector.data_ptr<double>()),
                as<float>(partials),
                nullptr,
                as<uint32_t>(merged2) + 2,
                as<PerReplica>(decided),
                weights.data_ptr<float>(),
                as<double>(merged2),
                as<Decision>(decision)};
#if defined(EDIT_EXT_CUDA)
  if (on_cuda(device)) {
    const c10::DeviceGuard guard(device);
    const Tensor table = bytes_on(device, stack.tensors.size() * sizeof(StackedTensor));
    const cuda::OnChip plan = cuda::on_chip(stack.tensors, count);
    const Tensor run_sums = bytes_on(device, plan.runs * pairs_of(count) * 4);
    v.run_sums = as<float>(run_sums);
    cuda::stacked_sync(stack.tensors, table.data_ptr(), v, plan, p, current_stream(device));
  } else {
    cpu::stacked_sync(cpu_device(), stack.tensors, v, p);
  }
#else
  cpu::stacked_sync(cpu_device(), stack.tensors, v, p);
#endif
  written(anchor);
  written(momentum);
  written(detector);
  for (const Tensor& t : params) written(t);
  return {norms_in(decided), weights, flags_in(decided), scalars_in(decision)};
}

}  // namespace edit_ext
