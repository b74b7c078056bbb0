// A GPU for tests: the .cu sources, compiled by g++, run on fibers. Blocks run one after another,
// the threads of a block one at a time until they meet: at a barrier all threads of the block, at a
// shuffle the lanes that its mask names. Between meetings threads run in the order that a test
// asks for, so that code which leans on lock step or on luck fails. Streams: emu_streams.h.
//
// In a cooperative launch the threads of all blocks live at once. A thread that sleeps
// (__nanosleep) waits for another block: its own is left where it stands and the next one runs.
// Blocks still share their `__shared__` variables, so what a kernel keeps there over such a wait
// is overwritten by its neighbours; dynamic shared memory is each block's own, and begins as NaN.
//
// What ends a test: a barrier that a finished thread will never reach, a shuffle that a lane of its
// mask does not call, lanes that meet in shuffles of different kind, threads or blocks that wait
// for ever, a wait for a block that may not run yet.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "emu_streams.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
// One block runs at a time on a host thread, and ranks are host threads.
#define __shared__ static thread_local

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x, y = 1, z = 1;
  explicit dim3(unsigned x = 1) : x(x) {}
};

enum {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrCooperativeLaunch
};
inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorNotReady ? "not ready" : "emulated";
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int which, int device);

namespace emu {

// The compiler's own jumps: no system call, and no sanitizer that takes a fiber's stack for the
// thread's. The two ends of a jump must be functions of their own.
using Jump = void* [5];
#define EMU_JUMPS __attribute__((noinline, no_sanitize("address")))

enum class Order { forward, reverse, random };
enum class Wait { none, barrier, shuffle, sleep, done };

struct Fiber {
  ucontext_t context;  // how it begins; from then on jumps, which cost no system call
  Jump here;
  bool fresh;
  std::unique_ptr<char[]> stack;
  Wait wait;
  bool slept;                        // before it ran last
  unsigned mask, bits_in, bits_out;  // of a shuffle; doubles take two rounds
  int delta, kind;
};

// What one host thread emulates with.
struct Machine {
  static constexpr size_t kStack = 256 << 10;
  std::vector<Fiber> fibers;
  Jump scheduler;
  std::function<void()> body;
  dim3 thread, block, block_size, grid_size;
  int first = 0, current = 0;  // fibers: thread 0 of the block that runs, and the thread that does
  bool cooperative = false;
  char* dynamic = nullptr;       // shared memory of the block that runs
  bool progress = false;         // somebody did more than look whether another block is there
  int processors = 1;            // few, so that blocks take several chunks each
  int shared_bytes = 227 << 10;  // dynamic, of a block
  Order order = Order::forward;
  std::mt19937 randomness{5};
  std::string error;
};
inline thread_local Machine machine;
// Kernels that have run, by address; shared by all host threads of a test.
inline std::set<const void*>& launched() {
  static std::set<const void*> kernels;
  return kernels;
}

EMU_JUMPS inline void pause(Wait wait) {
  Machine& m = machine;
  Fiber& f = m.fibers[m.current];
  f.wait = wait;
  if (__builtin_setjmp(f.here) == 0) __builtin_longjmp(m.scheduler, 1);
}

EMU_JUMPS inline void resume(Fiber& f) {
  if (__builtin_setjmp(machine.scheduler) != 0) return;
  if (!f.fresh) __builtin_longjmp(f.here, 1);
  f.fresh = false;
  setcontext(&f.context);
}

inline void enter() {
  machine.body();
  pause(Wait::done);
}

inline void start(Fiber& f) {
  if (!f.stack) f.stack.reset(new char[Machine::kStack]);  // no page before it is used
  f.wait = Wait::none;
  f.slept = false;
  f.fresh = true;
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.get();
  f.context.uc_stack.ss_size = Machine::kStack;
  f.context.uc_link = nullptr;
  makecontext(&f.context, enter, 0);
}

// Lets the lanes of the warp whose fibers begin at `first` go on if one of their meetings is
// complete.
inline bool shuffled(Machine& m, int first, int lanes) {
  bool moved = false;
  for (int lane = 0; lane < lanes; ++lane) {
    const Fiber& f = m.fibers[first + lane];
    if (f.wait != Wait::shuffle) continue;
    if (!(f.mask >> lane & 1)) throw std::runtime_error("a lane calls a shuffle without its bit");
    bool complete = true;
    for (int other = 0; other < 32; ++other) {
      if (!(f.mask >> other & 1)) continue;
      if (other >= lanes) throw std::runtime_error("a shuffle names a lane that is not there");
      const Fiber& o = m.fibers[first + other];
      if (o.wait == Wait::done) {
        throw std::runtime_error("a shuffle names a lane that has returned");
      }
      complete = complete && o.wait == Wait::shuffle;
    }
    if (!complete) continue;
    const unsigned mask = f.mask;
    const int delta = f.delta, kind = f.kind;
    for (int other = 0; other < lanes; ++other) {
      if (!(mask >> other & 1)) continue;
      Fiber& o = m.fibers[first + other];
      if (o.mask != mask || o.delta != delta || o.kind != kind) {
        throw std::runtime_error("lanes meet in different shuffles");
      }
      const int source = other + delta;
      const bool there = source < 32 && (mask >> source & 1);
      // What a GPU leaves undefined is poison here: a lane outside the mask.
      o.bits_out = source >= 32 ? o.bits_in : there ? m.fibers[first + source].bits_in : ~0u;
      o.wait = Wait::none;
    }
    moved = true;
  }
  return moved;
}

// The block whose fibers begin at m.first, until all its threads have returned (true) or, in a
// cooperative launch, it waits for another block (false).
inline bool run_block(Machine& m) {
  const int threads = static_cast<int>(m.block_size.x);
  const auto begin = m.fibers.begin() + m.first, end = begin + threads;
  const auto count = [&](Wait w) {
    return std::count_if(begin, end, [w](const Fiber& f) { return f.wait == w; });
  };
  std::vector<int> turn(threads);
  for (int t = 0; t < threads; ++t) turn[t] = m.order == Order::reverse ? threads - 1 - t : t;
  for (auto f = begin; f != end; ++f) {
    f->slept = f->wait == Wait::sleep;
    if (f->slept) f->wait = Wait::none;
  }
  bool stuck = false;   // the last round moved nobody: wake all
  unsigned asleep = 0;  // warps, as bits
  while (true) {
    if (m.order == Order::random) std::shuffle(turn.begin(), turn.end(), m.randomness);
    bool moved = false;
    if (stuck) asleep = 0;
    for (int t : turn) {
      Fiber& f = begin[t];
      if (f.wait != Wait::none || (asleep >> (t / 32) & 1)) continue;
      m.current = m.first + t;
      m.thread.x = static_cast<unsigned>(t);
      resume(f);
      moved = moved || f.wait != Wait::sleep || !f.slept;
    }
    for (int warp = 0; warp < threads; warp += 32) {
      moved = shuffled(m, m.first + warp, std::min(32, threads - warp)) || moved;
    }
    m.progress = m.progress || moved;
    if (count(Wait::done) == threads) return true;
    if (count(Wait::barrier) > 0 && count(Wait::done) > 0) {
      throw std::runtime_error("a thread has returned while others wait at a barrier");
    }
    if (count(Wait::barrier) == threads) {
      for (auto f = begin; f != end; ++f) f->wait = Wait::none;
      moved = true;
      // Behind a barrier about half the warps sleep until the others are stuck, so that some run
      // as far ahead as they can.
      if (m.order == Order::random) asleep = static_cast<unsigned>(m.randomness());
    }
    if (count(Wait::sleep) > 0) {
      if (!m.cooperative) throw std::runtime_error("a block waits for one that may not run yet");
      // In random order at once, whatever the other threads of the block have done by then.
      if (m.order == Order::random || !moved) return false;
    }
    if (!moved && (stuck || m.order != Order::random)) {
      throw std::runtime_error("threads wait for ever");
    }
    stuck = !moved;
  }
}

inline void note_launch(const void* kernel) {
  static std::atomic_flag busy = ATOMIC_FLAG_INIT;
  while (busy.test_and_set()) {
  }
  launched().insert(kernel);
  busy.clear();
}

// The order that blocks run in.
inline std::vector<unsigned> turns(Machine& m, unsigned blocks) {
  std::vector<unsigned> turn(blocks);
  for (unsigned b = 0; b < blocks; ++b) turn[b] = m.order == Order::reverse ? blocks - 1 - b : b;
  if (m.order == Order::random) std::shuffle(turn.begin(), turn.end(), m.randomness);
  return turn;
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, Parameters... arguments) {
  Machine& m = machine;
  note_launch(reinterpret_cast<const void*>(kernel));
  if (m.fibers.size() < block.x) m.fibers.resize(block.x);
  m.grid_size = grid;
  m.block_size = block;
  m.first = 0;
  m.cooperative = false;
  m.body = [&] { kernel(arguments...); };
  for (unsigned b : turns(m, grid.x)) {
    m.block.x = b;
    for (unsigned t = 0; t < block.x; ++t) start(m.fibers[t]);
    run_block(m);
  }
}

// One block a processor, all of them at a time, each with `shared` bytes of its own.
template <class... Parameters>
void launch_cooperative(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                        Parameters... arguments) {
  Machine& m = machine;
  note_launch(reinterpret_cast<const void*>(kernel));
  if (grid.x > static_cast<unsigned>(m.processors) ||
      shared > static_cast<size_t>(m.shared_bytes)) {
    throw std::runtime_error("a cooperative launch of more than runs at a time");
  }
  const size_t threads = size_t{grid.x} * block.x;
  if (m.fibers.size() < threads) m.fibers.resize(threads);
  m.grid_size = grid;
  m.block_size = block;
  m.cooperative = true;
  m.body = [&] { kernel(arguments...); };
  for (size_t t = 0; t < threads; ++t) start(m.fibers[t]);
  // Exactly as long as asked for, so that an address sanitizer sees what lies behind it.
  std::vector<std::vector<char>> memory(grid.x, std::vector<char>(shared, '\xff'));
  std::vector<bool> done(grid.x);
  while (std::count(done.begin(), done.end(), false) > 0) {
    m.progress = false;
    for (unsigned b : turns(m, grid.x)) {
      if (done[b]) continue;
      m.block.x = b;
      m.first = static_cast<int>(b * block.x);
      m.dynamic = memory[b].data();
      done[b] = run_block(m);
    }
    if (!m.progress) throw std::runtime_error("blocks wait for ever");
  }
}

inline unsigned exchange_bits(unsigned mask, unsigned bits, int delta, int kind) {
  Fiber& f = machine.fibers[machine.current];
  f.mask = mask;
  f.bits_in = bits;
  f.delta = delta;
  f.kind = kind;
  pause(Wait::shuffle);
  return f.bits_out;
}

}  // namespace emu

#define threadIdx (emu::machine.thread)
#define blockIdx (emu::machine.block)
#define blockDim (emu::machine.block_size)
#define gridDim (emu::machine.grid_size)

inline void __syncthreads() { emu::pause(emu::Wait::barrier); }
inline void __nanosleep(unsigned) { emu::pause(emu::Wait::sleep); }
inline void __threadfence() {}  // one host thread runs all blocks
inline unsigned atomicAdd(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at = before + value;
  return before;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, int which, int) {
  *value = which == cudaDevAttrMultiProcessorCount            ? emu::machine.processors
           : which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? emu::machine.shared_bytes
                                                              : 1;
  return cudaSuccess;
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, int delta) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "four or eight bytes");
  constexpr int kWords = sizeof(T) / 4;
  unsigned words[kWords];
  std::memcpy(words, &value, sizeof(T));
  for (int w = 0; w < kWords; ++w) {
    words[w] = emu::exchange_bits(mask, words[w], delta, kWords * 10 + w);
  }
  std::memcpy(&value, words, sizeof(T));
  return value;
}
