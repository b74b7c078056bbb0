"""Fixtures shared by all tests."""

from __future__ import annotations

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
