// What NcclComm delivers over the fake library equals what ThreadComm delivers, bit for bit: random
// blocks, and whole trajectories of sync_layer with the CPU device.
#include <random>

#include "nccl_world.h"
#include "world.h"

using namespace edit_ext;
using namespace edit_ext::testing;

namespace {

// One rank's part of some rounds of calls with random sizes, zero among them; returns all buffers.
std::vector<char> random_rounds(Comm& comm, unsigned seed) {
  const int size = comm.size(), me = comm.rank();
  std::mt19937 common(seed), own(seed + 1000u * static_cast<unsigned>(me + 1));
  std::vector<char> seen;
  const auto noise = [&](size_t n) {
    std::vector<char> x(n);
    for (char& c : x) c = static_cast<char>(own());
    return x;
  };
  for (int round = 0; round < 20; ++round) {
    // bytes[i][j]: from i to j; the same draw on every rank
    std::vector<std::vector<int64_t>> bytes(size, std::vector<int64_t>(size));
    for (auto& row : bytes) {
      for (int64_t& b : row) b = common() % 3 == 0 ? 0 : common() % 5000;
    }
    std::vector<std::vector<char>> out, in;
    std::vector<Block> to, from;
    for (int p = 0; p < size; ++p) {
      out.push_back(noise(bytes[me][p]));
      in.emplace_back(bytes[p][me]);
    }
    for (int p = 0; p < size; ++p) {
      to.push_back({out[p].data(), bytes[me][p]});
      from.push_back({in[p].data(), bytes[p][me]});
    }
    comm.exchange(to.data(), from.data());
    for (const auto& x : in) seen.insert(seen.end(), x.begin(), x.end());

    // What lies beyond `total` may or may not travel: only what is before it counts.
    const int64_t each = common() % 3000, total = each * size - (each ? common() % each : 0);
    for (const bool scalars : {false, true}) {
      const int64_t block = scalars ? 24 : each, end = scalars ? 24 * size : total;
      std::vector<char> all(block * size);
      const std::vector<char> mine = noise(block);
      std::copy(mine.begin(), mine.end(), all.begin() + me * block);
      scalars ? comm.gather_scalars(all.data(), block) : comm.all_gather(all.data(), block, end);
      seen.insert(seen.end(), all.begin(), all.begin() + end);
    }
  }
  return seen;
}

void random_blocks() {
  for (int size : {1, 2, 3, 4}) {
    reset();
    const auto threads = std::make_shared<ThreadGroup>(size);
    Ranks ranks = connect(size);
    std::vector<std::vector<char>> a(size), b(size);
    run_ranks(size, [&](int r) {
      ThreadComm comm(threads, r);
      a[r] = random_rounds(comm, 7);
    });
    run_ranks(size, [&](int r) { b[r] = random_rounds(*ranks[r], 7); });
    for (int r = 0; r < size; ++r) CHECK(a[r].size() > 100 && same_bits(a[r], b[r]));
    CHECK(close_all(ranks));
  }
}

// A call that the library takes at once, with its work still to be done on the stream.
void open_collectives() {
  reset();
  fake().open = true;
  Ranks ranks = connect(2);
  std::vector<std::vector<int>> first(2, {-1, -1}), second(2, {-1, -1});
  for (int r = 0; r < 2; ++r) {  // one thread: nothing waits for the peer
    first[r][r] = r;
    second[r][r] = 10 + r;
    ranks[r]->gather_scalars(first[r].data(), sizeof(int));
    ranks[r]->all_gather(second[r].data(), sizeof(int), 2 * sizeof(int));
  }
  CHECK(close_all(ranks));  // an orderly end flushes what is open
  for (int r = 0; r < 2; ++r) {
    CHECK(first[r] == std::vector<int>({0, 1}) && second[r] == std::vector<int>({10, 11}));
  }
}

// ---- trajectories ----

constexpr int kSyncs = 7;
const std::vector<std::vector<int>> kLayers = {{1000, 3, 77, 1}, {20000, 129}, {5}};

struct Seat {
  std::unique_ptr<Comm> shard, replica, mesh;
};
using MakeSeat = std::function<Seat(int r, int s)>;

// Replica 1 runs wild before sync 4 and is NaN before sync 5; before sync 6 all are NaN.
float movement(int k, int r, int layer, size_t j) {
  if (k == 6 || (k == 5 && r == 1)) return NAN;
  const double x = std::sin(0.37 * static_cast<double>(j) + 1.3 * r + 0.7 * layer + k);
  return static_cast<float>((k == 4 && r == 1 ? 0.5 : 0.01) * x);
}

template <class T>
void append(std::vector<char>& to, const T* from, size_t n) {
  const char* p = reinterpret_cast<const char*>(from);
  to.insert(to.end(), p, p + n * sizeof(T));
}

// All that one rank holds after each sync: parameters, anchor, momentum, detectors, decision.
std::vector<char> train(const Seat& seat, int r, int replicas, int s, int shards, Wire wire) {
  const Comms comms{seat.shard.get(), seat.replica.get(), seat.mesh.get()};
  cpu::CpuDevice device(two_threads);
  Policy policy;
  policy.ema_warmup = 3;
  policy.clip_norm = 1.5;
  std::vector<std::unique_ptr<RankLayer>> layers;
  for (const auto& sizes : kLayers) {
    size_t n = 0;
    for (int size : sizes) n += static_cast<size_t>(size);
    std::vector<float> start(n);
    for (size_t j = 0; j < n; ++j) {
      start[j] = static_cast<float>(std::cos(0.11 * static_cast<double>(j) + 3.0 * s));
    }
    layers.push_back(std::make_unique<RankLayer>(sizes, wire, r, replicas, s, shards, start));
  }
  std::vector<char> seen;
  for (int k = 0; k < kSyncs; ++k) {
    for (size_t l = 0; l < layers.size(); ++l) {
      RankLayer& layer = *layers[l];
      for (auto& tensor : layer.tensors) {
        for (size_t j = 0; j < tensor.size(); ++j) {
          tensor[j] += movement(k, r, static_cast<int>(l), j);
        }
      }
      sync_begin(device, layer.view);
      sync_exchange(device, comms, layer.view, policy, {k, 8, 0});
      sync_finish(device, layer.view);
      CHECK(layer.view.decision->status == kOk);
      const std::vector<float> values = layer.values();
      append(seen, values.data(), values.size());
      append(seen, layer.anchor.data(), layer.anchor.size());
      append(seen, layer.momentum.data(), layer.momentum.size());
      append(seen, layer.view.detectors, static_cast<size_t>(replicas));
      append(seen, layer.view.decision, 1);
    }
  }
  return seen;
}

using Traces = std::vector<std::vector<char>>;

Traces trace(int replicas, int shards, Wire wire, const MakeSeat& make) {
  Traces traces(replicas * shards);
  run_ranks(replicas * shards, [&](int i) {
    const int r = i / shards, s = i % shards;
    const Seat seat = make(r, s);
    traces[i] = train(seat, r, replicas, s, shards, wire);
    for (Comm* comm : {seat.mesh.get(), seat.replica.get(), seat.shard.get()}) {
      if (auto* nccl = dynamic_cast<NcclComm*>(comm)) CHECK(nccl->close(20.0));
    }
  });
  return traces;
}

void trajectory(int replicas, int shards, Wire wire) {
  reset();
  const Mesh mesh(replicas, shards);
  const Traces threads = trace(replicas, shards, wire, [&](int r, int s) {
    Mesh::Seat seat = mesh.seat(r, s);
    return Seat{std::move(seat.shard), std::move(seat.replica), std::move(seat.mesh)};
  });
  std::vector<nccl::UniqueId> ids;
  for (int i = 0; i < replicas + shards + 1; ++i) ids.push_back(library()->unique_id());
  const auto join = [&](int id, int rank, int size) -> std::unique_ptr<Comm> {
    return std::make_unique<NcclComm>(library(), ids[id], rank, size, options(), nullptr);
  };
  const Traces nccl = trace(replicas, shards, wire, [&](int r, int s) {
    Seat seat;
    seat.mesh = join(replicas + shards, r * shards + s, replicas * shards);
    seat.replica = join(replicas + s, r, replicas);
    seat.shard = join(r, s, shards);
    return seat;
  });
  for (size_t i = 0; i < nccl.size(); ++i)
    CHECK(!nccl[i].empty() && same_bits(nccl[i], threads[i]));
  CHECK(fake().counts.live == 0 && fake().counts.misuses == 0 && fake().counts.aborts == 0);
}

}  // namespace

int main() {
  random_blocks();
  open_collectives();
  for (const auto& [replicas, shards] : {std::pair{1, 1}, {2, 1}, {4, 1}, {1, 2}, {2, 2}, {3, 2}}) {
    trajectory(replicas, shards, Wire::f32);
  }
  trajectory(2, 2, Wire::bf16);
  return testing::close("test_nccl_values");
}
