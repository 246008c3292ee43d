"""The suites refuse what is wrong: bugs planted in a row optimizer and in a rule, each with the test that finds it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.shm.layout import Group, Layout, SlotSpec
from gba_hvd.testing import RowOptimizerContract, RuleContract
from gba_hvd.testing.rules import N
from gba_hvd.update_rules.rule import DenseStart, Plain, Rule


@dataclass(frozen=True)
class Ftrl:
    """FTRL-proximal (McMahan et al. 2013, algorithm 1), each weight by itself; beta is 1."""

    lr: float
    slots: ClassVar = (SlotSpec("z"), SlotSpec("n"))

    def update_(
        self, flat: np.ndarray, layout: Layout, group: Group, grad: RowGrad, scale: float, lr: float, step: int
    ) -> None:
        if lr == 0:
            return
        records = layout.record_starts(grad.keys, group).astype(np.int64)[:, None]
        at = records + np.arange(group.dim)
        at_z, at_n = at + group.slots[0], at + group.slots[1]
        w, z, n = flat[at], flat[at_z], flat[at_n]
        g = scale * grad.values
        z = np.where(n == 0, -w / lr, z)
        z = z + g - (np.sqrt(n + g * g) - np.sqrt(n)) / lr * w
        n = n + g * g
        flat[at], flat[at_z], flat[at_n] = -z * lr / (1 + np.sqrt(n)), z, n
        flat.view(np.uint32)[records + group.record - 1] += 1


class LateClip(Plain):
    """The gradient of a late push is clipped to the norm of the last step's."""

    def __init__(self, step: int) -> None:
        self._step, self._norm = step, 0.0

    @classmethod
    def start(cls, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> Rule:
        return cls(dense.step)

    def compensated(self, pushes: Sequence[tuple[int, np.ndarray]], values: np.ndarray) -> list[np.ndarray]:
        found = [self._clipped(gradient) if 0 <= step < self._step else gradient for step, gradient in pushes]
        return found

    def _clipped(self, gradient: np.ndarray) -> np.ndarray:
        norm = float(np.linalg.norm(gradient))
        if norm > self._norm:
            gradient = gradient * np.float32(self._norm / norm)
        return gradient

    def stepped(self, values: np.ndarray, gradient: np.ndarray, lrs: Sequence[float], step: int) -> None:
        self._step, self._norm = step, float(np.linalg.norm(gradient))


class TestFtrl(RowOptimizerContract):
    @pytest.fixture
    def row_optimizer(self) -> Ftrl:
        return Ftrl(lr=0.1)


class TestLateClip(RuleContract):
    @pytest.fixture
    def rule(self) -> Rule:
        return LateClip.start({}, DenseStart(np.zeros(N, np.float32), 10, [N], [0], [{}]), [0, 1])


def with_bug(right: type, old: str, new: str) -> Any:
    """The class with another line in it."""
    source = inspect.getsource(right)
    assert source.count(old) == 1
    names = dict(globals())
    exec(source.replace(old, new), names)
    return names[right.__name__]


ALONE = "test_nothing_but_the_records_of_the_step_is_written"
AGAINST = "test_the_first_step_of_a_row_goes_against_its_gradient"
FINITE = "test_compensated_gives_a_finite_gradient_for_each_push"


@pytest.mark.parametrize(
    ("old", "new", "test"),
    [
        ("layout.record_starts(grad.keys, group)", "(group.at + grad.keys * group.record)", ALONE),
        ("records = ", "lr = self.lr; records = ", "test_a_larger_learning_rate_moves_rows_further"),
        ("at + group.slots[1]", "at + group.slots[0]", "test_every_slot_is_written"),
        ("g = scale * grad.values", "g = grad.values; g *= scale", "test_the_gradient_is_not_written"),
        ("z + g -", "z - g -", AGAINST),
        ("np.where(n == 0, -w / lr, z)", "z", AGAINST),
    ],
    ids=["places", "learning rate", "slots", "gradient written", "sign", "initial weights"],
)
def test_a_row_optimizer_with_a_bug_fails_the_suite(old: str, new: str, test: str) -> None:
    suite, optimizer = RowOptimizerContract(), with_bug(Ftrl, old, new)(lr=0.1)
    with pytest.raises(AssertionError):
        getattr(suite, test)(optimizer, *(["user"] if test == ALONE else []))


@pytest.mark.parametrize(
    ("old", "new", "test"),
    [
        ("gradient = gradient * np", "gradient *= np", FINITE),
        ("return found", "return found[:1]", FINITE),
        ("self._norm / norm", "np.nan", FINITE),
        (
            "found = [",
            "self._step += 1; found = [",
            "test_a_push_with_the_newest_values_or_unknown_ones_is_not_compensated",
        ),
        (
            "found = [",
            "self._norm *= 0.5; found = [",
            "test_compensating_changes_nothing_before_the_step_is_applied",
        ),
    ],
    ids=["gradient written", "fewer", "not finite", "newest step", "norm"],
)
def test_a_rule_with_a_bug_fails_the_suite(old: str, new: str, test: str) -> None:
    rule = with_bug(LateClip, old, new)(10)
    with pytest.raises(ValueError if "*= np" in new else AssertionError):
        getattr(RuleContract(), test)(rule)
