"""Whether mode gba drops so much as too stale that it is a warning, with the reason and what to do.

Decided here from two histograms, and from counts by worker, by windows; of mode hop_bw from its setting alone. The
chief's `ModeRequests` looks every few seconds, and reports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gba_hvd.callbacks import Event
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.coordinator.staleness import weighting

MANY = 0.1  # of the micro-batches of a window: above it is a warning
FEW = 0.05  # at or below it the warning is over
WINDOW = 50  # micro-batches at least
BEGIN, OVER = "many_dropped", "many_dropped_over"
MOST, HALF = 0.95, 0.5  # of one worker's: from that share on it is a warning, at or below this one it is over
WORKER_WINDOW = 20  # micro-batches of one worker at least
WORKER_BEGIN, WORKER_OVER = "worker_dropped", "worker_kept"


class DropWatch:
    """The share of micro-batches that are dropped as too stale, in the newest window. Of mode gba.

    discipline: the mode's, with the weighting, its tolerance, and the age it goes by
    """

    def __init__(self, discipline: Discipline, servers_per_host: int = 1) -> None:
        self._rules, self._servers_per_host = discipline, servers_per_host
        self._weighting = weighting(discipline.staleness, discipline.tolerance)
        self.forget()

    def forget(self) -> None:
        """The mode begins, or the workers are others: the window is empty, and nothing is known to be dropped."""
        self._before: dict[int, int] | None = None
        self._stands = False

    def look(self, step: int, staleness: Mapping[int, int], ages: Mapping[int, int]) -> Event | None:
        """The warning, or its end, if this window makes one; the first call begins a window.

        staleness, ages: {steps: micro-batches} so far in the job, since the token and of the dense values
        """
        by_values = self._rules.staleness_of == "values"
        now = dict(ages if by_values else staleness)
        if self._before is None or any(now.get(age, 0) < n for age, n in self._before.items()):  # or: rolled back
            self._before = now
            return None
        window = {age: n - self._before.get(age, 0) for age, n in now.items() if n > self._before.get(age, 0)}
        total = sum(window.values())
        if total < WINDOW:
            return None
        self._before = now
        share = sum(n for age, n in window.items() if self._weighting.weight(age) == 0) / total
        if self._stands if share > MANY else (not self._stands or share > FEW):
            return None
        self._stands = share > MANY
        data = {
            "share": round(share, 4), "micro_batches": total, "tolerance": self._rules.tolerance,
            "staleness_of": self._rules.staleness_of,
        }  # fmt: skip
        if not self._stands:
            text = f"{share:.0%} of the newest {total:,} micro-batches were dropped as too stale, {FEW:.0%} or less"
            return Event(OVER, step, text, data)
        return Event(BEGIN, step, self._warning(share, total, max(window)), data, level="warning")

    def _warning(self, share: float, total: int, oldest: int) -> str:
        rules = self._rules
        by_values = rules.staleness_of == "values"
        what, late = ("the dense values that they came of were", "old") if by_values else ("their data was", "late")
        return (
            f"{share:.0%} of the newest {total:,} micro-batches were dropped as too stale, more than {MANY:.0%}: "
            f"{what} more than tolerance={rules.tolerance} steps {late} (staleness_of={rules.staleness_of!r}), up "
            f"to {oldest}. Raise the tolerance; let a step have more micro-batches (a smaller batch of each, or a "
            "larger global batch), so that fewer steps pass meanwhile; or drop none: staleness='inverse', or "
            "staleness='none' (with staleness_of='token') and an update rule for late gradients, such as rule='dc'"
        ) + (
            f". servers_per_host={self._servers_per_host} make values older where cores are short: fewer "
            "servers_per_host, or more cores"
        ) * (self._servers_per_host > 1)


class WorkerDropWatch:
    """Workers of which (nearly) all micro-batches in their newest window were dropped as too stale. Of mode gba."""

    def __init__(self, tolerance: int) -> None:
        self._tolerance = tolerance
        self.forget()

    def forget(self) -> None:
        """The mode begins, or the workers are others."""
        self._before: dict[int, tuple[int, int]] = {}
        self._stand: set[int] = set()

    def look(self, step: int, drops: Iterable[tuple[int, int, int, int]]) -> list[Event]:
        """Warnings and their ends. drops: rank, worker, its micro-batches in steps so far, those that were dropped."""
        found = [self._look_at(step, *one) for one in drops]
        return [event for event in found if event is not None]

    def _look_at(self, step: int, rank: int, worker: int, pushes: int, dropped: int) -> Event | None:
        before = self._before.get(worker, (0, 0))
        if pushes < before[0]:  # its server was started again
            before = self._before[worker] = (0, 0)
        n, n_dropped = pushes - before[0], dropped - before[1]
        if n < WORKER_WINDOW:
            return None
        self._before[worker] = pushes, dropped
        share, stands = n_dropped / n, worker in self._stand
        data = {"rank": rank, "worker": worker, "share": round(share, 4), "micro_batches": n}
        if not stands and share >= MOST:
            self._stand.add(worker)
            return Event(WORKER_BEGIN, step, self._warning(rank, share, n), data, level="warning")
        if stands and share <= HALF:
            self._stand.discard(worker)
            return Event(
                WORKER_OVER, step, f"{share:.0%} of the newest {n:,} micro-batches of rank {rank} were dropped", data
            )
        return None

    def _warning(self, rank: int, share: float, n: int) -> str:
        return (
            f"{share:.0%} of the newest {n:,} micro-batches of rank {rank} were dropped as too stale (tolerance="
            f"{self._tolerance}): what this worker computes trains nothing. It is much slower than the others: see its "
            "seconds per micro-batch in gba-hvd status, and what else its host runs. Or raise the tolerance, weight "
            "late gradients (staleness='inverse'), or leave the worker out"
        )


def backups_too_many(mode: str, backups: int, n_workers: int, step: int) -> Event | None:
    """The warning that `backups` counts as less with so few workers; None where it does not, or for a single worker."""
    if mode != "hop_bw" or not 1 < n_workers <= backups:
        return None
    text = (
        f"backups={backups} with {n_workers} workers counts as backups={n_workers - 1} in mode {mode!r}: a step waits "
        f"for one worker at least, and up to {n_workers - 1} of {n_workers} gradients are dropped. Choose fewer "
        "backups than workers (backups=0 waits for all), or mode 'gba', which drops only what is too stale"
    )
    data = {"mode": mode, "backups": backups, "workers": n_workers}
    return Event("backups_too_many", step, text, data, level="warning")
