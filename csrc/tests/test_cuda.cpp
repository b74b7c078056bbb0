// The CUDA kernels under the emulator: bit-equal to the CPU twin at odd sizes and addresses, in
// whole trajectories, whatever order threads and blocks run in and however late streams are.
#include <unistd.h>

#include "../cpu/stacked.h"
#include "../cuda/device.h"
#include "../cuda/stacked.h"
#include "cuda_cases.h"
#include "trajectory.h"

using namespace edit_ext;
using namespace edit_ext::testing;
using cuda::CudaDevice;

// A symbol whose address is known both here and to nm: where the program was loaded.
extern "C" void edit_ext_landmark() {}

namespace {

constexpr emu::Order kOrders[] = {emu::Order::forward, emu::Order::reverse, emu::Order::random};
constexpr emu::Mode kModes[] = {emu::Mode::early, emu::Mode::late, emu::Mode::random};

// A side stream; each next case meets an order of threads with another mode of streams.
class Side {
 public:
  explicit Side(size_t turn) {
    emu::set_mode(kModes[turn % 3]);
    cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a side stream");
  }
  ~Side() { cudaStreamDestroy(stream_); }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;
  void settle() const { cuda::check(cudaStreamSynchronize(stream_), "a side stream"); }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

void same(const Case& a, const Case& b) {
  for (size_t i = 0; i < a.tensors.size(); ++i) CHECK(a.tensors[i].equals(b.tensors[i]));
  for (const size_t i : {0, 1, 2, 4}) CHECK(a.buffers[i].equals(b.buffers[i]));
  CHECK(same_bits(a.shard_sums, b.shard_sums));
  CHECK(std::memcmp(&a.decision, &b.decision, sizeof(Decision)) == 0);
  CHECK(a.merge_records[0].norm2 == b.merge_records[0].norm2);
  for (const Case* c : {&a, &b}) {
    for (const Guarded& g : c->tensors) CHECK(g.intact());
    for (const Guarded& g : c->buffers) CHECK(g.intact());
  }
}

void compare_sync(const std::vector<Shape>& shapes, Wire wire, int replica, int replicas, int bad,
                  const Policy& p, bool anchored = true, bool replicated = false, bool late = false,
                  float keep = 0.0f) {
  static unsigned seed = 0;
  ++seed;
  Case expected(shapes, wire, replica, replicas, seed, replicated);
  const auto set = [=](LayerView& v) {
    v.anchored = anchored;
    v.late = late;
    v.keep = keep;
  };
  set(expected.v);
  cpu::CpuDevice cpu_device;
  expected.sync(cpu_device, p, bad, [] {});
  for (const emu::Order order : kOrders) {
    emu::machine.order = order;
    const Side stream(seed + static_cast<size_t>(order));
    Case found(shapes, wire, replica, replicas, seed, replicated);
    set(found.v);
    CudaDevice device(stream);
    found.sync(device, p, bad, [&] { stream.settle(); });
    same(found, expected);
  }
}

void passes() {
  Policy p;
  p.clip_norm = 3.0;
  for (const Wire wire : {Wire::f32, Wire::bf16}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      for (const int64_t n : {0, 1, 3, 31, 127, 8193, 65537}) {
        compare_sync({{n, type, 0}}, wire, 0, 2, -1, p);
      }
      std::vector<Shape> odd;
      for (int offset = 1; offset < 8; ++offset) odd.push_back({257 * offset, type, offset});
      compare_sync(odd, wire, 1, 3, -1, p);
    }
    for (const int replicas : {1, 2, 3, 4, 5, 8, 9}) {
      for (const int bad : {-1, 0, replicas - 1}) {
        compare_sync({{70000, DType::f32, 0}, {5, DType::bf16, 0}}, wire, replicas - 1, replicas,
                     bad, p);
      }
    }
    // The momentum of the whole layer; what the other replicas would return is what is sent.
    for (const int bad : {-1, 0}) {
      compare_sync({{70000, DType::f32, 0}, {5, DType::bf16, 0}}, wire, 1, 3, bad, p, true, true);
      compare_sync({{257, DType::bf16, 3}}, wire, 1, 2, bad, p, true, true);
    }
    // Results that come steps later: CO2's rules, and a mix with the local weights.
    Policy stale = p;
    stale.clip_norm = 0.0;
    stale.clip_value = 0.5;
    for (const double gap : {0.0, 2.0}) {
      stale.gap_scale = gap;
      stale.staleness = 1.5;
      for (const bool whole : {false, true}) {
        for (const int bad : {-1, 0}) {
          compare_sync({{70000, DType::f32, 0}, {517, DType::bf16, 1}}, wire, 1, 3, bad, stale,
                       true, whole, true, gap > 0.0 ? 0.25f : 0.0f);
        }
      }
    }
    // More chunks than blocks, so that shared memory is used again.
    compare_sync({{1300000, DType::f32, 0}}, wire, 0, 2, -1, p);
    compare_sync({{1300000, DType::f32, 0}}, wire, 0, 2, 1, p);
    // Optimizer states and buffers: no anchor, outer step "replace", no clip.
    Policy replace;
    replace.outer = Outer::replace;
    replace.clip_norm = 0.0;
    compare_sync({{3000, DType::f32, 0}}, wire, 0, 2, -1, replace, false);
    compare_sync({{3000, DType::f32, 0}}, wire, 0, 1, 0, replace, false);
  }
}

// Too few steps: neither device changes a bit of parameters, anchor, momentum and detectors.
void void_syncs() {
  Policy p;
  for (const Wire wire : {Wire::f32, Wire::bf16}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      for (const bool anchored : {true, false}) {
        const std::vector<Shape> shapes{{8193, type, 0}, {257, type, 1}};
        p.min_steps = 3 * 2 + 1;
        compare_sync(shapes, wire, 1, 2, 0, p, anchored);
        Case before(shapes, wire, 1, 2, 77), after(shapes, wire, 1, 2, 77);
        after.v.anchored = anchored;
        CudaDevice device(nullptr);
        after.sync(device, p, 0, [] {});
        CHECK(after.decision.skip == kVoid && after.decision.status == kOk);
        for (const size_t i : {0, 1}) {
          CHECK(after.tensors[i].equals(before.tensors[i]));
          // Without an anchor there is none to keep: pseudo_grad takes it as zero.
          if (anchored) CHECK(after.buffers[i].equals(before.buffers[i]));
        }
        CHECK(same_bits(after.detectors, before.detectors));
        p.min_steps = 3 * 2;  // enough
        after.sync(device, p, -1, [] {});
        CHECK(after.decision.skip == kNoSkip && !after.tensors[0].equals(before.tensors[0]));
      }
    }
  }
}

void many_tensors() {
  std::vector<Shape> shapes;
  for (int i = 0; i < 1100; ++i) shapes.push_back({i % 11 == 0 ? i : 0, DType::f32, i % 4});
  compare_sync(shapes, Wire::f32, 0, 2, -1, {});  // 99 with elements: the table on the device
  shapes.resize(200);
  compare_sync(shapes, Wire::bf16, 1, 2, -1, {});  // 18: by value
}

// Chunks behind the 2^31st element: only their places, nobody has that much memory here.
void large_offsets() {
  const int64_t n = (int64_t{1} << 31) + 17, second = round_up(n, kGroup);
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  cuda::Tensors t{};
  t.count = 2;
  t.few[0] = {nullptr, n, 0, 0, DType::f32};
  t.few[1] = {nullptr, n, second, chunks, DType::f32};
  t.num_chunks = 2 * chunks;
  const auto last = place(t, chunks - 1), next = place(t, chunks), end = place(t, 2 * chunks - 1);
  CHECK(last.tensor == &t.few[0] && last.start == int64_t{1} << 31 && last.size == 17);
  CHECK(next.tensor == &t.few[1] && next.start == 0 && next.flat() == second);
  CHECK(end.flat() == second + (int64_t{1} << 31) && end.size == 17);
}

void same(const StackedCase& a, const StackedCase& b) {
  for (size_t i = 0; i < a.params.size(); ++i) {
    CHECK(a.params[i].equals(b.params[i]) && a.params[i].intact() && b.params[i].intact());
  }
  for (size_t i = 0; i < 2; ++i) CHECK(a.buffers[i].equals(b.buffers[i]));
  for (const StackedCase* c : {&a, &b}) {
    for (const Guarded& g : c->buffers) CHECK(g.intact());
  }
  CHECK(std::memcmp(&a.decision, &b.decision, sizeof(Decision)) == 0);
  CHECK(std::memcmp(&a.merged2, &b.merged2, 8) == 0 && same_bits(a.weights, b.weights));
}

// The passes on one processor, and the form that stays on chip on devices that hold every layer
// here, in one block or in three, of several runs each.
struct Chip {
  int processors, shared_bytes;
};
constexpr Chip kChips[] = {{1, 0}, {1, 8 << 20}, {3, 3 << 20}};

void sync_on(const Chip& chip, StackedCase& c, const Policy& p, const Side& stream) {
  emu::machine.processors = chip.processors;
  emu::machine.shared_bytes = chip.shared_bytes;
  const cuda::OnChip plan = cuda::on_chip(c.tensors, c.v.replicas);
  CHECK((plan.blocks > 0) == (chip.shared_bytes > 0));
  cuda::stacked_sync(c.tensors, c.table.data(), c.v, plan, p, stream);
  stream.settle();
  emu::machine.processors = emu::Machine().processors;
  emu::machine.shared_bytes = emu::Machine().shared_bytes;
}

void stacked() {
  const std::vector<std::vector<Shape>> layers = {
      {{0, DType::f32, 0}, {1, DType::f32, 0}, {67000, DType::f32, 0}, {31, DType::f32, 0}},
      {{2049, DType::f32, 1}, {129, DType::f32, 3}},
      {{4096, DType::f32, 4}, {1, DType::f32, 5}, {3, DType::f32, 6}, {65537, DType::f32, 7}},
      std::vector<Shape>(100, {3, DType::f32, 0})};
  Policy p;
  p.clip_norm = 2.0;
  unsigned seed = 100;
  for (const auto& shapes : layers) {
    for (int replicas = 1; replicas <= kMaxStacked; ++replicas) {
      for (const int special : {0, 1, 2}) {  // 1: replicas cancel; 2: one, or all, NaN
        if (special == 1 && replicas % 2) continue;
        ++seed;
        const auto make = [&] {
          auto c = std::make_unique<StackedCase>(shapes, replicas, special == 1, seed);
          if (special == 2) c->tensors[0].data[replicas - 1][0] = NAN;
          return c;
        };
        const auto expected = make();
        cpu::stacked_sync(cpu::CpuDevice(), expected->tensors, expected->v, p);
        CHECK(special != 1 || expected->merged2 < 0);
        for (const emu::Order order : kOrders) {
          emu::machine.order = order;
          for (const Chip& chip : kChips) {
            const Side stream(seed + static_cast<size_t>(order));
            const auto found = make();
            sync_on(chip, *found, p, stream);
            same(*found, *expected);
          }
        }
      }
    }
  }
}

// Which layers stay on chip, with the numbers of on_chip.h; and nothing where nothing is to hold.
void choice() {
  const auto fits = [](int processors, int kilobytes, int replicas, int64_t size, int tensors = 1) {
    emu::machine.processors = processors;
    emu::machine.shared_bytes = kilobytes << 10;
    const std::vector<StackedTensor> layer(tensors, {{}, size, 0, 0, 0});
    const cuda::OnChip plan = cuda::on_chip(layer, replicas);
    CHECK(plan.blocks <= processors && plan.shared <= plan.largest);
    CHECK(plan.largest + 256 <= kilobytes << 10);
    return plan.blocks > 0;
  };
  for (const auto& [replicas, most] : {std::pair(2, 2433024), {4, 1351680}, {8, 811008}}) {
    CHECK(fits(132, 227, replicas, most) && !fits(132, 227, replicas, most + 1));
  }
  for (const auto& [replicas, most] : {std::pair(2, 1327104), {4, 884736}, {8, 442368}}) {
    CHECK(fits(108, 163, replicas, most) && !fits(108, 163, replicas, most + 1));
  }
  CHECK(fits(132, 227, 8, 1, 396) && !fits(132, 227, 8, 1, 397));  // a whole run each
  CHECK(!fits(132, 227, 8, 1, 0) && !fits(132, 48, 8, 1));
  emu::machine.processors = emu::Machine().processors;
  emu::machine.shared_bytes = emu::Machine().shared_bytes;
}

void trajectories() {
  for (const Wire wire : {Wire::f32, Wire::bf16}) {
    for (const auto& [replicas, shards] :
         {std::pair(1, 1), {2, 1}, {3, 1}, {4, 1}, {1, 2}, {2, 2}}) {
      const Mesh mesh(replicas, shards), twin(replicas, shards);
      const auto [expected, expected_anchors] =
          trajectory(twin, wire, [] { return std::make_unique<cpu::CpuDevice>(); });
      const auto [found, anchors] =
          trajectory(mesh, wire, [] { return std::make_unique<CudaDevice>(nullptr); });
      if (failures) return;
      same_anchors(mesh, anchors);
      for (int r = 0; r < replicas; ++r) {
        for (int s = 0; s < shards; ++s) {
          for (int k = 0; k < kSyncs; ++k) {
            for (size_t l = 0; l < kLayers.size(); ++l) {
              CHECK(same_bits(found[r][s][k][l], expected[r][s][k][l]));
              CHECK(same_bits(anchors[r][s][k][l], expected_anchors[r][s][k][l]));
            }
          }
        }
      }
    }
  }
}

// Every kernel in this program has run: nm lists them, the emulator has their addresses.
void all_kernels_ran() {
  const std::string command = "nm -C /proc/" + std::to_string(getpid()) + "/exe";
  FILE* pipe = popen(command.c_str(), "r");
  CHECK(pipe != nullptr);
  if (!pipe) return;
  std::vector<std::pair<uintptr_t, std::string>> kernels;
  uintptr_t own = 0;
  char line[4096];
  while (std::fgets(line, sizeof(line), pipe)) {
    char kind = 0;
    unsigned long long address = 0;
    int name = 0;
    if (std::sscanf(line, "%llx %c %n", &address, &kind, &name) < 2) continue;
    if (std::strcmp(line + name, "edit_ext_landmark\n") == 0) own = address;
    const bool code = kind == 't' || kind == 'T' || kind == 'w' || kind == 'W';
    const std::string symbol(line + name);
    const size_t at = symbol.find("_kernel");
    const char next = at == std::string::npos ? 0 : symbol[at + 7];
    if (code && (next == '(' || next == '<') && symbol.find("[clone") == std::string::npos) {
      kernels.emplace_back(address, symbol);
    }
  }
  CHECK(pclose(pipe) == 0);
  const uintptr_t base = reinterpret_cast<uintptr_t>(edit_ext_landmark) - own;
  CHECK(own != 0 && kernels.size() >= 20);
  for (const auto& [address, symbol] : kernels) {
    const bool ran = emu::launched().count(reinterpret_cast<const void*>(base + address)) != 0;
    if (!ran) std::printf("never run: %s", symbol.c_str());
    CHECK(ran);
  }
}

}  // namespace

int main() {
  passes();
  void_syncs();
  many_tensors();
  large_offsets();
  stacked();
  choice();
  trajectories();
  all_kernels_ran();
  return testing::close("test_cuda");
}
