#include "c10d_comm.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace edit_ext {
namespace {

constexpr int64_t kMessage = int64_t{4} << 20;  // bytes of one message

// A slow peer is waited for; whether it is slow or dead is told by its heartbeat, not by a
// collective's timeout. Eleven days: Gloo adds it to the current time, so it has to be finite.
constexpr std::chrono::milliseconds kPatience{1000 * 1000 * 1000};

struct Message {
  int peer;
  bool outgoing;
  c10::intrusive_ptr<c10d::Work> work;
};

// Runs `call`; what it throws names the peer. Gloo's guesses at a cause are left out.
template <class Call>
auto naming(const std::string& peer, bool outgoing, const Call& call) {
  try {
    return call();
  } catch (const std::exception& e) {
    const std::string what = e.what();
    throw std::runtime_error((outgoing ? "sending to " : "receiving from ") + peer + " failed: " +
                             what.substr(0, what.find(". This is typically caused by")));
  }
}

// Messages of at most kMessage bytes to or from every peer, round by round. Each rank starts with
// the peer after itself, so that no rank is everybody's first.
template <class Post>
void post_all(int rank, const std::vector<std::string>& names, const Block* blocks, bool outgoing,
              std::vector<Message>& posted, const Post& post) {
  const int size = static_cast<int>(names.size());
  int64_t most = 0;
  for (int r = 0; r < size; ++r) most = std::max(most, r == rank ? 0 : blocks[r].bytes);
  for (int64_t at = 0; at < most; at += kMessage) {
    for (int k = 1; k < size; ++k) {
      const int peer = (rank + k) % size;
      const Block& b = blocks[peer];
      if (at >= b.bytes) continue;
      std::vector<at::Tensor> bytes{at::from_blob(static_cast<char*>(b.data) + at,
                                                  {std::min(kMessage, b.bytes - at)},
                                                  at::TensorOptions().dtype(at::kByte))};
      posted.push_back(
          {peer, outgoing, naming(names[peer], outgoing, [&] { return post(peer, bytes); })});
    }
  }
}

}  // namespace

C10dComm::C10dComm(const std::string& payload_group, const std::string& scalar_group,
                   std::vector<std::string> names)
    : names_(std::move(names)) {
  const auto open = [](Channel& c, const std::string& name) {
    c.group = c10d::resolve_process_group(name);
    c.sent.resize(c.group->getSize());
    c.received.resize(c.group->getSize());
  };
  open(payload_, payload_group);
  open(scalars_, scalar_group);
  TORCH_CHECK_VALUE(static_cast<int>(names_.size()) == payload_.group->getSize(), "names has ",
                    names_.size(), " entries; expected ", payload_.group->getSize());
  TORCH_CHECK_VALUE(payload_.group->getSize() == scalars_.group->getSize() &&
                        payload_.group->getRank() == scalars_.group->getRank(),
                    "C10dComm: payload group ", payload_group, " and scalar group ", scalar_group,
                    " must hold the same ranks in the same order");
}

void C10dComm::wait_for(const c10::intrusive_ptr<c10d::Work>& work) {
  const auto await = [this](const c10::intrusive_ptr<c10d::Work>& next) {
    std::lock_guard<std::mutex> lock(mutex_);
    awaited_ = next;
    return aborted_.empty();
  };
  bool done = false;
  try {
    done = await(work) && work->wait(kPatience);
  } catch (...) {
    await(nullptr);
    throw;
  }
  await(nullptr);
  if (!done) poll();
}

void C10dComm::transfer(Channel& c, const Block* to, const Block* from) {
  poll();
  std::vector<Message> posted;
  const auto tag = [](uint32_t& count) { return static_cast<int>(count++ & 0x7fffffff); };
  post_all(rank(), names_, from, false, posted, [&](int peer, std::vector<at::Tensor>& t) {
    return c.group->recv(t, peer, tag(c.received[peer]));
  });
  post_all(rank(), names_, to, true, posted, [&](int peer, std::vector<at::Tensor>& t) {
    sent_ += t[0].numel();
    return c.group->send(t, peer, tag(c.sent[peer]));
  });
  for (Message& m : posted) {
    naming(names_[m.peer], m.outgoing, [&] { wait_for(m.work); });
  }
  poll();
}

void C10dComm::gather(Channel& c, void* buffer, int64_t each, int64_t total) {
  std::vector<Block> from(size());
  for (int r = 0; r < size(); ++r) {
    from[r] = {static_cast<char*>(buffer) + r * each,
               std::min(each, std::max<int64_t>(0, total - r * each))};
  }
  const std::vector<Block> to(size(), from[rank()]);
  transfer(c, to.data(), from.data());
}

void C10dComm::exchange(const Block* to, const Block* from) { transfer(payload_, to, from); }

void C10dComm::all_gather(void* buffer, int64_t each, int64_t total) {
  gather(payload_, buffer, each, total);
}

void C10dComm::gather_scalars(void* buffer, int64_t each) {
  gather(scalars_, buffer, each, each * size());
}

void C10dComm::abort(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_.empty()) aborted_ = reason.empty() ? "aborted" : reason;
  // A peer that has stopped sends nothing more and closes nothing: its message would be waited for
  // as long as its process lives.
  if (!awaited_) return;
  try {
    awaited_->abort();
  } catch (const c10::Error&) {
    return;  // a backend that cannot; its wait ends with the message or the process
  }
}

void C10dComm::poll() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!aborted_.empty()) throw std::runtime_error("group aborted: " + aborted_);
}

}  // namespace edit_ext
