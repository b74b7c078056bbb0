"""The example's Llama is what its names say."""

from __future__ import annotations

import pytest
import torch

from edit_ext.examples.model import PRESETS, Llama, LlamaConfig, parameter_count, rotate, rotations

SMALL = LlamaConfig(dim=32, layers=2, heads=4, hidden=48)


@pytest.mark.parametrize(
    ("preset", "millions"),
    [("tiny", 0.2340), ("15m", 14.95), ("125m", 125.2), ("350m", 349.2), ("1b", 1005.1)],
)
def test_presets_have_the_sizes_they_are_named_for(preset, millions):
    """Counted on the meta device, embedding and head included; names are within one percent."""
    with torch.device("meta"):
        model = Llama(PRESETS[preset])
    assert parameter_count(model) / 1e6 == pytest.approx(millions, rel=1e-3)
    named = {"15m": 15, "125m": 125, "350m": 350, "1b": 1000}
    if preset in named:
        assert parameter_count(model) / 1e6 == pytest.approx(named[preset], rel=0.01)


def test_no_byte_sees_what_follows_it():
    """Changing byte 5 changes no logits before position 5, and those at 5."""
    torch.manual_seed(0)
    model = Llama(SMALL).eval()
    tokens = torch.randint(256, (1, 12))
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % 256
    with torch.no_grad():
        a, b = model(tokens), model(other)
    assert torch.allclose(a[:, :5], b[:, :5], atol=1e-6)
    assert not torch.allclose(a[:, 5], b[:, 5], atol=1e-3)


def test_rotary_scores_depend_on_distance_alone():
    """The product of a query and a key moved by the same number of positions stays the same."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8).unbind(0)
    cos, sin = rotations(20, SMALL, torch.device("cpu"))

    def score(i: int, j: int) -> torch.Tensor:
        turned_q = rotate(q, (cos[i : i + 1], sin[i : i + 1]))
        turned_k = rotate(k, (cos[j : j + 1], sin[j : j + 1]))
        return (turned_q * turned_k).sum()

    assert score(5, 2) == pytest.approx(score(14, 11).item(), abs=1e-5)
    assert abs(score(5, 2) - score(5, 4)) > 1e-3


def test_the_loss_is_the_mean_cross_entropy_and_starts_at_chance():
    """With targets the model returns the loss of its own logits, about ln 256 when untrained."""
    torch.manual_seed(0)
    model = Llama(SMALL)
    tokens, targets = torch.randint(256, (2, 4, 16))
    expected = torch.nn.functional.cross_entropy(model(tokens).transpose(1, 2), targets)
    assert model(tokens, targets).item() == pytest.approx(expected.item(), abs=1e-5)
    assert model(tokens, targets).item() == pytest.approx(5.545, abs=0.1)


def test_tied_weights_are_one_parameter():
    """`tied` shares the matrix, so that it is counted once and gets both gradients."""
    tied = Llama(LlamaConfig(dim=32, layers=1, heads=4, hidden=48, tied=True))
    apart = Llama(LlamaConfig(dim=32, layers=1, heads=4, hidden=48))
    assert tied.head.weight is tied.embedding.weight
    assert parameter_count(apart) - parameter_count(tied) == 256 * 32


def test_bf16_keeps_its_positions_exact():
    """A model in bf16 trains a step, its rotary angles still computed in fp32."""
    torch.manual_seed(0)
    model = Llama(SMALL).to(torch.bfloat16)
    tokens = torch.randint(256, (2, 16))
    loss = model(tokens, tokens)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    assert rotations(4, SMALL, torch.device("cpu"))[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"), [({"heads": 5}, "dim=32, heads=5"), ({"layers": 0}, "layers must be")]
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    """The error gives the numbers."""
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**{"dim": 32, "layers": 1, "heads": 4, "hidden": 48, **change})
