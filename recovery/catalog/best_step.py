"""The rule of `keep_best`: which of several checkpoints has the best model; for manifests, and for records of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Saved(Generic[T]):
    """A checkpoint. best_step: at which the model was best until then; None: it names none. is_final: servers saved it
    when all workers were gone, so it names what was known when the world formed."""

    what: T
    step: int
    best_step: int | None
    is_final: bool = False


def kept_of(saved: Sequence[Saved[T]]) -> tuple[T, T] | None:
    """(the first checkpoint from the best step on, the newest one that names this step).

    Of two of one step the older one is first. None where no step is named, or its checkpoint is yet to be saved.
    saved: of one run, oldest first
    """
    named = [(one, one.best_step) for one in saved if one.best_step is not None and not one.is_final]
    if not named:
        return None
    namer, best_step = named[-1]
    later = [one for one in saved if one.step >= best_step]
    return (min(later, key=lambda one: one.step).what, namer.what) if later else None


def best_words(metric: str, value: float | None, step: int) -> str:
    """`valid_auc 0.6863 of step 471`"""
    measured = "best" if not metric else metric if value is None else f"{metric} {value:.4f}"
    return f"{measured} of step {step:,}"
