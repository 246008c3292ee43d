"""What the workers of an evaluation add up, by kind, and what comes of it.

    frames of a batch -> Accumulator.add -> .state() (travels) -> combined(part, all states) -> plain values

Decided here: the frames of each kind, their checks, and how parts of several workers come together. The same code runs
on workers (allreduce mode) and in the coordinator (asynchronous modes), so a kind travels by its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from gba_hvd.metrics.grouped_auc import GroupedScores, grouped_auc_from
from gba_hvd.metrics.scores import ScoreAccumulator, ScoreState, scores_from

Kind = Literal["scores", "grouped scores", "sums"]
Frames = Sequence[NDArray[Any]]

# scores: logits, labels; grouped scores: logits, labels, groups; sums: numbers that are added up.
DTYPES: Mapping[Kind, tuple[str, ...]] = {
    "scores": ("float32", "float32"),
    "grouped scores": ("float32", "float32", "int64"),
    "sums": ("float64",),
}


@dataclass(frozen=True)
class Part:
    """One thing that an evaluation measures; the same on all workers.

    name: of the task, "" where there is one only. n_sums: numbers of kind "sums". exact_limit: of kinds with scores,
    see `metrics.scores`. is_masked: a batch may have fewer scores than samples.
    may_be_probabilities: whether the outputs are logits is not specified, so the first batch is examined
    """

    kind: Kind
    name: str = ""
    n_sums: int = 0
    exact_limit: int = 0
    is_masked: bool = False
    may_be_probabilities: bool = False

    def wrong(self, frames: Frames, n_samples: int) -> str:
        """What is wrong with the frames of a batch of so many samples, in words; empty if nothing is."""
        if self.kind == "sums":
            n = len(frames[0])
            return "" if n == self.n_sums else f"{n} sums, expected {self.n_sums}"
        sizes = {len(frame) for frame in frames}
        if len(sizes) > 1:
            return f"columns of {sorted(sizes)} values"
        n = sizes.pop()
        if n > n_samples or (n < n_samples and not self.is_masked):
            return f"{n} scores of {n_samples} samples"
        return "" if np.isin(frames[1], (0, 1)).all() else "labels must be 0 or 1"

    def look_like_probabilities(self, frames: Frames) -> bool:
        """Whether all outputs of the first batch lie in [0, 1], where it is not specified what they are."""
        if not self.may_be_probabilities or not len(frames[0]):
            return False
        return bool(((frames[0] >= 0) & (frames[0] <= 1)).all())


class Accumulator(Protocol):
    """What one worker, or the coordinator, has of a part so far. Not thread-safe."""

    def add(self, frames: Frames) -> None:
        """Take in the frames of one batch, see `DTYPES`."""

    def state(self) -> dict[str, Any]:
        """As plain values and arrays that can travel."""


class _Scores:
    def __init__(self, part: Part) -> None:
        self._scores = ScoreAccumulator(part.exact_limit)
        self._groups = GroupedScores() if part.kind == "grouped scores" else None

    def add(self, frames: Frames) -> None:
        self._scores.add(*frames[:2])
        if self._groups is not None:
            self._groups.add(*frames)

    def state(self) -> dict[str, Any]:
        scores = self._scores.state()
        return scores if self._groups is None else {"scores": scores, "groups": self._groups.state()}


class _Sums:
    def __init__(self, part: Part) -> None:
        self._sums = np.zeros(part.n_sums)

    def add(self, frames: Frames) -> None:
        self._sums += frames[0]

    def state(self) -> dict[str, Any]:
        return {"sums": self._sums}


def accumulator(part: Part) -> Accumulator:
    """An empty one for this part."""
    return _Sums(part) if part.kind == "sums" else _Scores(part)


def combined(part: Part, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of all workers' states, as plain values: those of `Scores`, of `GroupedAuc`, or `sums`."""
    if part.kind == "sums":
        return {"sums": np.sum([s["sums"] for s in states], axis=0).tolist()}
    scores: list[ScoreState] = [s["scores"] if part.kind == "grouped scores" else s for s in states]
    found = dataclasses.asdict(scores_from(scores))
    if part.kind == "grouped scores":
        found |= dataclasses.asdict(grouped_auc_from([s["groups"] for s in states]))
    return found
