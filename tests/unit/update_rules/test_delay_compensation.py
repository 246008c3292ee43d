"""Delay compensation against a computation by hand: as a rule, in a server's part, and in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gba_hvd_tools.commands.simulate import training as command
from gba_hvd_tools.simulated.experiment import Experiment, run

from gba_hvd import SGD, BadInput, update_rules
from gba_hvd.embedding.row_gradients import RowGrad, pack_by_owner
from gba_hvd.ps.messages import Apply, Endpoint, Enter, JobPosition, PlannedMember
from gba_hvd.ps.partition.gaps import SAMPLED, GapMeter
from gba_hvd.ps.partition.partition import Partition
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.update_rules.delay_compensation import Compensation
from gba_hvd.update_rules.gap_aware import G
from gba_hvd.update_rules.kept_values import KeptValues
from gba_hvd.update_rules.rule import DenseStart, Received, Step
from recovery import state_codec

N, LR, MOMENTUM = 4, 0.1, 0.9
START = np.array([1.0, -1.0, 0.5, 2.0])
EPS = 1e-7
WORKERS = (11, 22)
CONSTANT = {"lambda": 0.5, "adaptive": False}


def spec(momentum: float = 0.0) -> dict[str, Any]:
    return spec_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(N))], lr=LR, momentum=momentum))


@pytest.fixture
def make_part(tmp_path: Path) -> Any:
    made: list[Partition] = []
    optimizer = SGD(lr=0.1)
    layout = Layout.of({"user": (8, 2)}, optimizer.slots, 1, seed=3, init_std=0.1)
    memory = ShardMemory.create_or_open(tmp_path, "part", layout, grace_s=0)
    memory.reserve([0])
    memory.init_shard(0, 0)

    def make(rule: str, settings: dict[str, Any], momentum: float = 0.0, resumed: bool = False) -> Partition:
        workers = [(worker, rank, 0, 1) for rank, worker in enumerate(WORKERS)]
        enter = Enter(
            1, [Endpoint(0, 0, "127.0.0.1", 1, 2)], 0, [0], JobPosition(), 64, 16, 8, {"name": "async"}, "global",
            0.1, [LR], [("w", [N], 0)], spec(momentum), workers, rule, settings,
        )  # fmt: skip
        if resumed:
            made.append(Partition.resume(enter, tmp_path / "dense", memory, optimizer, 1 << 32)[0])
            return made[-1]
        frames = [bytearray(START.astype(np.float32).tobytes()), state_codec.encode([{}])]
        made.append(Partition.begin(enter, frames, tmp_path / "dense", memory, optimizer, 1 << 32))
        return made[-1]

    yield make
    for part in made:
        part.close()
    memory.close()


def apply(part: Partition, step: int, *pushes: tuple[int, int, np.ndarray]) -> None:
    """pushes: (worker, step of the dense values, gradient)."""
    none = pack_by_owner([RowGrad(np.empty(0, np.int64), np.empty((0, 2), np.float32))], np.zeros(1, np.int32), 1)[0]
    members = []
    for number, (worker, dense_step, gradient) in enumerate(pushes):
        serial = 100 * step + number
        frames = [bytearray(gradient.astype(np.float32).tobytes()), bytearray(none.tobytes())]
        assert part.push(serial, serial, frames, dense_step, worker)
        members.append(PlannedMember(serial, serial, 1.0))
    applied = part.apply(Apply(1, step, members, 1 / len(pushes), 0.1, [LR], 0, list(WORKERS)))
    assert (applied.failed, applied.missing, applied.missed) == ("", [], 0)


def gradients(step: int) -> np.ndarray:
    return np.cos(np.arange(N) + step)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_dc_with_a_constant_lambda_is_the_taylor_term_of_each_push(make_part: Callable[..., Partition]) -> None:
    part = make_part("dc", CONSTANT)
    values = [START]
    for step, used in ((1, 0), (2, 0), (3, 1), (4, 0)):
        g, now = gradients(step), values[-1]
        values.append(now - LR * (g + 0.5 * g * g * (now - values[used])))
        apply(part, step, (11, used, g))
    np.testing.assert_allclose(part.dense.values, values[-1], rtol=1e-5)
    plain = START - LR * sum(gradients(step) for step in (1, 2, 3, 4))
    assert np.abs(part.dense.values - plain).max() > 1e-3, "the correction came to nothing"


def test_dc_divides_lambda_by_the_root_of_the_mean_square(make_part: Callable[..., Partition]) -> None:
    part = make_part("dc", {})
    values, square = [START], np.zeros(N)
    for step, used in ((1, 0), (2, 0), (3, 1), (4, 1)):
        g, now = gradients(step), values[-1]
        square = 0.95 * square + 0.05 * g * g
        values.append(now - LR * (g + 2.0 / np.sqrt(square + EPS) * g * g * (now - values[used])))
        apply(part, step, (11, used, g))
    np.testing.assert_allclose(part.dense.values, values[-1], rtol=1e-5)


def test_in_a_step_of_several_pushes_each_is_corrected_by_its_own_distance(make_part: Callable[..., Partition]) -> None:
    part = make_part("dc", CONSTANT)
    apply(part, 1, (11, 0, gradients(1)))
    one, g, h = START - LR * gradients(1), gradients(2), gradients(5)
    apply(part, 2, (11, 1, g), (22, 0, h))
    late = h + 0.5 * h * h * (one - START)
    np.testing.assert_allclose(part.dense.values, one - LR * (g + late) / 2, rtol=1e-5)


def test_a_gradient_of_the_newest_values_or_of_unknown_ones_stays_bit_for_bit() -> None:
    compensation = Compensation({}, START.astype(np.float32), 3)
    g = gradients(1).astype(np.float32)
    fresh, unknown = compensation.of([(3, g), (-1, g)], START.astype(np.float32))
    np.testing.assert_array_equal(fresh, g)
    np.testing.assert_array_equal(unknown, g)


@pytest.mark.parametrize("to_look_ahead", [False, True])
def test_dana_dc_corrects_from_the_look_ahead_before_the_momentum(
    make_part: Callable[..., Partition], to_look_ahead: bool
) -> None:
    part = make_part("dana_dc", {**CONSTANT, "to_look_ahead": to_look_ahead}, momentum=MOMENTUM)
    v = {worker: np.zeros(N) for worker in WORKERS}
    values, shown = START, [START]
    for step, worker, used in ((1, 11, 0), (2, 22, 0), (3, 11, 1), (4, 22, 2), (5, 11, 4)):
        g = gradients(step)
        now = shown[-1] if to_look_ahead else values
        v[worker] = MOMENTUM * v[worker] + g + 0.5 * g * g * (now - shown[used])
        values = values - LR * v[worker]
        shown.append(values - LR * MOMENTUM * sum(v.values()))
        apply(part, step, (worker, used, g))
    np.testing.assert_allclose(part.dense.values, values, rtol=1e-5)
    np.testing.assert_allclose(part.dense.shown, shown[-1], rtol=1e-5)


def test_dana_dc_corrects_a_fresh_gradient_to_the_model_only() -> None:
    gradient, model = np.ones(1, np.float32), np.array([1.0], np.float32)
    for to_look_ahead, corrected in ((False, 1 + 0.5 * 1 * 1 * 0.25), (True, 1.0)):
        settings = {**CONSTANT, "to_look_ahead": to_look_ahead}
        start = DenseStart(model, 3, [1], [0], [{}], settings, [LR], shown=np.array([0.75], np.float32))
        rule = update_rules.make("dana_dc", spec(MOMENTUM), start, WORKERS)
        assert rule.compensated([(3, gradient)], model)[0].tolist() == [corrected]


def test_a_step_that_failed_does_not_change_what_dana_dc_corrects_to() -> None:
    gradient, model = np.ones(1, np.float32), np.array([1.0], np.float32)
    start = DenseStart(model, 3, [1], [0], [{}], {**CONSTANT, "to_look_ahead": True}, [LR], shown=model)
    rule = update_rules.make("dana_dc", spec(MOMENTUM), start, WORKERS)
    rule.act(Step(4, model, gradient, [Received(11, 3, 1.0, gradient)], [LR]))  # and no `stepped`
    assert rule.compensated([(3, gradient)], model)[0].tolist() == [1.0]


@pytest.mark.parametrize("rule", ["dc", "dana_dc"])
def test_a_server_that_starts_again_goes_on_and_corrects_only_what_it_can(
    make_part: Callable[..., Partition], rule: str
) -> None:
    part = make_part(rule, CONSTANT, momentum=MOMENTUM)
    for step in (1, 2, 3):
        apply(part, step, (11, step - 1, gradients(step)))
    model, shown, state = part.dense.values.copy(), part.dense.shown.copy(), part.dense.state()
    part.close()
    again = make_part(rule, CONSTANT, momentum=MOMENTUM, resumed=True)
    np.testing.assert_array_equal(again.dense.values, model)
    np.testing.assert_array_equal(again.dense.shown, shown)
    buffer = np.asarray(state[0]["momentum_buffer"], dtype=np.float64)
    g = gradients(4)
    apply(again, 4, (11, 0, g))  # of values that nobody has any more: compared with the oldest there are
    corrected = g + 0.5 * g * g * (model - shown)
    moved = MOMENTUM * buffer / (2 if rule == "dana_dc" else 1) + corrected
    np.testing.assert_allclose(again.dense.values, model - LR * moved, rtol=1e-5)


@pytest.mark.parametrize("rule", ["dc", "dana_dc"])
def test_entering_and_leaving_at_once_changes_no_bit(make_part: Callable[..., Partition], rule: str) -> None:
    part = make_part(rule, {}, momentum=MOMENTUM)
    np.testing.assert_array_equal(part.export()[1], START.astype(np.float32))


def test_a_correction_that_overflows_is_a_step_that_failed_and_leaves_all_as_it_was(
    make_part: Callable[..., Partition],
) -> None:
    part = make_part("dc", CONSTANT)
    apply(part, 1, (11, 0, gradients(1)))
    before = part.dense.values.copy()
    none = pack_by_owner([RowGrad(np.empty(0, np.int64), np.empty((0, 2), np.float32))], np.zeros(1, np.int32), 1)[0]
    huge = np.full(N, 1e25, np.float32)
    assert part.push(2, 2, [bytearray(huge.tobytes()), bytearray(none.tobytes())], 0, 11)
    applied = part.apply(Apply(1, 2, [PlannedMember(2, 2, 1.0)], 1.0, 0.1, [LR], 0))
    assert "not finite" in applied.failed
    np.testing.assert_array_equal(part.dense.values, before)


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_values_are_kept_for_as_long_as_pushes_need_them() -> None:
    kept = KeptValues(np.zeros(1, np.float32), 0)
    for step in range(1, 200):
        kept.add(np.full(1, step, np.float32), step)
        used = kept.used(max(0, step - 100 if step > 100 else 0))
        assert used is not None and used[0] == max(0, step - 100), "grew too late"


def test_a_push_that_is_suddenly_older_than_what_is_kept_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptValues(np.zeros(1, np.float32), 0)
    for step in range(1, 101):
        kept.add(np.full(1, step, np.float32), step)
    used = [kept.used(dense_step) for dense_step in (69, 20, 21)]
    assert [None if values is None else values[0] for values in used] == [69, 69, 69]
    assert [r.getMessage() for r in caplog.records] == [
        "a push was computed with the dense values of step 20, the oldest kept are of step 69: more are kept from now "
        "on. Such pushes are compared with the oldest"
    ]
    for step in range(101, 200):
        kept.add(np.full(1, step, np.float32), step)
    assert (values := kept.used(101)) is not None and values[0] == 101


def test_older_values_than_there_is_room_for_are_the_oldest_there_are(caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptValues(np.zeros(2, np.float32), 0, at_most_bytes=32)
    for step in range(1, 20):
        kept.add(np.full(2, step, np.float32), step)
    for _ in range(2):
        used = kept.used(3)
        assert used is not None and used[0] == 16
    assert [r.getMessage()[:64] for r in caplog.records] == [
        "a push was computed with the dense values of step 3, the oldest "
    ]
    assert kept.used(-1) is None


# --- the gap ---------------------------------------------------------------------------------------------------------


def test_the_gap_is_the_distance_from_the_values_used_and_is_counted_by_worker(
    make_part: Callable[..., Partition],
) -> None:
    part = make_part("none", {})
    moves = [-LR * gradients(step) for step in (1, 2, 3)]
    apply(part, 1, (11, 0, gradients(1)))
    apply(part, 2, (22, 0, gradients(2)))
    apply(part, 3, (11, 0, gradients(3)))
    apply(part, 4, (22, -1, gradients(4)))  # nobody knows
    gaps = [0.0, np.sqrt(np.mean(moves[0] ** 2)), np.sqrt(np.mean((moves[0] + moves[1]) ** 2))]
    squares = [np.mean(move**2) for move in moves]
    usual = np.sqrt((G * squares[0] + squares[1]) * (1 - G) / (1 - G**2))
    found = part.gaps.by_worker
    assert found[11] == pytest.approx((2, gaps[2], gaps[2] / usual), rel=1e-4)
    assert found[22] == pytest.approx((1, gaps[1], 1.0), rel=1e-4)


def test_under_a_look_ahead_the_gap_is_from_what_the_worker_was_shown(make_part: Callable[..., Partition]) -> None:
    part = make_part("dana_zero", {}, momentum=MOMENTUM)
    apply(part, 1, (11, 0, gradients(1)))
    apply(part, 2, (11, 1, gradients(2)))
    ahead = np.sqrt(np.mean((LR * MOMENTUM * gradients(1)) ** 2))
    assert part.gaps.by_worker[11][1] == pytest.approx(ahead, rel=1e-4)


def test_of_very_many_values_the_gap_is_estimated() -> None:
    n = 20 * SAMPLED
    values = np.random.default_rng(3).standard_normal(n).astype(np.float32)
    meter = GapMeter(np.zeros(n, np.float32), np.zeros(n, np.float32), 0)
    meter.stepped([], values, values, 1)
    gap, in_steps = meter.of(0) or (0.0, 0.0)
    assert gap == pytest.approx(np.sqrt(np.mean(values**2)), rel=0.01)
    assert in_steps == pytest.approx(1.0)


# --- in the simulator ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_simulator_has_the_rules_their_settings_and_the_gap() -> None:
    common: dict[str, Any] = {"workers": 8, "micro_batches": 300, "lr": 0.01}
    losses = {}
    for rule in ("none", "dana_zero", "dana_dc"):
        outcome = run(Experiment(rule=rule, **common))
        losses[rule] = outcome.loss
        assert set(outcome.gaps) == set(range(8))
        assert sum(n for n, _, _ in outcome.gaps.values()) == 300
    assert len(set(losses.values())) == 3 and max(losses.values()) < 1
    weak = run(Experiment(rule="dana_dc", rule_settings={"lambda": 1e-9, "adaptive": False}, **common))
    assert weak.loss == pytest.approx(losses["dana_zero"], rel=1e-4)


@pytest.mark.slow
def test_dana_zero_makes_the_gap_smaller_and_more_workers_make_it_larger() -> None:
    """What its authors say of it, and why delay hurts."""

    def gap(rule: str, workers: int) -> float:
        outcome = run(Experiment(rule=rule, workers=workers, micro_batches=400, lr=0.003))
        return command.mean_gap(outcome)[0]

    assert gap("dana_zero", 8) < 0.7 * gap("none", 8)
    assert gap("none", 4) < gap("none", 8) < gap("none", 16)


def test_settings_of_the_simulator_are_read_and_refused() -> None:
    assert command.parsed_settings(["none", "dc"], ["lambda=0.5", "adaptive=false"]) == CONSTANT
    with pytest.raises(BadInput, match="only dc, dana_dc, look_ahead have settings"):
        command.parsed_settings(["none"], ["lambda=0.5"])
    with pytest.raises(BadInput, match="NAME=VALUE"):
        command.parsed_settings(["dc"], ["lambda"])
    with pytest.raises(BadInput, match="with 0 the rule has no effect"):
        Experiment(rule="dc", rule_settings={"lambda": 0.0})


def test_an_optimizer_without_momentum_has_dc_but_not_dana_dc() -> None:
    update_rules.check("dc", spec())
    with pytest.raises(BadInput, match="dana_dc takes over the optimizer's momentum"):
        update_rules.check("dana_dc", spec())
