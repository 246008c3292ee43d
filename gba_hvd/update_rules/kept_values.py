"""The dense values that workers were shown at recent steps, for rules that compare them with the newest ones.

How many are kept follows from the ages that pushes had: twice the oldest, at least 32, at most what fits the limit of
bytes. Not decided: what becomes of the difference.
"""

from __future__ import annotations

import logging
from collections import deque

import numpy as np

AT_LEAST, AT_MOST_BYTES = 32, 256 << 20

log = logging.getLogger("gba_hvd.ps")


class KeptValues:
    """Belongs to one server's rule. Takes 4 n bytes for each step that is kept.

    shown: float32 [n], as of `step`. Nothing of this is saved: a server that starts again starts over.
    """

    def __init__(self, shown: np.ndarray, step: int, at_most_bytes: int = AT_MOST_BYTES) -> None:
        self._kept = deque([(step, shown.copy())])
        self._room = max(2, at_most_bytes // max(1, shown.nbytes))
        self._wanted = min(AT_LEAST, self._room)
        self._warned_of: set[bool] = set()  # values too old, by whether there was no room

    @property
    def newest(self) -> np.ndarray:
        """float32 [n]"""
        return self._kept[-1][1]

    def used(self, dense_step: int) -> np.ndarray | None:
        """float32 [n]: what was shown at `dense_step`, or the oldest there is; None for a negative (unknown) step."""
        if dense_step < 0:
            return None
        newest, oldest = self._kept[-1][0], self._kept[0][0]
        self._wanted = min(self._room, max(self._wanted, 2 * (newest - dense_step + 1)))
        is_full = len(self._kept) == self._room
        if dense_step < oldest and is_full not in self._warned_of:
            self._warned_of.add(is_full)
            log.warning(
                "a push was computed with the dense values of step %d, the oldest kept are of step %d: %s. Such pushes "
                "are compared with the oldest", dense_step, oldest,
                f"there is room for {self._room} steps" if is_full else "more are kept from now on",
            )  # fmt: skip
        return next((shown for step, shown in reversed(self._kept) if step <= dense_step), self._kept[0][1])

    def add(self, shown: np.ndarray, step: int) -> None:
        """What is shown from step `step` on, float32 [n]."""
        self._kept.append((step, shown.copy()))
        while len(self._kept) > self._wanted:
            self._kept.popleft()
