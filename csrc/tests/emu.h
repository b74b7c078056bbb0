// A GPU for tests: the .cu sources, compiled by g++, run on fibers. Blocks run one after another,
// the threads of a block one at a time until they meet: at a barrier all threads of the block, at a
// shuffle the lanes that its mask names. Between meetings threads run in the order that a test
// asks for, so that code which leans on lock step or on luck fails. Streams: emu_streams.h.
//
// What ends a test: a barrier that a finished thread will never reach, a shuffle that a lane of its
// mask does not call, lanes that meet in shuffles of different kind, threads that wait for ever.
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

inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorNotReady ? "not ready" : "emulated";
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = 1;  // few processors, so that blocks take several chunks each
  return cudaSuccess;
}

namespace emu {

// The compiler's own jumps: no system call, and no sanitizer that takes a fiber's stack for the
// thread's. The two ends of a jump must be functions of their own.
using Jump = void* [5];
#define EMU_JUMPS __attribute__((noinline, no_sanitize("address")))

enum class Order { forward, reverse, random };
enum class Wait { none, barrier, shuffle, done };

struct Fiber {
  ucontext_t context;  // how it begins; from then on jumps, which cost no system call
  Jump here;
  bool fresh;
  std::unique_ptr<char[]> stack;
  Wait wait;
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
  int current = 0;
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
  if (!f.stack) f.stack = std::make_unique<char[]>(Machine::kStack);
  f.wait = Wait::none;
  f.fresh = true;
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.get();
  f.context.uc_stack.ss_size = Machine::kStack;
  f.context.uc_link = nullptr;
  makecontext(&f.context, enter, 0);
}

// Lets the lanes of the warp that begins at `first` go on if one of their meetings is complete.
inline bool shuffled(Machine& m, int first, int threads) {
  bool moved = false;
  const int lanes = std::min(32, threads - first);
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

inline void run_block(Machine& m) {
  const int threads = static_cast<int>(m.block_size.x);
  std::vector<int> turn(threads);
  for (int t = 0; t < threads; ++t) turn[t] = m.order == Order::reverse ? threads - 1 - t : t;
  for (int t = 0; t < threads; ++t) start(m.fibers[t]);
  bool stuck = false;   // the last round moved nobody: wake all
  unsigned asleep = 0;  // warps, as bits
  while (true) {
    if (m.order == Order::random) std::shuffle(turn.begin(), turn.end(), m.randomness);
    bool moved = false;
    if (stuck) asleep = 0;
    for (int t : turn) {
      if (m.fibers[t].wait != Wait::none || (asleep >> (t / 32) & 1)) continue;
      m.current = t;
      m.thread.x = static_cast<unsigned>(t);
      resume(m.fibers[t]);
      moved = true;
    }
    for (int first = 0; first < threads; first += 32) moved = shuffled(m, first, threads) || moved;
    const auto end = m.fibers.begin() + threads;
    const auto count = [&](Wait w) {
      return std::count_if(m.fibers.begin(), end, [w](const Fiber& f) { return f.wait == w; });
    };
    if (count(Wait::done) == threads) return;
    if (count(Wait::barrier) > 0 && count(Wait::done) > 0) {
      throw std::runtime_error("a thread has returned while others wait at a barrier");
    }
    if (count(Wait::barrier) == threads) {
      for (auto f = m.fibers.begin(); f != end; ++f) f->wait = Wait::none;
      moved = true;
      // Behind a barrier about half the warps sleep until the others are stuck, so that some run
      // as far ahead as they can.
      if (m.order == Order::random) asleep = static_cast<unsigned>(m.randomness());
    }
    if (!moved && (stuck || m.order != Order::random)) {
      throw std::runtime_error("threads wait for ever");
    }
    stuck = !moved;
  }
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, Parameters... arguments) {
  Machine& m = machine;
  {
    static std::atomic_flag busy = ATOMIC_FLAG_INIT;
    while (busy.test_and_set()) {
    }
    launched().insert(reinterpret_cast<const void*>(kernel));
    busy.clear();
  }
  if (m.fibers.size() < block.x) m.fibers.resize(block.x);
  m.grid_size = grid;
  m.block_size = block;
  m.body = [&] { kernel(arguments...); };
  std::vector<unsigned> turn(grid.x);
  for (unsigned b = 0; b < grid.x; ++b) turn[b] = m.order == Order::reverse ? grid.x - 1 - b : b;
  if (m.order == Order::random) std::shuffle(turn.begin(), turn.end(), m.randomness);
  for (unsigned b : turn) {
    m.block.x = b;
    run_block(m);
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
