"""The field reports that belong to this stage, and a check that each has become a test."""

from __future__ import annotations

import re
from pathlib import Path

# Number -> what went wrong for users elsewhere. A row's tests are named test_row_NN_short_name.
ROWS = {
    1: "DiLoCo maths: wrong sign of the pseudo-gradient, wrong blend",
    2: "start-up: replicas initialised with different weights",
    3: "world of one: the averaging step was skipped and fed zeros",
    4: "frozen parameters: buffers were made for them too",
    5: "counters: every restart repeated the warm-up",
    6: "counters: one tick per parameter group",
    7: "forward patterns: state machines broke on unusual loops",
    8: "hooks not called: a submodule used through another method",
    9: "no gradients on a rank: others waited for ever",
    10: "odd shapes: 0-dim parameters broke wrappers",
    11: "uneven DTensor: a rebuilt one had a wrong global shape",
    12: "meta device: a tie was lost, and dead parameters were held",
    13: "stale references: parameters replaced or added were not synchronised",
    14: "torch.compile: hooks registered after the first call did not run",
    15: "replicate x shard mesh: replicas were averaged at every step",
    16: "buffers: BatchNorm statistics stayed local",
    17: "param groups: a wrapper kept a dead list",
    18: "resharding: a checkpoint fitted only the mesh that had saved it",
    19: "weights_only: the default load refused custom classes",
    20: "fp16 norms: squares overflowed",
    21: "softmax weights: NaN when all are minus infinity",
    22: "bf16 updates: steps below half a unit were lost",
    23: "norm per shard: each rank clipped by a factor of its own",
    24: "alignment: vector loads on unaligned views",
    25: "streams: kernels ran on the default stream and read stale inputs",
    26: "Gloo average: taken as a sum",
    27: "dead rank: hang, or healthy processes killed",
    28: "teardown: a destructor waited for a thread while holding the interpreter lock",
    29: "uneven data: ranks with more batches waited for ever",
    30: "restart: the unique id of the previous life was read from the shared store",
    31: "build isolation: setup.py imported a torch that was not there",
    32: "toolkit: tracebacks and late refusals without a matching one",
    33: "benchmark: times that did not wait for the work",
}
# Reports without a number -> the test that stands for each.
SHORT = {
    "data parallel parity": "test_short_data_parallel_parity",
    "deepcopy and pickle of an attached model": "test_short_copies_and_pickles",
    "create, sync, destroy many times": "test_short_come_and_go",
    "sparse gradients": "test_short_sparse_gradients",
    "a worker that joins with another local step": "test_short_joins_with_another_step",
    "the source of a start dies half-way": "test_short_source_of_a_start_dies",
    "skipped steps: still synced, capped": "test_short_skipped_steps",
    "skipped steps: reported": "test_short_skips_are_reported",
    "Gloo picks loopback, or reads NCCL's syntax": "test_short_gloo_address",
    "importing the compiled part before torch": "test_short_compiled_part_first",
    "gradients of small parameters on one rank": "test_short_small_gradients_on_one_rank",
    "parameters on several devices": "test_short_several_devices",
    "two ranks on one GPU": "test_short_two_ranks_on_one_gpu",
    "tensor on another device than the current one": "test_short_another_device",
    "two communicators at once": "test_short_communicators_at_once",
    "peak memory at a sync": "test_short_peak_memory",
    "another libnccl than torch's": "test_short_library_is_torchs",
}


def all_tests() -> set[str]:
    """All test functions of this folder."""
    found: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        found.update(re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE))
    return found


def test_every_row_is_a_test() -> None:
    """Lists the rows that no test stands for, and row tests that the table does not know."""
    numbers = {int(m[1]) for name in all_tests() if (m := re.match(r"test_row_(\d+)_", name))}
    missing = [f"row {number}, {text}" for number, text in ROWS.items() if number not in numbers]
    missing += [text for text, name in SHORT.items() if name not in all_tests()]
    assert not missing, "without a test: " + "; ".join(missing)
    assert numbers <= set(ROWS), f"not in the table: {sorted(numbers - set(ROWS))}"
