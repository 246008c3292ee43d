"""Residuals of row gradients: added to the row's next gradient, stored for as many rows as the memory allows.

A table may have more rows than a worker has memory, so this is a table of slots: each row has one place, and a row that
comes to a place takes it from the one before, whose residual is lost (`lost` says how much). Rows that come often are
there when they come again; of those that come seldom little would be gained.

What is new is *pending* until `settle`: a step that is computed again finds what it had. Nothing of this is in
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gba_hvd.shm.layout import NO_KEY

_BUDGET_BYTES = 64 << 20
_FREE = NO_KEY  # in place of a key
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: spreads near keys


class RowResiduals:
    """One worker's, by group of tables. Not thread-safe. dims: of the groups' rows; budget_bytes: for all of them."""

    def __init__(self, dims: Sequence[int], budget_bytes: int = _BUDGET_BYTES) -> None:
        room = [max(2, budget_bytes // len(dims) // (8 + 4 * dim)) for dim in dims]
        self._bits = [n.bit_length() - 1 for n in room]
        self._dims = list(dims)
        self._keys: list[np.ndarray | None] = [None] * len(dims)  # int64 [slots]; made when first used
        self._residuals: list[np.ndarray] = [np.empty((0, dim), np.float32) for dim in dims]
        self._pending: list[tuple[int, np.ndarray, np.ndarray | None]] = []  # None: nothing waits for these any more
        self._losing = 0.0
        self.lost = 0.0  # sum of |residual| of rows that had to make room, or whose gradients were not finite

    @property
    def is_empty(self) -> bool:
        """Nothing has waited yet."""
        return all(keys is None for keys in self._keys)

    def wait_for(self, shards: np.ndarray) -> bool:
        """Something waits for rows of these shards, bool [S]."""
        return any(known is not None and shards[known[known != _FREE] % len(shards)].any() for known in self._keys)

    def begin(self) -> None:
        """A step: `plus` and `keep` follow, or `taken`; then `settle` if it is decided."""
        self._pending.clear()
        self._losing = 0.0

    def plus(self, group: int, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """values float32 [n, dim] of these rows (int64 [n], distinct), and what waits for them; a copy."""
        known, found = self._keys[group], values.copy()
        if known is not None:
            at = self._slots(group, keys)
            here = known[at] == keys
            found[here] += self._residuals[group][at[here]]
        return found

    def taken(self, group: int, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """As `plus`; nothing waits for these rows from now on."""
        self._pending.append((group, keys, None))
        return self.plus(group, keys, values)

    def lose(self, group: int, keys: np.ndarray) -> None:
        """Discard the residuals of these rows, and count them as lost."""
        nothing = np.zeros((len(keys), self._dims[group]), np.float32)
        self._losing += float(np.abs(self.taken(group, keys, nothing)).sum(dtype=np.float64))

    def keep(self, group: int, keys: np.ndarray, residuals: np.ndarray) -> None:
        """What waits for these rows from now on, float32 [n, dim]."""
        self._pending.append((group, keys, residuals))

    def settle(self) -> None:
        """The step is decided."""
        for group, keys, _ in self._pending:  # all of them first: what waited for these went along
            self._free(group, keys)
        for group, keys, residuals in self._pending:
            if residuals is not None:
                self._put(group, keys, residuals)
        self.lost += self._losing
        self.begin()

    def clear(self) -> None:
        """Discard all residuals; they are lost."""
        for group, known in enumerate(self._keys):
            if known is not None:
                self.lost += float(np.abs(self._residuals[group][known != _FREE]).sum(dtype=np.float64))
                known[:] = _FREE
        self.begin()

    def _put(self, group: int, keys: np.ndarray, residuals: np.ndarray) -> None:
        if self._keys[group] is None:
            self._keys[group] = np.full(1 << self._bits[group], _FREE, np.int64)
            self._residuals[group] = np.zeros((1 << self._bits[group], self._dims[group]), np.float32)
        known, at = self._keys[group], self._slots(group, keys)
        assert known is not None
        others = at[(known[at] != keys) & (known[at] != _FREE)]
        self.lost += float(np.abs(self._residuals[group][np.unique(others)]).sum(dtype=np.float64))
        known[at], self._residuals[group][at] = keys, residuals
        beaten = known[at] != keys  # two of these rows have one place
        self.lost += float(np.abs(residuals[beaten]).sum(dtype=np.float64))

    def _free(self, group: int, keys: np.ndarray) -> None:
        known = self._keys[group]
        if known is not None:
            at = self._slots(group, keys)
            known[at[known[at] == keys]] = _FREE

    def _slots(self, group: int, keys: np.ndarray) -> np.ndarray:
        hashed = (keys.astype(np.uint64) * _GOLDEN) >> np.uint64(64 - self._bits[group])
        return hashed.astype(np.int64)
