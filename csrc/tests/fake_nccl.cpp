// A library with the NCCL symbols that we use, over host memory, for ranks that are threads of one
// process. It is as unhelpful as a non-blocking NCCL may be: no call finishes at once, work goes on
// only while somebody asks for the asynchronous error, and every misuse is counted.
#include "fake_nccl.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "../comm/nccl_api.h"

using namespace edit_ext::nccl;
using edit_ext::testing::FakeNccl;

namespace {

struct Op {
  enum Kind { send, recv, gather } kind;
  int peer;
  const char* source;
  char* target;
  size_t bytes;
};

struct Room {  // the ranks that came with one id
  std::vector<Communicator> members;
  bool complete = false;
};

}  // namespace

struct edit_ext::nccl::OpaqueCommunicator {
  std::shared_ptr<Room> room;
  int rank, polls;
  bool dead = false, joined = false, finalizing = false, quiet = false;
  bool busy = false;  // a call is in progress
  int completed = 0;
  Result error = kSuccess;
  std::deque<Op> pending{};
  std::atomic<int> inside{0};  // threads
};

namespace {

FakeNccl control;
std::mutex mutex;  // guards all below
std::condition_variable died;
std::map<std::string, std::shared_ptr<Room>> rooms;
std::vector<std::unique_ptr<OpaqueCommunicator>> all;  // never freed, so that a late use is seen
std::string last_error;

thread_local int depth = 0;
thread_local std::vector<std::pair<Communicator, Op>> grouped;
thread_local std::vector<Communicator> doomed;
thread_local bool refused = false;  // something in the open group was

Result misuse(const std::string& what) {
  ++control.counts.misuses;
  last_error = what;
  return kInvalidUsage;
}

// A communicator takes one thread at a time, aborts too. (Except that an abort may free a thread
// that is stuck.)
class Inside {
 public:
  explicit Inside(Communicator comm) : comm_(comm) {
    if (comm->inside++ > 0 && !control.stick) ++control.counts.misuses;
  }
  ~Inside() { --comm_->inside; }

 private:
  const Communicator comm_;
};

void note(Communicator comm, const std::string& what) {
  std::lock_guard<std::mutex> lock(control.mutex);
  control.log.push_back(std::to_string(comm->rank) + ": " + what);
}

// The first send or receive with that peer; nothing overtakes an all-gather.
std::deque<Op>::iterator find(std::deque<Op>& ops, Op::Kind kind, int peer) {
  const auto fence =
      std::find_if(ops.begin(), ops.end(), [](const Op& op) { return op.kind == Op::gather; });
  const auto found = std::find_if(ops.begin(), fence,
                                  [&](const Op& op) { return op.kind == kind && op.peer == peer; });
  return found == fence ? ops.end() : found;
}

bool pair_up(Communicator from, Communicator to) {
  const auto send = find(from->pending, Op::send, to->rank);
  const auto recv = find(to->pending, Op::recv, from->rank);
  if (send == from->pending.end() || recv == to->pending.end()) return false;
  if (send->bytes != recv->bytes) {
    last_error =
        std::to_string(send->bytes) + " bytes sent, " + std::to_string(recv->bytes) + " expected";
    from->error = to->error = kInvalidUsage;
    return false;
  }
  std::memcpy(recv->target, send->source, send->bytes);
  from->pending.erase(send);
  to->pending.erase(recv);
  return true;
}

bool gather(Room& room) {
  const Op* first = nullptr;
  for (Communicator c : room.members) {
    if (c->pending.empty() || c->pending.front().kind != Op::gather) return false;
    if (!first) first = &c->pending.front();
    if (c->pending.front().bytes != first->bytes) {
      last_error = "all_gather of different sizes";
      for (Communicator other : room.members) other->error = kInvalidUsage;
      return false;
    }
  }
  for (Communicator to : room.members) {
    for (Communicator from : room.members) {
      char* target = to->pending.front().target + from->rank * first->bytes;
      const char* source = from->pending.front().source;
      if (target != source) std::memcpy(target, source, first->bytes);
    }
  }
  for (Communicator c : room.members) c->pending.pop_front();
  return true;
}

void progress(Room& room) {
  if (control.hold || !room.complete) return;
  for (bool moved = true; moved;) {
    moved = gather(room);
    for (Communicator from : room.members) {
      for (Communicator to : room.members) {
        while (from != to && pair_up(from, to)) moved = true;
      }
    }
  }
}

Result state(Communicator c) {
  if (c->error != kSuccess) return c->error;
  if (!c->joined) {
    if (!c->room->complete || c->polls < 0 || c->polls-- > 0) return kInProgress;
    c->joined = true;
    return kSuccess;
  }
  progress(*c->room);
  if (c->error != kSuccess) return c->error;
  if (c->rank == control.failing_rank && c->completed >= control.failing_after) {
    last_error = "peer closed the connection";
    return c->error = kRemoteError;
  }
  if (c->finalizing) {
    bool all_quiet = c->pending.empty();
    for (Communicator m : c->room->members) all_quiet = all_quiet && m->finalizing;
    c->quiet = all_quiet;
    return all_quiet ? kSuccess : kInProgress;
  }
  if (!c->busy) return kSuccess;
  if (!c->pending.empty()) return kInProgress;
  c->busy = false;
  ++c->completed;
  return kSuccess;
}

// The end of a group, or a call outside of one.
Result post(std::unique_lock<std::mutex>& lock) {
  Result result = kSuccess;
  const auto ops = std::exchange(grouped, {});
  if (std::exchange(refused, false)) return kSystemError;
  std::map<Communicator, std::string> calls;
  for (const auto& [c, op] : ops) {
    if (c->dead) return misuse("call on a dead communicator");
    if (c->error != kSuccess) return c->error;
    if (!c->joined || c->busy || c->finalizing) return misuse("call on a busy communicator");
    if (op.bytes == 0 || (op.kind != Op::gather && op.peer == c->rank)) return misuse("no message");
    const char* const names[] = {" send ", " recv ", " all_gather "};
    std::string& text = calls[c];
    text += names[op.kind];
    if (op.kind != Op::gather) text += std::to_string(op.peer) + " ";
    text += std::to_string(op.bytes);
  }
  for (const auto& [c, op] : ops) c->pending.push_back(op);
  for (const auto& [c, text] : calls) {
    note(c, (ops.front().second.kind == Op::gather ? "" : "group") + text);
    if (control.stick) {
      Communicator stuck = c;
      died.wait_for(lock, std::chrono::seconds(20), [&] { return stuck->dead; });
      return kInternalError;
    }
    if (control.open) {
      ++c->completed;
    } else {
      c->busy = true;
      result = kInProgress;
    }
  }
  return result;
}

Result add(Communicator comm, const Op& op) {
  const Inside guard(comm);
  std::unique_lock<std::mutex> lock(mutex);
  ++(depth > 0 ? control.counts.in_group : control.counts.outside);
  if (op.kind == Op::send && op.peer == control.refused_peer) {
    refused = true;
    last_error = "no route";
    return kSystemError;
  }
  grouped.emplace_back(comm, op);
  if (depth == 0) return post(lock);
  return op.kind == Op::recv ? kInProgress : kSuccess;  // a non-blocking library says either
}

Result kill(Communicator c) {
  const Inside guard(c);
  std::this_thread::sleep_for(std::chrono::milliseconds(control.abort_ms));
  std::lock_guard<std::mutex> lock(mutex);
  if (c->dead) return misuse("abort of a dead communicator");
  note(c, "abort");
  c->dead = true;
  c->pending.clear();
  ++control.counts.aborts;
  --control.counts.live;
  for (Communicator m : c->room->members) {
    if (m && m != c && !m->quiet && m->error == kSuccess) m->error = kRemoteError;
  }
  last_error = "a peer has gone";
  died.notify_all();
  return kSuccess;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT FakeNccl* fake_nccl() { return &control; }

EXPORT Result ncclGetVersion(int* version) {
  *version = control.version;
  return kSuccess;
}

EXPORT Result ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> made{0};
  *id = UniqueId{};
  const std::string text = "fake " + std::to_string(++made);
  std::memcpy(id->bytes + sizeof(id->bytes) - text.size(), text.data(), text.size());
  return kSuccess;
}

EXPORT Result ncclCommInitRankConfig(Communicator* comm, int ranks, UniqueId id, int rank,
                                     Config* config) {
  std::lock_guard<std::mutex> lock(mutex);
  if (config->magic != 0xcafebeef || config->size != sizeof(Config) || config->blocking != 0 ||
      config->version != 22700 || config->min_ctas != kUnset || config->net_name) {
    return misuse("config");
  }
  control.max_ctas = config->max_ctas;
  std::shared_ptr<Room>& room = rooms[std::string(id.bytes, sizeof(id.bytes))];
  if (!room) room = std::make_shared<Room>();
  room->members.resize(ranks);
  if (room->members[rank]) return misuse("rank taken");
  auto* c = new OpaqueCommunicator{room, rank, control.init_polls};
  all.emplace_back(c);
  *comm = room->members[rank] = c;
  room->complete = std::count(room->members.begin(), room->members.end(), nullptr) == 0;
  ++control.counts.inits;
  ++control.counts.live;
  note(c, "init");
  return kInProgress;
}

EXPORT Result ncclCommGetAsyncError(Communicator comm, Result* error) {
  const Inside guard(comm);
  std::this_thread::sleep_for(std::chrono::microseconds(20));  // a window for who comes in wrongly
  std::lock_guard<std::mutex> lock(mutex);
  if (comm->dead) return misuse("poll of a dead communicator");
  *error = state(comm);
  return kSuccess;
}

EXPORT Result ncclCommFinalize(Communicator comm) {
  const Inside guard(comm);
  std::lock_guard<std::mutex> lock(mutex);
  if (comm->dead || comm->busy || comm->finalizing) return misuse("finalize");
  note(comm, "finalize");
  comm->finalizing = true;
  ++control.counts.finalizes;
  return kInProgress;
}

EXPORT Result ncclCommDestroy(Communicator comm) {
  const Inside guard(comm);
  std::lock_guard<std::mutex> lock(mutex);
  if (comm->dead || !comm->quiet) return misuse("destroy would block");
  note(comm, "destroy");
  comm->dead = true;
  ++control.counts.destroys;
  --control.counts.live;
  return kSuccess;
}

EXPORT Result ncclCommAbort(Communicator comm) {
  if (depth == 0) return kill(comm);
  doomed.push_back(comm);
  return kSuccess;
}

EXPORT Result ncclGroupStart() {
  ++depth;
  return kSuccess;
}

EXPORT Result ncclGroupEnd() {
  if (--depth > 0) return kSuccess;
  const auto aborts = std::exchange(doomed, {});
  for (Communicator c : aborts) kill(c);
  if (aborts.size() > 1) ++control.counts.group_aborts;
  std::unique_lock<std::mutex> lock(mutex);
  if (depth < 0) return depth = 0, misuse("group end without a start");
  return post(lock);
}

#ifndef FAKE_NCCL_WITHOUT_SEND
EXPORT Result ncclSend(const void* data, size_t count, DataType, int peer, Communicator comm,
                       Stream) {
  return add(comm, {Op::send, peer, static_cast<const char*>(data), nullptr, count});
}
#endif

EXPORT Result ncclRecv(void* data, size_t count, DataType, int peer, Communicator comm, Stream) {
  return add(comm, {Op::recv, peer, nullptr, static_cast<char*>(data), count});
}

EXPORT Result ncclAllGather(const void* own, void* to, size_t count, DataType, Communicator comm,
                            Stream) {
  return add(comm, {Op::gather, -1, static_cast<const char*>(own), static_cast<char*>(to), count});
}

EXPORT const char* ncclGetErrorString(Result result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kInvalidUsage:
      return "invalid usage";
    case kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "some error";
  }
}

EXPORT const char* ncclGetLastError(Communicator) {
  static thread_local std::string copy;
  std::lock_guard<std::mutex> lock(mutex);
  copy = last_error;
  return copy.c_str();
}
