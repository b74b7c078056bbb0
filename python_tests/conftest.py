"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def _pool() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def ranks(_pool: Ranks) -> Ranks:
    """Processes that serve as ranks, shared by the whole run."""
    return _pool


# A shell's background job ignores Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
