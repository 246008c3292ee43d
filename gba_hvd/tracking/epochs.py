"""Quality by epoch: which metrics were measured together, and which epoch is the best by validation.

Decided here: metrics reported at one step of one epoch belong together; validation alone chooses the best epoch, so
that a test figure is never chosen by itself. No file, no clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

EPOCH = "epoch"  # metric: of the loop; with metrics of quality, the one that they are of
BEST = "best_"  # begins the names of metrics that repeat the scores of the best epoch, see `best_metrics`
_VALIDATION = re.compile(r"(valid|validation|val|dev|eval)[_./ -](.+)", re.IGNORECASE)
_QUALITY = re.compile(r"(valid|validation|val|dev|eval|test|holdout)[_./ -].+|(.+_)?auc", re.IGNORECASE)
_HIGHER = ("auc", "gauc", "acc", "f1", "ndcg", "recall", "precision", "map", "hit")
_LOWER = ("logloss", "log_loss", "loss", "nll", "rmse", "mse", "mae", "error")


@dataclass(frozen=True)
class MeasuredTogether:
    """What was reported at one step: of one epoch, as one ends and the next begins there.

    epoch: counted from 0, as the training loop does; None when not known
    """

    step: int
    epoch: int | None
    values: Mapping[str, float] = field(default_factory=dict)

    def is_of(self, step: int, epoch: int | None) -> bool:
        return (self.step, self.epoch) == (step, epoch)

    def plus(self, values: Mapping[str, float]) -> MeasuredTogether:
        return MeasuredTogether(self.step, self.epoch, {**self.values, **values})

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": self.epoch, "values": dict(self.values)}

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> MeasuredTogether | None:
        return None if values is None else cls(int(values["step"]), values["epoch"], dict(values["values"]))

    @property
    def name(self) -> str:
        return f"step {self.step:,}" if self.epoch is None else f"epoch {self.epoch}"


def is_quality(name: str) -> bool:
    """Whether a metric scores the model, by its name: `valid_auc`, `test/logloss`, `auc`; not `best_valid_auc`."""
    return not name.startswith(BEST) and bool(_QUALITY.fullmatch(name))


@dataclass(frozen=True)
class Chooser:
    """The validation metric that chooses the best epoch. others: of its kind, which nothing but their names put behind.

    plain: the name under which a metric of this kind comes first
    """

    name: str
    more_is_better: bool
    plain: str
    others: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """`valid_auc`; where there are others, also how to choose one."""
        if not self.others:
            return self.name
        others = ", ".join(self.others)
        return f"{self.name} (the first by name, before {others}; one that is reported as {self.plain} comes first)"


def chooser(names: Iterable[str]) -> Chooser | None:
    """None without a validation metric. An AUC before other scores, scores before losses; of one kind, a plain
    `valid_auc` before names with more words, and of these the first in the alphabet."""
    found = []
    for name in names:
        match = _VALIDATION.fullmatch(name)
        what = match.group(2).lower() if match else ""
        for order, known in enumerate((*_HIGHER, *_LOWER)):
            if match and (what == known or what.startswith(known + "_") or what.endswith("_" + known)):
                found.append((order, what != known, name, name[: match.start(2)] + known))
                break
    if not found:
        return None
    order, has_more_words, name, plain = min(found)
    others = sorted(one[2] for one in found if one[:2] == (order, True) and one[2] != name)
    return Chooser(name, order < len(_HIGHER), plain, tuple(others) if has_more_words else ())


def better(new: MeasuredTogether, best: MeasuredTogether | None) -> bool:
    """Whether `new` is better than the best so far, by the validation metric of `new`. Of equals the earlier stays."""
    by = chooser(new.values)
    if by is None:
        return False
    name = by.name
    if not math.isfinite(new.values[name]):
        return False
    if best is None or name not in best.values:
        return True
    return new.values[name] > best.values[name] if by.more_is_better else new.values[name] < best.values[name]


class BestEpoch:
    """Values as they are reported: the newest ones, those of one step together, and those of the best epoch."""

    def __init__(self) -> None:
        self.newest: MeasuredTogether | None = None
        self.best: MeasuredTogether | None = None

    def add(self, step: int, epoch: int | None, values: Mapping[str, float]) -> bool:
        """Whether the best epoch is another one now, or has more values."""
        if self.newest is None or not self.newest.is_of(step, epoch):
            self.newest = MeasuredTogether(step, epoch)
        self.newest = self.newest.plus(values)
        is_best = better(self.newest, self.best) or (self.best is not None and self.best.is_of(step, epoch))
        self.best = self.newest if is_best else self.best
        return is_best

    def state_dict(self) -> dict[str, Any]:
        measured = {"newest": self.newest, "best": self.best}
        return {name: one.as_dict() for name, one in measured.items() if one is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.newest, self.best = MeasuredTogether.of(state.get("newest")), MeasuredTogether.of(state.get("best"))


def best_of(measured: Iterable[MeasuredTogether]) -> MeasuredTogether | None:
    """The best by validation; None when no validation metric was reported."""
    best: MeasuredTogether | None = None
    for one in measured:
        if better(one, best):
            best = one
    return best
