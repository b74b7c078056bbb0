// NcclLibrary, and how a NcclComm over the fake library begins and calls.
#include "nccl_world.h"

using namespace edit_ext;
using namespace edit_ext::testing;
using State = NcclComm::State;

namespace {

// ---- the library ----

bool real_library_here = false;

void library_absent() {
  CHECK(says(thrown([] { NcclLibrary::load("/nowhere/libnccl.so.2"); }),
             {"no NCCL library", "/nowhere/libnccl.so.2"}));
  const std::string why = thrown([] { NcclLibrary::load(); });
  real_library_here = why.empty();
  CHECK(real_library_here || says(why, {"no NCCL library", "libnccl.so.2"}));
}

void missing_symbol() {
  CHECK(says(thrown([] { NcclLibrary::load(FAKE_NCCL_WITHOUT_SEND); }),
             {"fake_nccl_without_send", "has no symbol ncclSend"}));
  // The C library, as a file that is no NCCL at all.
  CHECK(says(thrown([] { NcclLibrary::load("libc.so.6"); }), {"no symbol ncclGetVersion"}));
}

void versions() {
  reset();
  for (int good : {22700, 22707, 22800, 22807, 23003, 23203, 30000}) {
    fake().version = good;
    CHECK(NcclLibrary::load(FAKE_NCCL)->version() == good);
  }
  fake().version = 23003;
  CHECK(NcclLibrary::load(FAKE_NCCL)->version_text() == "2.30.3");
  fake().version = 22605;
  CHECK(says(thrown([] { NcclLibrary::load(FAKE_NCCL); }),
             {"NCCL 2.26.5", "fake_nccl", "too old", "2.27"}));
  fake().version = 2804;
  CHECK(says(thrown([] { NcclLibrary::load(FAKE_NCCL); }), {"NCCL 2.8.4"}));
}

// The fake bears the soname of the real library, as torch's does.
void the_loaded_library_is_taken() {
  CHECK(!NcclLibrary::load(FAKE_NCCL)->was_loaded());
  CHECK(NcclLibrary::load(FAKE_NCCL)->was_loaded());
  if (real_library_here) return;  // that one came first
  const auto found = NcclLibrary::load();
  CHECK(found->was_loaded() && says(found->path(), {"fake_nccl"}));
}

// ---- the beginning ----

void begins() {
  for (int size : {2, 4}) {
    reset();
    Ranks ranks = connect(size);
    for (auto& comm : ranks) {
      CHECK(comm->state() == State::ready && comm->size() == size);
      comm->poll();
    }
    run_ranks(size, [&](int r) { gather_one(*ranks[r]); });
    CHECK(close_all(ranks));
    for (auto& comm : ranks) CHECK(comm->state() == State::closed);
    ranks.clear();
    CHECK(fake().counts.inits == size && fake().counts.destroys == size);
    CHECK(fake().counts.aborts == 0 && fake().counts.finalizes == size);
  }
}

void group_of_one() {
  reset();
  NcclComm comm(nullptr, nccl::UniqueId{}, 0, 1, options(), nullptr);
  double x = 3.0;
  Block own{&x, sizeof(x)};
  comm.exchange(&own, &own);
  comm.all_gather(&x, sizeof(x), sizeof(x));
  comm.gather_scalars(&x, sizeof(x));
  comm.poll();
  CHECK(x == 3.0 && comm.bytes_sent() == 0 && comm.state() == State::ready);
  CHECK(comm.close(1.0) && comm.state() == State::closed);
  NcclComm other(nullptr, nccl::UniqueId{}, 0, 1, options(), nullptr);
  other.abort("enough");
  CHECK(says(thrown([&] { other.gather_scalars(&x, sizeof(x)); }), {"aborted: enough"}));
  CHECK(fake().counts.inits == 0);
}

void options_arrive() {
  reset();
  fake().init_polls = 40;  // past the first millisecond of waiting
  std::atomic<int> polled{0};
  NcclOptions o = options();
  o.max_ctas = 4;
  o.poll_signals = [&] { ++polled; };
  Ranks ranks = connect(2, o);
  CHECK(fake().max_ctas == 4 && polled > 0);
  CHECK(close_all(ranks));
  Ranks plain = connect(2);
  CHECK(fake().max_ctas == nccl::kUnset);
  CHECK(close_all(plain));
  CHECK(says(thrown([] { NcclComm(library(), nccl::UniqueId{}, 2, 2, options(), nullptr); }),
             {"replica group, rank 2 of 2", "rank must be"}));
}

// A member that never comes, and a library that is never ready: an exception in time, and nothing
// left behind.
void init_times_out() {
  for (const bool alone : {true, false}) {
    reset();
    if (!alone) fake().init_polls = -1;
    const nccl::UniqueId id = library()->unique_id();
    std::atomic<int> timed_out{0};
    run_ranks(alone ? 1 : 2, [&](int r) {
      std::string error;
      const double took = seconds_of(
          [&] { error = thrown([&] { NcclComm(library(), id, r, 2, options(0.2), nullptr); }); });
      CHECK(took < 5.0 &&
            says(error, {"replica group, rank " + std::to_string(r) + " of 2: init"}));
      // The other may see the first one go before its own time is up.
      const bool late = error.find("timed out after 0.2 s; a peer is missing") != std::string::npos;
      CHECK(late ? took >= 0.2 : says(error, {"a peer has gone"}));
      timed_out += late;
    });
    CHECK(timed_out >= 1);
    CHECK(fake().counts.live == 0 && fake().counts.aborts == fake().counts.inits);
  }
}

void init_is_interrupted() {
  reset();
  NcclOptions o = options();
  o.poll_signals = [] { throw std::runtime_error("Ctrl-C"); };
  const nccl::UniqueId id = library()->unique_id();
  run_ranks(1, [&](int) {
    CHECK(thrown([&] { NcclComm(library(), id, 0, 2, o, nullptr); }) == "Ctrl-C");
  });
  CHECK(fake().counts.live == 0);
}

// An id that is spent, or a rank that is taken.
void init_is_refused() {
  reset();
  const nccl::UniqueId id = library()->unique_id();
  Ranks ranks(2);
  run_ranks(2, [&](int r) {
    ranks[r] = std::make_unique<NcclComm>(library(), id, r, 2, options(), nullptr);
  });
  CHECK(says(thrown([&] { NcclComm(library(), id, 0, 2, options(), nullptr); }),
             {"init failed: invalid usage (rank taken)"}));
  fake().counts.misuses = 0;
  CHECK(close_all(ranks));
}

// Generations have ids of their own: ranks of two generations do not find each other, and two whole
// groups side by side keep their values apart.
void generations_never_mix() {
  reset();
  const nccl::UniqueId old_id = library()->unique_id(), new_id = library()->unique_id();
  CHECK(std::memcmp(&old_id, &new_id, sizeof(old_id)) != 0);
  run_ranks(2, [&](int r) {
    const nccl::UniqueId& id = r == 0 ? old_id : new_id;
    CHECK(says(thrown([&] { NcclComm(library(), id, r, 2, options(0.2), nullptr); }), {"init"}));
  });
  Ranks one = connect(2), two = connect(2);
  run_ranks(4, [&](int i) {
    const int r = i % 2, generation = i / 2;
    NcclComm& comm = *(generation == 0 ? one : two)[r];
    for (int k = 0; k < 50; ++k) {
      int all[2] = {-1, -1};
      all[r] = 1000 * generation + 2 * k + r;
      comm.gather_scalars(all, sizeof(int));
      CHECK(all[0] == 1000 * generation + 2 * k && all[1] == all[0] + 1);
    }
  });
  run_ranks(4, [&](int i) { CHECK((i < 2 ? one : two)[i % 2]->close(20.0)); });
  CHECK(fake().counts.live == 0);
}

// Sends and receives in one group without empty ones, nearest peer first; one collective outside.
void order_of_calls() {
  reset();
  Ranks ranks = connect(3);
  run_ranks(3, [&](int r) {
    char x[64] = {};
    Block to[3], from[3];
    for (int p = 0; p < 3; ++p) {
      to[p] = {x, 1 + r + p};
      from[p] = {x + 8 + 8 * p, 1 + r + p};
    }
    if (r == 1) to[2] = {};
    if (r == 2) from[1] = {};
    ranks[r]->exchange(to, from);
    ranks[r]->all_gather(x, 5, 12);
    ranks[r]->all_gather(x, 5, 0);
    ranks[r]->gather_scalars(x, 8);
    CHECK(ranks[r]->bytes_sent() == (r == 0 ? 2 + 3 : r == 1 ? 2 : 3 + 4) + 2 * 5 + 2 * 8);
  });
  CHECK(close_all(ranks));
  CHECK(fake().counts.in_group == 2 * 5 && fake().counts.outside == 3 * 2);
  const std::vector<std::string> wanted[3] = {
      {"0: init", "0: group send 1 2 recv 2 3 send 2 3 recv 1 2", "0:  all_gather 5",
       "0:  all_gather 8", "0: finalize", "0: destroy"},
      {"1: init", "1: group recv 0 2 send 0 2 recv 2 4", "1:  all_gather 5", "1:  all_gather 8",
       "1: finalize", "1: destroy"},
      {"2: init", "2: group send 0 3 send 1 4 recv 0 3", "2:  all_gather 5", "2:  all_gather 8",
       "2: finalize", "2: destroy"}};
  for (int r = 0; r < 3; ++r) {
    std::vector<std::string> seen;
    for (const std::string& line : fake().log) {
      if (line[0] == '0' + r) seen.push_back(line);
    }
    CHECK(seen == wanted[r]);
  }
}

}  // namespace

int main() {
  library_absent();  // before the fake is loaded, which the default name then finds
  the_loaded_library_is_taken();
  missing_symbol();
  versions();
  begins();
  group_of_one();
  options_arrive();
  init_times_out();
  init_is_interrupted();
  init_is_refused();
  generations_never_mix();
  order_of_calls();
  return testing::close("test_nccl");
}
