"""Where the time of allreduce steps goes: each worker's part of it, and what this worker waits for. For people only.

A worker's part of a step is what it computes and the reading that it waits for; the rest of a step is the exchange,
in which those that were fast wait for the slowest. `gba-hvd status` shows it, from the board of the host that is asked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

_EVERY_S = 2.0
_MOST = 100  # workers of which the times are shown, the slowest ones

Part = Literal["reading", "rows", "sum"]
_T = TypeVar("_T")
_END = object()


class StepTimes:
    """Of one worker; means over the steps of some seconds.

    reading: waiting for batches; rows: exchange with other hosts; sum: of dense gradients, over all workers
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._now: dict[str, float] = {}
        self._forget()
        self._shown_s: float | None = None

    def _forget(self) -> None:
        self._n, self._n_samples = 0, 0
        self._sums = dict.fromkeys(("step", "slowest", "waiting", "reading", "rows", "sum"), 0.0)
        self._by_rank: list[list[float]] = []  # micro-batches, seconds computing, seconds reading

    def begin_step(self) -> None:
        self._now = dict.fromkeys(("reading", "rows", "sum"), 0.0)

    @property
    def reading_s(self) -> float:
        """In this step so far."""
        return self._now.get("reading", 0.0)

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        began_s = self._clock()
        try:
            yield
        finally:
            self._now[name] = self._now.get(name, 0.0) + self._clock() - began_s

    def reading(self, batches: Iterable[_T]) -> Iterator[_T]:
        """The batches; the time until each comes counts as reading."""
        coming = iter(batches)
        while True:
            with self.part("reading"):
                batch: Any = next(coming, _END)
            if batch is _END:
                return
            yield batch

    def ended(
        self, rank: int, step_s: float, n_samples: int, shares: Sequence[int], micro_batch_s: Sequence[float],
        reading_s: Sequence[float],
    ) -> dict[str, Any] | None:  # fmt: skip
        """A step was applied; returns what is to be shown of those since the last time, every few seconds.

        shares: micro-batches of each worker in the step; micro_batch_s, reading_s: by all of them, as agreed
        """
        computing_s = [n * s for n, s in zip(shares, micro_batch_s, strict=True)]
        busy_s = [a + b for a, b in zip(computing_s, reading_s, strict=True)]
        if len(self._by_rank) != len(shares):
            self._forget()
            self._by_rank = [[0.0, 0.0, 0.0] for _ in shares]
        for sums, *values in zip(self._by_rank, shares, computing_s, reading_s, strict=True):
            sums[:] = [a + b for a, b in zip(sums, values, strict=True)]
        slowest_s = max(busy_s)
        now = {"step": step_s, "slowest": slowest_s, "waiting": slowest_s - busy_s[rank], **self._now}
        self._sums = {name: total + now.get(name, 0.0) for name, total in self._sums.items()}
        self._n, self._n_samples = self._n + 1, self._n_samples + n_samples
        now_s = self._clock()
        if self._shown_s is not None and now_s - self._shown_s < _EVERY_S:
            return None
        self._shown_s = now_s
        found = self._means(rank)
        self._forget()
        return found

    def _means(self, rank: int) -> dict[str, Any]:
        """By worker [rank, micro-batches in a step, seconds computing, seconds reading], and seconds of this one's."""
        n = self._n
        by_rank = [[i, *(round(total / n, 6) for total in sums)] for i, sums in enumerate(self._by_rank)]
        listed = sorted(by_rank, key=lambda one: -(one[2] + one[3]))[:_MOST]
        means = {f"{name}_s": round(total / n, 6) for name, total in self._sums.items()}
        rate = round(self._n_samples / max(self._sums["step"], 1e-9), 1)
        return {"rank": rank, "steps": n, "samples_per_s": rate, **means, "by_rank": listed}
