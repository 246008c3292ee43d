"""Whether mode gba drops so much as too stale that it is a warning, with the reason and what to do.

Decided here from two histograms, by windows; the chief's `ModeRequests` looks every few seconds, and reports it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gba_hvd.callbacks import Event
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.coordinator.staleness import weighting

MANY = 0.1  # of the micro-batches of a window: above it is a warning
FEW = 0.05  # at or below it the warning is over
WINDOW = 50  # micro-batches at least
BEGIN, OVER = "many_dropped", "many_dropped_over"


class DropWatch:
    """The share of micro-batches that are dropped as too stale, in the newest window. Of mode gba.

    discipline: the mode's, with the weighting, its tolerance, and the age it goes by
    """

    def __init__(self, discipline: Discipline) -> None:
        self._rules = discipline
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
        )
