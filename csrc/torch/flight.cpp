#include "flight.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace edit_ext {
namespace {

at::Tensor grown(Buffers& b, at::Tensor& t, int64_t bytes, at::Device device) {
  if (t.defined() && t.numel() >= bytes && t.device() == device) return t;
  if (t.defined() && b.last_use && !b.last_use->passed()) {
    b.outgrown.emplace_back(std::move(t), b.last_use);
  }
  return t = bytes_on(device, bytes);
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
    for (const at::Tensor* t :
         {&b->send, &b->recv, &b->merged, &b->partials, &b->anchor, &b->momentum}) {
      if (t->defined()) sum += t->numel();
    }
  }
  return sum;
}

void BufferPool::reserve(int64_t anchor, int64_t momentum) {
  anchor_ = std::max(anchor_, anchor);
  momentum_ = std::max(momentum_, momentum);
}

bool BufferPool::give_room(Buffers& b, at::Device device) const {
  const void* const before[] = {b.anchor.unsafeGetTensorImpl(), b.momentum.unsafeGetTensorImpl()};
  grown(b, b.anchor, anchor_, device);
  grown(b, b.momentum, momentum_, device);
  return b.anchor.unsafeGetTensorImpl() != before[0] ||
         b.momentum.unsafeGetTensorImpl() != before[1];
}

at::Tensor BufferPool::room(Buffers& b, int64_t floats, at::Device device) {
  return grown(b, b.anchor, floats * 4, device).narrow(0, 0, floats * 4).view(at::kFloat);
}

ScalarBlock::ScalarBlock(at::Device where, int replicas, int shards, int mesh_ranks) {
  int64_t at = 0;
  const auto take = [&at](int64_t bytes) {
    const int64_t place = at;
    at = round_up(at + bytes, 16);
    return place;
  };
  take(shards * static_cast<int64_t>(sizeof(double)));  // shard sums, at the start
  records = take(replicas * static_cast<int64_t>(sizeof(NormRecord)));
  per_replica = take(replicas * static_cast<int64_t>(sizeof(PerReplica)));
  merge_records = take(mesh_ranks * static_cast<int64_t>(sizeof(MergeRecord)));
  gaps = take(mesh_ranks * static_cast<int64_t>(sizeof(double)));
  decision = take(sizeof(Decision));
  device = zeros_on(where, at);
  host = on_cuda(where) ? pinned_bytes(at) : device;
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
  b.outgrown.erase(std::remove_if(b.outgrown.begin(), b.outgrown.end(),
                                  [](const auto& old) { return old.second->passed(); }),
                   b.outgrown.end());
  const at::Device where = anchor.device();
  v.send = grown(b, b.send, wire_bytes(v.wire, v.replicas * v.piece), where).data_ptr();
  v.recv = grown(b, b.recv, wire_bytes(v.wire, (v.replicas - 1) * v.piece), where).data_ptr();
  if (v.replicated && v.wire == Wire::f32) {
    v.merged = reinterpret_cast<float*>(received(v, v.replica));  // where it is returned from
  } else {
    v.merged = as<float>(grown(b, b.merged, v.piece * 4, where));
  }
  v.partials = as<float>(grown(b, b.partials, layout.partials(v.piece) * 4, where));
  scalars = ScalarBlock(where, v.replicas, v.shards, v.mesh_ranks);
  char* const base = static_cast<char*>(scalars.device.data_ptr());
  v.shard_sums = reinterpret_cast<double*>(base);
  v.records = reinterpret_cast<NormRecord*>(base + scalars.records);
  v.per_replica = reinterpret_cast<PerReplica*>(base + scalars.per_replica);
  v.merge_records = reinterpret_cast<MergeRecord*>(base + scalars.merge_records);
  v.gaps = reinterpret_cast<double*>(base + scalars.gaps);
  v.decision = reinterpret_cast<Decision*>(base + scalars.decision);
}

}  // namespace edit_ext
