"""What a running job knows about its best model (`keep_best`): which it is, whether it is saved, what was missed.

    measured    a better value: its checkpoint is due at once. A worse one: what was the best and is not saved by then
                never will be, so the best one before it, which is saved, counts again
    begun       a checkpoint was begun; what is the best then is saved with it, unless that fails
    failed      it failed

Decided here: the manifest of a checkpoint names what `about` has. Which checkpoint that is: `best_step.kept_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from recovery.catalog.best_step import UnsavedBest

_NOT_BEGUN = "no checkpoint was begun before the next evaluation"


@dataclass(frozen=True)
class Best:
    """value: the larger the better. until: the step of the next evaluation, which was not better; None: none yet.

    is_begun: a checkpoint that has it was begun; is_saved: and is complete
    """

    value: float
    step: int
    until: int | None = None
    is_begun: bool = False
    is_saved: bool = False


class BestSoFar:
    """One worker's. Only the chief knows which saves are begun and succeed: on others no best model is missed.

    best: so far, of those that are saved or may still be. unsaved: was better, and cannot be saved any more. is_due:
    `best` is to be saved at once. why_not: what keeps it from being saved, as far as is known
    """

    def __init__(self, metric: str) -> None:
        self.metric, self.is_less_better = metric.removeprefix("-"), metric.startswith("-")
        self.best: Best | None = None
        self._before: Best | None = None  # saved, and the best one before `best`
        self._missed: Best | None = None
        self.is_due, self.why_not, self._why_missed = False, "", ""
        self._begun_step = self._saved_step = -1  # of the newest checkpoint that was begun; that is complete
        self.is_chief = True

    @property
    def unsaved(self) -> UnsavedBest | None:
        one = self._missed
        return None if one is None else UnsavedBest(one.step, self.metric, self._given(one.value), self._why_missed)

    @property
    def about(self) -> dict[str, Any]:
        """As a checkpoint has it; empty: there is no value so far."""
        found: dict[str, Any] = {}
        if self.best is not None:
            found = {"best_step": self.best.step, "best_value": self._given(self.best.value)}
            found |= {} if self.best.until is None else {"best_until": self.best.until}
        if (unsaved := self.unsaved) is not None:
            found |= {"best_unsaved_step": unsaved.step, "best_unsaved_value": unsaved.value}
            found["best_unsaved_why"] = unsaved.why
        return found | {"best_metric": self.metric} if found else {}

    def measured(self, step: int, given: float) -> None:
        value = -given if self.is_less_better else given
        if not math.isfinite(value):
            return
        best = self.best
        if best is not None and value <= best.value:  # (of equals the earlier stays)
            if best.until is None and step > best.step:
                self._next_evaluation(best, step, given)
            return
        if best is not None and best.is_begun:
            self._before = best
        self.best = Best(value, step, is_begun=step <= self._begun_step, is_saved=step <= self._saved_step)
        self.is_due, self.why_not = not self.best.is_begun, ""
        if self._missed is not None and value >= self._missed.value:
            self._missed = None

    def _next_evaluation(self, best: Best, step: int, given: float) -> None:
        self.best, self.is_due = replace(best, until=step), False
        if best.is_begun or not self.is_chief:
            return
        self._miss(best)
        self.measured(step, given)

    def _miss(self, best: Best) -> None:
        if self._missed is None or best.value > self._missed.value:
            self._missed, self._why_missed = best, self.why_not or _NOT_BEGUN
        self.best, self._before, self.is_due, self.why_not = self._before, None, False, ""

    def begun(self, step: int) -> None:
        """A checkpoint of this step was begun."""
        self._begun_step, self.is_due = step, False
        if self.best is not None and self.best.until is None and step >= self.best.step:
            self.best = replace(self.best, is_begun=True)

    def done(self, step: int) -> None:
        """The newest checkpoint, complete or restored, has this step."""
        self._saved_step, best = step, self.best
        if best is None or best.step > step:
            return
        if step < (best.until or math.inf):
            self.best, self.is_due = replace(best, is_begun=True, is_saved=True), False
        elif best.is_begun and not best.is_saved:
            self.why_not = f"its checkpoint is of step {step}, after the next evaluation"
            self._miss(best)

    def failed(self, why: str) -> None:
        """The checkpoint that was begun last was not saved."""
        best, begun_step, self._begun_step = self.best, self._begun_step, self._saved_step
        if best is None or best.is_saved or not best.is_begun or begun_step < best.step:
            return
        self.why_not = why
        if best.until is None:
            self.best = replace(best, is_begun=False)
        else:
            self._miss(best)

    def state(self) -> dict[str, Any]:
        """Plain values, for `load`."""
        of = {"best": self.best, "before": self._before, "missed": self._missed}
        return {**{name: one and asdict(one) for name, one in of.items()}, "why_missed": self._why_missed}

    def load(self, state: Mapping[str, Any]) -> None:
        loaded = {name: Best(**one) if (one := state.get(name)) else None for name in ("best", "before", "missed")}
        self.best, self._before, self._missed = loaded["best"], loaded["before"], loaded["missed"]
        self._why_missed = str(state.get("why_missed", ""))
        if self.best is not None and self.best.until is None and self.best.step <= self._saved_step:
            self.done(self._saved_step)

    def _given(self, value: float) -> float:
        return -value if self.is_less_better else value
