// A whole run on a mesh of threads: what replicas do between syncs, what each rank holds after each
// of them, and what it should hold.
#pragma once

#include <thread>
#include <utility>

#include "../cpu/worker.h"
#include "world.h"

namespace edit_ext::testing {

constexpr int kSyncs = 7;
inline const std::vector<std::vector<int>> kLayers = {{1000, 3, 77, 1}, {70000, 129}, {5}};

inline Policy policy() {
  Policy p;
  p.ema_warmup = 3;
  p.clip_norm = 1.5;
  return p;
}

// What replica r has moved element j by, in the window before sync k. Replica 1 runs wild in
// window 4, is NaN in window 5; in window 6 all are NaN.
inline double movement(int k, int r, int layer, int j) {
  if (k == 6 || (k == 5 && r == 1)) return NAN;
  const double x =
      std::sin(0.37 * j + 1.3 * r + 0.7 * layer) * (1.0 + 0.05 * std::cos(k + 2.0 * r));
  return (k == 4 && r == 1 ? 50.0 : 1.0) * 0.01 * x;
}

inline bool flagged(int k, int r) { return k == 6 || (r == 1 && (k == 4 || k == 5)); }

inline int size_of_layer(int l) {
  int n = 0;
  for (int size : kLayers[l]) n += size;
  return n;
}

inline std::vector<float> start_of(int l, int s) {
  std::vector<float> x(size_of_layer(l));
  for (size_t j = 0; j < x.size(); ++j) x[j] = static_cast<float>(std::cos(0.11 * j + l + 3.0 * s));
  return x;
}

inline void train(RankLayer& layer, int k, int r, int s, int l) {
  const int n = size_of_layer(l);
  int j = 0;
  for (auto& t : layer.tensors) {
    for (float& x : t) x += static_cast<float>(movement(k, r, l, s * n + j++));
  }
}

// values[r][s][k][l]: what each rank holds after each sync.
using Record = std::vector<std::vector<std::vector<std::vector<std::vector<float>>>>>;

inline void run_rank(const Mesh& mesh, Device& device, int r, int s, Wire wire, Record& record,
                     Record& anchors) {
  const Mesh::Seat seat = mesh.seat(r, s);
  cpu::Worker worker;
  std::vector<std::unique_ptr<RankLayer>> layers;
  for (size_t l = 0; l < kLayers.size(); ++l) {
    layers.push_back(std::make_unique<RankLayer>(kLayers[l], wire, r, mesh.replicas, s, mesh.shards,
                                                 start_of(static_cast<int>(l), s)));
  }
  const Policy p = policy();
  for (int k = 0; k < kSyncs; ++k) {
    std::vector<cpu::Worker::Ticket> tickets;
    for (size_t l = 0; l < layers.size(); ++l) {
      RankLayer& layer = *layers[l];
      train(layer, k, r, s, static_cast<int>(l));
      sync_begin(device, layer.view);
      tickets.push_back(worker.submit([&device, &seat, &layer, &p, k] {
        sync_exchange(device, seat.comms(), layer.view, p, {k, 8, 0});
      }));
    }
    for (size_t l = 0; l < layers.size(); ++l) {
      while (!worker.wait(tickets[l], 1.0)) {
      }
      sync_finish(device, layers[l]->view);
      CHECK(layers[l]->view.decision->status == kOk);
      record[r][s][k].push_back(layers[l]->values());
      anchors[r][s][k].push_back(layers[l]->anchor);
    }
  }
  CHECK(worker.close(5.0));
}

inline std::vector<double> widened(const std::vector<float>& x) { return {x.begin(), x.end()}; }

inline void compare(const Mesh& mesh, const Record& record, double tolerance) {
  const Policy p = policy();
  for (size_t l = 0; l < kLayers.size(); ++l) {
    std::vector<double> start;
    for (int s = 0; s < mesh.shards; ++s) {
      const auto part = widened(start_of(static_cast<int>(l), s));
      start.insert(start.end(), part.begin(), part.end());
    }
    Expected expected(start);
    const size_t n = size_of_layer(static_cast<int>(l));
    for (int k = 0; k < kSyncs; ++k) {
      std::vector<std::vector<double>> replicas(mesh.replicas, expected.anchor);
      std::vector<bool> flags;
      for (int r = 0; r < mesh.replicas; ++r) {
        for (size_t j = 0; j < start.size(); ++j) {
          replicas[r][j] += movement(k, r, static_cast<int>(l), static_cast<int>(j));
        }
        flags.push_back(flagged(k, r));
      }
      expected.sync(replicas, flags, p);
      for (int r = 0; r < mesh.replicas; ++r) {
        for (int s = 0; s < mesh.shards; ++s) {
          bool equal = true;
          for (size_t j = 0; j < n; ++j) {
            equal = equal && near(record[r][s][k][l][j], expected.anchor[s * n + j], tolerance);
          }
          CHECK(equal);
        }
      }
    }
  }
}

// Runs all ranks of the mesh; `make` gives each its Device. Returns parameters and anchors.
template <class Make>
std::pair<Record, Record> trajectory(const Mesh& mesh, Wire wire, Make make) {
  Record record(
      mesh.replicas,
      Record::value_type(mesh.shards, std::vector<std::vector<std::vector<float>>>(kSyncs)));
  Record anchors = record;
  std::vector<std::thread> threads;
  for (int r = 0; r < mesh.replicas; ++r) {
    for (int s = 0; s < mesh.shards; ++s) {
      threads.emplace_back([&, r, s] {
        try {
          const auto device = make();
          run_rank(mesh, *device, r, s, wire, record, anchors);
        } catch (const std::exception& e) {
          std::printf("rank %d.%d: %s\n", r, s, e.what());
          mesh.all->abort(e.what());
          CHECK(false);
        }
      });
    }
  }
  for (std::thread& t : threads) t.join();
  return {record, anchors};
}

inline void same_anchors(const Mesh& mesh, const Record& anchors) {
  for (int s = 0; s < mesh.shards; ++s) {
    for (int r = 1; r < mesh.replicas; ++r) {
      for (int k = 0; k < kSyncs; ++k) {
        for (size_t l = 0; l < kLayers.size(); ++l) {
          CHECK(same_bits(anchors[r][s][k][l], anchors[0][s][k][l]));
        }
      }
    }
  }
}

}  // namespace edit_ext::testing
