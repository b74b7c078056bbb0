"""Stop signals and clearing up: a block that they end, and one that they cannot cut short."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from edit_ext.launch import STOP_SIGNALS


class ExitOnStop:
    """From `start` to `stop`, SIGTERM and SIGHUP raise SystemExit(128 + n) in the main thread, as
    Ctrl-C raises KeyboardInterrupt; where someone handles or ignores them, that stays."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}

    def start(self) -> None:
        if _in_main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, _exit)

    def stop(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


@contextmanager
def held_back() -> Iterator[None]:
    """Stop signals that arrive inside take effect afterwards."""
    if not _in_main_thread():  # which alone handles signals
        yield
        return
    came: list[int] = []
    held = [n for n in STOP_SIGNALS if signal.getsignal(n) not in (None, signal.SIG_IGN)]
    handlers = {n: signal.signal(n, lambda number, _: came.append(number)) for n in held}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(came):
            signal.raise_signal(late)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
