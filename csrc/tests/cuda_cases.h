// Layers in guarded memory of exactly the promised sizes, for one device at a time.
#pragma once

#include <memory>

#include "../core/layout.h"
#include "../core/stacked.h"
#include "../cuda/tensors.cuh"
#include "testing.h"

namespace edit_ext::testing {

inline std::mt19937 randomness;
inline std::normal_distribution<float> distribution;

inline void seed_with(unsigned seed) {
  randomness.seed(seed);
  distribution.reset();
}
inline float normal() { return distribution(randomness); }

// Memory with a margin on both sides that must stay as it was.
struct Guarded {
  static constexpr size_t kMargin = 64;
  std::vector<char> bytes;
  char* data;
  size_t size;

  Guarded(size_t n, size_t misaligned = 0) : bytes(n + 3 * kMargin, 0x5a), size(n) {
    const auto at = reinterpret_cast<uintptr_t>(bytes.data()) + kMargin;
    data = reinterpret_cast<char*>((at + 63) / 64 * 64) + misaligned;
  }
  Guarded(const Guarded&) = delete;
  Guarded(Guarded&&) = default;
  bool intact() const {
    for (const char* p = bytes.data(); p < bytes.data() + bytes.size(); ++p) {
      if ((p < data || p >= data + size) && *p != 0x5a) return false;
    }
    return true;
  }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data);
  }
  bool equals(const Guarded& other) const {
    return size == other.size && std::memcmp(data, other.data, size) == 0;
  }
};

struct Shape {
  int64_t size;
  DType dtype;
  int misaligned;  // elements
};

inline void fill(char* data, int64_t n, DType type) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = normal();
    if (type == DType::f32) reinterpret_cast<float*>(data)[i] = x;
    if (type == DType::bf16) reinterpret_cast<bf16*>(data)[i] = from_float<bf16>(x);
    if (type == DType::f16) reinterpret_cast<f16*>(data)[i] = from_float<f16>(x);
  }
}

// One layer of one rank in guarded memory of exactly the promised sizes.
struct Case {
  std::vector<Guarded> tensors;
  Layout layout;
  LayerView v{};
  std::vector<Guarded> buffers;
  std::vector<Detector> detectors;
  std::vector<double> shard_sums;
  std::vector<NormRecord> records;
  std::vector<PerReplica> per_replica;
  std::vector<MergeRecord> merge_records;
  std::vector<double> gaps;
  Decision decision{};

  Case(const std::vector<Shape>& shapes, Wire wire, int replica, int replicas, unsigned seed,
       bool replicated = false) {
    seed_with(seed);
    for (const Shape& s : shapes) {
      tensors.emplace_back(s.size * size_of(s.dtype), s.misaligned * size_of(s.dtype));
      fill(tensors.back().data, s.size, s.dtype);
      layout.add(tensors.back().data, s.size, s.dtype);
    }
    layout.describe(v);
    v.replica = replica;
    v.replicas = replicas;
    v.shards = v.mesh_ranks = 1;
    v.wire = wire;
    v.anchored = true;
    v.replicated = replicated;
    v.piece = piece_size(v.size, replicas);
    v.anchor = add(replicas * v.piece * 4)->as<float>();
    fill(buffers.back().data, replicas * v.piece, DType::f32);
    const int64_t held = replicated ? replicas * v.piece : v.piece;
    v.momentum = add(held * 4)->as<float>();
    fill(buffers.back().data, held, DType::f32);
    v.send = add(wire_bytes(wire, replicas * v.piece))->data;
    v.recv = add(wire_bytes(wire, (replicas - 1) * v.piece))->data;
    fill(static_cast<char*>(v.recv), (replicas - 1) * v.piece,
         wire == Wire::f32 ? DType::f32 : DType::bf16);
    const bool inside = replicated && wire == Wire::f32;
    float* own = static_cast<float*>(v.send) + replica * v.piece;
    v.merged = inside ? own : add(v.piece * 4)->as<float>();
    v.partials = add(layout.partials(v.piece) * 4)->as<float>();
    v.table = add(shapes.size() * sizeof(cuda::DeviceTensor))->data;
    detectors.resize(replicas);
    shard_sums.resize(1);
    records.resize(replicas);
    per_replica.resize(replicas);
    merge_records.resize(1);
    gaps.resize(1);
    v.detectors = detectors.data();
    v.shard_sums = shard_sums.data();
    v.records = records.data();
    v.per_replica = per_replica.data();
    v.merge_records = merge_records.data();
    v.gaps = gaps.data();
    v.decision = &decision;
  }

  Guarded* add(size_t bytes) {
    buffers.emplace_back(bytes);
    return &buffers.back();
  }

  // One sync, with the norms of the other replicas made up; `bad` is NaN. `settle` waits for the
  // device.
  template <class Settle>
  void sync(Device& device, const Policy& p, int bad, Settle settle) {
    device.pseudo_grad(v);
    device.record(v, {5, 3, 0});
    settle();
    for (int r = 0; r < v.replicas; ++r) {
      if (r != v.replica) records[r] = {1.0 + r, 5, 3, 0};
      if (r == bad) records[r].norm2 = NAN;
    }
    device.decide(v, p);
    device.merge(v);
    if (p.gap_scale > 0.0) device.gap(v);
    if (v.replicated) device.encode_merged(v);
    device.outer_step(v, p);
    device.write_back(v);
    settle();
  }
};

struct StackedCase {
  std::vector<Guarded> params, buffers;
  std::vector<StackedTensor> tensors;
  std::vector<Detector> detectors;
  std::vector<PerReplica> per_replica;
  std::vector<float> weights;
  std::vector<char> table;
  double merged2 = 0;
  uint32_t arrived = 0;
  Decision decision{};
  StackedView v{};

  // `spread`: how far replicas are from the anchor; `cancel`: even ones are the odd ones' opposite.
  StackedCase(const std::vector<Shape>& shapes, int replicas, bool cancel, unsigned seed)
      : detectors(replicas), per_replica(replicas), weights(replicas), table(shapes.size() * 128) {
    seed_with(seed);
    int64_t size = 0, chunks = 0, runs = 0;
    for (const Shape& s : shapes) size += round_up(s.size, kGroup);
    for (int i = 0; i < 2; ++i) {
      buffers.emplace_back(size * 4);
      fill(buffers.back().data, size, DType::f32);
    }
    v.anchor = buffers[0].as<float>();
    v.momentum = buffers[1].as<float>();
    int64_t at = 0;
    for (const Shape& s : shapes) {
      StackedTensor t{{}, s.size, at, chunks, runs};
      for (int r = 0; r < replicas; ++r) {
        params.emplace_back(s.size * 4, s.misaligned * 4);
        t.data[r] = params.back().as<float>();
        for (int64_t j = 0; j < s.size; ++j) {
          const float moved = cancel && r % 2 ? v.anchor[at + j] - t.data[r - 1][j] : normal();
          t.data[r][j] = v.anchor[at + j] + moved;
        }
      }
      at += round_up(s.size, kGroup);
      chunks += (s.size + kChunk - 1) / kChunk;
      runs += runs_of(s.size);
      if (s.size) tensors.push_back(t);
    }
    v.replicas = replicas;
    v.num_chunks = chunks;
    buffers.emplace_back(chunks * pairs_of(replicas) * 4);
    v.partials = buffers[2].as<float>();
    buffers.emplace_back(runs * pairs_of(replicas) * 4);
    v.run_sums = buffers[3].as<float>();
    v.arrived = &arrived;
    v.detectors = detectors.data();
    v.per_replica = per_replica.data();
    v.weights = weights.data();
    v.merged2 = &merged2;
    v.decision = &decision;
  }
};

}  // namespace edit_ext::testing
