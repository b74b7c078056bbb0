"""The fp64 reference against golden numbers, torch's own optimizer and plain properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edit_ext import reference
from edit_ext.reference import Detector, Policy, SyncResult

NAN, INF = math.nan, math.inf
PLAIN = Policy(outer_lr=1.0, outer_momentum=0.0, weighting="uniform", clip_norm=None)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def fed(norms: list[float], policy: Policy | None = None) -> Detector:
    row = Detector()
    for norm in norms:
        row = row.feed(norm, (policy or Policy()).ema_alpha)
    return row


def sync(anchor: Tensor, replicas: list[Tensor], policy: Policy, **more) -> SyncResult:
    """A first sync: zero momentum and, unless given, fresh detectors and one step a replica."""
    given = {
        "momentum": torch.zeros_like(anchor, dtype=torch.float64),
        "detectors": [Detector()] * len(replicas),
        "steps": [1] * len(replicas),
        **more,
    }
    return reference.sync_layer(anchor, replicas, policy=policy, **given)


def close(got: float | list[float] | Tensor, want: float | list[float] | Tensor) -> bool:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (got, want))
    return torch.allclose(a, b, rtol=0, atol=1e-9)


# Golden numbers


def test_golden_ewma() -> None:
    """The raw recursion after six and after seven norms."""
    six = fed([0, 1, 1.2, 0.9, 1.1, 1.0])
    seven = six.feed(5.0, 0.02)
    assert close([six.mean, six.var], [0.0998831712, 0.0929544944])
    assert close([seven.mean, seven.var], [0.197885507776, 0.5523014764531])


ANCHOR = vector(1, 2)
REPLICAS = [vector(0.9, 2.1), vector(1.2, 1.7), vector(NAN, 5)]


@pytest.mark.parametrize(
    ("phi", "clip", "anchor"),
    [
        (10.0, 1.0, [1.0423743290, 1.9015008946]),
        (0.05, 0.5875309673, [1.0248962305, 1.9421287253]),
    ],
)
def test_golden_sync(phi: float, clip: float, anchor: list[float]) -> None:
    """Two replicas accepted, one flagged, with the clip idle and at work."""
    got = sync(ANCHOR, REPLICAS, Policy(clip_norm=phi))
    assert close(got.norms[:2], [0.1414213562, 0.3605551275])
    assert close(got.weights, [0.5545652671, 0.4454347329, 0.0])
    assert close(-got.merged, [0.0336304199, -0.0781738931])
    assert close([got.merged_norm, got.clip], [0.0851008972, clip])
    assert close(got.anchor, anchor)
    assert got.flags == [False, False, True] and not got.skip


def test_golden_second_sync() -> None:
    """Momentum of the first sync enters the second."""
    first = sync(ANCHOR, REPLICAS, Policy())
    moved = first.anchor + vector(0.01, -0.02)
    second = sync(first.anchor, [moved], Policy(), momentum=first.momentum)
    assert close(second.anchor, [1.0700407571, 1.8412789905])
    assert close(second.momentum, [-0.0369043359, 0.0825391145])


def test_scalar_by_hand() -> None:
    """Anchor 1, replicas at 0.8 and 0.6, outer lr 1, no momentum: the mean, 0.7; so by replace."""
    replicas = [vector(0.8), vector(0.6)]
    for policy in (PLAIN, Policy(outer="replace", weighting="uniform")):
        got = sync(vector(1.0), replicas, policy)
        assert got.params.item() == pytest.approx(0.7, rel=1e-15)


@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_step_is_torch_sgd(nesterov: bool) -> None:
    """Five syncs equal SGD stepped on a copy with grad = anchor - mean of the replicas."""
    policy = Policy(outer_momentum=0.9, nesterov=nesterov, weighting="uniform", clip_norm=None)
    draw = torch.Generator().manual_seed(0)
    anchor = torch.randn(7, generator=draw, dtype=torch.float64)
    copy = anchor.clone().requires_grad_()
    sgd = torch.optim.SGD([copy], lr=0.7, momentum=0.9, nesterov=nesterov)
    momentum, rows = torch.zeros_like(anchor), [Detector()] * 3
    for _ in range(5):
        moves = torch.randn(3, 7, generator=draw, dtype=torch.float64)
        replicas = [anchor + 0.1 * move for move in moves]
        copy.grad = anchor - sum(replicas) / 3
        got = sync(anchor, replicas, policy, momentum=momentum, detectors=rows)
        sgd.step()
        anchor, momentum, rows = got.anchor, got.momentum, got.detectors
        torch.testing.assert_close(anchor, copy.detach(), rtol=1e-14, atol=1e-14)


# Who is accepted

STEADY = fed([1.0, 1.02, 0.99, 1.01] * 5)


def test_one_flagged() -> None:
    """A far norm is flagged: weight 0, its detector not fed, and the others decide."""
    replicas = [vector(1.0, 0), vector(0, 1.01), vector(3.0, 3.0)]
    got = sync(vector(0, 0), replicas, PLAIN, detectors=[STEADY] * 3)
    assert got.flags == [False, False, True] and got.weights == [0.5, 0.5, 0.0]
    assert close(got.anchor, [0.5, 0.505])
    assert got.detectors[2] == STEADY._replace(flags_in_a_row=1)
    assert got.detectors[0] == STEADY.feed(1.0, 0.02)


def test_all_flagged_returns_to_the_anchor() -> None:
    """Anchor and momentum stay bit for bit and the params go back to the anchor."""
    momentum = vector(0.25, -0.5)
    far = [vector(3.0, 3.0), vector(NAN, 0)]
    got = sync(ANCHOR, far, Policy(), detectors=[STEADY] * 2, momentum=momentum)
    assert got.skip and got.weights == [0, 0] and got.flags == [True, True]
    assert torch.equal(got.anchor, ANCHOR) and torch.equal(got.params, ANCHOR)
    assert torch.equal(got.momentum, momentum)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("z_threshold", [3.0, None])
def test_nonfinite_replica_never_leaks(bad: float, z_threshold: float | None) -> None:
    """The result is bit-equal to that of the healthy replicas alone, z-test or not."""
    policy = Policy(z_threshold=z_threshold)
    healthy = [vector(0.9, 2.1), vector(1.2, 1.7)]
    got = sync(ANCHOR, [vector(bad, 2.0), *healthy], policy)
    want = sync(ANCHOR, healthy, policy)
    assert got.flags == [True, False, False] and got.weights == [0.0, *want.weights]
    assert torch.equal(got.anchor, want.anchor) and torch.equal(got.momentum, want.momentum)
    assert got.detectors == [Detector(nonfinite_in_a_row=1), *want.detectors]


def test_replica_that_stays_nonfinite_is_reported() -> None:
    """Non-finite once more than the cap: the host must raise, and nothing is stepped."""
    policy = Policy(max_flags_in_a_row=2)
    rows = [Detector()] * 2
    for expected in ([], [], [0]):
        got = sync(ANCHOR, [vector(NAN, 0), vector(1, 1)], policy, detectors=rows)
        rows = got.detectors
        assert got.stuck == expected and got.skip == bool(expected)


def test_cap_on_flags() -> None:
    """A lasting level shift is flagged max_flags_in_a_row times, then starts new statistics."""
    policy = Policy(max_flags_in_a_row=3)
    row, flags = STEADY, []
    for _ in range(6):
        row, flagged = row.judge(9.0, policy)
        flags.append(flagged)
    assert flags == [True] * 3 + [False] * 3
    assert row == fed([9.0] * 3)


def test_accepted_norm_ends_a_run_of_flags() -> None:
    """Flags count in a row only; a finite flag also ends a run of non-finite ones."""
    row, _ = STEADY.judge(9.0, Policy())
    row, _ = row.judge(NAN, Policy())
    assert row[3:] == (1, 1)
    assert row.judge(9.0, Policy())[0][3:] == (2, 0)
    assert row.judge(1.0, Policy())[0][3:] == (0, 0)


def test_small_norms_are_never_flagged() -> None:
    """The test is one-sided."""
    assert not STEADY.judge(0.0, Policy())[1]


def test_near_zero_variance_does_not_flag() -> None:
    """After norms equal to 1e-12, or all 0, a healthy replica's ripple below 3 % passes."""
    for count in (10, 100, 1000):
        row = fed([1.0, 1.0 + 1e-12] * (count // 2))
        assert not row.judge(1.03, Policy())[1]
        assert row.judge(1.5, Policy())[1]
        assert not fed([0.0] * count).judge(0.0, Policy())[1]


def test_nothing_is_flagged_during_warmup() -> None:
    """A finite norm is accepted until ema_warmup norms were fed; z_threshold None accepts all."""
    assert not fed([1.0] * 9).judge(1e6, Policy())[1]
    assert fed([1.0] * 10).judge(1e6, Policy())[1]
    assert not fed([1.0] * 10).judge(1e6, Policy(z_threshold=None))[1]


def test_idle_replica() -> None:
    """No step in the window: weight 0, no flag, detector untouched, even where it would win."""
    replicas = [vector(1, 2), vector(1.2, 1.7), vector(NAN, 2)]
    got = sync(ANCHOR, replicas, Policy(), steps=[0, 3, 0], detectors=[STEADY] * 3)
    assert got.idle == [True, False, True] and got.flags == [False] * 3
    assert got.weights == [0.0, 1.0, 0.0]
    assert got.detectors == [STEADY, got.detectors[1], STEADY]
    assert sync(ANCHOR, replicas, Policy(), steps=[0, 0, 0]).skip


def test_row_21_softmax_weights() -> None:
    """Norms of 1e30, inf, NaN, all 0, two equal; one and all flagged: never NaN, sum 1 or all 0."""

    def weigh(*norms: float) -> list[float]:
        accepted = [math.isfinite(g) for g in norms]
        return reference.weights(norms, accepted, [1] * len(norms), Policy())

    assert weigh(1e30, 1.0) == [0.0, 1.0]
    assert weigh(1e30, 1e30) == [0.5, 0.5]
    assert weigh(INF, NAN, 2.0, 2.0) == [0.0, 0.0, 0.5, 0.5]
    assert weigh(0.0, 0.0, 0.0, 0.0) == [0.25] * 4
    assert weigh(3.0, NAN) == [1.0, 0.0]
    assert weigh(INF, NAN, -INF) == [0.0] * 3
    # A zero weight times a NaN pseudo-gradient, and all flagged: through the whole sync.
    one = sync(ANCHOR, [vector(NAN, NAN), vector(0.5, 1.5)], Policy())
    assert one.merged.isfinite().all() and one.params.isfinite().all()
    none = sync(ANCHOR, [vector(NAN, 0), vector(INF, 0)], Policy())
    assert none.skip and torch.equal(none.params, ANCHOR)


def test_weights_by_steps_and_temperature() -> None:
    """Steps weigh in proportion over the accepted; a higher temperature levels the softmax."""
    by_steps = Policy(weighting="steps")
    assert reference.weights([9, 1, 1], [True, False, True], [3, 7, 1], by_steps) == [0.75, 0, 0.25]
    soft = [
        reference.weights([0, 1], [True] * 2, [1, 1], Policy(temperature=t))[0]
        for t in (0.1, 1, 10)
    ]
    assert soft[0] > soft[1] > soft[2] > 0.5
    assert soft[1] == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-14)


# 16-bit parameters and wires


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_bf16_weights_follow_the_fp32_run(wire: str, momentum: float) -> None:
    """Weights of 1, one of 4 replicas moves by 2^-8 a window, 50 windows: within 2 % of fp32."""
    policy = Policy(outer_lr=1.0, outer_momentum=momentum, weighting="uniform", clip_norm=None)

    def run(dtype: torch.dtype) -> Tensor:
        anchor, buffer = torch.ones(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
        params, rows = anchor.to(dtype), [Detector()] * 4
        for _ in range(50):
            moved = (params.double() - 2**-8).to(dtype)
            got = sync(
                anchor,
                [moved, params, params, params],
                policy,
                momentum=buffer,
                detectors=rows,
                param_dtype=dtype,
                wire=wire,
            )
            anchor, buffer, params, rows = got.anchor, got.momentum, got.params, got.detectors
        return anchor

    wide, narrow = run(torch.float32), run(torch.bfloat16)
    assert (wide - 1).abs().min() > 0.04
    torch.testing.assert_close(narrow - 1, wide - 1, rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_untouched_16_bit_replica_has_norm_zero(dtype: torch.dtype) -> None:
    """The part of the anchor that the dtype cannot hold is no pseudo-gradient, and stays."""
    anchor = vector(1 + 2**-12, -3.14159)
    got = sync(anchor, [anchor.to(dtype)] * 2, Policy(), param_dtype=dtype)
    assert got.norms == [0.0, 0.0] and torch.equal(got.anchor, anchor)
    assert got.params.dtype == dtype


@pytest.mark.parametrize("value", [300.0, 5000.0, 1e-6])
def test_norm_of_fp16_is_not_taken_in_fp16(value: float) -> None:
    """Squares of 300 leave fp16's range: the norm is finite and right, and the clip gives 1."""
    param = torch.tensor([value], dtype=torch.float16)
    got = sync(vector(0.0), [param], Policy(clip_norm=1.0), param_dtype=torch.float16)
    assert got.norms[0] == pytest.approx(param.item(), rel=1e-12)
    assert got.clip * got.merged_norm == pytest.approx(min(param.item(), 1.0), rel=1e-5)


def test_bf16_wire() -> None:
    """Sent differences and the returned step are rounded; norms, weights and momentum are not."""
    anchor, params = vector(0.0, 0.0), [vector(-1.0, -0.001), vector(-1.003, -0.3)]
    wide, narrow = sync(anchor, params, Policy()), sync(anchor, params, Policy(), wire="bf16")
    assert narrow.norms == wide.norms and narrow.weights == wide.weights
    sent = sum(w * (-p).bfloat16().double() for w, p in zip(wide.weights, params, strict=True))
    assert close(narrow.merged, sent) and close(narrow.momentum, sent)
    assert torch.equal(narrow.anchor, -(0.7 * (sent + 0.8 * sent)).bfloat16().double())


def test_step_beyond_the_wire_is_skipped() -> None:
    """A finite value above bf16's range becomes inf on the wire: the sync is left out, not NaN."""
    got = sync(vector(0.0), [vector(-3.4e38)], Policy(), wire="bf16")
    assert got.skip and got.flags == [False] and got.anchor.item() == 0.0


# Properties

finite_norms = st.lists(st.floats(0, 1e30), min_size=1, max_size=8)


@given(finite_norms, st.data(), st.sampled_from(["softmax", "uniform", "steps"]))
@settings(deadline=None, derandomize=True)
def test_weights_sum_to_one(norms: list[float], data: st.DataObject, weighting: str) -> None:
    """Over the accepted; the others have exactly 0."""
    accepted = data.draw(st.lists(st.booleans(), min_size=len(norms), max_size=len(norms)))
    steps = [r + 1 for r in range(len(norms))]
    got = reference.weights(norms, accepted, steps, Policy(weighting=weighting))
    assert all(w == 0 for w, ok in zip(got, accepted, strict=True) if not ok)
    assert all(0 <= w <= 1 for w in got)
    assert sum(got) == pytest.approx(1.0 if any(accepted) else 0.0, abs=1e-12)


values = st.floats(-100, 100, allow_subnormal=False)


@given(st.lists(st.tuples(values, values, values), min_size=1, max_size=5), st.randoms())
@settings(deadline=None, derandomize=True)
def test_order_of_replicas_does_not_matter(points: list[tuple[float, ...]], random) -> None:
    """Permuted replicas: permuted weights and flags, the same anchor up to the order of a sum."""
    order = random.sample(range(len(points)), len(points))
    anchor, replicas = vector(1, -2, 3), [vector(*p) for p in points]
    plain = sync(anchor, replicas, Policy())
    mixed = sync(anchor, [replicas[r] for r in order], Policy())
    assert mixed.weights == pytest.approx([plain.weights[r] for r in order], abs=1e-12)
    assert mixed.norms == [plain.norms[r] for r in order]
    torch.testing.assert_close(mixed.anchor, plain.anchor, rtol=1e-12, atol=1e-9)


@given(st.floats(0, 1e12), st.floats(1e-6, 1e6))
@settings(deadline=None, derandomize=True)
def test_clip_length(norm: float, phi: float) -> None:
    """A clipped step is never longer than clip_norm, and a shorter one is left alone."""
    clip = reference.clip_coefficient(norm, phi)
    assert 0 < clip <= 1 and clip * norm <= phi * (1 + 1e-12)
    assert clip == 1 or norm > phi - 2e-6
    assert reference.clip_coefficient(norm, None) == 1


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60), st.floats(0.01, 0.5))
@settings(deadline=None, derandomize=True)
def test_limit_is_the_weighted_sample_statistics(norms: list[float], alpha: float) -> None:
    """The recursion, read corrected, equals mean and variance computed from all norms at once."""
    raw = torch.tensor([(1 - alpha) ** k for k in reversed(range(len(norms)))]).double()
    w, x = raw / raw.sum(), vector(*norms)
    mean, w2 = float(w @ x), float(w @ w)
    sigma = max(math.sqrt(float(w @ (x - mean) ** 2) / (1 - w2)), 0.01 * mean)
    row = fed(norms, Policy(ema_alpha=alpha))
    nu = 1 / w2 - 1
    quantile = 2 + 10 / (4 * nu) + (160 + 128 + 6) / (96 * nu**2)
    want = mean + quantile * sigma * math.sqrt(1 + w2)
    assert row.limit(2.0, alpha) == pytest.approx(want, rel=1e-4, abs=1e-9)


def test_limit_nears_the_normal_quantile() -> None:
    """With alpha small and many norms fed, Student's quantile comes down to the threshold."""
    row = fed([0.9, 1.1] * 5000, Policy(ema_alpha=0.001))
    assert row.limit(3.0, 0.001) == pytest.approx(1 + 3 * 0.1, rel=2e-3)
