"""Which of a worker's readers reads a micro-batch, so that the groups of a block are decoded by one of them.

A lane stays with one reader while there are at least as many lanes as readers. Where there are fewer, the blocks of a
lane go round: while one reader reads a block, the others decode the next ones.
"""

from __future__ import annotations

from collections.abc import Callable

from gba_hvd.reading.datasets import Block, LaneOrder
from gba_hvd.reading.read_ahead import Share

Announce = Callable[[int, Block, Block | None], None]


class LaneReaders:
    """Not thread-safe, but `will_read` may be called from any thread.

    order: of the epoch. n: readers of this worker. micro_of: the micro-batch at an index of the epoch. announce: called
    with a reader, the block that it will read, and the one after it in the same lane if that is also its own
    """

    def __init__(self, order: LaneOrder, n: int, micro_of: Callable[[int], int], announce: Announce) -> None:
        self._order, self._n, self._micro_of, self._announce = order, n, micro_of, announce
        self._readers: dict[int, dict[int, int]] = {}  # by lane, by window: of those at hand
        self._to_announce: dict[Share, list[tuple[int, Block, Block | None]]] = {}

    def reader_of(self, share: Share) -> int:
        """The reader for a batch. Several micro-batches go by the first one."""
        first, *others = [self._order.block(self._micro_of(micro)) for micro in range(share[0], share[0] + share[1])]
        lane = self._readers.setdefault(first.lane, {})
        if first.window not in lane:
            lane[first.window] = self._least_loaded()
        reader = lane[first.window]
        stays = len(self._readers) >= self._n
        following = lane.setdefault(first.window + 1, reader if stays else (reader + 1) % self._n)
        for window in [window for window in lane if window < first.window]:
            del lane[window]
        found = self._to_announce[share] = []
        for block in (first, *others):
            after = self._order.after(block)
            found.append((reader, block, after if following == reader else None))
            if following != reader and after is not None:
                found.append((following, after, None))
        return reader

    def will_read(self, share: Share) -> None:
        """Announce what a batch needs, right before it is read: blocks of its lanes before these are released then."""
        for reader, now, after in self._to_announce.pop(share, ()):
            self._announce(reader, now, after)

    def _least_loaded(self) -> int:
        loads = [0] * self._n
        for lane in self._readers.values():
            for reader in lane.values():
                loads[reader] += 1
        return loads.index(min(loads))
