"""One sync in progress: layers begin in one static order, a bounded number of them in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from . import _C


class Pipeline:
    """Begins and waits for the layers of a sync.

    All ranks begin the layers in `order`, whatever their forward does, so exchanges always pair up.
    A layer may be needed early: everything before it begins first, and when `prefetch` layers are
    in flight the oldest is waited for. The layer after those that have begun is told to fetch what
    it keeps on the host; with offload it holds buffers from then on, beside those in flight.

    on_done: called with a layer's index after its result has been written back.
    """

    def __init__(
        self, layers: Sequence[_C.Layer], prefetch: int, on_done: Callable[[int], None]
    ) -> None:
        self.order = list(range(len(layers)))
        self.active = False
        self.done: set[int] = set()  # layers of the open sync that have been written back
        self._layers = layers
        self._prefetch = prefetch
        self._slots = max(prefetch, 1)
        self._on_done = on_done
        self._begun = 0
        self._flying: list[int] = []
        self._begin: Callable[[_C.Layer], None] | None = None

    def start(self, begin: Callable[[_C.Layer], None]) -> None:
        """Open a sync; `begin(layer)` starts the exchange of one layer. Nothing is begun yet."""
        if self.active:
            raise RuntimeError("a sync is in progress already")
        self.active = True
        self._begin = begin
        self._begun = 0
        self.done = set()
        self._fetch_next()

    def look_ahead(self) -> None:
        """Begin layers until `prefetch` are in flight."""
        while self._begun < len(self.order) and len(self._flying) < self._prefetch:
            self._begin_next()

    def need(self, wanted: Iterable[int]) -> None:
        """Return when the results of the layers `wanted` are in their parameters."""
        missing = [index for index in wanted if index not in self.done]
        if not missing:
            return
        for index in missing:
            while index not in self.done and index not in self._flying:
                if len(self._flying) >= self._slots:
                    self._finish(self._flying[0])
                self._begin_next()
            if index not in self.done:
                self._finish(index)
                self.look_ahead()

    def finish(self) -> None:
        """Begin and wait for all layers that are not done."""
        self.look_ahead()
        for index in self.order:
            self.need([index])

    def over(self) -> bool:
        """Close the sync if all its layers are done; True if this call closed it."""
        if not self.active or len(self.done) < len(self.order):
            return False
        self.active, self._begin = False, None
        return True

    @property
    def in_flight(self) -> bool:
        """Whether an exchange has begun whose result has not been written back."""
        return bool(self._flying)

    def _begin_next(self) -> None:
        index = self.order[self._begun]
        if self._begin is None:
            raise RuntimeError("no sync is in progress")
        self._begin(self._layers[index])
        self._begun += 1
        self._flying.append(index)
        self._fetch_next()

    def _fetch_next(self) -> None:
        if self._begun < len(self.order):
            self._layers[self.order[self._begun]].fetch()

    def _finish(self, index: int) -> None:
        layer = self._layers[index]
        try:
            layer.wait()
        finally:
            # wait() may raise after the write-back (a bad decision), or before it (Ctrl-C).
            if not layer.in_flight:
                self._flying.remove(index)
                self.done.add(index)
        self._on_done(index)
