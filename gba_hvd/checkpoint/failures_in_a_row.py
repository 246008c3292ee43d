"""Which failed saves are reported, where one follows the other for one reason: the 1st, 2nd, 4th, 8th and so on."""

from __future__ import annotations

import re


def shape(reason: str) -> str:
    """A reason without its numbers, which are those of a step, a time or an address."""
    return re.sub(r"\d+", "", reason)


class FailuresInARow:
    """why: of the last one; empty: none failed since `over`."""

    def __init__(self) -> None:
        self.why, self._first = "", 0
        self._n = self._n_same = 0  # since `over`; those with the last reason

    def text(self, step: int, why: str) -> str:
        """A save of this step has failed: what is reported; empty: nothing."""
        if not self._n_same or shape(why) != shape(self.why):
            self._n_same, self._first = 0, step
        self.why, self._n, self._n_same = why, self._n + 1, self._n_same + 1
        if self._n_same & (self._n_same - 1):
            return ""
        if self._n_same == 1:
            return f"the checkpoint of step {step} was not saved: {why}"
        return f"{self._n_same} checkpoints in a row, from step {self._first} to {step}, were not saved: {why}"

    def over(self) -> int:
        """A save has succeeded, or the job went back: how many failed before, for any reason."""
        n, self.why, self._n, self._n_same = self._n, "", 0, 0
        return n
