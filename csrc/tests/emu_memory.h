// Memory of the emulated GPU, device and pinned: streams touch it later than the host does, so what
// has been given back is closed, and whoever still uses it ends the test where it does.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace emu {

class Memory {
 public:
  // Filled with ones, which are NaN in every format: nothing may lean on memory being zero.
  void* lend(size_t bytes, bool pinned) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t size = (bytes / page + 1) * page;
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::runtime_error("the emulated GPU is out of memory");
    std::memset(at, 0xff, bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    lent_[static_cast<const char*>(at)] = {size, pinned};
    return at;
  }

  void reclaim(void* at) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = lent_.find(static_cast<const char*>(at));
    const size_t size = found->second.first;
    lent_.erase(found);
    // New pages in its place: the old ones go back to the system, the addresses do not.
    mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    closed_.emplace_back(at, size);
    if (closed_.size() <= kClosed) return;
    munmap(closed_.front().first, closed_.front().second);
    closed_.pop_front();
  }

  bool pinned(const void* at) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = lent_.upper_bound(static_cast<const char*>(at));
    if (after == lent_.begin()) return false;
    const auto& [start, block] = *--after;
    return static_cast<const char*>(at) < start + block.first && block.second;
  }

  // Bytes lent and not given back, in whole pages.
  size_t held(bool pinned) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t sum = 0;
    for (const auto& [start, block] : lent_) sum += block.second == pinned ? block.first : 0;
    return sum;
  }

 private:
  static constexpr size_t kClosed = 4096;  // a process may have 65530 mappings
  std::mutex mutex_;
  std::map<const char*, std::pair<size_t, bool>> lent_;  // bytes, pinned
  std::deque<std::pair<void*, size_t>> closed_;
};

// Never destroyed: at exit threads may still be inside.
inline Memory& memory() {
  static auto* found = new Memory;
  return *found;
}

}  // namespace emu
