// How NcclComm waits: by asking again, since the library has nothing to wait on.
#pragma once

#include <chrono>
#include <sstream>
#include <string>
#include <thread>

namespace edit_ext::nccl {

using Clock = std::chrono::steady_clock;

// The library takes a call in tens of microseconds; what takes longer waits for a peer.
constexpr double kSoonSeconds = 1e-3;

inline double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline void pause(double waited) {
  std::this_thread::sleep_for(std::chrono::microseconds(waited < kSoonSeconds ? 20 : 1000));
}

inline std::string seconds_text(double seconds) {
  std::ostringstream out;
  out << seconds << " s";
  return out.str();
}

}  // namespace edit_ext::nccl
