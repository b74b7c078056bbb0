#include "stacked.h"

#include <ATen/Functions.h>

#include "../core/stacked.h"
#include "check.h"
#include "policy.h"

namespace edit_ext {
namespace {

using at::Tensor;

// The R layouts of R equal replicas, seen as one list of chunks with R addresses each.
struct Stack {
  std::vector<Layout> replicas;

  Stack(at::TensorList params, int64_t count) {
    TORCH_CHECK_VALUE(count >= 1 && count <= kMaxStacked, "replicas is ", count, "; expected 1 to ",
                      kMaxStacked);
    const auto total = static_cast<int64_t>(params.size());
    TORCH_CHECK_VALUE(total > 0 && total % count == 0, "params has ", total,
                      " tensors; expected the same number for each of ", count, " replicas");
    const int64_t each = total / count;
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < each; ++i) {
        const Tensor &t = params[r * each + i], &first = params[i];
        const std::string item = "params[" + std::to_string(r * each + i) + "]";
        TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, item, " has dtype ", t.scalar_type(),
                         "; expected float32");
        TORCH_CHECK_VALUE(t.sizes() == first.sizes() && t.strides() == first.strides(), item,
                          " has shape ", t.sizes(), " and strides ", t.strides(),
                          "; expected those of replica 0, ", first.sizes(), " and ",
                          first.strides());
      }
      replicas.push_back(layout_of(params.slice(r * each, each), "params"));
    }
  }

  int count() const { return static_cast<int>(replicas.size()); }
  const Layout& first() const { return replicas[0]; }

  // body(chunk index, flat offset, elements, addresses of the R replicas)
  template <class Body>
  void for_chunks(const Body& body) const {
    const auto n = static_cast<int64_t>(first().chunks.size());
    cpu_device().for_each(n, [&](int64_t i) {
      const Chunk& c = first().chunks[i];
      float* at[kMaxStacked];
      for (int r = 0; r < count(); ++r) {
        at[r] = static_cast<float*>(replicas[r].tensors[c.tensor].data) + c.start;
      }
      body(i, first().tensors[c.tensor].offset + c.start, c.size, at);
    });
  }
};

// G[i][k] = <g_i, g_k>, i <= k, row by row, in fp64 from fp32 sums of chunks.
std::vector<double> gram_of(const Stack& stack, const float* anchor) {
  const int pairs = stack.count() * (stack.count() + 1) / 2;
  std::vector<float> partials(stack.first().chunks.size() * pairs);
  stack.for_chunks([&](int64_t i, int64_t flat, int n, float* const* at) {
    cpu_device().table().gram(n, stack.count(), anchor + flat, at, &partials[i * pairs]);
  });
  std::vector<double> sums;
  for (int p = 0; p < pairs; ++p) {
    sums.push_back(cpu::total(&partials[p], static_cast<int64_t>(partials.size()) / pairs, pairs));
  }
  return sums;
}

// The exact pass behind that guard.
double exact_norm2(const Stack& stack, const float* anchor, const float* weights) {
  std::vector<float> partials(stack.first().chunks.size());
  stack.for_chunks([&](int64_t i, int64_t flat, int n, float* const* at) {
    partials[i] = cpu_device().table().stacked_norm(n, stack.count(), weights, anchor + flat, at);
  });
  return cpu::total(partials.data(), static_cast<int64_t>(partials.size()));
}

void return_to_anchor(const Stack& stack, float* anchor) {
  stack.for_chunks([&](int64_t, int64_t flat, int n, float* const* at) {
    for (int r = 0; r < stack.count(); ++r) {
      cpu_device().table().write_back(n, anchor + flat, Wire::f32, nullptr, DType::f32, at[r],
                                      false);
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> stacked_outer_step(
    at::TensorList params, int64_t replicas, const Tensor& anchor, const Tensor& momentum,
    const Tensor& detector, double outer_lr, double outer_momentum, bool nesterov,
    std::optional<double> clip_norm, c10::string_view weighting, double temperature,
    std::optional<double> z_threshold, double ema_alpha, int64_t ema_warmup,
    int64_t max_flags_in_a_row) {
  const Stack stack(params, replicas);
  check_flat(anchor, "anchor", at::kFloat, stack.first().size);
  check_flat(momentum, "momentum", at::kFloat, stack.first().size);
  check_detector(detector, replicas);
  const Policy p =
      make_policy("sgd", outer_lr, outer_momentum, nesterov, clip_norm, std::string(weighting),
                  temperature, z_threshold, ema_alpha, ema_warmup, max_flags_in_a_row);
  float* const base = anchor.data_ptr<float>();
  const std::vector<double> gram = gram_of(stack, base);
  std::vector<PerReplica> decided(replicas);
  Decision d{};
  decide_stacked(p, stack.count(), gram.data(),
                 reinterpret_cast<Detector*>(detector.data_ptr<double>()), decided.data(), d);
  const Tensor weights = weights_of(decided);
  MergeRecord merged{merged_norm2(gram.data(), stack.count(), decided.data()), d.hash};
  if (merged.norm2 < 0.0) merged.norm2 = exact_norm2(stack, base, weights.data_ptr<float>());
  decide_clip(p, 1, &merged, d);
  if (d.skip) {
    return_to_anchor(stack, base);
  } else {
    const bool stream = cpu::streams(stack.first().size);
    stack.for_chunks([&](int64_t, int64_t flat, int n, float* const* at) {
      cpu_device().table().stacked_step(n, stack.count(), outer_numbers(p, d.clip),
                                        weights.data_ptr<float>(), base + flat,
                                        momentum.data_ptr<float>() + flat, at, stream);
    });
  }
  Tensor norms = at::empty({replicas}, at::kDouble), scalars = at::empty({3}, at::kDouble);
  for (int r = 0; r < stack.count(); ++r) norms.data_ptr<double>()[r] = decided[r].norm;
  const double numbers[3] = {d.merged_norm, d.clip, static_cast<double>(d.skip)};
  std::copy(numbers, numbers + 3, scalars.data_ptr<double>());
  return {norms, weights, flags_of(decided), scalars};
}

}  // namespace edit_ext
