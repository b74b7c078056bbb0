"""Which transport carries the syncs: what is chosen, what is said, what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from nets import plain, sgd
from ranks import Ranks
from torch import nn

import edit_ext
from edit_ext import _C
from edit_ext.transport import choose


def attached(comm: str) -> str:
    model = nn.Linear(3, 2)
    sync = edit_ext.attach(model, sgd(model), plain(), start="broadcast", comm=comm)
    return sync.explain()


def test_one_replica_sends_nothing() -> None:
    """Without peers there is no transport, and explain() says so."""
    assert "transport: one rank: nothing is sent" in attached("auto")


def test_unknown_transport_is_named() -> None:
    """An unknown name is refused with the known ones."""
    with pytest.raises(
        ValueError, match="comm must be one of 'auto', 'nccl', 'c10d', but is 'mpi'"
    ):
        attached("mpi")


def test_nccl_needs_a_gpu() -> None:
    """comm="nccl" for parameters on the CPU is refused at attach, not at the first sync."""
    with pytest.raises(ValueError, match="comm='nccl' cannot be used: the parameters are on cpu"):
        attached("nccl")


@pytest.mark.parametrize(
    ("comm", "why"), [("auto", "the parameters are on cpu"), ("c10d", "was asked for")]
)
def test_all_ranks_choose_alike(ranks: Ranks, comm: str, why: str) -> None:
    """Every rank says which transport was chosen and why."""
    for said in ranks.run(2, attached, comm):
        assert "transport: a c10d group of its own (gloo): " in said and why in said


class Group:
    """Two ranks that say what a test lets them say."""

    size, rank = 2, 0

    def __init__(self, *said: str) -> None:
        self.said = list(said)

    def name(self, member: int) -> str:
        return f"replica {member} (rank {member})"

    def gather_text(self, text: str, what: str) -> list[str]:
        return self.said


def test_short_two_ranks_on_one_gpu() -> None:
    """NCCL refuses two ranks on one device; "auto" then stages through the host and says which they
    are, "nccl" is refused at attach with the same words."""
    said = "replica 0 (rank 0) and replica 2 (rank 2) share the GPU GPU-1 of a, which NCCL refuses"
    group = Group("\nGPU-1 of a", "\nGPU-2 of a", "\nGPU-1 of a")
    direct, why = choose(group, "auto", torch.zeros(1))  # type: ignore[arg-type]
    assert not direct and why.endswith(f": {said}")
    with pytest.raises(ValueError, match=re.escape(f"comm='nccl' cannot be used: {said}")):
        choose(group, "nccl", torch.zeros(1))  # type: ignore[arg-type]


def test_one_replica_does_not_load_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU too, a replica alone does not look for the library; asked for, it must be there."""

    def absent() -> str:
        raise RuntimeError("no NCCL library")

    monkeypatch.setattr(_C, "nccl_version", absent)
    monkeypatch.setattr(_C, "on_cuda", lambda like: True)
    group, on_gpu = Group(), SimpleNamespace(device=torch.device("cuda:0"))
    group.size = 1
    assert choose(group, "auto", on_gpu) == (False, "one rank: nothing is sent")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be used: no NCCL library"):
        choose(group, "nccl", on_gpu)  # type: ignore[arg-type]


def test_one_rank_without_nccl_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks follow the one that cannot, and the others' sentence names its reason."""
    with pytest.raises(ValueError, match="too old on rank 1"):
        choose(Group("\na 1", "too old on rank 1\nb 1"), "nccl", torch.zeros(1))  # type: ignore[arg-type]
    monkeypatch.setattr(_C, "nccl_version", lambda: "2.30.7")
    direct, why = choose(Group("\na 1", "\nb 1"), "auto", torch.zeros(1))  # type: ignore[arg-type]
    assert direct and "NCCL 2.30.7" in why


@pytest.mark.parametrize(
    ("theirs", "said"),
    [((2, 30, 7), "NCCL 2.30.7 on"), ((2, 27, 5), "NCCL 2.30.7 (torch itself uses 2.27.5) on")],
)
def test_another_library_than_torchs_is_said(
    monkeypatch: pytest.MonkeyPatch, theirs: tuple[int, ...], said: str
) -> None:
    """A torch with NCCL inside leaves us the machine's, which may be of another version."""
    monkeypatch.setattr(_C, "nccl_version", lambda: "2.30.7")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: theirs)
    direct, why = choose(Group("\na 1", "\nb 1"), "auto", torch.zeros(1))  # type: ignore[arg-type]
    assert direct and said in why


@pytest.mark.parametrize(("ctas", "said"), [(-1, "from 0 to 64, but is -1"), (4, "no effect")])
def test_max_ctas_is_never_ignored(ctas: int, said: str) -> None:
    """A number that cannot be, and one that nothing would use, are refused."""
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=said):
        edit_ext.attach(model, sgd(model), plain(), max_ctas=ctas)


def test_nccl_comm_needs_a_direct_lane() -> None:
    """A lane that is no side stream of a GPU, and an id of another length, are named."""
    lane = _C.make_lane(torch.zeros(1))
    with pytest.raises(ValueError, match="id has 3 bytes; expected 128"):
        _C.make_nccl_comm(b"abc", 0, 2, lane, 1.0)
    with pytest.raises(ValueError, match="not a direct lane"):
        _C.make_nccl_comm(bytes(128), 0, 2, lane, 1.0)
