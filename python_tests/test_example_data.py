"""The example's data: real text without a download, disjoint streams, resumable by step number."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch

from edit_ext.examples.data import (
    Batches,
    DataError,
    check_data,
    find_files,
    load_corpus,
    validation_batches,
)

TEXT = torch.arange(10_000, dtype=torch.int64).remainder(251).to(torch.uint8)


def stream(rank: int, world: int, **changes) -> Batches:
    options = {"batch_size": 3, "seq_len": 16, "seed": 1, **changes}
    return Batches(TEXT, rank=rank, world=world, **options)


def test_the_standard_library_is_text_enough_and_the_same_each_time():
    """Without --data: megabytes of Python source, in fixed order, tests and packages left out."""
    files = find_files([])
    names = [f.relative for f in files]
    assert names == sorted(names)
    assert names == [f.relative for f in find_files([])]
    assert "json/decoder.py" in names
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    corpus = load_corpus([], window=129)
    assert len(corpus.train) > 4_000_000
    assert 0.01 < len(corpus.validation) / len(corpus.train) < 0.15
    assert b"import " in bytes(corpus.train[:100_000].tolist())


def test_held_out_files_are_chosen_by_name_alone():
    """Adding a file moves no other file between training and validation."""
    held = {f.relative for f in find_files([]) if f.held_out}
    assert held
    for file in find_files([]):
        assert file.held_out == (file.relative in held)


def test_replicas_share_an_epoch_without_overlap():
    """In one epoch every window is drawn exactly once, by one of the replicas."""
    world, streams = 4, [stream(rank, 4) for rank in range(4)]
    windows = streams[0].windows
    steps = windows // (3 * world)  # whole steps of the first epoch
    starts = [s for t in range(steps) for b in streams for s in b.starts(t)]
    assert len(starts) == len(set(starts)) == steps * 3 * world
    ordered = sorted(starts)
    assert all(b - a >= 16 for a, b in itertools.pairwise(ordered))
    assert ordered[0] >= 0 and ordered[-1] + 17 <= len(TEXT)


def test_a_step_is_drawn_without_what_came_before():
    """Step 700 asked of a fresh stream equals step 700 of one that has drawn all before it."""
    old, new = stream(1, 2), stream(1, 2)
    for step in range(700):  # several epochs, and batches that span two
        old.starts(step)
    assert old.starts(700) == new.starts(700)
    a, b = old.batch(700), new.batch(700)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_targets_are_the_inputs_one_byte_later():
    """int64, [batch, seq_len], cut from the text."""
    inputs, targets = stream(0, 2).batch(5)
    assert inputs.shape == targets.shape == (3, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    start = stream(0, 2).starts(5)[0]
    assert torch.equal(inputs[0], TEXT[start : start + 16].long())


def test_seed_replica_and_epoch_change_the_draw():
    """Neighbouring keys give different batches, noise included."""
    base = stream(0, 2)
    assert base.starts(0) != stream(1, 2).starts(0)
    assert base.starts(0) != stream(0, 2, seed=2).starts(0)
    assert base.starts(0) != base.starts(base.windows)
    assert not torch.equal(base.noise(3)[0], stream(1, 2).noise(3)[0])
    assert not torch.equal(base.noise(3)[0], base.noise(4)[0])
    assert base.noise(3)[0].shape == (3, 16)


@pytest.mark.parametrize("length", [17, 18, 31, 32, 33, 48, 49])
def test_short_texts_are_never_read_past_their_end(length):
    """Any text of more than seq_len bytes gives full windows at any step."""
    batches = Batches(TEXT[:length], batch_size=2, seq_len=16, seed=0, rank=0, world=1)
    for step in range(40):
        assert batches.batch(step)[0].shape == (2, 16)
        assert max(batches.starts(step)) + 17 <= length


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_all_ranks_together_validate_on_the_same_windows(world):
    """Each window once whatever the number of ranks; a rank without a share gets none."""
    options = {"batch_size": 2, "seq_len": 16, "count": 5}
    drawn = []
    for rank in range(world):
        for inputs, _ in validation_batches(TEXT, rank=rank, world=world, **options):
            drawn += [tuple(row) for row in inputs.tolist()]
    whole = validation_batches(TEXT, rank=0, world=1, **options)
    assert sorted(drawn) == sorted(tuple(row) for x, _ in whole for row in x.tolist())
    assert len(drawn) == 5


def test_files_and_folders(tmp_path):
    """Folders are searched, hidden and empty files left out; one file is split at its end."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_bytes(b"x" * 1000)
    (tmp_path / "a" / ".hidden").write_bytes(b"y" * 1000)
    (tmp_path / "a" / "empty.txt").write_bytes(b"")
    corpus = load_corpus([str(tmp_path / "a")], window=20)
    assert (len(corpus.train), len(corpus.validation)) == (950, 50)
    assert set(corpus.train.tolist()) == {ord("x")}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (None, "no such file or folder"),
        (b"", "the file is empty"),
        (b"short", "5 bytes are too few"),
    ],
)
def test_missing_empty_and_short_files_are_one_line(tmp_path, make, message):
    """Each names the file and what is wrong with it."""
    path = tmp_path / "text.txt"
    if make is not None:
        path.write_bytes(make)
    with pytest.raises(DataError, match=message) as error:
        load_corpus([str(path)], window=33)
    assert "text.txt" in str(error.value) and "\n" not in str(error.value)


def test_an_empty_folder_is_refused(tmp_path):
    """Not a silent fall-back to other text."""
    with pytest.raises(DataError, match="holds no files with text"):
        check_data([str(tmp_path)])


def test_a_data_set_without_its_package_is_one_sentence(monkeypatch):
    """The sentence says what to install."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install datasets"):
        check_data(["hf:some/name"])


def test_a_data_set_is_read_from_its_text_column(monkeypatch):
    """Rows are joined; the validation split is the validation text; a config may be named."""
    asked = []

    def load_dataset(path, config):
        asked.append((path, config))
        rows = [{"text": "héllo " * 20}, {"text": "world " * 20}]
        return {"train": rows, "validation": rows[:1]}

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: module)
    corpus = load_corpus(["hf:wiki:small"], window=10)
    assert asked == [("wiki", "small")]
    assert len(corpus.train) == 20 * 7 + 2 + 20 * 6
    assert len(corpus.validation) == 20 * 7


def test_the_deal_goes_on_with_another_number_of_replicas():
    """Four replicas, then two, three and one: an epoch's windows come once each, none left out."""
    text = torch.arange(256, dtype=torch.uint8).repeat(20)
    sizes = {"batch_size": 2, "seq_len": 16, "seed": 3}
    seen, dealt, step = [], 0, 0
    for world, steps in ((4, 5), (2, 3), (3, 2), (1, 140)):
        parts = [
            Batches(text, **sizes, rank=rank, world=world, start=step, dealt=dealt)
            for rank in range(world)
        ]
        for t in range(step, step + steps):
            seen += [start for part in parts for start in part.starts(t)]
        step, dealt = step + steps, dealt + steps * 2 * world
    windows = parts[0].windows
    assert len(seen) == dealt and 64 < windows < dealt
    assert len(set(seen[:windows])) == windows
