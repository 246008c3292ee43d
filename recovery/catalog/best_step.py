"""The rule of `keep_best`: which of several checkpoints has the best model; for manifests, and for records of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Saved(Generic[T]):
    """A checkpoint. best_step: at which the model was best until then; None: it names none. is_final: servers saved it
    when all workers were gone, so it names what was known when the world formed.

    until: the step of the next evaluation, which was not better: from there on no checkpoint has the best model; None:
    there was none yet. metric: by which it was the best. is_later: its job resumed from a checkpoint that had the best
    model already
    """

    what: T
    step: int
    best_step: int | None
    is_final: bool = False
    until: int | None = None
    metric: str = ""
    is_later: bool = False


def kept_of(saved: Sequence[Saved[T]]) -> tuple[T, T] | None:
    """(the first checkpoint from the best step on, and before a worse evaluation; the newest one that names this step).

    Of two of one step the older one is first. Where the best model was not saved, or is yet to be, the best one before
    it counts. None where no step is named, or none was saved.
    saved: of one run, oldest first
    """
    named = [one for one in saved if one.best_step is not None and not one.is_final]
    before = math.inf  # the step of the best model that was looked at last
    for namer in reversed(named):
        step = namer.best_step
        if namer.metric != named[-1].metric:
            break
        if step is None or step >= before:
            continue
        end = min(before, math.inf if namer.until is None else namer.until)
        if own := [one for one in saved if step <= one.step < end and not one.is_later]:
            return min(own, key=lambda one: one.step).what, namer.what
        before = step
    return None


@dataclass(frozen=True)
class UnsavedBest:
    """A model that was better than each that is saved. why: it was not saved"""

    step: int
    metric: str = ""
    value: float | None = None
    why: str = ""

    @classmethod
    def of(cls, about: dict[str, Any]) -> UnsavedBest | None:
        """Of what a manifest or an event has about the best model."""
        if (step := about.get("best_unsaved_step")) is None:
            return None
        metric, value = str(about.get("best_metric", "")), about.get("best_unsaved_value")
        return cls(int(step), metric, value, str(about.get("best_unsaved_why", "")))

    @property
    def words(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"the best model, {best_words(self.metric, self.value, self.step)}, was not saved{why}"


def unsaved_of(newest: dict[str, Any], kept: dict[str, Any] | None) -> UnsavedBest | None:
    """What was better than the best one that is saved. newest, kept: what the newest checkpoint that names a best step,
    and the newest one that names the step of the one that is kept, have about it; None: none is kept
    """
    if (known := UnsavedBest.of(newest)) is not None:
        return known
    step = newest.get("best_step")
    if step is None or newest.get("best_until") is None or (kept is not None and kept.get("best_step") == step):
        return None
    why = "no checkpoint from before the next evaluation is there"
    return UnsavedBest(int(step), str(newest.get("best_metric", "")), newest.get("best_value"), why)


def best_words(metric: str, value: float | None, step: int) -> str:
    """`valid_auc 0.6863 of step 471`"""
    measured = "best" if not metric else metric if value is None else f"{metric} {value:.4f}"
    return f"{measured} of step {step:,}"


def ahead_words(n_steps: int) -> str:
    """How far rows of a checkpoint are ahead of the model that was measured; empty: they are of its step."""
    return f"rows up to {n_steps:,} step{'s' * (n_steps > 1)} ahead of the measured model" if n_steps else ""
