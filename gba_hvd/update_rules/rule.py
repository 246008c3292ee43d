"""What an update rule is given, and what it answers: the vocabulary of `gba_hvd.update_rules`.

A rule decides what a server does to its dense part with the pushes of one step, and which dense values workers are
shown. It is arithmetic on flat arrays: the pushes are collected, the optimizer is stepped and files are written by
`ps.partition`. Before the mode is entered, `why_not` is asked on every worker and `start` makes each server's rule;
then in this order, for every step:

    1. compensated  the gradients of its pushes, corrected for the age of the values they were computed with
    2. damping      of each push, by that age
    3. act          the step: leave it to the user's optimizer, or say what the values are to be
    4. stepped      the step is applied. Only now may the rule remember it; a step that fails leaves the rule as it was

Where steps are clipped, 1 and 2 may happen twice for a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

Setting = float | bool


@dataclass(frozen=True)
class DenseStart:
    """The dense part of one server, as a rule finds it.

    values: float32 [n]. sizes, groups: of each tensor, numbers in it and its optimizer group.
    state:    the optimizer's, of each tensor, as in `optimizer.state[p]`
    settings: of the rule, those that were given, see `Rule.defaults`
    lrs:      learning rate of each optimizer group
    shown:    float32 [n], what workers have been shown so far by a server that died; None: the mode begins
    """

    values: np.ndarray
    step: int
    sizes: Sequence[int]
    groups: Sequence[int]
    state: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Setting] = field(default_factory=dict)
    lrs: Sequence[float] = ()
    shown: np.ndarray | None = None

    def group_of_elements(self) -> np.ndarray:
        """int32 [n]: the optimizer group of each element."""
        return np.repeat(self.groups, self.sizes).astype(np.int32)


@dataclass(frozen=True)
class Damping:
    """What a push is multiplied by.

    dense: float32 [n], or [1] for all; from 0 to 1
    rows:  their mean. The rows of a push are multiplied by the mean over the dense elements of all servers, the same on
           every server, also on one that has none
    """

    dense: np.ndarray
    rows: float


_NONE = Damping(np.ones(1, np.float32), 1.0)


def not_damped(dense_step: int) -> Damping:
    return _NONE


@dataclass(frozen=True)
class Received:
    """A push in a step.

    worker:    who computed it
    share:     of the step's gradient: its weight by staleness and samples; the shares of fresh pushes add up to 1
    staleness: steps between the dense values it was computed with and those the step is applied to; 0 if not known
    gradient:  float32 [n], as `Rule.compensated` made it
    """

    worker: int
    share: float
    staleness: int
    gradient: np.ndarray


@dataclass(frozen=True)
class Step:
    """A step that is decided.

    values:   float32 [n], the model before the step
    gradient: float32 [n], sum of share * damping * gradient over the pushes, the gradients as compensated
    lrs:      learning rate of each optimizer group
    workers:  all that live; empty if that is not known
    """

    number: int
    values: np.ndarray
    gradient: np.ndarray
    pushes: Sequence[Received]
    lrs: Sequence[float]
    workers: Sequence[int] = ()


@dataclass(frozen=True)
class ByOptimizer:
    """The user's optimizer takes the step, with these learning rates.

    ahead: of a rule that looks ahead, workers are shown the values after the step plus so many times the step
    """

    lrs: Sequence[float]
    ahead: float = 0.0


@dataclass(frozen=True)
class NewValues:
    """The rule took over the optimizer's momentum, and the step with it.

    values:   float32 [n], the model after the step: what is evaluated, saved, exported and switched with
    momentum: float32 [n], what the optimizer continues with when the rule is left
    shown:    float32 [n], what workers compute gradients with; None: the model
    """

    values: np.ndarray
    momentum: np.ndarray
    shown: np.ndarray | None = None


class Rule(Protocol):
    """Belongs to one server, which serialises the calls.

    A class that a distribution registers in `gba_hvd.update_rules` has these methods and attributes; a subclass of
    `Plain` overrides what differs.

    looks_ahead:   it shows workers other values than the model's, so evaluations are given the model's
    knows_workers: it uses `Step.workers`
    owns_momentum: it answers `NewValues`, and steps with the optimizer's settings as they were when it started; workers
                   then report changes of them. Not required: without it there are none to report
    defaults:      its settings (`GBACallback(rule_settings=...)`) with their defaults; empty: it has none. Servers get
                   all numbers as floats
    """

    looks_ahead: ClassVar[bool]
    knows_workers: ClassVar[bool]
    defaults: ClassVar[Mapping[str, Setting]]

    @classmethod
    def refused(cls, settings: Mapping[str, Setting]) -> str:
        """Why these settings, of those in `defaults` and of their kind, cannot be used; empty: they can."""

    @classmethod
    def why_not(cls, optimizer: Mapping[str, Any]) -> str:
        """Why the rule does not go with this optimizer (as `torch_optimizers.spec_of` describes it); empty: it does."""

    @classmethod
    def start(cls, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> Rule:
        """A server's rule, as things stand. workers: who trains now, by id. `why_not` was empty."""

    def compensated(self, pushes: Sequence[tuple[int, np.ndarray]], values: np.ndarray) -> list[np.ndarray]:
        """The gradients float32 [n] of a step's pushes that count, corrected; the arrays given are not written.

        pushes: (step of the values it was computed with, negative when not known; gradient float32 [n]).
        values: float32 [n], the model before the step. Changes nothing that counts before `stepped`. A gradient that
        was computed with these values, or with unknown ones, stays as it is.
        """

    def damping(self, dense_step: int) -> Damping:
        """The damping of a push computed with the values of step `dense_step`, which is negative when not known."""

    def act(self, step: Step) -> ByOptimizer | NewValues:
        """What becomes of the step. Changes nothing that counts before `stepped`."""

    def stepped(self, values: np.ndarray, gradient: np.ndarray, lrs: Sequence[float], step: int) -> None:
        """The step `act` was asked about is applied: the values after it, its gradient, its learning rates."""

    def shown(self, values: np.ndarray, lrs: Sequence[float]) -> np.ndarray | None:
        """What workers are shown in place of these values, as things stand; None: the values."""


class Plain:
    """Rule "none": the user's optimizer steps with any gradient, however old."""

    looks_ahead: ClassVar[bool] = False
    knows_workers: ClassVar[bool] = False
    owns_momentum: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Setting]] = {}

    @classmethod
    def refused(cls, settings: Mapping[str, Setting]) -> str:
        return ""

    @classmethod
    def why_not(cls, optimizer: Mapping[str, Any]) -> str:
        return ""

    @classmethod
    def start(cls, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> Rule:
        return cls()

    def compensated(self, pushes: Sequence[tuple[int, np.ndarray]], values: np.ndarray) -> list[np.ndarray]:
        return [gradient for _, gradient in pushes]

    def damping(self, dense_step: int) -> Damping:
        return _NONE

    def act(self, step: Step) -> ByOptimizer | NewValues:
        return ByOptimizer(step.lrs)

    def stepped(self, values: np.ndarray, gradient: np.ndarray, lrs: Sequence[float], step: int) -> None:
        pass

    def shown(self, values: np.ndarray, lrs: Sequence[float]) -> np.ndarray | None:
        return None
