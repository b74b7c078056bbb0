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

// The last tensor of a layer of several is held by all shards alike.
inline int shared_of_layer(int l) { return kLayers[l].size() > 1 ? kLayers[l].back() : 0; }

// Place in the whole layer of element j of shard s: the shards one after the other, then what all
// of them hold.
inline int place_in_layer(int l, int s, int shards, int j) {
  const int own = size_of_layer(l) - shared_of_layer(l);
  return j < own ? s * own + j : (shards - 1) * own + j;
}

inline double start_at(int l, int place) { return std::cos(0.11 * place + l); }

inline std::vector<float> start_of(int l, int s, int shards) {
  std::vector<float> x;
  for (int j = 0; j < size_of_layer(l); ++j) {
    x.push_back(static_cast<float>(start_at(l, place_in_layer(l, s, shards, j))));
  }
  return x;
}

inline void train(RankLayer& layer, int k, int r, int s, int shards, int l) {
  int j = 0;
  for (auto& t : layer.tensors) {
    for (float& x : t) {
      x += static_cast<float>(movement(k, r, l, place_in_layer(l, s, shards, j++)));
    }
  }
}

// values[r][s][k][l]: what each rank holds after each sync.
using Record = std::vector<std::vector<std::vector<std::vector<std::vector<float>>>>>;

inline void run_rank(const Mesh& mesh, Device& device, int r, int s, Wire wire, bool replicated,
                     Record& record, Record& anchors) {
  const Mesh::Seat seat = mesh.seat(r, s);
  cpu::Worker worker;
  std::vector<std::unique_ptr<RankLayer>> layers;
  for (size_t l = 0; l < kLayers.size(); ++l) {
    layers.push_back(std::make_unique<RankLayer>(kLayers[l], wire, r, mesh.replicas, s, mesh.shards,
                                                 start_of(static_cast<int>(l), s, mesh.shards),
                                                 shared_of_layer(static_cast<int>(l)) > 0,
                                                 replicated));
  }
  const Policy p = policy();
  for (int k = 0; k < kSyncs; ++k) {
    std::vector<cpu::Worker::Ticket> tickets;
    for (size_t l = 0; l < layers.size(); ++l) {
      RankLayer& layer = *layers[l];
      train(layer, k, r, s, mesh.shards, static_cast<int>(l));
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

inline void compare(const Mesh& mesh, const Record& record, double tolerance) {
  const Policy p = policy();
  for (size_t l = 0; l < kLayers.size(); ++l) {
    const int layer = static_cast<int>(l);
    std::vector<double> start;
    for (int j = 0;
         j <= place_in_layer(layer, mesh.shards - 1, mesh.shards, size_of_layer(layer) - 1); ++j) {
      start.push_back(static_cast<float>(start_at(layer, j)));
    }
    Expected expected(start);
    const size_t n = size_of_layer(layer);
    for (int k = 0; k < kSyncs; ++k) {
      std::vector<std::vector<double>> replicas(mesh.replicas, expected.anchor);
      std::vector<bool> flags;
      for (int r = 0; r < mesh.replicas; ++r) {
        for (size_t j = 0; j < start.size(); ++j) {
          replicas[r][j] += movement(k, r, layer, static_cast<int>(j));
        }
        flags.push_back(flagged(k, r));
      }
      expected.sync(replicas, flags, p);
      for (int r = 0; r < mesh.replicas; ++r) {
        for (int s = 0; s < mesh.shards; ++s) {
          bool equal = true;
          for (size_t j = 0; j < n; ++j) {
            const int place = place_in_layer(layer, s, mesh.shards, static_cast<int>(j));
            equal = equal && near(record[r][s][k][l][j], expected.anchor[place], tolerance);
          }
          CHECK(equal);
        }
      }
    }
  }
}

// Runs all ranks of the mesh; `make` gives each its Device. Returns parameters and anchors.
template <class Make>
std::pair<Record, Record> trajectory(const Mesh& mesh, Wire wire, Make make,
                                     bool replicated = false) {
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
          run_rank(mesh, *device, r, s, wire, replicated, record, anchors);
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
