// Whole trajectories of sync_layer on meshes of threads: equal to the equations, bit-identical
// between replicas, and without one look of the host at a device scalar.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "../cpu/device.h"
#include "../cpu/worker.h"
#include "world.h"

using namespace edit_ext;
using namespace edit_ext::testing;

namespace {

constexpr int kSyncs = 7;
const std::vector<std::vector<int>> kLayers = {{1000, 3, 77, 1}, {70000, 129}, {5}};

Policy policy() {
  Policy p;
  p.ema_warmup = 3;
  p.clip_norm = 1.5;
  return p;
}

// What replica r has moved element j by, in the window before sync k. Replica 1 runs wild in
// window 4, is NaN in window 5; in window 6 all are NaN.
double movement(int k, int r, int layer, int j) {
  if (k == 6 || (k == 5 && r == 1)) return NAN;
  const double x =
      std::sin(0.37 * j + 1.3 * r + 0.7 * layer) * (1.0 + 0.05 * std::cos(k + 2.0 * r));
  return (k == 4 && r == 1 ? 50.0 : 1.0) * 0.01 * x;
}

bool flagged(int k, int r) { return k == 6 || (r == 1 && (k == 4 || k == 5)); }

int size_of_layer(int l) {
  int n = 0;
  for (int size : kLayers[l]) n += size;
  return n;
}

std::vector<float> start_of(int l, int s) {
  std::vector<float> x(size_of_layer(l));
  for (size_t j = 0; j < x.size(); ++j) x[j] = static_cast<float>(std::cos(0.11 * j + l + 3.0 * s));
  return x;
}

void train(RankLayer& layer, int k, int r, int s, int l) {
  const int n = size_of_layer(l);
  int j = 0;
  for (auto& t : layer.tensors) {
    for (float& x : t) x += static_cast<float>(movement(k, r, l, s * n + j++));
  }
}

// values[r][s][k][l]: what each rank holds after each sync.
using Record = std::vector<std::vector<std::vector<std::vector<std::vector<float>>>>>;

void run_rank(const Mesh& mesh, int r, int s, Wire wire, Record& record, Record& anchors) {
  const Mesh::Seat seat = mesh.seat(r, s);
  cpu::CpuDevice device(two_threads);
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

std::vector<double> widened(const std::vector<float>& x) { return {x.begin(), x.end()}; }

void compare(const Mesh& mesh, const Record& record, double tolerance) {
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

void trajectory(int replicas, int shards, Wire wire, double tolerance) {
  const Mesh mesh(replicas, shards);
  Record record(replicas,
                Record::value_type(shards, std::vector<std::vector<std::vector<float>>>(kSyncs)));
  Record anchors = record;
  std::vector<std::thread> threads;
  for (int r = 0; r < replicas; ++r) {
    for (int s = 0; s < shards; ++s) {
      threads.emplace_back([&, r, s] {
        try {
          run_rank(mesh, r, s, wire, record, anchors);
        } catch (const std::exception& e) {
          std::printf("rank %d.%d: %s\n", r, s, e.what());
          mesh.all->abort(e.what());
          CHECK(false);
        }
      });
    }
  }
  for (std::thread& t : threads) t.join();
  if (failures) return;
  compare(mesh, record, tolerance);
  for (int s = 0; s < shards; ++s) {
    for (int r = 1; r < replicas; ++r) {
      for (int k = 0; k < kSyncs; ++k) {
        for (size_t l = 0; l < kLayers.size(); ++l) {
          CHECK(same_bits(anchors[r][s][k][l], anchors[0][s][k][l]));
        }
      }
    }
  }
}

// Device and Comm as on a GPU: their scalars are theirs. Everything outside their calls finds the
// page closed and dies at the first look.
class ClosedDevice final : public Device {
 public:
  explicit ClosedDevice(const Scalars& scalars) : scalars_(scalars) {}
  void pseudo_grad(const LayerView& v) override {
    inside([&] { device_.pseudo_grad(v); });
  }
  void record(const LayerView& v, const SyncTag& t) override {
    inside([&] { device_.record(v, t); });
  }
  void merge(const LayerView& v, const Policy& p) override {
    inside([&] { device_.merge(v, p); });
  }
  void outer_step(const LayerView& v, const Policy& p) override {
    inside([&] { device_.outer_step(v, p); });
  }
  void write_back(const LayerView& v) override {
    inside([&] { device_.write_back(v); });
  }

 private:
  template <class F>
  void inside(F f) {
    scalars_.open();
    f();
    scalars_.close();
  }
  const Scalars& scalars_;
  cpu::CpuDevice device_;
};

class ClosedComm final : public Comm {
 public:
  ClosedComm(Comm& inner, const Scalars& scalars) : inner_(inner), scalars_(scalars) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void exchange(const Block* to, const Block* from) override { inner_.exchange(to, from); }
  void all_gather(void* b, int64_t each, int64_t total) override {
    inner_.all_gather(b, each, total);
  }
  void gather_scalars(void* b, int64_t each) override {
    scalars_.open();
    inner_.gather_scalars(b, each);
    scalars_.close();
  }
  void abort(const std::string& reason) override { inner_.abort(reason); }
  void poll() const override { inner_.poll(); }
  int64_t bytes_sent() const override { return inner_.bytes_sent(); }

 private:
  Comm& inner_;
  const Scalars& scalars_;
};

void no_host_decision() {
  const Mesh mesh(2, 1);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      const Mesh::Seat seat = mesh.seat(r, 0);
      RankLayer layer({1000, 7}, Wire::bf16, r, 2, 0, 1, std::vector<float>(1007, 1.0f));
      ClosedDevice device(layer.scalars);
      ClosedComm replica(*seat.replica, layer.scalars), all(*seat.mesh, layer.scalars);
      const Comms comms{nullptr, &replica, &all};
      layer.scalars.close();
      for (int k = 0; k < 3; ++k) {
        for (float& x : layer.tensors[0]) x += 0.1f * static_cast<float>(r + 1);
        sync_begin(device, layer.view);
        sync_exchange(device, comms, layer.view, policy(), {k, 1, 0});
        sync_finish(device, layer.view);
      }
      layer.scalars.open();
      CHECK(layer.view.decision->status == kOk && layer.tensors[0][0] > 1.0f);
    });
  }
  for (std::thread& t : threads) t.join();

  // The trap works: a look from outside ends the process.
  const pid_t child = fork();
  if (child == 0) {
    std::freopen("/dev/null", "w", stderr);
    Scalars scalars;
    const volatile double* x = scalars.take<double>(1);
    scalars.close();
    _exit(*x == 0.0 ? 0 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(!(WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

// A replica that never comes, and one that aborts: everybody else gets an exception in time.
void missing_member() {
  ThreadGroup group(2, 0.2);
  bool thrown = false;
  try {
    group.meet();
  } catch (const std::exception&) {
    thrown = true;
  }
  CHECK(thrown);
}

void sticky_worker_errors() {
  cpu::Worker worker;
  const auto bad = worker.submit([] { throw std::runtime_error("broken link"); });
  int thrown = 0;
  for (int i = 0; i < 3; ++i) {
    try {
      worker.wait(bad, 5.0);
    } catch (const std::exception& e) {
      thrown += std::strcmp(e.what(), "broken link") == 0;
    }
  }
  try {
    worker.submit([] {});
  } catch (const std::exception&) {
    ++thrown;
  }
  CHECK(thrown == 4);
}

}  // namespace

int main() {
  no_host_decision();  // forks, so it comes before any thread that lives on
  for (int replicas : {1, 2, 3, 4}) {
    trajectory(replicas, 1, Wire::f32, 1e-6);
    trajectory(replicas, 2, Wire::f32, 1e-6);
  }
  // bf16 keeps 8 bits of each pseudo-gradient and step: 2^-9 of a movement of about 0.02, a sync.
  trajectory(2, 2, Wire::bf16, 5e-4);
  missing_member();
  sticky_worker_errors();
  return testing::close("test_sync");
}
