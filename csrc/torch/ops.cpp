// The steps of a sync as torch operators, for researchers, tests and benchmarks. Each does what its
// step of sync.h does, on tensors in the flat layout of core/layout.h.
#include <ATen/Functions.h>
#include <torch/library.h>

#include "../core/sync.h"
#include "../cpu/device.h"
#include "check.h"
#include "place.h"
#include "stacked.h"

namespace edit_ext {
namespace {

using at::Tensor;
using OptionalDouble = std::optional<double>;

Tensor pseudo_grad_op(const Tensor& anchor, at::TensorList params, const Tensor& send) {
  const at::Device device = place_of(anchor, "anchor");
  const Layout layout = layout_of(params, "params", device);
  check_flat(anchor, "anchor", device, at::kFloat, layout.size);
  const Wire wire = wire_of(send, "send");
  check_flat(send, "send", device, send.scalar_type(), layout.size);
  const Tensor partials = bytes_on(device, layout.partials(0) * 4);
  const Tensor table = bytes_on(device, table_bytes(layout.tensors.size()));
  const Tensor sum = at::zeros({1}, at::TensorOptions(device).dtype(at::kDouble));
  LayerView v{};
  layout.describe(v);
  v.wire = wire;
  v.anchored = true;
  v.anchor = anchor.data_ptr<float>();
  v.send = send.data_ptr();
  v.partials = as<float>(partials);
  v.table = table.data_ptr();
  v.shard_sums = sum.data_ptr<double>();
  run_on(device, [&](Device& passes) { passes.pseudo_grad(v); });
  written(send);
  return sum;
}

std::tuple<Tensor, Tensor, Tensor> decide_op(const Tensor& norms, const Tensor& steps,
                                             const Tensor& detector, c10::string_view weighting,
                                             double temperature, OptionalDouble z_threshold,
                                             double ema_alpha, int64_t ema_warmup,
                                             int64_t max_flags_in_a_row) {
  const at::Device device = place_of(norms, "norms");
  const int64_t replicas = norms.numel();
  check_flat(norms, "norms", device, at::kDouble, 1);
  check_vector(steps, "steps", device, at::kLong, replicas);
  check_detector(detector, replicas, device);
  const Policy p = make_policy("sgd", 1.0, 0.0, false, std::nullopt, std::string(weighting),
                               temperature, z_threshold, ema_alpha, ema_warmup, max_flags_in_a_row);
  static_assert(sizeof(NormRecord) == 32, "norm2, sync_index, steps, done");
  const Tensor records = zeros_on(device, replicas * 32).view(at::kDouble).view({replicas, 4});
  records.select(1, 0).copy_(at::mul(norms, norms));
  records.view(at::kLong).select(1, 2).copy_(steps);
  const Tensor decided = zeros_on(device, replicas * sizeof(PerReplica));
  const Tensor decision = zeros_on(device, sizeof(Decision));
  const Tensor merged = zeros_on(device, sizeof(MergeRecord));
  LayerView v{};
  v.replicas = static_cast<int32_t>(replicas);
  v.detectors = reinterpret_cast<Detector*>(detector.data_ptr<double>());
  v.records = reinterpret_cast<NormRecord*>(records.data_ptr());
  v.per_replica = as<PerReplica>(decided);
  v.merge_records = as<MergeRecord>(merged);
  v.decision = as<Decision>(decision);
  run_on(device, [&](Device& passes) { passes.decide(v, p); });
  written(detector);
  return {weights_in(decided), flags_in(decided), skip_in(decision)};
}

Tensor merge_op(at::TensorList pieces, const Tensor& weights, const Tensor& merged) {
  TORCH_CHECK_VALUE(!pieces.empty(), "pieces is empty; expected one tensor per replica");
  const at::Device device = place_of(merged, "merged");
  const int64_t n = merged.numel();
  check_flat(merged, "merged", device, at::kFloat, 0);
  check_vector(weights, "weights", device, at::kFloat, static_cast<int64_t>(pieces.size()));
  const Wire wire = wire_of(pieces[0], "pieces[0]");
  std::vector<const void*> from;
  for (size_t r = 0; r < pieces.size(); ++r) {
    const std::string item = "pieces[" + std::to_string(r) + "]";
    check_vector(pieces[r], item, device, pieces[0].scalar_type(), n);
    from.push_back(pieces[r].data_ptr());
  }
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  const Tensor partials = bytes_on(device, chunks * 4);
  const Tensor sum = at::zeros({1}, at::TensorOptions(device).dtype(at::kDouble));
#if defined(EDIT_EXT_CUDA)
  if (on_cuda(device)) {
    const c10::DeviceGuard guard(device);
    cuda::merge_pieces(from, wire, weights.data_ptr<float>(), n, merged.data_ptr<float>(),
                       as<float>(partials), sum.data_ptr<double>(), current_stream(device));
    written(merged);
    return sum;
  }
#endif
  cpu_device().merge_pieces(from, wire, weights.data_ptr<float>(), n, merged.data_ptr<float>(),
                            as<float>(partials), sum.data_ptr<double>());
  written(merged);
  return sum;
}

void outer_step_op(const Tensor& merged, const Tensor& anchor, const Tensor& momentum,
                   const Tensor& norm2, double outer_lr, double outer_momentum, bool nesterov,
                   OptionalDouble clip_norm) {
  const at::Device device = place_of(merged, "merged");
  const int64_t n = merged.numel();
  check_flat(merged, "merged", device, at::kFloat, 0);
  check_vector(anchor, "anchor", device, at::kFloat, n);
  check_vector(momentum, "momentum", device, at::kFloat, n);
  check_vector(norm2, "norm2", device, at::kDouble, 1);
  const Policy p = make_policy("sgd", outer_lr, outer_momentum, nesterov, clip_norm, "uniform", 1.0,
                               std::nullopt, 0.02, 2, 1);
  static_assert(sizeof(MergeRecord) == 16, "norm2, hash");
  const Tensor record = zeros_on(device, sizeof(MergeRecord));
  record.view(at::kDouble).narrow(0, 0, 1).copy_(norm2);
  const Tensor decision = zeros_on(device, sizeof(Decision));
  LayerView v{};
  v.size = v.piece = n;
  v.replicas = v.mesh_ranks = 1;
  v.anchor = anchor.data_ptr<float>();
  v.momentum = momentum.data_ptr<float>();
  v.merged = merged.data_ptr<float>();
  v.merge_records = as<MergeRecord>(record);
  v.decision = as<Decision>(decision);
  run_on(device, [&](Device& passes) { passes.outer_step(v, p); });
  written(anchor);
  written(momentum);
}

void write_back_op(const Tensor& anchor, at::TensorList params) {
  const at::Device device = place_of(anchor, "anchor");
  const Layout layout = layout_of(params, "params", device);
  check_flat(anchor, "anchor", device, at::kFloat, layout.size);
  for (size_t i = 0; i < params.size(); ++i) {
    check_written(params[i], "params[" + std::to_string(i) + "]");
  }
  const Tensor table = bytes_on(device, table_bytes(layout.tensors.size()));
  LayerView v{};
  layout.describe(v);
  v.anchored = true;
  v.anchor = anchor.data_ptr<float>();
  v.table = table.data_ptr();
  run_on(device, [&](Device& passes) { passes.write_back(v); });
  for (const Tensor& t : params) written(t);
}

Tensor stream(int64_t kind, const Tensor& a, const Tensor& b, const Tensor& out) {
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 2, "kind is ", kind,
                    "; expected 0 (copy), 1 (triad) or "
                    "2 (read)");
  const int64_t n = a.numel();
  check_flat(a, "a", at::kCPU, at::kFloat, 0);
  check_flat(b, "b", at::kCPU, at::kFloat, n);
  check_flat(out, "out", at::kCPU, at::kFloat, n);
  std::vector<float> partials((n + kChunk - 1) / kChunk);
  const cpu::CpuDevice& dev = cpu_device();
  dev.for_flat(n, [&](int64_t i, int64_t at, int size) {
    partials[i] = dev.table().stream(static_cast<int>(kind), size, a.data_ptr<float>() + at,
                                     b.data_ptr<float>() + at, out.data_ptr<float>() + at);
  });
  written(out);
  return at::full({1}, cpu::total(partials.data(), static_cast<int64_t>(partials.size())),
                  at::kDouble);
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

// One implementation: each asks its tensors where they are.
void implement(torch::Library& m) {
  m.impl("pseudo_grad", pseudo_grad_op);
  m.impl("decide", decide_op);
  m.impl("merge", merge_op);
  m.impl("outer_step", outer_step_op);
  m.impl("write_back", write_back_op);
  m.impl("stacked_outer_step", stacked_outer_step);
}

TORCH_LIBRARY_IMPL(edit_ext, CPU, m) {
  implement(m);
  m.impl("stream", stream);
}

// Also without a CUDA part: then place_of() says what to do.
TORCH_LIBRARY_IMPL(edit_ext, CUDA, m) { implement(m); }

}  // namespace edit_ext
