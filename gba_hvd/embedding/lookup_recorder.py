"""What a forward pass looks up, recorded in a pass that fetches no row.

Pure, but for the exception that ends a pass early: the tables call `add` for each lookup, in its thread.
"""

from __future__ import annotations

import numpy as np

_AGREEING_PASSES = 20


class AllRecorded(BaseException):
    """The last lookup of a forward pass was recorded; the rest of the pass is not needed.

    No `Exception`, so that a model that catches these does not catch it.
    """


class LookupRecorder:
    """The keys of one forward pass.

    keys: by group of tables, int64 [n] of each lookup. stop_after: raise AllRecorded at this lookup; None: never
    """

    def __init__(self, n_groups: int, stop_after: int | None = None) -> None:
        self.keys: list[list[np.ndarray]] = [[] for _ in range(n_groups)]
        self.n_lookups, self._stop_after = 0, stop_after

    def add(self, group: int, keys: np.ndarray) -> None:
        self.keys[group].append(keys)
        self.n_lookups += 1
        if self.n_lookups == self._stop_after:
            raise AllRecorded


class PassLength:
    """How many lookups a forward pass makes, from passes that ran to their end.

    A pass may end early only after 20 complete ones agreed: a model that looks up more rows for some batches
    than for others is likely to show it by then.
    """

    def __init__(self) -> None:
        self._lengths: set[int] = set()
        self._n_complete = 0

    def saw_complete(self, n_lookups: int) -> None:
        self._lengths.add(n_lookups)
        self._n_complete += 1

    @property
    def stop_after(self) -> int | None:
        """The lookup after which a pass may end; None: let it run."""
        if self._n_complete < _AGREEING_PASSES or len(self._lengths) != 1:
            return None
        return next(iter(self._lengths))
