// The emulator notices what a GPU would punish at random: planted mistakes, one a kernel.
#include <string>

#include "emu.h"
#include "testing.h"

namespace {

constexpr emu::Order kOrders[] = {emu::Order::forward, emu::Order::reverse, emu::Order::random};

void reversed(int* out, int base, bool barrier) {
  __shared__ int x[64];
  x[threadIdx.x] = base + static_cast<int>(threadIdx.x);
  if (barrier) __syncthreads();
  out[threadIdx.x] = x[63 - threadIdx.x];
}
void early_return() {
  if (threadIdx.x == 7) return;
  __syncthreads();
}
void lane_missing() {
  if (threadIdx.x != 3) __shfl_down_sync(0xffffffffu, 1.0f, 1);
}
void lane_unnamed() { __shfl_down_sync(0xfffffffeu, 1.0f, 1); }

// Every block adds to the sum, waits for the others, and reads it.
void meet(unsigned* sum, unsigned* arrived, unsigned* out, bool wait, bool kept) {
  __shared__ unsigned mine;
  auto* own = reinterpret_cast<unsigned*>(emu::machine.dynamic);
  if (threadIdx.x == 0) {
    *own = mine = blockIdx.x + 1;
    atomicAdd(sum, mine);
    atomicAdd(arrived, 1);
    while (wait && *static_cast<volatile unsigned*>(arrived) < gridDim.x) __nanosleep(32);
  }
  __syncthreads();
  if (threadIdx.x == 1) out[blockIdx.x] = *sum + (kept ? mine : *own);
}
void lonely() {
  while (true) __nanosleep(32);
}

bool blocks_met(emu::Order order, bool wait, bool kept) {
  emu::machine.order = order;
  unsigned sum = 0, arrived = 0, out[3] = {};
  emu::launch_cooperative(meet, dim3(3), dim3(64), 4, &sum, &arrived, static_cast<unsigned*>(out),
                          bool{wait}, bool{kept});
  return out[0] == 7 && out[1] == 8 && out[2] == 9;
}

template <class... P>
bool refused(void (*kernel)(P...), const std::string& part, bool cooperative = false) {
  try {
    if (cooperative) {
      emu::launch_cooperative(kernel, dim3(1), dim3(64), 0);
    } else {
      emu::launch(kernel, dim3(1), dim3(64));
    }
  } catch (const std::exception& e) {
    return std::string(e.what()).find(part) != std::string::npos;
  }
  return false;
}

void the_emulator_notices() {
  for (const bool barrier : {true, false}) {
    bool right = true;
    for (const emu::Order order : kOrders) {
      emu::machine.order = order;
      int out[64] = {}, base = static_cast<int>(order) * 100 + 1;
      emu::launch(reversed, dim3(1), dim3(64), static_cast<int*>(out), int{base}, bool{barrier});
      for (int i = 0; i < 64; ++i) right = right && out[i] == base + 63 - i;
    }
    CHECK(right == barrier);
  }
  emu::machine.processors = 3;
  for (const emu::Order order : kOrders) {
    CHECK(blocks_met(order, true, false));
    CHECK(!blocks_met(order, false, false));  // no barrier
    CHECK(!blocks_met(order, true, true));    // a __shared__ variable kept over one
  }
  CHECK(refused(lonely, "may not run yet"));
  CHECK(refused(lonely, "blocks wait for ever", true));
  emu::machine.processors = 0;
  CHECK(refused(lonely, "more than runs at a time", true));
  CHECK(refused(early_return, "returned while others wait at a barrier"));
  CHECK(refused(lane_missing, "a lane that has returned"));
  CHECK(refused(lane_unnamed, "without its bit"));
}

}  // namespace

int main() {
  the_emulator_notices();
  return edit_ext::testing::close("test_emulator");
}
