"""One sync in progress: layers begin in one static order, a bounded number of them in flight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from . import _C


class Pipeline:
    """Begins and waits for the layers of a sync.

    All ranks begin the layers in the same order, whatever their forward does, so exchanges always
    pair up. A layer may be needed early: everything before it begins first, and when `prefetch`
    layers are in flight the oldest is waited for. The layer after those that have begun is told to
    fetch what it keeps on the host; with offload it holds buffers from then on, beside those in
    flight.

    Optimizer states take no buffers of their own: they begin as soon as all before them have, and
    the lane takes one after the other.

    A late layer only begins here; what comes back is due steps later and *lands* here then. Where
    a layer begins and lands at once, it begins first.

    is_state: whether the layer of an index is one of those. on_done: called with a layer's index
    after its result has been written back.
    """

    def __init__(
        self,
        layers: Sequence[_C.Layer],
        prefetch: int,
        is_state: Callable[[int], bool],
        on_done: Callable[[int], None],
    ) -> None:
        self.done: set[int] = set()  # layers of the open sync that need nothing any more
        self._layers = layers
        self._prefetch = prefetch
        self._slots = max(prefetch, 1)
        self._is_state = is_state
        self._on_done = on_done
        self._order: list[int] = []
        self._late: Collection[int] = ()
        self._landing: dict[int, float] = {}
        self._kept: dict[int, float] = {}
        self._begun = 0
        self._flying: list[int] = []
        self._begin: Callable[[int], None] | None = None

    @property
    def active(self) -> bool:
        """Whether some layer has to begin or land before the next step."""
        return self._begin is not None or bool(self._landing)

    @property
    def in_flight(self) -> bool:
        """Whether an exchange has begun whose result has not been written back."""
        return bool(self._flying)

    def start(
        self,
        order: list[int],
        late: Collection[int],
        begin: Callable[[int], None],
        kept: dict[int, float],
    ) -> None:
        """Open a sync of the layers `order`; `begin(index)` starts the exchange of one of them.
        Nothing is begun yet. kept: share of the local weights that stays, where one does."""
        if self._begin is not None:
            raise RuntimeError("a sync is in progress already")
        self._order, self._late, self._begin = order, late, begin
        self._begun = 0
        self._kept = kept
        self.done = set()
        self._fetch_next()

    def land(self, layers: dict[int, float]) -> None:
        """What these late layers have in flight longest is due now; of each the share of the local
        weights that stays."""
        self._landing |= layers

    def look_ahead(self) -> None:
        """Begin layers until `prefetch` are in flight."""
        while self._begun < len(self._order) and self._prefetch:
            index = self._order[self._begun]
            if index in self._late:
                return  # it is read at its own forward, where it may land too
            if len(self._holding()) >= self._prefetch and not self._is_state(index):
                return
            self._begin_next()

    def need(self, wanted: Iterable[int]) -> None:
        """Return when the results of the layers `wanted` are in their parameters."""
        for index in wanted:
            if self._begin is not None and index in self._order and index not in self.done:
                self._bring(index)
            if index in self._landing:
                self._land(index)

    def finish(self) -> None:
        """Begin and wait for all layers that are not done."""
        self.look_ahead()
        self.need([*self._order, *self._landing])

    def over(self) -> bool:
        """Close the sync if all its layers are done; True if this call closed it."""
        if self._begin is None or len(self.done) < len(self._order):
            return False
        self._begin = None
        return True

    def waits_for(self, index: int) -> bool:
        """Whether new weights of a layer are still to come before the next step."""
        here = self._begin is not None and index in self._order and index not in self._late
        return index in self._landing or (here and index not in self.done)

    def _bring(self, index: int) -> None:
        while index not in self.done and index not in self._flying:
            if len(self._holding()) >= self._slots and not self._is_state(self._order[self._begun]):
                self._finish(self._holding()[0])
            self._begin_next()
        if index not in self.done:
            self._finish(index)
            self.look_ahead()

    def _holding(self) -> list[int]:
        """Layers in flight that hold buffers, oldest first."""
        return [index for index in self._flying if not self._is_state(index)]

    def _begin_next(self) -> None:
        index = self._order[self._begun]
        if self._begin is None:
            raise RuntimeError("no sync is in progress")
        self._begin(index)
        self._begun += 1
        if index in self._late:
            self.done.add(index)
            if index in self._landing:
                self._land(index)
        else:
            self._flying.append(index)
        self._fetch_next()

    def _fetch_next(self) -> None:
        if self._begun < len(self._order):
            self._layers[self._order[self._begun]].fetch()

    def _land(self, index: int) -> None:
        self._layers[index].wait(self._landing[index])
        del self._landing[index]
        self._on_done(index)

    def _finish(self, index: int) -> None:
        layer = self._layers[index]
        try:
            layer.wait(self._kept.get(index, 0.0))
        finally:
            # wait() may raise after the write-back (a bad decision), or before it (Ctrl-C).
            if not layer.in_flight:
                self._flying.remove(index)
                self.done.add(index)
        self._on_done(index)
