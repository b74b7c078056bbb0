// A library with the NCCL symbols that we use, for ranks that are processes of one machine: bytes
// go over Unix sockets, one for each pair of ranks. As with a non-blocking NCCL a call may be left
// in progress, and goes on while somebody asks for the asynchronous error. Unlike there it is in
// progress until its bytes have come: what the stream gets next must find them.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../comm/nccl_api.h"
#include "emu.h"

#ifndef SOCKET_NCCL_VERSION
#define SOCKET_NCCL_VERSION 22707
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace edit_ext::nccl;

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kDeadline(60);  // of any call, whatever its caller's patience
constexpr uint64_t kBye = ~uint64_t{0};        // the length of the message that says farewell
constexpr size_t kHeader = sizeof(uint64_t);

struct Transfer {  // a message behind its length
  uint64_t length;
  char* data;
  size_t bytes;
  uint64_t header = length;  // what travels, or has come
  size_t done = 0;           // bytes, those of the header too
};

struct Peer {
  int socket = -1, listener = -1;
  std::deque<Transfer> out{}, in{};
};

struct Op {  // a send has no target, a receive no source
  Communicator comm;
  int peer;
  const char* source;
  char* target;
  size_t bytes;
  Stream stream;
};

thread_local int depth = 0;
thread_local std::vector<Op> grouped;
thread_local std::string last_error;

}  // namespace

// What tests read by name.
struct SocketNcclSeen {
  int max_ctas, destroys, aborts;
};
extern "C" {
__attribute__((visibility("default"))) SocketNcclSeen socket_nccl_seen{};
}

struct edit_ext::nccl::OpaqueCommunicator {
  std::string name;
  int rank;
  std::vector<Peer> peers;
  Clock::time_point began = Clock::now();
  bool joined = false, finalizing = false;
  Result error = kSuccess;
};

namespace {

Result fail(Communicator c, Result result, const std::string& why) {
  last_error = why;
  return c->error = result;
}

bool would_block() { return errno == EAGAIN || errno == EINTR; }

// Of the two ends of a pair the lower rank listens, under a name that no third process uses.
int open_socket(Communicator c, int low, int high, decltype(::connect)* attach) {
  const int s = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const std::string name = c->name + " " + std::to_string(low) + " " + std::to_string(high);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // abstract: no file is left behind
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (s >= 0 && attach(s, reinterpret_cast<sockaddr*>(&address), size) == 0) return s;
  if (s >= 0) close(s);
  return -1;
}

bool join(Communicator c) {
  c->joined = true;
  for (int r = 0; r < static_cast<int>(c->peers.size()); ++r) {
    Peer& p = c->peers[r];
    if (r == c->rank || p.socket >= 0) continue;
    if (r < c->rank) {
      p.socket = open_socket(c, r, c->rank, ::connect);  // refused until that rank has come
    } else {
      p.socket = accept4(p.listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    }
    c->joined = c->joined && p.socket >= 0;
  }
  return c->joined;
}

// True when the message is through; false when it has to wait, or when all is over.
bool move(Communicator c, int peer, Transfer& t, bool outgoing) {
  const int s = c->peers[peer].socket;
  while (t.done < kHeader + t.bytes) {
    const bool head = t.done < kHeader;
    char* at = head ? reinterpret_cast<char*>(&t.header) + t.done : t.data + (t.done - kHeader);
    const size_t left = kHeader + (head ? 0 : t.bytes) - t.done;
    const ssize_t n = outgoing ? send(s, at, left, MSG_NOSIGNAL) : recv(s, at, left, 0);
    if (n < 0 && would_block()) return false;
    if (n <= 0) {
      fail(c, kRemoteError, "rank " + std::to_string(peer) + " closed its connection");
      return false;
    }
    t.done += static_cast<size_t>(n);
    if (!outgoing && t.done == kHeader && t.header != t.length) {
      fail(c, kInvalidUsage,
           t.header == kBye ? "rank " + std::to_string(peer) + " has finalized"
                            : std::to_string(t.header) + " bytes sent, " +
                                  std::to_string(t.length) + " expected");
      return false;
    }
  }
  return true;
}

// All messages at once, so that none waits for one that waits for it.
bool progress(Communicator c, int milliseconds) {
  std::vector<pollfd> waiting;
  for (const Peer& p : c->peers) {
    const int events = (p.in.empty() ? 0 : POLLIN) | (p.out.empty() ? 0 : POLLOUT);
    if (events) waiting.push_back({p.socket, static_cast<short>(events), 0});
  }
  if (!waiting.empty()) poll(waiting.data(), waiting.size(), milliseconds);
  bool idle = true;
  for (int r = 0; r < static_cast<int>(c->peers.size()); ++r) {
    Peer& p = c->peers[r];
    if (r == c->rank) continue;
    while (!p.out.empty() && move(c, r, p.out.front(), true)) p.out.pop_front();
    while (!p.in.empty() && move(c, r, p.in.front(), false)) p.in.pop_front();
    idle = idle && p.out.empty() && p.in.empty();
    char next = 0;  // a peer that is ahead has sent something, a farewell at least
    const ssize_t n = p.in.empty() && !c->finalizing ? recv(p.socket, &next, 1, MSG_PEEK) : 1;
    if (n == 0 || (n < 0 && !would_block())) {
      fail(c, kRemoteError, "rank " + std::to_string(r) + " closed its connection");
    }
  }
  return idle;
}

Result state(Communicator c, int milliseconds) {
  if (c->error != kSuccess) return c->error;
  const bool idle = c->joined ? progress(c, milliseconds) : join(c);
  if (c->error != kSuccess || idle) return c->error;
  if (Clock::now() - c->began > kDeadline) return fail(c, kSystemError, "no end after 60 s");
  return kInProgress;
}

bool busy(Communicator c) {
  bool any = !c->joined || c->finalizing;
  for (const Peer& p : c->peers) any = any || !p.out.empty() || !p.in.empty();
  return any;
}

Result post() {
  const std::vector<Op> ops = std::exchange(grouped, {});
  std::set<Communicator> comms;
  for (const Op& op : ops) comms.insert(op.comm);
  for (Communicator c : comms) {
    if (c->error != kSuccess) return c->error;
    if (busy(c)) return fail(c, kInvalidUsage, "call on a busy communicator");
    c->began = Clock::now();
  }
  for (const Op& op : ops) {
    if (cudaStreamSynchronize(op.stream) != cudaSuccess) return kUnhandledCudaError;
    Peer& p = op.comm->peers[op.peer];
    if (op.source && op.target) {
      std::memmove(op.target, op.source, op.bytes);
    } else if (op.source) {
      p.out.push_back({op.bytes, const_cast<char*>(op.source), op.bytes});
    } else {
      p.in.push_back({op.bytes, op.target, op.bytes});
    }
  }
  Result result = kSuccess;
  for (Communicator c : comms) {
    const Result now = state(c, 0);
    if (result == kSuccess || result == kInProgress) result = now == kSuccess ? result : now;
  }
  return result;
}

Result add(const Op& op) {
  grouped.push_back(op);
  return depth == 0 ? post() : kSuccess;
}

void hang_up(Communicator c) {
  for (Peer& p : c->peers) {
    if (p.socket >= 0) close(p.socket);
    if (p.listener >= 0) close(p.listener);
    p = Peer{};
  }
}

}  // namespace

EXPORT Result ncclGetVersion(int* version) {
  *version = SOCKET_NCCL_VERSION;
  return kSuccess;
}

EXPORT Result ncclGetUniqueId(UniqueId* id) {
  static int made = 0;
  *id = UniqueId{};
  const std::string name =
      "edit_ext " + std::to_string(getpid()) + " " + std::to_string(++made) + " " +
      std::to_string(std::chrono::system_clock::now().time_since_epoch().count());
  std::memcpy(id->bytes, name.data(), name.size());
  return kSuccess;
}

EXPORT Result ncclCommInitRankConfig(Communicator* comm, int ranks, UniqueId id, int rank,
                                     Config* config) {
  if (config->magic != 0xcafebeef || config->size != sizeof(Config) || config->blocking != 0) {
    last_error = "a config of another layout, or of a blocking communicator";
    return kInvalidArgument;
  }
  socket_nccl_seen.max_ctas = config->max_ctas;
  auto* c = new OpaqueCommunicator{id.bytes, rank, std::vector<Peer>(ranks)};
  *comm = c;
  for (int r = rank + 1; r < ranks; ++r) {
    c->peers[r].listener = open_socket(c, rank, r, ::bind);
    if (listen(c->peers[r].listener, 1) != 0) return fail(c, kSystemError, std::strerror(errno));
  }
  return state(c, 0);
}

EXPORT Result ncclCommGetAsyncError(Communicator c, Result* error) {
  *error = state(c, 1);
  return kSuccess;
}

// A farewell to all, and theirs: nobody hangs up on a peer that still wants something.
EXPORT Result ncclCommFinalize(Communicator c) {
  if (busy(c)) return fail(c, kInvalidUsage, "finalize of a busy communicator");
  c->finalizing = true;
  c->began = Clock::now();
  for (int r = 0; r < static_cast<int>(c->peers.size()); ++r) {
    if (r == c->rank) continue;
    c->peers[r].out.push_back({kBye, nullptr, 0});
    c->peers[r].in.push_back({kBye, nullptr, 0});
  }
  return state(c, 0);
}

EXPORT Result ncclCommDestroy(Communicator c) {
  ++socket_nccl_seen.destroys;
  hang_up(c);
  delete c;
  return kSuccess;
}

// Not freed: the abort may come while a call of another thread is stuck in here.
EXPORT Result ncclCommAbort(Communicator c) {
  ++socket_nccl_seen.aborts;
  hang_up(c);
  c->error = kInvalidUsage;
  return kSuccess;
}

EXPORT Result ncclGroupStart() {
  ++depth;
  return kSuccess;
}

EXPORT Result ncclGroupEnd() { return --depth > 0 ? kSuccess : post(); }

#ifndef SOCKET_NCCL_WITHOUT_SEND
EXPORT Result ncclSend(const void* data, size_t count, DataType, int peer, Communicator c,
                       Stream stream) {
  return add({c, peer, static_cast<const char*>(data), nullptr, count, stream});
}
#endif

EXPORT Result ncclRecv(void* data, size_t count, DataType, int peer, Communicator c,
                       Stream stream) {
  return add({c, peer, nullptr, static_cast<char*>(data), count, stream});
}

EXPORT Result ncclAllGather(const void* own, void* all, size_t count, DataType, Communicator c,
                            Stream stream) {
  const auto* source = static_cast<const char*>(own);
  auto* target = static_cast<char*>(all);
  ++depth;
  for (int r = 0; r < static_cast<int>(c->peers.size()); ++r) {
    char* part = target + static_cast<size_t>(r) * count;
    add({c, r, source, r == c->rank ? part : nullptr, count, stream});
    if (r != c->rank) add({c, r, nullptr, part, count, stream});
  }
  return ncclGroupEnd();
}

EXPORT const char* ncclGetErrorString(Result result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kRemoteError:
      return "remote process exited or there was a network error";
    case kInvalidUsage:
      return "invalid usage";
    default:
      return "some error";
  }
}

EXPORT const char* ncclGetLastError(Communicator) { return last_error.c_str(); }
