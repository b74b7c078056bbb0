// Compiled, never run, where a real nccl.h is at hand (the CUDA check): our declarations against
// NVIDIA's. The oldest supported header must match in full, newer ones may only have appended.
#include <nccl.h>

#include <cstddef>
#include <cstdint>

#include "../comm/nccl_api.h"

namespace ours = edit_ext::nccl;

namespace {

// Same number of parameters, each of the same size, and the same result.
template <class R, class... A, class S, class... B>
constexpr bool alike(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) == sizeof...(B)) {
    return sizeof(R) == sizeof(S) && ((sizeof(A) == sizeof(B)) && ...);
  }
  return false;
}

}  // namespace

#define SAME_CALL(type, function) static_assert(alike(ours::type{}, decltype(&function){}))
SAME_CALL(GetVersion, ncclGetVersion);
SAME_CALL(GetUniqueId, ncclGetUniqueId);
SAME_CALL(CommInitRankConfig, ncclCommInitRankConfig);
SAME_CALL(CommFinalize, ncclCommFinalize);
SAME_CALL(CommDestroy, ncclCommDestroy);
SAME_CALL(CommAbort, ncclCommAbort);
SAME_CALL(CommGetAsyncError, ncclCommGetAsyncError);
SAME_CALL(GetErrorString, ncclGetErrorString);
SAME_CALL(GetLastError, ncclGetLastError);
SAME_CALL(GroupStart, ncclGroupStart);
SAME_CALL(GroupEnd, ncclGroupEnd);
SAME_CALL(Send, ncclSend);
SAME_CALL(Recv, ncclRecv);
SAME_CALL(AllGather, ncclAllGather);

#define SAME_VALUE(mine, theirs) static_assert(int64_t{mine} == int64_t{theirs})
SAME_VALUE(ours::kSuccess, ncclSuccess);
SAME_VALUE(ours::kUnhandledCudaError, ncclUnhandledCudaError);
SAME_VALUE(ours::kSystemError, ncclSystemError);
SAME_VALUE(ours::kInternalError, ncclInternalError);
SAME_VALUE(ours::kInvalidArgument, ncclInvalidArgument);
SAME_VALUE(ours::kInvalidUsage, ncclInvalidUsage);
SAME_VALUE(ours::kRemoteError, ncclRemoteError);
SAME_VALUE(ours::kInProgress, ncclInProgress);
SAME_VALUE(ours::kInt8, ncclInt8);
SAME_VALUE(ours::kUint8, ncclUint8);
SAME_VALUE(ours::kUnset, NCCL_CONFIG_UNDEF_INT);
static_assert(sizeof(ours::Result) == sizeof(ncclResult_t));
static_assert(sizeof(ours::DataType) == sizeof(ncclDataType_t));
static_assert(sizeof(ours::UniqueId) == sizeof(ncclUniqueId));
static_assert(alignof(ours::UniqueId) == alignof(ncclUniqueId));
static_assert(sizeof(ours::Stream) == sizeof(cudaStream_t));

#define SAME_PLACE(mine, theirs)                                                  \
  static_assert(offsetof(ours::Config, mine) == offsetof(ncclConfig_t, theirs) && \
                sizeof(ours::Config{}.mine) == sizeof(ncclConfig_t{}.theirs))
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cga_cluster_size, cgaClusterSize);
SAME_PLACE(min_ctas, minCTAs);
SAME_PLACE(max_ctas, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
SAME_PLACE(traffic_class, trafficClass);
SAME_PLACE(comm_name, commName);
SAME_PLACE(collnet_enable, collnetEnable);
SAME_PLACE(cta_policy, CTAPolicy);
SAME_PLACE(shrink_share, shrinkShare);
SAME_PLACE(nvls_ctas, nvlsCTAs);
static_assert(NCCL_VERSION_CODE >= 22700, "older than what we support");
static_assert(NCCL_VERSION_CODE >= 22800 || sizeof(ours::Config) == sizeof(ncclConfig_t));
static_assert(sizeof(ours::Config) <= sizeof(ncclConfig_t));

// The hidden fields that NVIDIA's initializer fills in.
constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
static_assert(theirs.magic == ours::Config{}.magic);
static_assert(theirs.version / 100 != 227 || theirs.version / 100 == ours::Config{}.version / 100);
