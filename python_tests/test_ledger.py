"""The ledger: bytes a sync moves through memory and over the wire."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edit_ext import reference


def test_ledger_of_memory() -> None:
    """24 + 24/R a parameter on the fp32 wire, part by part; 12 R + 20 stacked."""
    assert reference.memory_bytes(4) == {
        "pseudo_grad": 12,
        "merge": 4 + 4 / 4,
        "outer_step": 20 / 4,
        "write_back": 8,
        "total": 30,
    }
    for replicas in (1, 2, 3, 8):
        total = reference.memory_bytes(replicas)["total"]
        assert total == pytest.approx(24 + 24 / replicas)
        assert reference.memory_bytes(replicas, param=2)["total"] == pytest.approx(total - 4)
        narrow = reference.memory_bytes(replicas, wire=2)["total"]
        assert narrow == pytest.approx(26 + 18 / replicas)
        assert reference.stacked_bytes(replicas) == 12 * replicas + 20


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=6), st.integers(1, 7))
@settings(deadline=None, derandomize=True)
def test_ledger_of_the_wire(counts: list[int], replicas: int) -> None:
    """Pieces cover the padded layer in order; all ranks together send 2 (R-1) N elements."""
    size = sum(map(reference.padded, counts))
    pieces = reference.piece_sizes(size, replicas)
    assert sum(pieces) == size and all(a >= b for a, b in pairwise(pieces))
    assert all(p % 128 == 0 for p in pieces)
    sent = [reference.wire_bytes(counts, replicas, r) for r in range(replicas)]
    scalars = replicas * (32 + 16) * (replicas - 1)
    assert sum(sent) == 4 * 2 * (replicas - 1) * size + scalars
