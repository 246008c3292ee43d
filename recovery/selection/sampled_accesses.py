"""CPR-SSU: the rows worth saving, out of a sub-sampled stream of accesses, without a counter per row.

Every `period`-th access is looked at, from a random one of the step's first `period` on, so that no row is always
passed over. Its row goes to a list of at most `capacity` rows, in place of a random one when the list is full. Rows
accessed often and lately are in it with the greatest chance.

One writer, who applies the gradients, and one reader, who saves; they may be two processes that map the same words:

    uint32:  asked | swapped | list 0: length, rows [capacity] | list 1: the same | a bit for each row of the shard

The reader takes the list in use by `asked += 1`. The writer notices at its next access, empties the other list, lists
rows there from then on, and writes `swapped = asked`; what the reader takes is not written any more. A step that was in
flight is waited for, by its marks. So the writer never waits, and no access that was looked at is lost. A writer that
dies within a step may leave a row marked that is in no list; the next swap clears the marks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from recovery.errors import BadInput
from recovery.rows import RowSource

HEAD_WORDS = 2
_ASKED, _SWAPPED = 0, 1
_PIECE = 64
_STEP_S, _LOOK_S = 1.0, 50e-6
StepMarks = Callable[[], tuple[int, int]]


def n_words(n_rows: int, capacity: int) -> int:
    """uint32 words for the lists of a shard with so many rows."""
    return HEAD_WORDS + 2 * (1 + capacity) + -(-n_rows // 32)


class SampledAccesses:
    """The lists of one table's shard.

    words: uint32, at least n_words, zeros at first. capacity: r * n_rows, the most rows that one save takes.
    """

    def __init__(self, words: np.ndarray, n_rows: int, capacity: int, period: int = 2) -> None:
        assert len(words) >= n_words(n_rows, capacity)
        self._words, self._n_rows, self._period = words, n_rows, period
        self._lists = [words[HEAD_WORDS + i * (1 + capacity) :][: 1 + capacity] for i in (0, 1)]
        self._listed = words[HEAD_WORDS + 2 * (1 + capacity) :]
        self.capacity = capacity

    @classmethod
    def private(cls, n_rows: int, capacity: int, period: int = 2) -> SampledAccesses:
        """In ordinary memory, for a writer and a reader in one process."""
        if not 0 < capacity <= n_rows < 2**32 or period < 1:
            raise BadInput(f"needs 0 < capacity <= n_rows < 2^32 and period >= 1, got {capacity}, {n_rows}, {period}")
        return cls(np.zeros(n_words(n_rows, capacity), np.uint32), n_rows, capacity, period)

    def __len__(self) -> int:
        """Rows that `take` would find."""
        words = self._words
        return 0 if words[_ASKED] != words[_SWAPPED] else int(self._lists[int(words[_SWAPPED]) & 1][0])

    # --- the writer --------------------------------------------------------------------------------------------------

    def add(self, rows: np.ndarray, rng: np.random.Generator) -> None:
        """The accesses of one step. rows: integers [n], indices in the shard, repeated for each access."""
        looked_at = rows[rng.integers(self._period) :: self._period]
        # In pieces that replace a small part of the list: a row that was replaced comes back with its next access.
        piece = max(_PIECE, self.capacity // 8)
        for start in range(0, len(looked_at), piece):
            self._add(self._current(), looked_at[start : start + piece], rng)

    def _add(self, filled: np.ndarray, looked_at: np.ndarray, rng: np.random.Generator) -> None:
        indices, n = filled[1:], int(filled[0])
        new, first = np.unique(looked_at[~self._is_listed(looked_at)], return_index=True)
        new = new[np.argsort(first)]
        room = min(self.capacity - n, len(new))
        indices[n : n + room] = new[:room]
        self._mark(new[:room], True)
        filled[0] = n + room
        if room < len(new):
            self._replace(indices, new[room:], rng)

    def _current(self) -> np.ndarray:
        words = self._words
        asked = int(words[_ASKED])
        if asked != words[_SWAPPED]:
            self._listed[:] = 0
            self._lists[asked & 1][0] = 0
            words[_SWAPPED] = asked
        return self._lists[asked & 1]

    def _replace(self, indices: np.ndarray, new: np.ndarray, rng: np.random.Generator) -> None:
        slots = rng.integers(self.capacity, size=len(new))
        evicted = indices[slots]
        indices[slots] = new  # where a slot was drawn twice the later row stays, as if they had come one by one
        self._mark(evicted, False)
        self._mark(indices[slots], True)

    def _is_listed(self, rows: np.ndarray) -> np.ndarray:
        bits: np.ndarray = self._listed[rows >> 5] >> (rows & 31).astype(np.uint32)
        return (bits & 1).astype(bool)

    def _mark(self, rows: np.ndarray, listed: bool) -> None:
        bits = np.left_shift(np.uint32(1), (rows & 31).astype(np.uint32))
        if listed:
            np.bitwise_or.at(self._listed, rows >> 5, bits)
        else:
            np.bitwise_and.at(self._listed, rows >> 5, ~bits)

    # --- the reader --------------------------------------------------------------------------------------------------

    def take(self, step_marks: StepMarks | None = None) -> np.ndarray:
        """The rows to save: int64, ascending. The list is empty afterwards.

        step_marks: (finished, begun) of the shard, where a step may be in flight (see `recovery.rows.RowSource`)
        """
        words = self._words
        taken = self._lists[int(words[_SWAPPED]) & 1]
        if words[_ASKED] != words[_SWAPPED]:
            return np.empty(0, np.int64)  # nothing was accessed since the last time
        words[_ASKED] += 1
        if step_marks is not None:
            _await_step(step_marks)
        # A writer that died in the middle leaves a list that names rows twice, or none of this shard.
        rows = np.unique(taken[1 : 1 + min(int(taken[0]), self.capacity)].astype(np.int64))
        return rows[rows < self._n_rows]


def _await_step(step_marks: StepMarks) -> None:
    """Until a step in flight is over; for a while only, as its writer may be dead."""
    finished, in_flight = step_marks()
    until_s = time.monotonic() + _STEP_S
    while finished < in_flight and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        finished, _ = step_marks()


class SampledRowSource(RowSource, Protocol):
    """A row source that also samples accesses; the policy "ssu" needs that."""

    def sampled_accesses(
        self, capacities: Sequence[int], period: int, rng: np.random.Generator | None = None
    ) -> Mapping[tuple[int, int], SampledAccesses]:
        """The lists by table and shard; those of the shards that are here.

        capacities: of each table, the most rows of a shard in a list; 0: no list. rng: what a writer in this process
        draws by; None: its own. Raises BadInput where the lists that exist are others.
        """
