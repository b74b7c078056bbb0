// TensorTable: the tensors of a layer as kernels read them where a launch cannot carry them all.
#pragma once

#include <cstring>
#include <vector>

#include "place.h"

namespace edit_ext {

class TensorTable {
 public:
  // Lets v.table hold v.tensors for all that the current stream gets from now on. It is copied,
  // from pinned memory, only when a tensor is not where it was at the last call. Until the stream
  // has passed the caller's last kernel it keeps the result, which a later call may replace here.
  std::vector<at::Tensor> point(LayerView& v, [[maybe_unused]] at::Device device) {
    v.table_filled = false;
#if defined(EDIT_EXT_CUDA)
    if (!on_cuda(device)) return {};
    const std::vector<cuda::TableRow> rows = cuda::table_of(v);
    const auto bytes = static_cast<int64_t>(rows.size() * sizeof(cuda::TableRow));
    if (bytes == 0) return {};
    if (!host_.defined() || host_.numel() != bytes ||
        std::memcmp(host_.data_ptr(), rows.data(), bytes) != 0) {
      host_ = pinned_bytes(bytes);
      std::memcpy(host_.data_ptr(), rows.data(), bytes);
      device_ = bytes_on(device, bytes);
      copy_up(device_, host_);
    }
    v.table = device_.data_ptr();
    v.table_filled = true;
#endif
    return {host_, device_};
  }

 private:
  at::Tensor host_, device_;
};

}  // namespace edit_ext
