// What one layer in flight holds: buffers from a pool, scalars, and the view that sync.h works on.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "../core/comm.h"
#include "../core/layout.h"
#include "../cpu/worker.h"

namespace edit_ext {

// Working memory of one layer in flight.
struct Buffers {
  at::Tensor send, recv, merged, partials;
};

// As many Buffers as layers may be in flight, each grown to the largest layer that used it.
class BufferPool {
 public:
  explicit BufferPool(int count);
  std::shared_ptr<Buffers> acquire();  // throws std::runtime_error when all are in use
  int64_t bytes() const;

 private:
  std::vector<std::shared_ptr<Buffers>> buffers_;
};

struct SharedComms {
  std::shared_ptr<Comm> shard, replica, mesh;
};

// A missing group is a group of one.
inline int group_size(const std::shared_ptr<Comm>& c) { return c ? c->size() : 1; }
inline int group_rank(const std::shared_ptr<Comm>& c) { return c ? c->rank() : 0; }

// All that the worker's task touches. The task and the layer share it, so a layer may be dropped
// while its exchange is still under way.
struct Flight {
  std::shared_ptr<Buffers> buffers;
  SharedComms comms;
  Layout layout;
  LayerView view{};
  Policy policy;
  SyncTag tag{};
  at::Tensor anchor, momentum, detector;
  std::vector<double> shard_sums;
  std::vector<NormRecord> records;
  std::vector<PerReplica> per_replica;
  std::vector<MergeRecord> merge_records;
  Decision decision{};
  cpu::Worker::Ticket ticket = 0;
  double begin_seconds = 0, exchange_seconds = 0, wait_seconds = 0;
  int64_t bytes_sent = 0;

  // Bytes that this rank has sent in all three groups so far.
  int64_t sent() const;
  // Makes `view` point at all of the above, with buffers large enough.
  void point();
};

}  // namespace edit_ext
