// Whole trajectories of sync_layer on meshes of threads: equal to the equations, bit-identical
// between replicas, and without one look of the host at a device scalar.
#include <sys/wait.h>
#include <unistd.h>

#include "trajectory.h"

using namespace edit_ext;
using namespace edit_ext::testing;

namespace {

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
  void decide(const LayerView& v, const Policy& p) override {
    inside([&] { device_.decide(v, p); });
  }
  void merge(const LayerView& v) override {
    inside([&] { device_.merge(v); });
  }
  void gap(const LayerView& v) override {
    inside([&] { device_.gap(v); });
  }
  void encode_merged(const LayerView& v) override {
    inside([&] { device_.encode_merged(v); });
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

// A window with too few steps: every replica keeps its own weights, to the bit, and the next sync,
// with the steps of both windows, gives what it gives without the void one before it.
void check_void(int replicas, int shards, Wire wire) {
  Policy p = policy();
  p.min_steps = 3 * replicas;
  p.weighting = Weighting::steps;
  const Mesh mesh(replicas, shards), twin(replicas, shards);
  std::vector<std::thread> threads;
  for (int r = 0; r < replicas; ++r) {
    for (int s = 0; s < shards; ++s) {
      threads.emplace_back([&, r, s] {
        const Mesh::Seat seat = mesh.seat(r, s), other = twin.seat(r, s);
        const std::vector<float> start(1007, 1.0f);
        RankLayer layer({1000, 7}, wire, r, replicas, s, shards, start);
        RankLayer once({1000, 7}, wire, r, replicas, s, shards, start);
        cpu::CpuDevice device(two_threads);
        const auto sync = [&](RankLayer& l, const Comms& comms, const SyncTag& tag) {
          sync_begin(device, l.view);
          sync_exchange(device, comms, l.view, p, tag);
          sync_finish(device, l.view);
          CHECK(l.view.decision->status == kOk);
        };
        const auto train = [&](RankLayer& l) {
          for (float& x : l.tensors[0]) x += 0.01f * static_cast<float>(r + 1);
        };
        for (int k = 0; k < 3; ++k) {  // momentum and detectors hold something from k = 1 on
          train(layer);
          train(once);
          const auto own = layer.values(), anchor = layer.anchor, momentum = layer.momentum;
          const std::vector<Detector> detectors(layer.view.detectors,
                                                layer.view.detectors + replicas);
          sync(layer, seat.comms(), {2 * k, r % 2 + 1, 0});
          CHECK(layer.view.decision->skip == kVoid);
          CHECK(same_bits(layer.values(), own) && same_bits(layer.anchor, anchor));
          CHECK(same_bits(layer.momentum, momentum));
          CHECK(std::memcmp(layer.view.detectors, detectors.data(),
                            detectors.size() * sizeof(Detector)) == 0);
          train(layer);
          train(once);
          sync(layer, seat.comms(), {2 * k + 1, 2 * (r % 2 + 1) + 1, 0});
          sync(once, other.comms(), {k, 2 * (r % 2 + 1) + 1, 0});
          CHECK(layer.view.decision->skip == kNoSkip && !same_bits(layer.anchor, anchor));
          CHECK(same_bits(layer.values(), once.values()) && same_bits(layer.anchor, once.anchor));
          CHECK(same_bits(layer.momentum, once.momentum));
        }
      });
    }
  }
  for (std::thread& t : threads) t.join();
}

// A flat vector becomes its mean over the replicas, in the same bits everywhere; NaN stays NaN.
void check_mean(int replicas, int n) {
  const Mesh mesh(replicas, 1);
  const int64_t room = replicas * piece_size(n, replicas);
  std::vector<std::vector<float>> flats(replicas, std::vector<float>(room));
  std::vector<double> expected(n);
  for (int r = 0; r < replicas; ++r) {
    for (int j = 0; j < n; ++j) {
      flats[r][j] = static_cast<float>((j * 37 + r * 11) % 101) / 64.0f;
      expected[j] += flats[r][j] / static_cast<double>(replicas);
    }
  }
  flats[replicas - 1][n / 2] = NAN;
  std::vector<std::thread> threads;
  for (int r = 0; r < replicas; ++r) {
    threads.emplace_back([&, r] {
      const Mesh::Seat seat = mesh.seat(r, 0);
      cpu::CpuDevice device(two_threads);
      LayerView v{};
      v.size = n;
      v.replica = r;
      v.replicas = replicas;
      v.piece = piece_size(n, replicas);
      v.wire = Wire::f32;
      std::vector<float> recv((replicas - 1) * v.piece), partials(v.piece / kChunk + 1);
      std::vector<PerReplica> per_replica(replicas);
      for (PerReplica& p : per_replica) p.weight = 1.0f / static_cast<float>(replicas);
      MergeRecord record{};
      Decision decision{};
      v.send = flats[r].data();
      v.recv = recv.data();
      v.merged = flats[r].data() + r * v.piece;
      v.partials = partials.data();
      v.per_replica = per_replica.data();
      v.merge_records = &record;
      v.decision = &decision;
      mean_exchange(device, *seat.replica, v);
    });
  }
  for (std::thread& t : threads) t.join();
  for (int j = 0; j < n; ++j) {
    for (int r = 1; r < replicas; ++r) {
      CHECK(std::memcmp(&flats[r][j], &flats[0][j], sizeof(float)) == 0);
    }
    CHECK(j == n / 2 ? std::isnan(flats[0][j]) : std::fabs(flats[0][j] - expected[j]) < 1e-6);
  }
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

void check_trajectory(int replicas, int shards, Wire wire, double tolerance) {
  const auto make = [] { return std::make_unique<cpu::CpuDevice>(two_threads); };
  const Mesh mesh(replicas, shards), twin(replicas, shards);
  const auto [record, anchors] = trajectory(mesh, wire, make);
  if (failures) return;
  compare(mesh, record, tolerance);
  same_anchors(mesh, anchors);
  // The momentum of all pieces on every replica: on fp32 the same numbers, on bf16 another
  // rounding.
  const auto [replicated, theirs] = trajectory(twin, wire, make, true);
  if (failures) return;
  compare(twin, replicated, tolerance);
  same_anchors(twin, theirs);
  CHECK((replicated == record) == (wire == Wire::f32));
}

}  // namespace

int main() {
  no_host_decision();  // forks, so it comes before any thread that lives on
  for (int replicas : {1, 2, 3, 4}) {
    check_trajectory(replicas, 1, Wire::f32, 1e-6);
    check_trajectory(replicas, 2, Wire::f32, 1e-6);
  }
  // bf16 keeps 8 bits of each pseudo-gradient and step: 2^-9 of a movement of about 0.02, a sync.
  check_trajectory(2, 2, Wire::bf16, 5e-4);
  for (const Wire wire : {Wire::f32, Wire::bf16}) {
    check_void(2, 1, wire);
    check_void(3, 2, wire);
  }
  for (int replicas : {2, 3, 4}) {
    for (int n : {1, 127, 1000, 200000}) check_mean(replicas, n);
  }
  missing_member();
  sticky_worker_errors();
  return testing::close("test_sync");
}
