// The decisions, fed with numbers worked out by hand or printed by an independent script.
#include <cstring>
#include <limits>

#include "../core/policy.h"
#include "testing.h"

using namespace edit_ext;
using testing::near;

namespace {

const double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::numeric_limits<double>::quiet_NaN();

struct Case {
  std::vector<NormRecord> records;
  std::vector<Detector> detectors;
  std::vector<PerReplica> out;
  Decision d{};

  explicit Case(const std::vector<double>& norms) : detectors(norms.size()), out(norms.size()) {
    for (double n : norms) records.push_back({n * n, 0, 1, 0});
  }
  void run(const Policy& p) {
    decide(p, static_cast<int>(records.size()), records.data(), detectors.data(), out.data(), d);
  }
};

void golden_recursion() {
  Detector d{};
  const double norms[] = {0, 1, 1.2, 0.9, 1.1, 1.0, 5.0};
  for (int i = 0; i < 7; ++i) {
    feed(d, norms[i], 0.02);
    if (i == 5) {
      CHECK(near(d.mean, 0.0998831712, 1e-9));
      CHECK(near(d.var, 0.0929544944, 1e-9));
    }
  }
  CHECK(near(d.mean, 0.197885507776, 1e-12));
  CHECK(near(d.var, 0.5523014764531, 1e-12));
}

void golden_weights() {
  Case c({0.1414213562373095, 0.36055512754639896, kNan});
  c.run(Policy{});
  CHECK(near(c.out[0].weight, 0.5545652671, 1e-7));
  CHECK(near(c.out[1].weight, 0.4454347329, 1e-7));
  CHECK(c.out[2].flagged && c.out[2].weight == 0.0f);
  CHECK(c.d.accepted == 2 && !c.d.skip);
  CHECK(c.detectors[2].count == 0 && c.detectors[2].nonfinite_in_a_row == 1);
}

void golden_clip() {
  Policy p;
  p.clip_norm = 0.05;
  const MergeRecord record{0.0851008972 * 0.0851008972, 0};
  Decision d{};
  decide_clip(p, 1, &record, nullptr, d);
  CHECK(near(d.clip, 0.5875309673, 1e-8));
  p.clip_norm = 10.0;
  decide_clip(p, 1, &record, nullptr, d);
  CHECK(d.clip == 1.0);
  const MergeRecord bad{kInf, 0};
  decide_clip(p, 1, &bad, nullptr, d);
  CHECK(d.skip == 1);
}

void extreme_norms() {
  Case all_bad({kNan, kInf, kNan});
  all_bad.run(Policy{});
  CHECK(all_bad.d.skip == 1);
  for (const PerReplica& r : all_bad.out) CHECK(r.weight == 0.0f);

  Case huge({1e30, 2.0, kInf});
  huge.run(Policy{});
  CHECK(huge.out[0].weight == 0.0f && huge.out[1].weight == 1.0f && huge.out[2].weight == 0.0f);

  Case zeros({0.0, 0.0});
  zeros.run(Policy{});
  CHECK(zeros.out[0].weight == 0.5f && zeros.out[1].weight == 0.5f);
}

// Feeds `n` norms around `level` to replica 0 of a group of two.
Case trained(const Policy& p, int n, double level, double spread) {
  Case c({level, level});
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal(level, spread);
  for (int i = 0; i < n; ++i) {
    for (NormRecord& r : c.records) {
      const double norm = spread > 0 ? normal(random) : level;
      r.norm2 = norm * norm;
    }
    c.run(p);
  }
  return c;
}

void spike_is_flagged_and_not_fed() {
  const Policy p;
  Case c = trained(p, 60, 1.0, 0.05);
  const Detector before = c.detectors[1];
  c.records[0].norm2 = 1.0;
  c.records[1].norm2 = 4.0;
  c.run(p);
  CHECK(!c.out[0].flagged && c.out[1].flagged);
  CHECK(c.out[0].weight == 1.0f && c.out[1].weight == 0.0f);
  CHECK(c.detectors[1].mean == before.mean && c.detectors[1].count == before.count);
  CHECK(c.detectors[1].flags_in_a_row == before.flags_in_a_row + 1);
}

void steady_norms_are_not_flagged() {
  const Policy p;
  Case c = trained(p, 300, 1.0, 0.0);
  c.records[1].norm2 = 1.02 * 1.02;  // two per cent above a norm that never moved
  c.run(p);
  CHECK(!c.out[1].flagged);
  Case still = trained(p, 20, 0.0, 0.0);
  still.records[0].norm2 = still.records[1].norm2 = 1.0;  // the layer moves for the first time
  still.run(p);
  CHECK(!still.out[0].flagged && !still.out[1].flagged);
}

void a_lasting_shift_is_accepted() {
  Policy p;
  p.max_flags_in_a_row = 3;
  Case c = trained(p, 60, 1.0, 0.05);
  int flags = 0;
  for (int i = 0; i < 10; ++i) {
    c.records[1].norm2 = 25.0;
    c.records[0].norm2 = 1.0;
    c.run(p);
    flags += c.out[1].flagged;
  }
  CHECK(flags == 3);
  CHECK(c.detectors[1].count == 7);  // started anew with the accepted norm
}

void lasting_nan_is_an_error() {
  Policy p;
  p.max_flags_in_a_row = 3;
  Case c({1.0, kNan});
  for (int i = 0; i < 3; ++i) {
    c.run(p);
    CHECK(c.d.status == kOk);
  }
  c.run(p);
  CHECK(c.d.status == kNonFinite && c.d.culprit == 1);
}

void idle_replicas_have_no_say() {
  Case c({0.0, 3.0});
  c.records[0].steps = 0;
  c.run(Policy{});
  CHECK(c.out[0].idle && !c.out[0].flagged && c.out[0].weight == 0.0f);
  CHECK(c.out[1].weight == 1.0f && c.detectors[0].count == 0);
  c.records[1].steps = 0;
  c.run(Policy{});
  CHECK(c.d.skip == 1);
}

// Steps of all replicas together, idle and flagged ones too, against the least that is wanted.
void too_few_steps_are_void() {
  Policy p;
  p.min_steps = 5;
  p.ema_warmup = 2;
  Case c({3.0, kNan});
  c.detectors[0] = {0.5, 0.25, 7.0, 2.0, 1.0};
  c.detectors[1] = {0.5, 0.25, 7.0, 0.0, 10.0};  // one more would be an error
  const std::vector<Detector> before = c.detectors;
  const auto untouched = [&] {
    return std::memcmp(before.data(), c.detectors.data(), 2 * sizeof(Detector)) == 0;
  };
  c.records[0].steps = 4;
  c.records[1].steps = 0;
  c.run(p);
  CHECK(c.d.skip == kVoid && c.d.status == kOk && c.d.accepted == 0 && untouched());
  CHECK(!c.out[0].flagged && !c.out[0].idle && c.out[1].idle && c.out[0].norm == 3.0);
  CHECK(c.out[0].weight == 0.0f && c.out[1].weight == 0.0f);
  c.records[1].steps = 0;
  c.records[1].done = 1;
  c.run(p);
  CHECK(c.d.skip == kVoid && untouched());  // one of them has ended, the other goes on
  const uint64_t hash = c.d.hash;
  const MergeRecord nothing[2] = {{0.0, hash}, {0.0, hash}};
  decide_clip(p, 2, nothing, nullptr, c.d);
  CHECK(c.d.skip == kVoid && c.d.status == kOk);
  const MergeRecord other[2] = {{kNan, hash}, {0.0, hash + 1}};
  decide_clip(p, 2, other, nullptr, c.d);
  CHECK(c.d.skip == kVoid && c.d.status == kDisagree);

  // What another least, or none, would have said is another decision.
  Case same = c, more = c, ended = c;
  p.min_steps = 6;
  more.run(p);
  CHECK(more.d.skip == kVoid && more.d.hash != hash);
  p.min_steps = 4;
  same.run(p);
  CHECK(same.d.skip == kNoSkip && same.out[0].flagged + same.out[1].flagged == 0);
  CHECK(same.out[0].weight == 1.0f && same.detectors[0].count == 8.0 && same.d.hash != hash);

  p.min_steps = 5;
  ended.records[0].done = 1;  // no sync follows that could count these steps
  ended.run(p);
  CHECK(ended.d.skip == kNoSkip && ended.out[0].weight == 1.0f && ended.detectors[0].count == 8.0);
}

void weights_by_steps_and_uniform() {
  Policy p;
  p.weighting = Weighting::steps;
  Case c({1.0, 9.0});
  c.records[1].steps = 3;
  c.run(p);
  CHECK(c.out[0].weight == 0.25f && c.out[1].weight == 0.75f);
  p.weighting = Weighting::uniform;
  c.run(p);
  CHECK(c.out[0].weight == 0.5f && c.out[1].weight == 0.5f);
}

void disagreement_is_seen() {
  Case c({1.0, 1.0});
  c.records[1].sync_index = 4;
  c.run(Policy{});
  CHECK(c.d.status & kWrongSync);
  const MergeRecord records[2] = {{1.0, 5}, {1.0, 6}};
  Decision d{};
  d.hash = 5;
  decide_clip(Policy{}, 2, records, nullptr, d);
  CHECK((d.status & kDisagree) && d.skip == 1);
}

void exponential() {
  for (double x = 0.0; x > -60.0; x -= 0.0137) {
    CHECK(near(exp_nonpositive(x) / std::exp(x), 1.0, 1e-14));
  }
  CHECK(exp_nonpositive(0.0) == 1.0 && exp_nonpositive(-1e30) == 0.0);
  CHECK(exp_nonpositive(kNan) == 0.0);
}

}  // namespace

int main() {
  golden_recursion();
  golden_weights();
  golden_clip();
  extreme_norms();
  spike_is_flagged_and_not_fed();
  steady_norms_are_not_flagged();
  a_lasting_shift_is_accepted();
  lasting_nan_is_an_error();
  idle_replicas_have_no_say();
  too_few_steps_are_void();
  weights_by_steps_and_uniform();
  disagreement_is_seen();
  exponential();
  return testing::close("test_policy");
}
