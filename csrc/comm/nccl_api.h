// The part of NCCL's C interface that we use, in declarations of our own: no header of NCCL or CUDA
// is needed to build, and no library to import. Layout and values are those of nccl.h 2.27.7;
// csrc/tests/nccl_layout.cpp compares them with a real header, up to 2.32.3 so far.
#pragma once

#include <climits>
#include <cstddef>

namespace edit_ext::nccl {

struct UniqueId {
  char bytes[128];
};

// A fixed underlying type: newer libraries return values that are not listed here.
enum Result : unsigned int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : unsigned int { kInt8 = 0, kUint8 = 1 };

constexpr int kUnset = INT_MIN;

// A library of another version reads as many bytes as `size` says and takes its defaults for the
// rest, so the oldest layout that we support serves all.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 22700;
  int blocking = kUnset;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
  int traffic_class = kUnset;
  const char* comm_name = nullptr;
  int collnet_enable = kUnset;
  int cta_policy = kUnset;
  int shrink_share = kUnset;
  int nvls_ctas = kUnset;
};

using Communicator = struct OpaqueCommunicator*;
using Stream = void*;  // a cudaStream_t

using GetVersion = Result (*)(int* version);
using GetUniqueId = Result (*)(UniqueId* id);
using CommInitRankConfig = Result (*)(Communicator* comm, int ranks, UniqueId id, int rank,
                                      Config* config);
using CommFinalize = Result (*)(Communicator comm);
using CommDestroy = Result (*)(Communicator comm);
using CommAbort = Result (*)(Communicator comm);
using CommGetAsyncError = Result (*)(Communicator comm, Result* error);
using GetErrorString = const char* (*)(Result result);
using GetLastError = const char* (*)(Communicator comm);
using GroupStart = Result (*)();
using GroupEnd = Result (*)();
using Send = Result (*)(const void* data, size_t count, DataType type, int peer, Communicator comm,
                        Stream stream);
using Recv = Result (*)(void* data, size_t count, DataType type, int peer, Communicator comm,
                        Stream stream);
using AllGather = Result (*)(const void* own, void* all, size_t count, DataType type,
                             Communicator comm, Stream stream);

}  // namespace edit_ext::nccl
