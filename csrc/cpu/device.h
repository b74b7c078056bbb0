// CpuDevice: the CPU twin of Device. Computes at once, on the calling thread and on whatever
// threads the injected parallel_for brings.
#pragma once

#include <functional>
#include <vector>

#include "../core/device.h"
#include "kernels.h"

namespace edit_ext::cpu {

// Calls body(begin, end) so that [0, n) is covered once, in any order, and returns when all is
// done.
using Body = std::function<void(int64_t begin, int64_t end)>;
using ParallelFor = std::function<void(int64_t n, const Body& body)>;

void serial_for(int64_t n, const Body& body);

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(ParallelFor parallel_for = serial_for, const Kernels& table = kernels())
      : parallel_for_(std::move(parallel_for)), kernels_(table) {}

  void pseudo_grad(const LayerView& v) override;
  void record(const LayerView& v, const SyncTag& tag) override;
  void decide(const LayerView& v, const Policy& p) override;
  void merge(const LayerView& v) override;
  void gap(const LayerView& v) override;
  void encode_merged(const LayerView& v) override;
  void outer_step(const LayerView& v, const Policy& p) override;
  void write_back(const LayerView& v) override;

  // Step 5 without the decision: merged and sum [1] from R pieces of n elements wherever they are.
  // weights: [R]; partials: one a chunk.
  void merge_pieces(const std::vector<const void*>& pieces, Wire wire, const float* weights,
                    int64_t n, float* merged, float* partials, double* sum) const;

  // body(i) for i in [0, n), on all threads.
  void for_each(int64_t n, const std::function<void(int64_t)>& body) const;
  // body(chunk, first element, elements) over a flat range.
  void for_flat(int64_t size,
                const std::function<void(int64_t chunk, int64_t at, int n)>& body) const;
  const Kernels& table() const { return kernels_; }

 private:
  void for_chunks(
      const LayerView& v,
      const std::function<void(int64_t index, const Chunk&, const TensorView&)>& body) const;

  ParallelFor parallel_for_;
  const Kernels& kernels_;
};

// Outputs of a layer this large will not be found in a cache again: store past it.
inline bool streams(int64_t elements) { return elements * 4 >= (int64_t{8} << 20); }

// Adds every `stride`-th chunk sum by the tree of core/chunk.h.
double total(const float* partials, int64_t n, int64_t stride = 1);

}  // namespace edit_ext::cpu
