#include "stacked.h"

#include <algorithm>

namespace edit_ext::cpu {
namespace {

// body(chunk, flat offset, elements, addresses of the R replicas)
template <class Body>
void for_chunks(const CpuDevice& device, const std::vector<StackedTensor>& tensors,
                const StackedView& v, const Body& body) {
  device.for_each(v.num_chunks, [&](int64_t i) {
    const auto after =
        std::upper_bound(tensors.begin(), tensors.end(), i,
                         [](int64_t at, const StackedTensor& t) { return at < t.first_chunk; });
    const StackedTensor& t = *(after - 1);
    const int64_t start = (i - t.first_chunk) * kChunk;
    float* at[kMaxStacked];
    for (int r = 0; r < v.replicas; ++r) at[r] = t.data[r] + start;
    body(i, t.offset + start, static_cast<int>(std::min<int64_t>(kChunk, t.size - start)), at);
  });
}

}  // namespace

void stacked_sync(const CpuDevice& device, const std::vector<StackedTensor>& tensors,
                  const StackedView& v, const Policy& p) {
  const Kernels& table = device.table();
  const int pairs = pairs_of(v.replicas);
  for_chunks(device, tensors, v, [&](int64_t i, int64_t flat, int n, float* const* at) {
    table.gram(n, v.replicas, v.anchor + flat, at, v.partials + i * pairs);
  });
  double gram[kMaxPairs];
  for (int i = 0; i < pairs; ++i) gram[i] = total(v.partials + i, v.num_chunks, pairs);
  decide_stacked(p, v.replicas, gram, v.detectors, v.per_replica, *v.decision);
  for (int r = 0; r < v.replicas; ++r) v.weights[r] = v.per_replica[r].weight;
  *v.merged2 = merged_norm2(gram, v.replicas, v.per_replica);
  double norm2 = *v.merged2;
  if (norm2 < 0.0) {
    for_chunks(device, tensors, v, [&](int64_t i, int64_t flat, int n, float* const* at) {
      v.partials[i] = table.stacked_norm(n, v.replicas, v.weights, v.anchor + flat, at);
    });
    norm2 = total(v.partials, v.num_chunks);
  }
  clip_stacked(p, norm2, *v.decision);
  const int64_t elements = tensors.empty() ? 0 : tensors.back().offset + tensors.back().size;
  const bool stream = streams(elements), skip = v.decision->skip != 0;
  const OuterStep numbers = outer_numbers(p, *v.decision);
  for_chunks(device, tensors, v, [&](int64_t, int64_t flat, int n, float* const* at) {
    if (!skip) {
      table.stacked_step(n, v.replicas, numbers, v.weights, v.anchor + flat, v.momentum + flat, at,
                         stream);
      return;
    }
    for (int r = 0; r < v.replicas; ++r) {  // back to the anchor
      table.write_back(n, v.anchor + flat, Wire::f32, nullptr, 0.0f, DType::f32, at[r], stream);
    }
  });
}

}  // namespace edit_ext::cpu
