"""The order of an epoch's samples when they lie in row groups: groups dealt to lanes, samples shuffled in a window.

    row groups in a random order -> dealt to M lanes -> windows of some groups -> the samples of a window, shuffled

Micro-batch i takes the next samples of lane i mod M, M being the micro-batches of a step. A worker that computes a lane
reads its groups and no others, so each group is read by one worker: in allreduce mode worker w of N has the same lanes
in every step. The order depends on seed, epoch, sizes and the cutting into micro-batches, never on the workers.

A lane needs as many samples as its micro-batches have. What its groups have beyond that, from the end, goes to lanes
that have too few, so at most M - 1 groups are cut in pieces for several lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gba_hvd import kernels
from gba_hvd.epoch import EpochPlan
from gba_hvd.reading.datasets import Block
from gba_hvd.shm.layout import table_seed


@dataclass(frozen=True)
class _Lane:
    """Pieces of row groups, one after the other: of each the first sample, and where it ends in the lane.

    group, first, ends: int64 [pieces]; window_ends: int64 [windows], where each window ends in the lane
    """

    group: np.ndarray
    first: np.ndarray
    ends: np.ndarray
    window_ends: np.ndarray


class RowGroupOrder:
    """The sample at each position of one epoch.

    sizes: int64 [g], the samples of each row group; samples are numbered through all groups. plan: the cutting, of as
    many samples. window: groups of a lane whose samples are shuffled together; None: so many that the windows of all
    lanes together have 8, at least 1. shuffle_groups: False where they come in a random order already
    """

    def __init__(
        self,
        sizes: np.ndarray,
        seed: int,
        epoch: int,
        plan: EpochPlan,
        window: int | None = None,
        shuffle_groups: bool = True,
    ) -> None:
        assert int(sizes.sum()) == plan.n_samples
        self._seed, self._epoch, self._plan = seed, epoch, plan
        self._window = window or -(-8 // plan.n_micro)
        groups = np.arange(len(sizes))
        if shuffle_groups:
            kernels.shuffled(len(sizes), 0, self._key("row groups"), groups)
        self._lanes = [self._lane(*pieces) for pieces in _dealt(sizes, groups, plan)]

    def rows(self, first: int, count: int) -> np.ndarray:
        """int64 [count]: the samples at positions first, first + 1, ..."""
        rows, done, size = np.empty(count, dtype=np.int64), 0, self._plan.micro_batch
        while done < count:
            micro, skipped = divmod(first + done, size)
            part = rows[done : done + min(count - done, size - skipped)]
            self._fill(part, micro, skipped)
            done += len(part)
        return rows

    def block(self, micro: int) -> Block:
        """Where the first sample of a micro-batch lies."""
        lane, at = self._at(micro)
        return self._block(lane, int(np.searchsorted(self._lanes[lane].window_ends, at, side="right")))

    def after(self, block: Block) -> Block | None:
        """The next window of the same lane."""
        is_last = block.window + 1 >= len(self._lanes[block.lane].window_ends)
        return None if is_last else self._block(block.lane, block.window + 1)

    def _block(self, lane: int, window: int) -> Block:
        pieces = self._lanes[lane].group[window * self._window : (window + 1) * self._window]
        return Block(lane, window, tuple(dict.fromkeys(pieces.tolist())))

    def _at(self, micro: int) -> tuple[int, int]:
        """The lane of a micro-batch, and where in it that begins."""
        turn, lane = divmod(micro, self._plan.n_micro)
        return lane, turn * self._plan.micro_batch

    def _fill(self, out: np.ndarray, micro: int, skipped: int) -> None:
        """Samples of one micro-batch, without the first `skipped`."""
        number, at = self._at(micro)
        lane, at, done = self._lanes[number], at + skipped, 0
        while done < len(out):
            window = int(np.searchsorted(lane.window_ends, at + done, side="right"))
            begin = int(lane.window_ends[window - 1]) if window else 0
            end = int(lane.window_ends[window])
            part = out[done : done + min(len(out) - done, end - at - done)]
            kernels.shuffled(end - begin, at + done - begin, self._key(f"lane {number} window {window}"), part)
            part += begin
            piece = np.searchsorted(lane.ends, part, side="right")
            part += lane.first[piece] - np.where(piece > 0, lane.ends[piece - 1], 0)
            done += len(part)

    def _lane(self, group: np.ndarray, first: np.ndarray, n: np.ndarray) -> _Lane:
        ends = np.cumsum(n)
        last = np.minimum(np.arange(self._window, len(n) + self._window, self._window), len(n)) - 1
        return _Lane(group, first, ends, ends[last])

    def _key(self, what: str) -> np.uint64:
        return np.uint64(table_seed(self._seed, f"{what} of epoch {self._epoch}"))


def _dealt(sizes: np.ndarray, groups: np.ndarray, plan: EpochPlan) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By lane the pieces that it has: the group of each, its first sample, how many samples; int64 [pieces]."""
    first_sample = np.cumsum(sizes) - sizes
    lanes, left_over = [], list[tuple[int, int, int]]()
    for lane in range(plan.n_micro):
        mine = groups[lane :: plan.n_micro]
        before = np.cumsum(sizes[mine]) - sizes[mine]
        used = np.clip(_samples_of_lane(plan, lane) - before, 0, sizes[mine])
        first, n_left = first_sample[mine], sizes[mine] - used
        for i in np.flatnonzero(n_left):
            left_over.append((int(mine[i]), int(first[i] + used[i]), int(n_left[i])))
        lanes.append([mine[used > 0], first[used > 0], used[used > 0]])
    for lane, pieces in enumerate(lanes):
        missing, more = _samples_of_lane(plan, lane) - int(pieces[2].sum()), list[tuple[int, int, int]]()
        while missing:
            group, at, n = left_over.pop()
            taken = min(n, missing)
            more.append((group, at, taken))
            if n > taken:
                left_over.append((group, at + taken, n - taken))
            missing -= taken
        if more:
            added = np.array(more, dtype=np.int64).T
            pieces[:] = [np.concatenate(columns) for columns in zip(pieces, added, strict=True)]
    return [(group, first, n) for group, first, n in lanes]


def _samples_of_lane(plan: EpochPlan, lane: int) -> int:
    micros = range(lane, -(-plan.n_samples // plan.micro_batch), plan.n_micro)
    return len(micros) * plan.micro_batch - (plan.micro_batch - plan.samples_of_micro(micros[-1]) if micros else 0)
