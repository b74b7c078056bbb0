// CudaDevice: the GPU twin of Device. Every step enqueues kernels on one stream of the current CUDA
// device and returns; no step reads anything back. Pointers of a view are device memory, but for
// `tensors` and `chunks`.
#pragma once

#include <vector>

#include "../core/device.h"
#include "runtime.h"

namespace edit_ext::cuda {

// One tensor as kernels know it. A launch carries a few of them; more are in LayerView::table.
struct TableRow {
  void* data;
  int64_t size, offset;  // elements; first element in the flat buffers
  int64_t first_chunk;
  DType dtype;
};
// What LayerView::table has to hold: empty if launches carry the tensors.
std::vector<TableRow> table_of(const LayerView& v);

constexpr int64_t kTableBytes = sizeof(TableRow);
constexpr int kMaxReplicas = 256;  // addresses of their pieces travel with a launch

// Step 5 without the decision: merged and sum [1] from R pieces of n elements wherever they are.
// weights: [R]; partials: one a chunk.
void merge_pieces(const std::vector<const void*>& pieces, Wire wire, const float* weights,
                  int64_t n, float* merged, float* partials, double* sum, cudaStream_t stream);

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(cudaStream_t stream) : stream_(stream) {}

  void pseudo_grad(const LayerView& v) override;
  void record(const LayerView& v, const SyncTag& tag) override;
  void decide(const LayerView& v, const Policy& p) override;
  void merge(const LayerView& v) override;
  void gap(const LayerView& v) override;
  void encode_merged(const LayerView& v) override;
  void outer_step(const LayerView& v, const Policy& p) override;
  void write_back(const LayerView& v) override;

 private:
  cudaStream_t stream_;
};

}  // namespace edit_ext::cuda
