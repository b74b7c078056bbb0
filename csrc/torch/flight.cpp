#include "flight.h"

#include <ATen/Functions.h>

namespace edit_ext {
namespace {

at::Tensor grown(at::Tensor& t, int64_t bytes) {
  if (!t.defined() || t.numel() < bytes) t = at::empty({bytes}, at::kByte);
  return t;
}

}  // namespace

BufferPool::BufferPool(int count) {
  TORCH_CHECK_VALUE(count >= 1, "count is ", count, "; expected at least 1 buffer");
  for (int i = 0; i < count; ++i) buffers_.push_back(std::make_shared<Buffers>());
}

std::shared_ptr<Buffers> BufferPool::acquire() {
  for (auto& b : buffers_) {
    if (b.use_count() == 1) return b;
  }
  throw std::runtime_error("all " + std::to_string(buffers_.size()) +
                           " buffers are in flight: wait for a layer before the next begins");
}

int64_t BufferPool::bytes() const {
  int64_t sum = 0;
  for (const auto& b : buffers_) {
    for (const at::Tensor* t : {&b->send, &b->recv, &b->merged, &b->partials}) {
      if (t->defined()) sum += t->numel();
    }
  }
  return sum;
}

int64_t Flight::sent() const {
  int64_t sum = 0;
  if (comms.replica) sum += comms.replica->bytes_sent();
  if (comms.shard) sum += comms.shard->bytes_sent();
  if (comms.mesh && comms.mesh != comms.replica) sum += comms.mesh->bytes_sent();
  return sum;
}

void Flight::point() {
  LayerView& v = view;
  layout.describe(v);
  v.replica = group_rank(comms.replica);
  v.replicas = group_size(comms.replica);
  v.shard = group_rank(comms.shard);
  v.shards = group_size(comms.shard);
  v.mesh_rank = group_rank(comms.mesh);
  v.mesh_ranks = group_size(comms.mesh);
  v.piece = piece_size(v.size, v.replicas);
  v.anchor = anchor.data_ptr<float>();
  v.momentum = momentum.defined() ? momentum.data_ptr<float>() : nullptr;
  v.detectors = reinterpret_cast<Detector*>(detector.data_ptr<double>());
  Buffers& b = *buffers;
  v.send = grown(b.send, wire_bytes(v.wire, v.replicas * v.piece)).data_ptr();
  v.recv = grown(b.recv, wire_bytes(v.wire, (v.replicas - 1) * v.piece)).data_ptr();
  v.merged = static_cast<float*>(grown(b.merged, v.piece * 4).data_ptr());
  v.partials = static_cast<float*>(grown(b.partials, layout.partials(v.piece) * 4).data_ptr());
  shard_sums.resize(v.shards);
  records.resize(v.replicas);
  per_replica.resize(v.replicas);
  merge_records.resize(v.mesh_ranks);
  v.shard_sums = shard_sums.data();
  v.records = records.data();
  v.per_replica = per_replica.data();
  v.merge_records = merge_records.data();
  v.decision = &decision;
}

}  // namespace edit_ext
