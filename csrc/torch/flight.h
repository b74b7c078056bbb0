// What one layer in flight holds: buffers from a pool, scalars, and the view that sync.h works on.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "../core/comm.h"
#include "../core/layout.h"
#include "lane.h"
#include "timer.h"

namespace edit_ext {

// Working memory of one layer in flight, where its parameters are.
struct Buffers {
  at::Tensor send, recv, merged, partials;
  at::Tensor anchor, momentum;            // of a layer whose own are on the host, else undefined
  std::shared_ptr<const Timer> last_use;  // its end: until then a stream may still read them
  // What was too small for a layer, with its last use. torch's allocator would give it to whatever
  // comes next on the stream that it was made on, and that may be another than the one that waits.
  std::vector<std::pair<at::Tensor, std::shared_ptr<const Timer>>> outgrown;
};

// As many Buffers as layers may be in flight, each grown to the largest layer that used it.
class BufferPool {
 public:
  explicit BufferPool(int count);
  std::shared_ptr<Buffers> acquire();  // throws std::runtime_error when all are in use
  // For layers that use it one after the other in the lane's own order.
  const std::shared_ptr<Buffers>& shared() const { return buffers_.front(); }
  int64_t bytes() const;
  // Room for the largest anchor and momentum asked for so far: `reserve` asks, in bytes, before
  // there is any, so that the room need not grow later. give_room is true when it made new memory.
  void reserve(int64_t anchor, int64_t momentum);
  bool give_room(Buffers& b, at::Device device) const;
  // Room for the anchor of a layer that has none of its own, `floats` of it.
  static at::Tensor room(Buffers& b, int64_t floats, at::Device device);

 private:
  int64_t anchor_ = 0, momentum_ = 0;
  std::vector<std::shared_ptr<Buffers>> buffers_;
};

// A missing group is a group of one.
inline int group_size(const std::shared_ptr<Comm>& c) { return c ? c->size() : 1; }
inline int group_rank(const std::shared_ptr<Comm>& c) { return c ? c->rank() : 0; }

// The scalars of one layer in flight: one block where the device works, and a block of the host
// that it is copied to when the sync is over. On the CPU both are one.
struct ScalarBlock {
  at::Tensor device, host;
  // Places, in bytes.
  int64_t records = 0, per_replica = 0, merge_records = 0, gaps = 0, decision = 0;

  ScalarBlock() = default;
  ScalarBlock(at::Device where, int replicas, int shards, int mesh_ranks);
  template <class T>
  const T* read(int64_t place) const {
    return reinterpret_cast<const T*>(static_cast<const char*>(host.data_ptr()) + place);
  }
};

// All that the lane's task touches. The task and the layer share it, so a layer may be dropped
// while its exchange is still under way.
struct Flight {
  std::shared_ptr<Buffers> buffers;
  SharedComms comms;
  Layout layout;
  LayerView view{};
  Policy policy;
  SyncTag tag{};
  bool restored = false;  // from a saved state: nobody asks how it went
  at::Tensor anchor, momentum, detector;
  ScalarBlock scalars;
  Lane::Ticket ticket = 0;
  std::vector<at::Tensor> tables;  // what kernels find the parameters by
  std::shared_ptr<Timer> begin_timer, stall_timer, write_back_timer;
  double exchange_seconds = 0, wait_seconds = 0;  // on the clock of the host
  int64_t bytes_sent = 0;

  // Bytes that this rank has sent in all three groups so far.
  int64_t sent() const;
  // Makes `view` point at all of the above, with buffers large enough.
  void point();
};

}  // namespace edit_ext
