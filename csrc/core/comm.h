// Comm: what ranks of one group say to each other. Payload moves as bytes and is never added up on
// the way, so any wire format works and results do not depend on a library's order of sums.
// Scalars are gathered and added by each rank in rank order, for the same reason.
#pragma once

#include <cstdint>
#include <string>

namespace edit_ext {

struct Block {
  void* data;
  int64_t bytes;
};

class Comm {
 public:
  virtual ~Comm() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // to[r] goes to rank r, from[r] is filled by rank r; own entries are ignored. [size] each.
  virtual void exchange(const Block* to, const Block* from) = 0;
  // buffer holds one block of `each` bytes per rank, own block filled in; bytes beyond `total`
  // mean nothing, and a transport may leave them out or overwrite them.
  virtual void all_gather(void* buffer, int64_t each, int64_t total) = 0;
  // The same for tens of bytes, on a channel that payload in flight does not delay.
  virtual void gather_scalars(void* buffer, int64_t each) = 0;

  // Ends the group: calls in progress and all later ones throw.
  virtual void abort(const std::string& reason) = 0;
  // The orderly end, called by all members when nothing is in progress: waits up to `seconds` for
  // what still travels. False if the group had to be broken off instead.
  virtual bool close([[maybe_unused]] double seconds) { return true; }
  // Throws what went wrong so far, if anything did.
  virtual void poll() const = 0;
  // Bytes this rank has sent, payload and scalars.
  virtual int64_t bytes_sent() const = 0;
};

// The three groups a rank belongs to; null means a group of one.
struct Comms {
  Comm* shard = nullptr;    // the ranks that hold one replica
  Comm* replica = nullptr;  // the ranks that hold the same shard
  Comm* mesh = nullptr;     // replica x shard
};

}  // namespace edit_ext
