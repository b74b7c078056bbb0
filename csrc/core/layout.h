// Layout: how the tensors of a layer lie in its flat buffers and are cut into chunks.
#pragma once

#include <vector>

#include "layer.h"

namespace edit_ext {

struct Layout {
  std::vector<TensorView> tensors;
  std::vector<Chunk> chunks;
  int64_t size = 0;      // elements of the flat buffers
  int64_t counted = -1;  // those that count in norms; -1: all
  int64_t counted_chunks = -1;

  // Appends a tensor behind the ones already there, at the next multiple of kGroup.
  void add(void* data, int64_t elements, DType dtype) {
    const auto index = static_cast<int32_t>(tensors.size());
    tensors.push_back({data, elements, size, dtype});
    size += round_up(elements, kGroup);
    for (int64_t start = 0; start < elements; start += kChunk) {
      const int64_t left = elements - start;
      chunks.push_back({index, static_cast<int32_t>(left < kChunk ? left : kChunk), start});
    }
  }

  // What is added from now on counts with another rank of the replica.
  void stop_counting() {
    counted = size;
    counted_chunks = static_cast<int64_t>(chunks.size());
  }

  // One fp32 sum per chunk of the tensors, or of a piece, whichever are more.
  int64_t partials(int64_t piece) const {
    const int64_t of_piece = (piece + kChunk - 1) / kChunk;
    const auto of_tensors = static_cast<int64_t>(chunks.size());
    return of_piece > of_tensors ? of_piece : of_tensors;
  }

  // Fills the part of a view that describes the tensors.
  void describe(LayerView& v) const {
    v.tensors = tensors.data();
    v.num_tensors = static_cast<int32_t>(tensors.size());
    v.chunks = chunks.data();
    v.num_chunks = static_cast<int64_t>(chunks.size());
    v.size = size;
    v.counted = counted < 0 ? size : counted;
    v.counted_chunks = counted < 0 ? v.num_chunks : counted_chunks;
  }
};

}  // namespace edit_ext
