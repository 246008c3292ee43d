"""Update rules as arithmetic on flat arrays: each against its formula, and against the rules it equals in theory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gba_hvd import BadInput, update_rules
from gba_hvd.torch_optimizers import build, spec_of
from gba_hvd.update_rules.dana_slim import SlimWorker
from gba_hvd.update_rules.dana_zero import DanaZero
from gba_hvd.update_rules.delay_roots import limit
from gba_hvd.update_rules.rule import ByOptimizer, NewValues, Received, Rule, Step
from gba_hvd.update_rules.sgd_momentum import Sgd

N, LR, MOMENTUM = 5, 0.05, 0.9
CURVATURE = np.linspace(0.2, 2.0, N).astype(np.float32)
START = np.linspace(-1, 1, N).astype(np.float32)


def spec(kind: Any = torch.optim.SGD, **settings: Any) -> dict[str, Any]:
    if kind is torch.optim.SGD:
        settings = {"momentum": MOMENTUM, **settings}
    return spec_of(kind([torch.nn.Parameter(torch.zeros(N))], lr=LR, **settings))


def made(
    name: str, values: np.ndarray, buffer: np.ndarray | None = None, workers: Sequence[int] = (), **sgd: Any
) -> Rule:
    state = [{}] if buffer is None else [{"momentum_buffer": torch.from_numpy(buffer)}]
    return update_rules.make(name, spec(**sgd), update_rules.DenseStart(values, 0, [N], [0], state), workers)


def pushes(*gradients: tuple[int, np.ndarray], staleness: int = 0) -> list[Received]:
    """Of these workers, all with the same share."""
    return [Received(worker, 1 / len(gradients), staleness, gradient) for worker, gradient in gradients]


class Server:
    """A rule, the user's optimizer and the values: what `ps.part` does, without files."""

    def __init__(
        self,
        name: str,
        workers: Sequence[int] = (),
        buffer: np.ndarray | None = None,
        start: np.ndarray = START,
        lr: float = LR,
        **sgd: Any,
    ) -> None:
        self.rule = made(name, start, buffer, workers, **sgd)
        self.values, self.step, self.lrs = start.copy(), 0, [lr]
        self.momentum = np.zeros(N, np.float32) if buffer is None else buffer
        self._param = torch.nn.Parameter(torch.from_numpy(self.values))
        self._optimizer = build(spec(**sgd), [[self._param]])
        ahead = self.rule.shown(self.values, self.lrs)
        self.shown = self.values.copy() if ahead is None else ahead

    def apply(self, received: Sequence[Received], living: Sequence[int] = ()) -> None:
        self.step += 1
        gradient = sum((np.float32(p.share) * p.gradient for p in received), np.zeros(N, np.float32))
        answer = self.rule.act(Step(self.step, self.values, gradient, received, self.lrs, living))
        before = self.values.copy()
        if isinstance(answer, ByOptimizer):
            self._optimizer.param_groups[0]["lr"] = answer.lrs[0]
            self._param.grad = torch.from_numpy(gradient)
            self._optimizer.step()
            self.shown = self.values + np.float32(answer.ahead) * (self.values - before)
        else:
            self.values[:], self.momentum = answer.values, answer.momentum
            self.shown = self.values.copy() if answer.shown is None else answer.shown
        self.rule.stepped(self.values, gradient, self.lrs, self.step)


def gradient_at(values: np.ndarray) -> np.ndarray:
    """Of a quadratic."""
    slope: np.ndarray = CURVATURE * values
    return slope


def delayed_run(server: Server, order: Sequence[int], slim: dict[int, SlimWorker] | None = None) -> list[np.ndarray]:
    """Every push is a step; worker i computes with what it was shown when it pushed last. What was shown, by step."""
    held = {worker: server.shown for worker in set(order)}
    seen = []
    for worker in order:
        gradient = gradient_at(held[worker])
        if slim is not None:
            gradient = slim[worker].outgoing(gradient, server.step)
        server.apply(pushes((worker, gradient)))
        held[worker] = server.shown
        seen.append(server.shown)
    return seen


ORDER = [0, 1, 2, 0, 0, 1, 2, 1, 0, 2, 2, 2, 1, 0, 1] * 4


# --- equal in theory -------------------------------------------------------------------------------------------------


def slim_workers(buffer: np.ndarray, n: int, by_step: bool = False) -> dict[int, SlimWorker]:
    sgd = Sgd.of(spec(), np.zeros(N, np.int32))
    return {worker: SlimWorker(sgd, buffer / np.float32(n), by_step) for worker in range(n)}


@pytest.mark.parametrize("buffer", [np.zeros(N, np.float32), np.linspace(1, -2, N).astype(np.float32)])
def test_what_dana_zero_shows_is_what_dana_slim_has(buffer: np.ndarray) -> None:
    zero = Server("dana_zero", range(3), buffer)
    slim = Server("dana_slim", range(3), buffer, start=zero.shown)
    shown = delayed_run(zero, ORDER)
    had = delayed_run(slim, ORDER, slim_workers(buffer, 3))
    np.testing.assert_allclose(had, shown, rtol=1e-4, atol=1e-6)
    assert np.abs(zero.values - slim.values).max() > 1e-3, "the look-ahead came to nothing"


@pytest.mark.parametrize("buffer", [np.zeros(N, np.float32), np.linspace(1, -2, N).astype(np.float32)])
def test_in_lock_step_both_danas_agree_on_steps_of_several_pushes(buffer: np.ndarray) -> None:
    zero = Server("dana_zero", range(2), buffer)
    slim = Server("dana_slim", range(2), buffer, start=zero.shown)
    workers = slim_workers(3 * buffer, 2, by_step=True)  # the server divides by the three pushes of a step
    for _ in range(30):
        of_zero = [(w, gradient_at(zero.shown) + np.float32(w)) for w in (0, 1, 0)]
        of_slim = [(w, workers[w].outgoing(gradient_at(slim.shown) + np.float32(w), slim.step)) for w in (0, 1, 0)]
        zero.apply(pushes(*of_zero))
        slim.apply(pushes(*of_slim))
        np.testing.assert_allclose(slim.shown, zero.shown, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_dana_zero_with_one_worker_in_lock_step_is_nesterovs_momentum(weight_decay: float) -> None:
    """torch's Nesterov has the look-ahead in its parameters; weight decay it takes there, so it is compared without."""
    server = Server("dana_zero", [7], weight_decay=weight_decay)
    param = torch.nn.Parameter(torch.from_numpy(START.copy()))
    plain = torch.optim.SGD([param], lr=LR, momentum=MOMENTUM, nesterov=not weight_decay, weight_decay=weight_decay)
    for _ in range(40):
        gradient = gradient_at(server.shown)
        param.grad = torch.from_numpy(gradient_at(param.detach().numpy()) if not weight_decay else gradient)
        plain.step()
        server.apply(pushes((7, gradient)))
        reached = server.values if weight_decay else server.shown
        np.testing.assert_allclose(reached, param.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_a_step_to_which_all_workers_contribute_is_one_of_plain_momentum() -> None:
    zero, plain = Server("dana_zero", range(4)), Server("none")
    rng = np.random.default_rng(0)
    for _ in range(20):
        received = pushes(*((w, rng.normal(size=N).astype(np.float32)) for w in range(4)))
        zero.apply(received)
        plain.apply(received)
        np.testing.assert_allclose(zero.values, plain.values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam, torch.optim.Adagrad])
@pytest.mark.parametrize("rule", ["staleness_lr", "gap_aware"])
def test_rules_that_only_weigh_change_nothing_about_fresh_pushes(rule: str, kind: Any) -> None:
    with_it, without = Server(rule, kind=kind), Server("none", kind=kind)
    for _ in range(20):
        for server in (with_it, without):
            server.apply(pushes((0, gradient_at(server.shown))))
        assert (with_it.rule.damping(with_it.step).dense == 1).all()
        np.testing.assert_array_equal(with_it.values, without.values)


# --- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 3])
def test_delayed_nesterov_is_its_formula(delay: int) -> None:
    server = Server("delayed_nesterov")
    shown = [server.shown] * (delay + 1)
    w = [START.astype(np.float64)] * 2
    looks = [w[-1]] * (delay + 1)
    for _ in range(40):
        d = MOMENTUM * (w[-1] - w[-2])
        looks.append(w[-1] + d)
        w.append(w[-1] + d - LR * (1 - MOMENTUM) * CURVATURE * looks[-1 - delay])
        shown.append(server.shown)
        server.apply(pushes((0, gradient_at(shown[-1 - delay]))))
        np.testing.assert_allclose(server.values, w[-1], rtol=1e-4, atol=1e-6)


def test_delayed_nesterov_leaves_nadam_as_it_is() -> None:
    with_it, without = Server("delayed_nesterov", kind=torch.optim.NAdam), Server("none", kind=torch.optim.NAdam)
    for _ in range(5):
        for server in (with_it, without):
            server.apply(pushes((0, gradient_at(server.shown))))
    np.testing.assert_array_equal(with_it.values, without.values)


def test_looking_ahead_with_sgd_shows_what_nesterov_and_dana_zero_show_with_one_worker() -> None:
    ours, dana = Server("look_ahead"), Server("dana_zero", [0])
    for shown_by_ours, shown_by_dana in zip(delayed_run(ours, [0] * 30), delayed_run(dana, [0] * 30), strict=True):
        np.testing.assert_allclose(shown_by_ours, shown_by_dana, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.values, dana.values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_looking_ahead_leaves_the_model_to_the_optimizer(kind: Any) -> None:
    with_it, without = Server("look_ahead", kind=kind), Server("none", kind=kind)
    for k in range(5):
        for server in (with_it, without):
            server.apply(pushes((0, gradient_at(START + k))))
    np.testing.assert_array_equal(with_it.values, without.values)
    assert not np.array_equal(with_it.shown, with_it.values)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.SGD])
def test_looking_ahead_is_refused_where_no_momentum_carries_the_next_step_on(kind: Any) -> None:
    settings = {"momentum": 0.0} if kind is torch.optim.SGD else {}
    with pytest.raises(BadInput, match="look_ahead needs momentum, or betas as Adam has them"):
        update_rules.check("look_ahead", spec(kind, **settings))


@pytest.mark.parametrize("age", [{0: 54.0, 1: 46.0}, {0: 1.0, 1: 1.0}])
def test_looking_ahead_is_stable_at_larger_learning_rates_where_values_are_old(age: dict[int, float]) -> None:
    without, with_it, fresh = limit(age, MOMENTUM), limit(age, MOMENTUM, 0.9), limit({0: 1.0}, MOMENTUM)
    assert without < fresh / 15 and with_it > fresh / 5 > 4 * without / 1.5
    for product, ahead, is_stable in ((0.99 * with_it, 0.9, True), (1.01 * with_it, 0.9, False)):
        assert (growth(product, age, ahead) < 1) == is_stable


def growth(product: float, ages: dict[int, float], ahead: float) -> float:
    """The recursion itself: by how much the largest error of the last 100 of 4000 steps exceeds that of 100 before."""
    total = sum(ages.values())
    w = [1.0, 1.0, 1.0]
    for _ in range(4000):
        used = sum(n / total * ((1 + ahead) * w[-1 - age] - ahead * w[-2 - age]) for age, n in ages.items())
        w.append(w[-1] + MOMENTUM * (w[-1] - w[-2]) - product * used)
        if abs(w[-1]) > 1e100:
            return float("inf")
    return max(map(abs, w[-100:])) / max(1e-300, *map(abs, w[-200:-100]))


@pytest.mark.parametrize(("stale", "divisor"), [([0], 1), ([1], 1), ([6], 6), ([2, 0, 10, 4], 4)])
def test_the_learning_rate_is_divided_by_the_mean_staleness(stale: list[int], divisor: float) -> None:
    received = [Received(0, 1 / len(stale), s, START) for s in stale]
    answer = made("staleness_lr", START).act(Step(1, START, START, received, [LR, 1.0]))
    assert answer == ByOptimizer(pytest.approx([LR / divisor, 1.0 / divisor]))  # type: ignore[arg-type]


def test_pushes_count_towards_the_mean_staleness_by_their_share() -> None:
    received = [Received(0, 0.75, 2, START), Received(1, 0.25, 10, START)]
    answer = made("staleness_lr", START).act(Step(1, START, START, received, [LR]))
    assert answer == ByOptimizer([LR / 4])


def test_groups_have_their_own_momentum_and_learning_rate() -> None:
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 3)]
    groups = [{"params": [params[0]], "momentum": 0.9}, {"params": [params[1]], "momentum": 0.5}]
    start = update_rules.DenseStart(START, 0, [2, 3], [0, 1], [{}, {}])
    rule = update_rules.make("dana_zero", spec_of(torch.optim.SGD(groups, lr=LR)), start, [0])
    ones, lrs = np.ones(N, np.float32), [0.1, 0.01]
    answer = rule.act(Step(1, START, ones, pushes((0, ones)), lrs))
    assert isinstance(answer, NewValues) and answer.shown is not None
    lr, momentum = np.array([0.1, 0.1, 0.01, 0.01, 0.01]), np.array([0.9, 0.9, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(answer.values, START - lr, rtol=1e-6)
    np.testing.assert_allclose(answer.shown, START - lr - lr * momentum, rtol=1e-6)


# --- entering, leaving, dying ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["dana_zero", "delayed_nesterov", "dana_slim"])
def test_the_momentum_of_the_optimizer_is_taken_over_and_given_back(rule: str) -> None:
    buffer = np.linspace(1, -2, N).astype(np.float32)
    server = Server(rule, range(3), buffer)
    if rule != "dana_slim":
        np.testing.assert_allclose(server.shown, START - LR * MOMENTUM * buffer, rtol=1e-6)
    nothing = pushes(*((w, np.zeros(N, np.float32)) for w in range(3)))
    server.apply(nothing)
    np.testing.assert_allclose(server.momentum, MOMENTUM * buffer, rtol=1e-6)


def test_danas_sum_stays_the_sum_of_the_workers_momenta() -> None:
    server = Server("dana_zero", range(3), np.ones(N, np.float32))
    delayed_run(server, ORDER)
    assert isinstance(server.rule, DanaZero)
    total = sum(server.rule.of(worker) for worker in range(3))
    np.testing.assert_allclose(server.momentum, total, rtol=1e-4, atol=1e-6)


def test_a_dead_workers_momentum_goes_to_the_living() -> None:
    server = Server("dana_zero", range(3))
    delayed_run(server, ORDER)
    assert isinstance(server.rule, DanaZero)
    before = {worker: server.rule.of(worker) for worker in range(3)}
    sum_before = server.momentum
    server.apply(pushes((1, np.zeros(N, np.float32))), living=[0, 1, 9])
    part = before[2] / 3
    assert server.rule.workers == [0, 1, 9]
    np.testing.assert_allclose(server.rule.of(0), before[0] + part, rtol=1e-5)
    np.testing.assert_allclose(server.rule.of(9), part, rtol=1e-5)
    np.testing.assert_allclose(server.rule.of(1), MOMENTUM * (before[1] + part), rtol=1e-5)
    lost = (1 - MOMENTUM) * (before[1] + part)
    np.testing.assert_allclose(server.momentum, sum_before - lost, rtol=1e-4, atol=1e-6)


def test_a_step_that_failed_leaves_the_rule_as_it_was() -> None:
    for rule in ("dana_zero", "dana_slim", "delayed_nesterov"):
        server = made(rule, START, workers=[0])
        step = Step(1, START, START, pushes((0, START)), [LR])
        first, again = server.act(step), server.act(step)
        assert isinstance(first, NewValues) and isinstance(again, NewValues)
        np.testing.assert_array_equal(first.momentum, again.momentum)
        server.stepped(first.values, START, [LR], 1)
        after = server.act(step)
        assert isinstance(after, NewValues)
        assert (after.momentum != first.momentum).any()


# --- where plain momentum fails --------------------------------------------------------------------------------------


def largest(server: Server, order: Sequence[int]) -> float:
    return float(np.abs(delayed_run(server, order)[-1]).max())


def test_with_many_workers_dana_holds_where_plain_momentum_does_not() -> None:
    order, lr = list(range(16)) * 60, 0.015
    assert largest(Server("none", lr=lr), order) > 1e3
    assert largest(Server("dana_zero", range(16), lr=lr), order) < 0.5
    assert largest(Server("delayed_nesterov", lr=lr), order) < 0.5


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"), [("dana-zero", "'dana_zero'"), ("Gap_Awar", "'gap_aware'"), ("nesterov", "'delayed_nesterov'")]
)
def test_a_misspelt_rule_is_answered_with_the_right_one(given: str, meant: str) -> None:
    with pytest.raises(BadInput, match=meant):
        update_rules.known_rule(given)


def test_a_rule_that_does_not_exist_is_answered_with_all() -> None:
    with pytest.raises(BadInput, match="staleness_lr"):
        update_rules.known_rule("xyz")


@pytest.mark.parametrize(
    ("rule", "optimizer", "what"),
    [
        ("dana_zero", lambda: spec(momentum=0.0), "group 0 of SGD has none"),
        ("dana_slim", lambda: spec(torch.optim.Adam), "Adam has another one, or none"),
        ("dana_zero", lambda: spec(torch.optim.Adagrad), "momentum of torch.optim.SGD"),
        ("dana_zero", lambda: spec(nesterov=True), "knows no nesterov"),
        ("delayed_nesterov", lambda: spec(dampening=0.5), "knows no dampening"),
        ("delayed_nesterov", lambda: spec(torch.optim.Adam), "or use torch.optim.NAdam"),
        ("dana_slim", lambda: spec(weight_decay=0.1), "without weight decay"),
    ],
)
def test_an_optimizer_that_a_rule_does_not_go_with_is_refused_naming_what_fits(
    rule: str, optimizer: Callable[[], dict[str, Any]], what: str
) -> None:
    with pytest.raises(BadInput, match=what):
        update_rules.check(rule, optimizer())


@pytest.mark.parametrize("rule", ["none", "gap_aware", "staleness_lr"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_rules_that_only_weigh_take_any_optimizer(rule: str, kind: Any) -> None:
    update_rules.check(rule, spec(kind))
