#include "staged.h"

#if defined(EDIT_EXT_CUDA)

#include <ATen/Functions.h>

#include <vector>

#include "../cuda/launch.h"

namespace edit_ext {

char* StagedComm::host(int64_t bytes) {
  if (!buffer_.defined() || buffer_.numel() < bytes) buffer_ = pinned_bytes(bytes);
  return static_cast<char*>(buffer_.data_ptr());
}

void StagedComm::copy(void* to, const void* from, int64_t bytes, bool down) {
  if (bytes == 0) return;
  const auto kind = down ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  cuda::check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream_),
              "copying between the device and pinned memory");
}

void StagedComm::finish() {
  cuda::check(cudaStreamSynchronize(stream_), "waiting for the side stream");
}

void StagedComm::exchange(const Block* to, const Block* from) {
  const int ranks = size(), own = rank();
  int64_t bytes = 0;
  for (int r = 0; r < ranks; ++r) bytes += r == own ? 0 : to[r].bytes + from[r].bytes;
  char* at = host(bytes);
  std::vector<Block> send(ranks), receive(ranks);
  for (int r = 0; r < ranks; ++r) {
    if (r == own) continue;
    send[r] = {at, to[r].bytes};
    receive[r] = {at + to[r].bytes, from[r].bytes};
    at += to[r].bytes + from[r].bytes;
    copy(send[r].data, to[r].data, to[r].bytes, true);
  }
  finish();
  inner_->exchange(send.data(), receive.data());
  for (int r = 0; r < ranks; ++r) {
    if (r != own) copy(from[r].data, receive[r].data, from[r].bytes, false);
  }
  finish();  // the buffer is used again by the next call
}

void StagedComm::all_gather(void* buffer, int64_t each, int64_t total) {
  char* const device = static_cast<char*>(buffer);
  char* const copy_of = host(each * size());
  const auto block = [&](int r) {
    const int64_t left = total - r * each;
    return left < 0 ? int64_t{0} : left < each ? left : each;
  };
  const int64_t mine = rank() * each;
  copy(copy_of + mine, device + mine, block(rank()), true);
  finish();
  inner_->all_gather(copy_of, each, total);
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) copy(device + r * each, copy_of + r * each, block(r), false);
  }
  finish();
}

void StagedComm::gather_scalars(void* buffer, int64_t each) {
  char* const device = static_cast<char*>(buffer);
  char* const copy_of = host(each * size());
  copy(copy_of + rank() * each, device + rank() * each, each, true);
  finish();
  inner_->gather_scalars(copy_of, each);
  copy(device, copy_of, each * size(), false);
  finish();
}

}  // namespace edit_ext

#endif
