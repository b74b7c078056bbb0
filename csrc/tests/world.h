// R x S ranks as threads, each with its own tensors, buffers and scalars, and what they should
// hold, computed from the equations in double precision over whole replicas.
#pragma once

#include <sys/mman.h>

#include <memory>
#include <thread>

#include "../comm/threads.h"
#include "../core/layout.h"
#include "../core/sync.h"
#include "../cpu/device.h"
#include "testing.h"

namespace edit_ext::testing {

// Pages for one rank's device scalars that can be closed to the host.
class Scalars {
 public:
  Scalars()
      : page_(static_cast<char*>(
            mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Scalars() { munmap(page_, kBytes); }
  Scalars(const Scalars&) = delete;
  Scalars& operator=(const Scalars&) = delete;

  template <class T>
  T* take(int n) {
    T* p = reinterpret_cast<T*>(page_ + used_);
    used_ += round_up(n * static_cast<int64_t>(sizeof(T)), 64);
    return p;
  }
  void close() const { mprotect(page_, kBytes, PROT_NONE); }
  void open() const { mprotect(page_, kBytes, PROT_READ | PROT_WRITE); }

 private:
  static constexpr int64_t kBytes = 1 << 16;
  char* page_;
  int64_t used_ = 0;
};

// The passes of one rank on two threads.
inline void two_threads(int64_t n, const cpu::Body& body) {
  std::thread other([&] { body(n / 2, n); });
  body(0, n / 2);
  other.join();
}

// One layer of one rank.
struct RankLayer {
  std::vector<std::vector<float>> tensors;
  Layout layout;
  LayerView view{};
  std::vector<float> anchor, momentum, merged, partials;
  std::vector<char> send, recv;
  Scalars scalars;

  RankLayer(const std::vector<int>& sizes, Wire wire, int replica, int replicas, int shard,
            int shards, const std::vector<float>& start, bool last_is_shared = false,
            bool replicated = false) {
    size_t at = 0;
    for (int n : sizes) {
      tensors.emplace_back(start.begin() + at, start.begin() + at + n);
      at += n;
    }
    for (auto& t : tensors) {
      if (last_is_shared && &t == &tensors.back() && shard > 0) layout.stop_counting();
      layout.add(t.data(), static_cast<int64_t>(t.size()), DType::f32);
    }
    LayerView& v = view;
    layout.describe(v);
    v.replica = replica;
    v.replicas = replicas;
    v.shard = shard;
    v.shards = shards;
    v.mesh_rank = replica * shards + shard;
    v.mesh_ranks = replicas * shards;
    v.wire = wire;
    v.anchored = true;
    v.replicated = replicated;
    v.piece = piece_size(v.size, replicas);
    anchor.resize(replicas * v.piece);
    momentum.resize((replicated ? replicas : 1) * v.piece);
    merged.resize(v.piece);
    partials.resize(layout.partials(v.piece));
    send.resize(wire_bytes(wire, replicas * v.piece));
    recv.resize(wire_bytes(wire, replicas * v.piece));
    for (size_t i = 0; i < tensors.size(); ++i) {
      std::copy(tensors[i].begin(), tensors[i].end(), anchor.begin() + layout.tensors[i].offset);
    }
    v.anchor = anchor.data();
    v.momentum = momentum.data();
    v.merged = merged.data();
    v.partials = partials.data();
    v.send = send.data();
    v.recv = recv.data();
    v.detectors = scalars.take<Detector>(replicas);
    v.shard_sums = scalars.take<double>(shards);
    v.records = scalars.take<NormRecord>(replicas);
    v.per_replica = scalars.take<PerReplica>(replicas);
    v.merge_records = scalars.take<MergeRecord>(v.mesh_ranks);
    v.gaps = scalars.take<double>(v.mesh_ranks);
    v.decision = scalars.take<Decision>(1);
  }

  std::vector<float> values() const {
    std::vector<float> all;
    for (const auto& t : tensors) all.insert(all.end(), t.begin(), t.end());
    return all;
  }
};

// The groups of an R x S mesh and each rank's seat in them.
struct Mesh {
  int replicas, shards;
  std::vector<std::shared_ptr<ThreadGroup>> shard_groups, replica_groups;
  std::shared_ptr<ThreadGroup> all;

  Mesh(int r, int s) : replicas(r), shards(s), all(std::make_shared<ThreadGroup>(r * s)) {
    for (int i = 0; i < r; ++i) shard_groups.push_back(std::make_shared<ThreadGroup>(s));
    for (int i = 0; i < s; ++i) replica_groups.push_back(std::make_shared<ThreadGroup>(r));
  }

  struct Seat {
    std::unique_ptr<ThreadComm> shard, replica, mesh;
    Comms comms() const { return {shard.get(), replica.get(), mesh.get()}; }
  };
  Seat seat(int r, int s) const {
    Seat x;
    if (shards > 1) x.shard = std::make_unique<ThreadComm>(shard_groups[r], s);
    if (replicas > 1) x.replica = std::make_unique<ThreadComm>(replica_groups[s], r);
    if (replicas * shards > 1) x.mesh = std::make_unique<ThreadComm>(all, r * shards + s);
    return x;
  }
};

// Algorithm 2 of arXiv 2412.07210 for one layer of R whole replicas, in double precision. Which
// replicas are flagged is given, not decided: the detector has tests of its own.
struct Expected {
  std::vector<double> anchor, momentum;

  explicit Expected(const std::vector<double>& start) : anchor(start), momentum(start.size()) {}

  void sync(const std::vector<std::vector<double>>& replicas, const std::vector<bool>& flagged,
            const Policy& p) {
    const size_t n = anchor.size();
    std::vector<double> norm(replicas.size()), merged(n);
    double least = INFINITY, sum = 0.0, merged2 = 0.0;
    for (size_t r = 0; r < replicas.size(); ++r) {
      for (size_t j = 0; j < n; ++j) norm[r] += std::pow(anchor[j] - replicas[r][j], 2);
      norm[r] = std::sqrt(norm[r]);
      if (!flagged[r]) least = std::fmin(least, norm[r]);
    }
    for (size_t r = 0; r < replicas.size(); ++r) {
      if (!flagged[r]) sum += std::exp((least - norm[r]) / p.temperature);
    }
    if (sum == 0.0) return;
    for (size_t r = 0; r < replicas.size(); ++r) {
      if (flagged[r]) continue;
      const double w = std::exp((least - norm[r]) / p.temperature) / sum;
      for (size_t j = 0; j < n; ++j) merged[j] += w * (anchor[j] - replicas[r][j]);
    }
    for (double m : merged) merged2 += m * m;
    const double clip = std::fmin(p.clip_norm / (std::sqrt(merged2) + 1e-6), 1.0);
    for (size_t j = 0; j < n; ++j) {
      const double g = clip * merged[j];
      momentum[j] = p.outer_momentum * momentum[j] + g;
      anchor[j] -= p.outer_lr * (g + p.outer_momentum * momentum[j]);
    }
  }
};

}  // namespace edit_ext::testing
