// A Comm for device memory over one for host memory: what travels is staged in pinned buffers. Each
// call waits for its stream, so it belongs on a worker thread and never on the one that trains.
#pragma once

#include "../core/comm.h"
#include "place.h"

#if defined(EDIT_EXT_CUDA)

namespace edit_ext {

class StagedComm final : public Comm {
 public:
  StagedComm(std::shared_ptr<Comm> inner, cudaStream_t stream)
      : inner_(std::move(inner)), stream_(stream) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void exchange(const Block* to, const Block* from) override;
  void all_gather(void* buffer, int64_t each, int64_t total) override;
  void gather_scalars(void* buffer, int64_t each) override;
  void abort(const std::string& reason) override { inner_->abort(reason); }
  void poll() const override { inner_->poll(); }
  int64_t bytes_sent() const override { return inner_->bytes_sent(); }

 private:
  // One pinned buffer, grown to the largest call.
  char* host(int64_t bytes);
  void copy(void* to, const void* from, int64_t bytes, bool down);
  void finish();

  const std::shared_ptr<Comm> inner_;
  const cudaStream_t stream_;
  at::Tensor buffer_;
};

}  // namespace edit_ext

#endif
