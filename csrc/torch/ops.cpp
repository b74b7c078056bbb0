// The steps of a sync as torch operators, for researchers, tests and benchmarks. Each does what its
// step of sync.h does, on tensors in the flat layout of core/layout.h.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../core/sync.h"
#include "../cpu/device.h"
#include "check.h"
#include "policy.h"
#include "stacked.h"

namespace edit_ext {
namespace {

using at::Tensor;
using OptionalDouble = std::optional<double>;

Tensor scalar(double value) { return at::full({1}, value, at::kDouble); }

Tensor pseudo_grad_op(const Tensor& anchor, at::TensorList params, const Tensor& send) {
  const Layout layout = layout_of(params, "params");
  check_flat(anchor, "anchor", at::kFloat, layout.size);
  const Wire wire = wire_of(send, "send");
  check_flat(send, "send", send.scalar_type(), layout.size);
  std::vector<float> partials(layout.partials(0));
  double sum = 0.0;
  LayerView v{};
  layout.describe(v);
  v.wire = wire;
  v.anchored = true;
  v.anchor = anchor.data_ptr<float>();
  v.send = send.data_ptr();
  v.partials = partials.data();
  v.shard_sums = &sum;
  cpu_device().pseudo_grad(v);
  return scalar(sum);
}

std::tuple<Tensor, Tensor, Tensor> decide_op(const Tensor& norms, const Tensor& steps,
                                             const Tensor& detector, c10::string_view weighting,
                                             double temperature, OptionalDouble z_threshold,
                                             double ema_alpha, int64_t ema_warmup,
                                             int64_t max_flags_in_a_row) {
  const int64_t replicas = norms.numel();
  check_flat(norms, "norms", at::kDouble, 1);
  check_vector(steps, "steps", at::kLong, replicas);
  check_detector(detector, replicas);
  const Policy p = make_policy("sgd", 1.0, 0.0, false, std::nullopt, std::string(weighting),
                               temperature, z_threshold, ema_alpha, ema_warmup, max_flags_in_a_row);
  std::vector<NormRecord> records(replicas);
  for (int64_t r = 0; r < replicas; ++r) {
    const double norm = norms.data_ptr<double>()[r];
    records[r] = {norm * norm, 0, steps.data_ptr<int64_t>()[r], 0};
  }
  std::vector<PerReplica> out(replicas);
  Decision d{};
  decide(p, static_cast<int>(replicas), records.data(),
         reinterpret_cast<Detector*>(detector.data_ptr<double>()), out.data(), d);
  return {weights_of(out), flags_of(out), at::full({1}, d.skip != 0, at::kBool)};
}

Tensor merge_op(at::TensorList pieces, const Tensor& weights, const Tensor& merged) {
  TORCH_CHECK_VALUE(!pieces.empty(), "pieces is empty; expected one tensor per replica");
  const int64_t n = merged.numel();
  check_flat(merged, "merged", at::kFloat, 0);
  check_vector(weights, "weights", at::kFloat, static_cast<int64_t>(pieces.size()));
  const Wire wire = wire_of(pieces[0], "pieces[0]");
  for (size_t r = 0; r < pieces.size(); ++r) {
    check_vector(pieces[r], "pieces[" + std::to_string(r) + "]", pieces[0].scalar_type(), n);
  }
  std::vector<float> partials((n + kChunk - 1) / kChunk);
  const cpu::CpuDevice& dev = cpu_device();
  dev.for_flat(n, [&](int64_t i, int64_t at, int size) {
    std::vector<const void*> from;
    for (const Tensor& t : pieces) {
      from.push_back(static_cast<const char*>(t.data_ptr()) + wire_bytes(wire, at));
    }
    partials[i] = dev.table().merge(size, static_cast<int>(from.size()), wire, from.data(),
                                    weights.data_ptr<float>(), merged.data_ptr<float>() + at,
                                    cpu::streams(n));
  });
  return scalar(cpu::total(partials.data(), static_cast<int64_t>(partials.size())));
}

void outer_step_op(const Tensor& merged, const Tensor& anchor, const Tensor& momentum,
                   const Tensor& norm2, double outer_lr, double outer_momentum, bool nesterov,
                   OptionalDouble clip_norm) {
  const int64_t n = merged.numel();
  check_flat(merged, "merged", at::kFloat, 0);
  check_vector(anchor, "anchor", at::kFloat, n);
  check_vector(momentum, "momentum", at::kFloat, n);
  check_vector(norm2, "norm2", at::kDouble, 1);
  const Policy p = make_policy("sgd", outer_lr, outer_momentum, nesterov, clip_norm, "uniform", 1.0,
                               std::nullopt, 0.02, 2, 1);
  const MergeRecord record{norm2.data_ptr<double>()[0], 0};
  Decision d{};
  decide_clip(p, 1, &record, d);
  if (d.skip) return;
  const OuterStep numbers = outer_numbers(p, d.clip);
  const cpu::CpuDevice& dev = cpu_device();
  dev.for_flat(n, [&](int64_t, int64_t at, int size) {
    dev.table().outer_step(size, numbers, merged.data_ptr<float>() + at,
                           anchor.data_ptr<float>() + at, momentum.data_ptr<float>() + at,
                           Wire::f32, nullptr);
  });
}

void write_back_op(const Tensor& anchor, at::TensorList params) {
  const Layout layout = layout_of(params, "params");
  check_flat(anchor, "anchor", at::kFloat, layout.size);
  Decision d{};
  LayerView v{};
  layout.describe(v);
  v.anchored = true;
  v.anchor = anchor.data_ptr<float>();
  v.decision = &d;
  cpu_device().write_back(v);
}

Tensor stream(int64_t kind, const Tensor& a, const Tensor& b, const Tensor& out) {
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 2, "kind is ", kind,
                    "; expected 0 (copy), 1 (triad) or "
                    "2 (read)");
  const int64_t n = a.numel();
  check_flat(a, "a", at::kFloat, 0);
  check_flat(b, "b", at::kFloat, n);
  check_flat(out, "out", at::kFloat, n);
  std::vector<float> partials((n + kChunk - 1) / kChunk);
  const cpu::CpuDevice& dev = cpu_device();
  dev.for_flat(n, [&](int64_t i, int64_t at, int size) {
    partials[i] = dev.table().stream(static_cast<int>(kind), size, a.data_ptr<float>() + at,
                                     b.data_ptr<float>() + at, out.data_ptr<float>() + at);
  });
  return scalar(cpu::total(partials.data(), static_cast<int64_t>(partials.size())));
}

}  // namespace

TORCH_LIBRARY(edit_ext, m) {
  m.def("pseudo_grad(Tensor anchor, Tensor[] params, Tensor(a!) send) -> Tensor");
  m.def(
      "decide(Tensor norms, Tensor steps, Tensor(a!) detector, *, str weighting, float "
      "temperature, "
      "float? z_threshold, float ema_alpha, int ema_warmup, int max_flags_in_a_row) "
      "-> (Tensor weights, Tensor flags, Tensor skip)");
  m.def("merge(Tensor[] pieces, Tensor weights, Tensor(a!) merged) -> Tensor");
  m.def(
      "outer_step(Tensor merged, Tensor(a!) anchor, Tensor(b!) momentum, Tensor norm2, "
      "float outer_lr, float outer_momentum, bool nesterov, float? clip_norm) -> ()");
  m.def("write_back(Tensor anchor, Tensor(a!)[] params) -> ()");
  m.def(
      "stacked_outer_step(Tensor(a!)[] params, int replicas, Tensor(b!) anchor, "
      "Tensor(c!) momentum, Tensor(d!) detector, *, float outer_lr, float outer_momentum, "
      "bool nesterov, float? clip_norm, str weighting, float temperature, float? z_threshold, "
      "float ema_alpha, int ema_warmup, int max_flags_in_a_row) "
      "-> (Tensor norms, Tensor weights, Tensor flags, Tensor scalars)");
  m.def("stream(int kind, Tensor a, Tensor b, Tensor(a!) out) -> Tensor");
}

TORCH_LIBRARY_IMPL(edit_ext, CPU, m) {
  m.impl("pseudo_grad", pseudo_grad_op);
  m.impl("decide", decide_op);
  m.impl("merge", merge_op);
  m.impl("outer_step", outer_step_op);
  m.impl("write_back", write_back_op);
  m.impl("stacked_outer_step", stacked_outer_step);
  m.impl("stream", stream);
}

}  // namespace edit_ext
