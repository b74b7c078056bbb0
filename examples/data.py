"""Text as bytes: where it comes from, what is held out, and which replica sees what at which step.

By default the text is the source code of the Python standard library that runs this program: real
text that every machine has. A batch is a pure function of seed, replica, step and what was dealt to
others before, so a run resumes at any step without replaying, and no window comes twice an epoch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 20  # one file in this many is for validation; else this part of the end of the text
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
HUGGING_FACE = "hf:"


class DataError(ValueError):
    """The text asked for is missing, empty or too short. The message is one line."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, uint8 [bytes] each, and one line that says what they are."""

    train: Tensor
    validation: Tensor
    description: str


@dataclass(frozen=True)
class TextFile:
    """A file, and its path relative to where the search began, which decides what is held out."""

    path: Path
    relative: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.relative.encode()).digest()
        return int.from_bytes(digest[:4], "little") % HELD_OUT == 0


def find_files(data: Sequence[str]) -> list[TextFile]:
    """The files named by ``--data`` in a fixed order; the standard library when it is empty.

    Folders are searched to the bottom, hidden and empty files left out. Nothing is read yet.
    Raises DataError for a path that does not exist, a named file that is empty, or no text at all.
    """
    if not data:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [f for f in _search(root, "*.py") if not SKIPPED_FOLDERS & set(f.path.parts)]
        if not found:
            raise DataError(f"no Python source files in {root}; name text files with --data")
        return found
    found = []
    for name in data:
        path = Path(name)
        if path.is_dir():
            inside = _search(path, "*")
            if not inside:
                raise DataError(f"--data {name}: the folder holds no files with text in them")
            found += inside
        elif not path.is_file():
            raise DataError(f"--data {name}: no such file or folder")
        elif path.stat().st_size == 0:
            raise DataError(f"--data {name}: the file is empty")
        else:
            found.append(TextFile(path, path.name))
    return found


def _search(root: Path, pattern: str) -> list[TextFile]:
    found = []
    for path in root.rglob(pattern):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)
        if not hidden and path.is_file() and path.stat().st_size:
            found.append(TextFile(path, relative.as_posix()))
    return sorted(found, key=lambda f: f.relative)


def check_data(data: Sequence[str]) -> None:
    """Find what can be found wrong with ``--data`` before any process starts. Raises DataError."""
    sets = [name for name in data if name.startswith(HUGGING_FACE)]
    if not sets:
        find_files(data)
    elif len(data) > 1:
        raise DataError(f"--data {sets[0]}: a Hugging Face data set cannot be mixed with others")
    elif importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"--data {sets[0]} needs the optional package datasets: pip install datasets"
        )


def load_corpus(data: Sequence[str], window: int) -> Corpus:
    """Read the text into memory and split it.

    `window` is the bytes of one training example, its last target included. Validation text is the
    held-out files; where these make less than one window, the last 1/20 of all text.
    Raises DataError when the text is missing, unreadable or shorter than a window on either side.
    """
    check_data(data)
    if data and data[0].startswith(HUGGING_FACE):
        name = data[0]
        train, validation = _hugging_face(data[0].removeprefix(HUGGING_FACE))
        split = "its validation split"
    else:
        name = ", ".join(data) or "the Python standard library"
        files = find_files(data)
        train = _read([f for f in files if not f.held_out])
        validation = _read([f for f in files if f.held_out])
        split = f"{sum(f.held_out for f in files)} of {len(files)} files"
    if min(len(train), len(validation)) < window:
        text = train + validation
        cut = len(text) - max(len(text) // HELD_OUT, window)
        train, validation = text[: max(cut, 0)], text[max(cut, 0) :]
        split = "its last part"
    for part, what in ((train, "training"), (validation, "validation")):
        if len(part) < window:
            raise DataError(
                f"{name}: {len(train) + len(validation)} bytes are too few; each part needs at "
                f"least one window of {window} bytes, the {what} part has {len(part)}"
            )
    description = (
        f"{name}: {len(train):,} bytes to train on, {len(validation):,} held out ({split})"
    )
    return Corpus(_tensor(train), _tensor(validation), description)


def _read(files: Sequence[TextFile]) -> bytes:
    try:
        return b"".join(f.path.read_bytes() for f in files)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _hugging_face(name: str) -> tuple[bytes, bytes]:
    """The splits train and validation (empty if it has none) of ``NAME`` or ``NAME:CONFIG``."""
    import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]

    path, _, config = name.partition(":")
    try:
        splits = datasets.load_dataset(path, config or None)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"--data {HUGGING_FACE}{name}: {reason}") from error
    if "train" not in splits:
        raise DataError(f"--data {HUGGING_FACE}{name}: it has no split named train")
    texts = []
    for split in ("train", "validation"):
        rows = splits.get(split, [])
        texts.append("\n\n".join(row["text"] for row in rows if "text" in row).encode())
    if not texts[0]:
        raise DataError(f"--data {HUGGING_FACE}{name}: it has no column named text, or no rows")
    return texts[0], texts[1]


class Batches:
    """Training batches of one replica.

    An epoch cuts the text into windows of `seq_len` bytes at a random offset and deals them, in
    random order, to replicas 0 .. world-1 in turn. Sequence j of step t of replica r is number
    dealt + ((t - start) * batch_size + j) * world + r of that endless deal: the first `start` steps
    have used up `dealt`.
    """

    def __init__(
        self,
        text: Tensor,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        rank: int,
        world: int,
        start: int = 0,
        dealt: int = 0,
    ) -> None:
        if len(text) <= seq_len:
            raise DataError(f"{len(text)} bytes of text are too few for --seq-len {seq_len}")
        self.text, self.batch_size, self.seq_len, self.seed = text, batch_size, seq_len, seed
        self.rank, self.world, self.start, self.dealt = rank, world, start, dealt
        self.windows = max(1, len(text) // seq_len - 1)  # whatever the offset
        self._orders: dict[int, Tensor] = {}

    def starts(self, step: int) -> list[int]:
        """First byte of each window of this step."""
        first = self.dealt + (step - self.start) * self.batch_size * self.world + self.rank
        mine = range(first, first + self.batch_size * self.world, self.world)
        return [int(self._order(n // self.windows)[n % self.windows]) for n in mine]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this step, int64 [batch_size, seq_len] each."""
        return pairs(self.text, self.starts(step), self.seq_len)

    def noise(self, step: int) -> tuple[Tensor, Tensor]:
        """As `batch`, but random bytes: what a replica with broken memory or storage would see."""
        generator = _generator(self.seed, self.rank, step)
        shape = (self.batch_size, self.seq_len + 1)
        bytes_ = torch.randint(256, shape, generator=generator)
        return bytes_[:, :-1], bytes_[:, 1:]

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            generator = _generator(self.seed, epoch)
            room = len(self.text) - self.windows * self.seq_len
            offset = torch.randint(min(room, self.seq_len), (1,), generator=generator)
            order = torch.randperm(self.windows, generator=generator) * self.seq_len + offset
            kept = {e: o for e, o in self._orders.items() if e == epoch - 1}  # a batch spans two
            self._orders = {**kept, epoch: order}
        return self._orders[epoch]


def validation_batches(
    text: Tensor, *, batch_size: int, seq_len: int, count: int, rank: int, world: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of `count` windows spread evenly over the text; fewer if it is short.

    Yields inputs and targets, int64 [up to batch_size, seq_len] each; nothing when a rank's share
    is empty. All ranks together see each window once, whatever `world` is.
    """
    count = min(count, (len(text) - 1) // seq_len)
    spread = (len(text) - 1 - seq_len) // max(1, count - 1)
    mine = [n * spread for n in range(rank, count, world)]
    for first in range(0, len(mine), batch_size):
        yield pairs(text, mine[first : first + batch_size], seq_len)


def pairs(text: Tensor, starts: Sequence[int], seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (the same bytes one later), int64 [len(starts), seq_len] each."""
    windows = torch.stack([text[start : start + seq_len + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def _generator(*key: int) -> torch.Generator:
    """A generator seeded by all of `key`, so that neighbouring keys give unrelated numbers."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
