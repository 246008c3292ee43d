"""`RuleContract`: what every update rule promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gba_hvd.torch_optimizers import spec_of
from gba_hvd.update_rules import make
from gba_hvd.update_rules.rule import ByOptimizer, DenseStart, NewValues, Received, Rule, Step

N = 600


def _given(numbers: np.ndarray) -> np.ndarray:
    """float32, not to be written."""
    array = numbers.astype(np.float32)
    array.flags.writeable = False
    return array


def _pushes(*dense_steps: int) -> list[tuple[int, np.ndarray]]:
    """Small, zero and large gradients for each of these steps of dense values."""
    shape = np.cos(np.arange(N))
    return [(step, _given(size * shape)) for step in dense_steps for size in (0.1, 0.0, 20.0)]


class RuleContract:
    @pytest.fixture
    def rule_name(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def rule(self, rule_name: str) -> Rule:
        """At step 10, on SGD with momentum, with workers 0 and 1."""
        parameter = torch.nn.Parameter(torch.zeros(N))
        start = DenseStart(np.linspace(-1, 1, N).astype(np.float32), 10, [N], [0], [{}])
        return make(rule_name, spec_of(torch.optim.SGD([parameter], lr=0.1, momentum=0.9)), start, [0, 1])

    @staticmethod
    def step(number: int = 11) -> Step:
        gradient, model = _given(np.sin(np.arange(N))), _given(np.linspace(-1, 1, N))
        pushes = [Received(worker, 0.5, 2 * worker, gradient) for worker in (0, 1)]
        return Step(number, model, gradient, pushes, [0.1], [0, 1])

    def after_a_step(self, rule: Rule) -> np.ndarray:
        """Makes step 11; the values that it leaves."""
        step = self.step()
        answer = rule.act(step)
        new = answer.values if isinstance(answer, NewValues) else step.values - np.float32(0.1) * step.gradient
        rule.stepped(new, step.gradient, step.lrs, 11)
        return _given(new)

    def test_a_push_with_the_newest_values_or_unknown_ones_is_not_damped(self, rule: Rule) -> None:
        for dense_step in (10, -1):
            damping = rule.damping(dense_step)
            assert (damping.dense == 1).all() and damping.rows == 1.0

    def test_damping_is_between_0_and_1(self, rule: Rule) -> None:
        step = self.step()
        rule.stepped(step.values + np.float32(0.5), step.gradient, step.lrs, 11)
        for dense_step in (11, 10, 3):
            damping = rule.damping(dense_step)
            assert damping.dense.dtype == np.float32 and damping.dense.shape in ((1,), (N,))
            assert ((damping.dense >= 0) & (damping.dense <= 1)).all() and 0 <= damping.rows <= 1

    def test_compensated_gives_a_finite_gradient_for_each_push(self, rule: Rule) -> None:
        """Of known and unknown age; the arrays given are read-only."""
        values = self.after_a_step(rule)
        pushes = _pushes(11, 10, 3, -1)
        found = rule.compensated(pushes, values)
        assert len(found) == len(pushes) and len(rule.compensated([], values)) == 0
        for gradient in found:
            assert gradient.dtype == np.float32 and gradient.shape == (N,) and np.isfinite(gradient).all()

    def test_a_push_with_the_newest_values_or_unknown_ones_is_not_compensated(self, rule: Rule) -> None:
        """Values that were shown ahead of the model are never the newest."""
        values = self.after_a_step(rule)
        pushes = _pushes(-1) if rule.looks_ahead else _pushes(11, -1)
        found = rule.compensated(pushes, values)
        np.testing.assert_array_equal(found, [gradient for _, gradient in pushes])

    def test_compensating_changes_nothing_before_the_step_is_applied(self, rule: Rule) -> None:
        values, pushes = self.after_a_step(rule), _pushes(11, 10, 3, -1)
        damping = [rule.damping(dense_step) for dense_step in (11, 10, 3, -1)]
        first, *others = [rule.compensated(pushes, values) for _ in range(4)]
        for again in others:
            np.testing.assert_array_equal(first, again)
        for before, after in zip(damping, map(rule.damping, (11, 10, 3, -1)), strict=True):
            np.testing.assert_array_equal(before.dense, after.dense)
            assert before.rows == after.rows

    def test_a_step_gives_learning_rates_or_finite_values(self, rule: Rule) -> None:
        answer = rule.act(self.step())
        if isinstance(answer, ByOptimizer):
            assert len(answer.lrs) == 1 and answer.lrs[0] >= 0
            return
        shown = rule.shown(answer.values, [0.1]) if answer.shown is None else answer.shown
        for array in (answer.values, answer.momentum, *([] if shown is None else [shown])):
            assert array.dtype == np.float32 and array.shape == (N,) and np.isfinite(array).all()

    def test_a_step_counts_when_it_is_applied_and_not_before(self, rule: Rule) -> None:
        first, again = rule.act(self.step()), rule.act(self.step())
        if isinstance(first, NewValues):
            assert isinstance(again, NewValues)
            np.testing.assert_array_equal(first.values, again.values)
            np.testing.assert_array_equal(first.momentum, again.momentum)
        else:
            assert first == again

    def test_a_rule_that_shows_other_values_says_so(self, rule: Rule) -> None:
        step = self.step()
        answer = rule.act(step)
        new = answer.values if isinstance(answer, NewValues) else step.values
        rule.stepped(new, step.gradient, step.lrs, 11)
        shown = rule.shown(new, step.lrs)
        assert rule.looks_ahead or shown is None or (shown == new).all()
