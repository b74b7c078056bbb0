// Offload: a layer's anchor and outer momentum in pinned memory of the host. For a sync they travel
// to room in the layer's buffers and back, on the lane's copy streams, while other layers compute
// and are exchanged. The host waits for nothing but in settle().
#pragma once

#include "flight.h"

namespace edit_ext {

class Offload {
 public:
  // anchor, momentum: pinned; momentum may be undefined.
  Offload(std::shared_ptr<Lane> lane, std::shared_ptr<BufferPool> pool, at::Device device,
          at::Tensor anchor, at::Tensor momentum);
  ~Offload();
  Offload(const Offload&) = delete;
  Offload& operator=(const Offload&) = delete;

  // Takes buffers and lets the state travel to them, unless it has or does already.
  void fetch();
  // The buffers of fetch(), which it calls if nobody did. Their last use ends with the copies.
  std::shared_ptr<Buffers> take();
  // Makes a flight with those buffers work on the copies.
  void point(Flight& f) const;
  // Lets the copies travel back behind the buffers' last use, which then ends with that.
  void bring_back(Buffers& b);
  // Returns when the state is back: the caller may read and write it. What was fetched and not
  // taken is given up, since the caller may be about to change it.
  void settle();

 private:
  // Copies one way and the memory they use, which no allocator knows of.
  struct Travel {
    std::shared_ptr<const Timer> end;
    std::vector<Lane::Copy> memory;
  };
  Travel travel(bool up, const Buffers& b, const Lane::Points& after) const;

  const std::shared_ptr<Lane> lane_;
  const std::shared_ptr<BufferPool> pool_;
  const at::Device device_;
  const at::Tensor anchor_, momentum_;
  std::shared_ptr<Buffers> fetched_;  // null unless fetched and not taken
  Travel up_, down_;                  // the last each way
};

}  // namespace edit_ext
