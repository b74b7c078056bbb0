#include "grid.cuh"
#include "on_chip.h"
#include "stacked.cuh"

namespace edit_ext::cuda {
namespace {

constexpr int kHoldThreads = kWarp * kMaxWarps;
static_assert(4 * kHoldThreads == kRun, "a thread holds four neighbouring elements of a run");

// One run in shared memory.
template <int R>
struct Slot {
  float held[R + 1][kRun];  // anchor, pseudo-gradients
  float* at[kMaxStacked];   // the run in each replica's tensor
  int64_t flat;             // and in the flat buffers
  int32_t size;
  bool aligned;
  // The halves of a warp read two neighbouring slots at a time: 64 bytes apart, in banks.
  char apart[112];
};
static_assert(sizeof(Slot<1>) % 128 == 64 && sizeof(Slot<8>) == 9 * 8192 + 192, "see `apart`");

// A block's copy of what all blocks decide alike.
struct alignas(16) Decided {
  double gram[kMaxPairs];
  Detector detectors[kMaxStacked];
  PerReplica per_replica[kMaxStacked];
  float weights[kMaxStacked];
  double merged2;
  Decision decision;
};

template <int R>
__device__ void find_run(const Stack& tensors, int64_t run, Slot<R>& slot) {
  const StackedTensor& t = *last_from(tensors, &StackedTensor::first_run, run);
  const int64_t start = (run - t.first_run) * kRun, left = t.size - start;
  for (int r = 0; r < R; ++r) slot.at[r] = t.data[r] + start;
  slot.flat = t.offset + start;
  slot.size = static_cast<int32_t>(left < kRun ? left : kRun);
  slot.aligned = aligned4(t, R);
}

// Inner products of the pseudo-gradients of this block's runs, in the order of
// BlockTeam::products: half a warp takes one run and one row i of products, <g_i, g_(i + d mod R)>
// for d = 0 ... R / 2: every pair once, but for even R the last ones twice, of which one counts.
template <int R>
__device__ void run_products(const Slot<R>* slots, int count, const StackedView& v, int64_t runs) {
  static_assert(2 * kProductLanes == kWarp, "two items a warp");
  constexpr int kReach = R / 2 + 1;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kProductLanes;
  const int items = R * count, halves = kHoldThreads / kProductLanes;
  // Whole warps take part, so that all lanes meet in the shuffles.
  for (int first = thread / kWarp * 2; first < items; first += halves) {
    const int item = first + thread / kProductLanes % 2;
    const int i = item / count, s = item % count;  // i == R: nothing is left for this half
    const Slot<R>& slot = slots[s];
    const float* g[kReach];
    EDIT_UNROLL
    for (int d = 0; d < kReach; ++d) g[d] = slot.held[1 + (i + d) % R];
    const int size = slot.size;
    float sums[kReach] = {};
#pragma unroll 4
    for (int j = lane; j < size; j += kProductLanes) {
      EDIT_UNROLL
      for (int d = 0; d < kReach; ++d) sums[d] = sums[d] + g[0][j] * g[d][j];
    }
    const int64_t run = blockIdx.x + static_cast<int64_t>(s) * gridDim.x;
    EDIT_UNROLL
    for (int d = 0; d < kReach; ++d) {
      for (int half = kProductLanes / 2; half > 0; half /= 2) {
        sums[d] = sums[d] + __shfl_down_sync(kAll, sums[d], half);
      }
      const int k = (i + d) % R, low = i < k ? i : k, high = i < k ? k : i;
      if (lane == 0 && i < R && (2 * d < R || i < k)) {
        v.run_sums[(diagonal(R, low) + high - low) * runs + run] = sums[d];
      }
    }
  }
}

// By recursion: a loop over halves is not unrolled, and x would lie in memory.
template <int N>
__device__ float fold_held(float* x) {
  if constexpr (N > 1) {
    EDIT_UNROLL
    for (int r = 0; r < N / 2; ++r) x[r] = x[r] + x[r + N / 2];
    return fold_held<N / 2>(x);
  }
  return x[0];
}

// The sum of chunk i from those of its runs; sums: [runs].
__device__ float chunk_sum(const Stack& tensors, int64_t i, const float* sums) {
  const auto c = place(tensors, i);
  const float* first = sums + c.tensor->first_run + c.start / kRun;
  const int count = static_cast<int>(runs_of(c.size));
  float x[kRuns];
  EDIT_UNROLL
  for (int r = 0; r < kRuns; ++r) x[r] = r < count ? first[r] : 0.0f;
  return fold_held<kRuns>(x);
}

template <int R>
__device__ void total_products(const Stack& tensors, const StackedView& v, int64_t runs,
                               double* gram) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int pair = warp; pair < pairs_of(R); pair += kMaxWarps) {
    const float* const sums = v.run_sums + pair * runs;
    const double sum = fold_warp(total_lane(
        tensors.num_chunks, lane, [&](int64_t i) { return chunk_sum(tensors, i, sums); }));
    if (lane == 0) gram[pair] = sum;
  }
}

// Every block computes the decision anew from the same sums, so that one barrier is enough; block 0
// publishes it. Where w'Gw is mostly rounding, the exact pass reads the replicas a second time: a
// segment's lanes run through four runs, which lie in four blocks.
template <int R>
__global__ void __launch_bounds__(kHoldThreads, 1)
    on_chip_kernel(const __grid_constant__ Stack tensors, const StackedView v, const int64_t runs,
                   const Policy p) {
  Decided& own = *reinterpret_cast<Decided*>(dynamic_shared());
  Slot<R>* const slots = reinterpret_cast<Slot<R>*>(dynamic_shared() + sizeof(Decided));
  const int thread = static_cast<int>(threadIdx.x);
  const int count =
      static_cast<int>((runs + gridDim.x - 1 - blockIdx.x) / gridDim.x);  // runs of this block
  GridBarrier grid{v.arrived, 0};

  if (thread < count) find_run(tensors, blockIdx.x + int64_t{thread} * gridDim.x, slots[thread]);
  // Before the first barrier, behind which block 0 brings them up to date.
  if (thread < R) own.detectors[thread] = v.detectors[thread];
  __syncthreads();
  for (int s = 0; s < count; ++s) {
    Slot<R>& slot = slots[s];
    hold<R>(BlockTeam{slot.aligned}, slot.size, v.anchor + slot.flat, slot.at, slot.held[0]);
  }
  __syncthreads();
  run_products(slots, count, v, runs);
  grid.wait();

  total_products<R>(tensors, v, runs, own.gram);
  __syncthreads();
  if (thread == 0) {
    decide_totals(p, R, own.gram, own.detectors, own.per_replica, own.weights, &own.merged2,
                  own.decision);
    if (!(own.merged2 < 0.0)) clip_stacked(p, own.merged2, own.decision);
  }
  __syncthreads();
  if (own.merged2 < 0.0) {
    exact_norms(tensors, v, own.weights);
    grid.wait();
    if (thread < kWarp) {
      const double exact = total(v.partials, v.num_chunks);
      if (thread == 0) clip_stacked(p, exact, own.decision);
    }
    __syncthreads();
  }

  if (blockIdx.x == 0 && thread < R) {
    v.detectors[thread] = own.detectors[thread];
    v.per_replica[thread] = own.per_replica[thread];
    v.weights[thread] = own.weights[thread];
    if (thread == 0) {
      *v.merged2 = own.merged2;
      *v.decision = own.decision;
    }
  }
  const OuterStep numbers = outer_numbers(p, own.decision);
  const bool skip = own.decision.skip != 0;
  for (int s = 0; s < count; ++s) {
    Slot<R>& slot = slots[s];
    const BlockTeam team{slot.aligned};
    if (skip) {
      for (int r = 0; r < R; ++r) {
        write_back<false, float, float>(team, slot.size, slot.held[0], nullptr, 0.0f, slot.at[r]);
      }
    } else {
      step_held<R>(team, slot.size, numbers, own.weights, slot.held[0], v.anchor + slot.flat,
                   v.momentum + slot.flat, slot.at);
    }
  }
}

template <int R>
void launch_on_chip(const Stack& tensors, const StackedView& v, const OnChip& plan, const Policy& p,
                    cudaStream_t stream) {
  if constexpr (R <= kMaxStacked) {
    if (v.replicas != R) return launch_on_chip<R + 1>(tensors, v, plan, p, stream);
    launch_cooperative("on_chip_kernel", on_chip_kernel<R>, plan.blocks, kHoldThreads, plan.shared,
                       plan.largest, stream, tensors, v, plan.runs, p);
  }
}

int attribute(decltype(cudaDevAttrMultiProcessorCount) which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

// Bytes of the __shared__ variables of on_chip_kernel, and some to spare; they count too.
constexpr int kStatic = 256;

}  // namespace

OnChip on_chip(const std::vector<StackedTensor>& tensors, int replicas) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (!attribute(cudaDevAttrCooperativeLaunch, device)) return {};
  const int processors = attribute(cudaDevAttrMultiProcessorCount, device);
  const int slot = static_cast<int>(sizeof(Slot<1>)) + (replicas - 1) * kRun * 4;
  const int room = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - kStatic -
                   static_cast<int>(sizeof(Decided));
  const int slots = room / slot;
  int64_t runs = 0;
  for (const StackedTensor& t : tensors) runs += runs_of(t.size);
  if (runs == 0 || runs > int64_t{processors} * slots) return {};
  const int64_t blocks = runs < processors ? runs : processors;
  const auto bytes = [=](int64_t n) { return static_cast<int32_t>(sizeof(Decided) + n * slot); };
  return {runs, static_cast<int32_t>(blocks), bytes((runs + blocks - 1) / blocks), bytes(slots)};
}

void on_chip_sync(const std::vector<StackedTensor>& tensors, void* table, const StackedView& v,
                  const OnChip& plan, const Policy& p, cudaStream_t stream) {
  launch_on_chip<1>(tensors_in(tensors, v.num_chunks, table, stream), v, plan, p, stream);
}

}  // namespace edit_ext::cuda
