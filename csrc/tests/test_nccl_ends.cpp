// How a NcclComm over the fake library fails and ends.
#include <sys/wait.h>
#include <unistd.h>

#include "nccl_world.h"

using namespace edit_ext;
using namespace edit_ext::testing;
using State = NcclComm::State;

namespace {

void an_error_is_an_exception() {
  reset();
  fake().failing_rank = 1;
  fake().failing_after = 1;
  Ranks ranks = connect(2);
  run_ranks(2, [&](int r) { gather_one(*ranks[r]); });
  ranks[0]->poll();
  NcclComm& comm = *ranks[1];
  const auto poll = [&] { comm.poll(); };
  const std::vector<std::string> parts = {"NCCL, replica group, rank 1 of 2", "asynchronous error",
                                          "remote process exited", "peer closed the connection"};
  CHECK(comm.state() == State::ready && says(thrown(poll), parts));
  CHECK(comm.state() == State::failed && says(thrown(poll), parts));  // sticky
  CHECK(says(thrown([&] { gather_one(comm); }), {"gather_scalars: failed before", "remote"}));
  CHECK(!comm.close(20.0) && comm.state() == State::aborted);  // nothing to close in order
  // The peer that is left sees its connection go.
  CHECK(says(thrown([&] { ranks[0]->poll(); }), {"rank 0 of 2", "a peer has gone"}));
  ranks.clear();
  CHECK(fake().counts.live == 0 && fake().counts.misuses == 0);
}

void an_error_ends_a_call() {
  reset();
  Ranks ranks = connect(2);
  fake().failing_rank = 0;
  int64_t x[2] = {};
  Block to[2] = {{x, 8}, {x, 8}}, from[2] = {{x + 1, 8}, {x + 1, 8}};
  CHECK(says(thrown([&] { ranks[0]->exchange(to, from); }),
             {"rank 0 of 2", "exchange failed: remote process exited"}));
  CHECK(ranks[0]->state() == State::failed && ranks[0]->bytes_sent() == 0);
}

// A message that is refused names its peer, and the group that it was in is left: the next group of
// this thread stands alone.
void a_refused_message_names_its_peer() {
  reset();
  Ranks ranks = connect(3), others = connect(2);
  fake().refused_peer = 2;
  int64_t x[2] = {};
  std::vector<Block> to(3, {x, 8}), from(3, {x + 1, 8});
  CHECK(says(thrown([&] { ranks[0]->exchange(to.data(), from.data()); }),
             {"rank 0 of 3: exchange with rank 2 failed: some error (no route)"}));
  CHECK(ranks[0]->state() == State::failed);
  fake().open = true;
  others[0]->exchange(to.data(), from.data());
  CHECK(others[0]->state() == State::ready && fake().counts.misuses == 0);
}

void peers_disagree_on_sizes() {
  reset();
  Ranks ranks = connect(2);
  std::atomic<int> seen{0};
  run_ranks(2, [&](int r) {
    char x[16] = {};
    Block to[2] = {{x, 3}, {x, 3}}, from[2] = {{x + 8, 3 + r}, {x + 8, 3 + r}};
    seen += says(thrown([&] { ranks[r]->exchange(to, from); }), {"3 bytes sent, 4 expected"});
  });
  CHECK(seen == 2);
}

void a_call_times_out() {
  reset();
  fake().hold = true;
  Ranks ranks = connect(2, options(0.2));
  const double took = seconds_of([&] {
    CHECK(says(thrown([&] { gather_one(*ranks[0]); }),
               {"gather_scalars timed out after 0.2 s", "missing or stuck"}));
  });
  CHECK(took >= 0.2 && took < 5.0 && ranks[0]->state() == State::failed);
}

// From another thread, while the call asks again and again, and while it sits inside the library.
void abort_frees_a_call() {
  for (const bool stuck : {false, true}) {
    reset();
    (stuck ? fake().stick : fake().hold) = true;
    Ranks ranks = connect(2);
    const double took = seconds_of([&] {
      run_ranks(3, [&](int i) {
        if (i < 2) {
          CHECK(says(thrown([&] { gather_one(*ranks[i]); }), {"aborted: replica 3 is gone"}));
        } else {
          for (bool all = false; !all;) {  // both are in their call
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            std::lock_guard<std::mutex> lock(fake().mutex);
            all = fake().log.size() == 4;  // two inits, two calls
          }
          ranks[0]->poll();  // does not wait behind a call
          NcclComm::abort_all({ranks[0].get(), ranks[1].get()}, "replica 3 is gone");
        }
      });
    });
    CHECK(took < 10.0);
    for (auto& comm : ranks) CHECK(comm->state() == State::aborted);
    ranks.clear();
    CHECK(fake().counts.aborts == 2 && fake().counts.live == 0 && fake().counts.misuses == 0);
  }
}

// Threads that call, ask and abort at random moments: each call ends, well or with the reason.
void abort_at_any_moment() {
  for (int trial = 0; trial < 20; ++trial) {
    reset();
    Ranks ranks = connect(2);
    std::atomic<int> ended{0}, rounds{0};
    run_ranks(4, [&](int i) {
      if (i < 2) {
        const std::string error = thrown([&] {
          for (;; ++rounds) gather_one(*ranks[i]);
        });
        CHECK(says(error, {"aborted: enough"}));
        ++ended;
      } else if (i == 2) {
        while (ended < 2) {
          (void)thrown([&] { ranks[0]->poll(); });
          std::this_thread::sleep_for(std::chrono::microseconds(20));
          CHECK(ranks[1]->bytes_sent() >= 0 && ranks[1]->state() != State::closed);
        }
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(500 * trial));
        // From the tenth on in the middle of the calls, however busy the machine is.
        for (int i = 0; trial >= 10 && rounds == 0 && i < 10000; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        NcclComm::abort_all({ranks[0].get(), ranks[1].get()}, "enough");
      }
    });
    CHECK(fake().counts.group_aborts == 1 && fake().counts.live == 0);
    CHECK(fake().counts.misuses == 0 && (trial < 10 || rounds > 0));
  }
}

void ends_happen_once() {
  reset();
  Ranks ranks = connect(2);
  CHECK(close_all(ranks));
  CHECK(ranks[0]->close(20.0));
  ranks[0]->abort("too late");
  CHECK(ranks[0]->state() == State::closed);
  ranks[0]->poll();  // nothing went wrong
  CHECK(says(thrown([&] { gather_one(*ranks[0]); }), {"gather_scalars: closed already"}));

  Ranks other = connect(2);
  for (auto& comm : other) {
    comm->abort("first");
    comm->abort("second");
    CHECK(!comm->close(20.0) && comm->state() == State::aborted);
    CHECK(says(thrown([&] { gather_one(*comm); }), {"gather_scalars: aborted: first"}));
    CHECK(says(thrown([&] { comm->poll(); }), {"aborted: first"}));
  }
  other.clear();
  ranks.clear();
  CHECK(fake().counts.aborts == 2 && fake().counts.destroys == 2 && fake().counts.misuses == 0);
}

void close_waits_for_peers_in_vain() {
  reset();
  Ranks ranks = connect(2);
  const double took = seconds_of([&] { CHECK(!ranks[0]->close(0.2)); });
  CHECK(took >= 0.2 && took < 5.0 && ranks[0]->state() == State::aborted);
  CHECK(says(thrown([&] { gather_one(*ranks[0]); }), {"aborted: not closed in 0.2 s"}));
  CHECK(!ranks[1]->close(20.0));  // nobody is left to close with
  CHECK(says(thrown([&] { gather_one(*ranks[1]); }), {"aborted: close failed: remote process"}));
}

// A call of another thread sits inside the library for good: close ends in time, and the call too.
void close_does_not_wait_for_a_stuck_call() {
  reset();
  fake().stick = true;
  Ranks ranks = connect(2);
  run_ranks(2, [&](int i) {
    if (i == 0) {
      CHECK(says(thrown([&] { gather_one(*ranks[0]); }), {"aborted: not closed in 0.2 s"}));
      return;
    }
    for (bool inside = false; !inside;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      std::lock_guard<std::mutex> lock(fake().mutex);
      inside = fake().log.size() == 3;  // two inits, one call
    }
    const double took = seconds_of([&] { CHECK(!ranks[0]->close(0.2)); });
    CHECK(took >= 0.2 && took < 5.0 && ranks[0]->state() == State::aborted);
  });
}

void sisters_are_aborted_in_one_group() {
  reset();
  Ranks shard = connect(2), replica = connect(2), mesh = connect(2);
  CHECK(thrown([&] { shard[0]->close(0.0); }).empty());  // has ended, is skipped
  fake().counts.aborts = 0;
  NcclComm::abort_all({shard[0].get(), replica[0].get(), nullptr, mesh[0].get()}, "a peer died");
  CHECK(fake().counts.group_aborts == 1 && fake().counts.aborts == 2);
  CHECK(replica[0]->state() == State::aborted && mesh[0]->state() == State::aborted);
  NcclComm::abort_all({replica[0].get(), mesh[0].get()}, "again");
  CHECK(fake().counts.aborts == 2 && fake().counts.misuses == 0);
  CHECK(replica[1]->state() == State::ready);  // a peer's end is its own
}

// Work is on the stream, a peer will never do its part, and the object goes.
void destructor_does_not_wait() {
  reset();
  fake().open = fake().hold = true;
  std::vector<int64_t> all(2);
  Ranks ranks = connect(2);
  ranks[0]->gather_scalars(all.data(), sizeof(int64_t));
  CHECK(seconds_of([&] { ranks.clear(); }) < 3.0);
  CHECK(fake().counts.aborts == 2 && fake().counts.finalizes == 0 && fake().counts.live == 0);
}

// An abort that hangs in the library is left behind after its time.
void destructor_leaves_a_hanging_abort() {
  reset();
  NcclOptions o = options();
  o.abort_timeout = 0.3;
  Ranks ranks = connect(2, o);
  ranks[1]->abort("apart");
  fake().abort_ms = 2000;
  const double took = seconds_of([&] { ranks.clear(); });
  CHECK(took >= 0.3 && took < 1.9);
  for (int i = 0; i < 500 && fake().counts.live > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK(fake().counts.live == 0);
}

// Its copy is of no use there, and its end there means nothing to the parent.
void a_forked_child_keeps_off() {
  reset();
  Ranks ranks = connect(2);
  const pid_t child = fork();
  if (child == 0) {
    bool fine = says(thrown([&] { gather_one(*ranks[0]); }), {"forked child cannot use it"});
    ranks[0]->abort("child");
    fine = fine && !ranks[0]->close(1.0);
    ranks.clear();
    _exit(fine && fake().counts.aborts == 0 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  run_ranks(2, [&](int r) { gather_one(*ranks[r]); });
  CHECK(close_all(ranks));
}

}  // namespace

int main() {
  a_forked_child_keeps_off();  // while there is no other thread
  an_error_is_an_exception();
  an_error_ends_a_call();
  a_refused_message_names_its_peer();
  abort_at_any_moment();
  peers_disagree_on_sizes();
  a_call_times_out();
  abort_frees_a_call();
  ends_happen_once();
  close_waits_for_peers_in_vain();
  close_does_not_wait_for_a_stuck_call();
  sisters_are_aborted_in_one_group();
  destructor_does_not_wait();
  destructor_leaves_a_hanging_abort();
  return testing::close("test_nccl_ends");
}
