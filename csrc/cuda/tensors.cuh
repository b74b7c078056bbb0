// The tensors of a layer as kernels see them: by value in the launch, or as a table on the device.
#pragma once

#include <cstring>
#include <vector>

#include "../core/layer.h"
#include "device.h"
#include "launch.h"

namespace edit_ext::cuda {

using DeviceTensor = TableRow;

// A Transformer block has about ten tensors. A launch copies its arguments whether they are used
// or not, so there is room for a few tensors here and not for as many as would fit.
constexpr int kByValue = 64;

template <class T>
struct TensorsOf {
  const T* table;  // null: `few`
  int64_t num_chunks;
  int32_t count;
  T few[kByValue];
};
using Tensors = TensorsOf<DeviceTensor>;

template <class T>
struct PlaceIn {
  const T* tensor;
  int64_t start;  // first element inside the tensor
  int size;

  EDIT_HD int64_t flat() const { return tensor->offset + start; }
};

// The last tensor that begins at or before chunk (or run) i. Empty tensors have none.
template <class T>
EDIT_HD const T* last_from(const TensorsOf<T>& t, int64_t T::* first, int64_t i) {
  const T* list = t.table ? t.table : t.few;
  int low = 0, high = t.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (list[middle].*first <= i) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return list + low;
}

// Where chunk i lies.
template <class T>
EDIT_HD PlaceIn<T> place(const TensorsOf<T>& t, int64_t i) {
  const T* tensor = last_from(t, &T::first_chunk, i);
  const int64_t start = (i - tensor->first_chunk) * kChunk;
  const int64_t left = tensor->size - start;
  return {tensor, start, static_cast<int>(left < kChunk ? left : kChunk)};
}

// The launch argument for these tensors. More than kByValue of them are copied to `memory` in
// stream order, so that a table in use is never overwritten.
template <class T>
TensorsOf<T> tensors_in(const std::vector<T>& all, int64_t chunks, void* memory,
                        cudaStream_t stream) {
  TensorsOf<T> out{};
  out.num_chunks = chunks;
  out.count = static_cast<int32_t>(all.size());
  if (out.count <= kByValue) {
    for (int i = 0; i < out.count; ++i) out.few[i] = all[i];
    return out;
  }
  // The source is pageable memory: the call returns when it has been read.
  check(cudaMemcpyAsync(memory, all.data(), all.size() * sizeof(T), cudaMemcpyHostToDevice, stream),
        "copying the table of tensors");
  out.table = static_cast<const T*>(memory);
  return out;
}

// Tensors of a view, empty ones left out.
inline std::vector<DeviceTensor> rows_of(const LayerView& v) {
  std::vector<DeviceTensor> all;
  int64_t chunks = 0;
  for (int i = 0; i < v.num_tensors; ++i) {
    const TensorView& t = v.tensors[i];
    if (t.size == 0) continue;
    DeviceTensor& row = all.emplace_back();
    std::memset(static_cast<void*>(&row), 0, sizeof(row));  // its padding: rows are compared
    row = {t.data, t.size, t.offset, chunks, t.dtype};
    chunks += (t.size + kChunk - 1) / kChunk;
  }
  return all;
}

inline Tensors tensors_of(const LayerView& v, cudaStream_t stream) {
  const std::vector<DeviceTensor> rows = rows_of(v);
  if (!v.table_filled) return tensors_in(rows, v.num_chunks, v.table, stream);
  Tensors out{};
  out.table = static_cast<const DeviceTensor*>(v.table);
  out.num_chunks = v.num_chunks;
  out.count = static_cast<int32_t>(rows.size());
  return out;
}

}  // namespace edit_ext::cuda
