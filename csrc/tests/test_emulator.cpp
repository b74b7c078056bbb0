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

template <class... P>
bool refused(void (*kernel)(P...), const std::string& part) {
  try {
    emu::launch(kernel, dim3(1), dim3(64));
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
  CHECK(refused(early_return, "returned while others wait at a barrier"));
  CHECK(refused(lane_missing, "a lane that has returned"));
  CHECK(refused(lane_unnamed, "without its bit"));
}

}  // namespace

int main() {
  the_emulator_notices();
  return edit_ext::testing::close("test_emulator");
}
