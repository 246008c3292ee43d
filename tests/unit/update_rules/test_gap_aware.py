"""The further the parameters have moved, the lighter; those that have not moved change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd import SGD
from gba_hvd.embedding.row_gradients import RowGrad, pack_by_owner
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.coordinator.ledger import Member, StepPlan
from gba_hvd.ps.coordinator.weighed_step import row_damping, weighed
from gba_hvd.ps.messages import Apply, Endpoint, Enter, JobPosition, Measure, PlannedMember
from gba_hvd.ps.partition.partition import Partition, gather
from gba_hvd.ps.partition.push_buffer import BufferedPush, merge_pushes
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.update_rules.gap_aware import GapAware
from gba_hvd.update_rules.rule import Plain, not_damped
from recovery import state_codec

N = 6
GROUPS = np.array([0, 0, 0, 0, 1, 1])
LRS = [0.1, 0.02]


def transcribed(
    steps: list[tuple[np.ndarray, np.ndarray, list[float]]], start: np.ndarray, used: int, of: str
) -> np.ndarray:
    """1 / (1 + gap / C) after these steps (values after, gradient, learning rates), as the formula stands.

    used: how many of the steps were applied to the values the push was computed with.
    """
    s, lr_max, before = np.zeros(N), np.zeros(2), start.astype(np.float64)
    for values, gradient, lrs in steps:
        moved = values.astype(np.float64) - before
        v = {"gradient": gradient, "buffer": moved / np.array(lrs)[GROUPS], "step": moved}[of]
        s = 0.999 * s + (1 - 0.999) * v.astype(np.float64) ** 2
        lr_max = np.maximum(lr_max, lrs)
        before = values.astype(np.float64)
    c = np.sqrt(s / (1 - 0.999 ** len(steps))) + 1e-8
    if of != "step":
        c = lr_max[GROUPS] * c
    theta = [start, *(values for values, _, _ in steps)]
    damped: np.ndarray = 1 / (1 + np.abs(theta[-1].astype(np.float64) - theta[used]) / c)
    return damped


def random_steps(n: int, start: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, list[float]]]:
    rng, values, steps = np.random.default_rng(n), start, []
    for k in range(n):
        gradient = rng.standard_normal(N).astype(np.float32)
        lrs = [lr * (2.0 if k < 2 else 1.0) for lr in LRS]  # a schedule: the largest was at the start
        values = values - np.array(lrs, np.float32)[GROUPS] * gradient
        steps.append((values, gradient, lrs))
    return steps


def follow(gaps: GapAware, steps: list[tuple[np.ndarray, np.ndarray, list[float]]], first: int = 1) -> GapAware:
    for k, (values, gradient, lrs) in enumerate(steps, first):
        gaps.stepped(values, gradient, lrs, k)
    return gaps


@pytest.fixture
def start() -> np.ndarray:
    return np.linspace(-1, 1, N).astype(np.float32)


@pytest.mark.parametrize("of", ["gradient", "buffer", "step"])
@pytest.mark.parametrize("n_steps", [1, 2, 9])
def test_the_damping_is_the_formula(start: np.ndarray, n_steps: int, of: str) -> None:
    steps = random_steps(n_steps, start)
    gaps = follow(GapAware(start, 0, GROUPS, measures=of), steps)
    for used in range(n_steps):
        expected = transcribed(steps, start, used, of)
        found = gaps.damping(used)
        assert found.dense.dtype == np.float32
        np.testing.assert_allclose(found.dense, expected, rtol=1e-4)
        assert found.rows == pytest.approx(expected.mean(), rel=1e-4)
        assert 0 < found.rows < 1


def test_one_usual_step_of_sgd_halves_a_gradient() -> None:
    gaps = GapAware(np.zeros(N, np.float32), 0, GROUPS, measures="gradient")
    gradient = np.ones(N, np.float32)
    gaps.stepped(-np.array(LRS, np.float32)[GROUPS], gradient, LRS, 1)
    np.testing.assert_allclose(gaps.damping(0).dense, np.full(N, 0.5), rtol=1e-5)


def test_with_momentum_the_usual_step_is_that_of_the_largest_learning_rate() -> None:
    """So a schedule that lowers it does not make late gradients count less."""
    gaps, start, buffer = GapAware(np.zeros(N, np.float32), 0, GROUPS, measures="buffer"), np.zeros(N, np.float32), 2.0
    values = start
    for k, lr in enumerate((0.1, 0.1, 0.01, 0.01, 0.0), 1):
        values = values - np.float32(lr * buffer)
        gaps.stepped(values, np.ones(N, np.float32), [lr, lr], k)
        if lr:
            np.testing.assert_allclose(gaps._usual_step(), 0.1 * buffer, rtol=1e-4)
    assert np.isfinite(gaps._usual_step()).all()


@pytest.mark.parametrize("used", [5, 9, -1])
def test_the_newest_values_and_unknown_ones_are_not_damped_at_all(start: np.ndarray, used: int) -> None:
    damping = follow(GapAware(start, 0, GROUPS, measures="gradient"), random_steps(5, start)).damping(used)
    assert damping.dense.tolist() == [1.0]
    assert damping.rows == 1.0


def test_values_that_came_back_to_where_they_were_have_no_gap(start: np.ndarray) -> None:
    gaps = GapAware(start, 0, GROUPS, measures="step")
    gaps.stepped(start + 1, start, LRS, 1)
    gaps.stepped(start, start, LRS, 2)
    assert (gaps.damping(0).dense == 1.0).all()
    assert gaps.damping(0).rows == 1.0
    assert gaps.damping(1).rows < 1.0


def test_a_step_that_was_missed_here_left_the_values_as_they_were(start: np.ndarray) -> None:
    steps = random_steps(2, start)
    gaps = GapAware(start, 0, GROUPS, measures="gradient")
    gaps.stepped(*steps[0], 1)
    gaps.stepped(*steps[1], 4)
    assert gaps.damping(3) is gaps.damping(1)
    assert gaps.damping(3).rows < 1.0


def test_only_the_last_values_are_kept_and_older_pushes_are_measured_against_the_oldest(start: np.ndarray) -> None:
    gaps = follow(GapAware(start, 0, GROUPS, measures="gradient", kept=3), random_steps(9, start))
    assert gaps.damping(0) is gaps.damping(7)
    assert gaps.damping(8) is not gaps.damping(7)


def test_a_server_that_begins_again_counts_older_pushes_in_full_at_first(start: np.ndarray) -> None:
    gaps = GapAware(start, 40, GROUPS, measures="gradient")
    assert gaps.damping(12).rows == 1.0
    follow(gaps, random_steps(1, start), first=41)
    assert gaps.damping(12) is gaps.damping(40)
    assert gaps.damping(12).rows < 1.0


def test_a_learning_rate_of_0_makes_any_gap_endless_and_none_out_of_none(start: np.ndarray) -> None:
    gaps = GapAware(start, 0, GROUPS, measures="gradient")
    gaps.stepped(np.append(start[:3], start[3:] + 1).astype(np.float32), start, [0.0, 0.0], 1)
    assert gaps.damping(0).dense.tolist() == [1, 1, 1, 0, 0, 0]


def test_a_server_without_dense_parameters_damps_no_row() -> None:
    nothing = np.empty(0, np.float32)
    gaps = GapAware(nothing, 0, np.empty(0, np.int32), measures="gradient")
    gaps.stepped(nothing, nothing, LRS, 1)
    assert gaps.damping(0).rows == 1.0


# --- in a step -------------------------------------------------------------------------------------------------------


def rows_of(value: float) -> np.ndarray:
    grad = RowGrad(np.array([3, 1], np.int64), np.full((2, 4), value, np.float32))
    return pack_by_owner([grad], np.zeros(3, np.int32), 1)[0]


def frame(array: np.ndarray) -> bytearray:
    return bytearray(array.tobytes())


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=N, max_size=N), st.floats(0.01, 1))
def test_pushes_without_a_gap_add_up_bit_for_bit_as_without_gap_aware(gradient: list[float], weight: float) -> None:
    steps = random_steps(4, np.zeros(N, np.float32))
    gaps = follow(GapAware(np.zeros(N, np.float32), 0, GROUPS, measures="gradient"), steps)
    pushes = [(BufferedPush(i, i, np.array(gradient, np.float32), rows_of(i), 4), weight) for i in range(3)]
    with_it, without = (merge_pushes(pushes, N, [4], damping) for damping in (gaps.damping, not_damped))
    np.testing.assert_array_equal(with_it[0], without[0])
    np.testing.assert_array_equal(with_it[1][0].values, without[1][0].values)


def test_a_stale_push_is_damped_element_by_element_and_its_rows_by_the_mean(start: np.ndarray) -> None:
    gaps = follow(GapAware(start, 0, GROUPS, measures="gradient"), random_steps(4, start))
    gradient, by = np.arange(N, dtype=np.float32), gaps.damping(1)
    fresh = BufferedPush(0, 1, gradient, rows_of(1.0), 4)
    stale = BufferedPush(1, 2, gradient, rows_of(1.0), 1)
    dense, rows = merge_pushes([(fresh, 1.0), (stale, 0.5)], N, [4], gaps.damping, row_damping=[1.0, by.rows])
    np.testing.assert_allclose(dense, gradient + 0.5 * by.dense * gradient, rtol=1e-6)
    np.testing.assert_allclose(rows[0].values, np.full((2, 4), 1 + 0.5 * by.rows), rtol=1e-6)


@pytest.fixture
def make_part(tmp_path: Path) -> Iterator[Callable[..., Partition]]:
    """A server's part with two dense tensors and one table, and real shard memory."""
    made: list[Partition] = []

    def make(optimizer: str = "SGD", resumed: bool = False, rule: str = "gap_aware", mode: str = "gba") -> Partition:
        row_optimizer = SGD(lr=0.1)
        layout = Layout.of({"user": (40, 4)}, row_optimizer.slots, 3, seed=3, init_std=0.1)
        memory = ShardMemory.create_or_open(tmp_path, f"part-{len(made) - resumed}", layout, grace_s=0)
        kind = getattr(torch.optim, optimizer)
        params = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(2))]
        spec = spec_of(kind([{"params": [p], "lr": lr} for p, lr in zip(params, LRS, strict=True)]))
        enter = Enter(
            1, [Endpoint(0, 0, "127.0.0.1", 1, 2)], 0, [0, 0, 0], JobPosition(), 64, 16, 8,
            {"name": mode}, "global", 0.1, LRS, [("w", [4], 0), ("b", [2], 1)], spec, rule=rule,
        )  # fmt: skip
        path = tmp_path / f"ps-{len(made) - resumed}.dense"
        if resumed:
            part, _ = Partition.resume(enter, path, memory, row_optimizer, 1 << 32)
        else:
            memory.reserve([0, 1, 2])
            for shard in range(3):
                memory.init_shard(shard, 0)
            frames = [frame(np.zeros(N, np.float32)), state_codec.encode([{}, {}])]
            part = Partition.begin(enter, frames, path, memory, row_optimizer, 1 << 32)
        made.append(part)
        return part

    yield make
    for part in made:
        part.close()


GRADIENT = np.arange(1, N + 1, dtype=np.float32)


def train(part: Partition, step: int, dense_steps: list[int]) -> np.ndarray:
    """A step of pushes computed with the values of these steps; the dense values after it."""
    for micro, dense_step in enumerate(dense_steps):
        assert part.push(micro, 10 * step + micro, [frame(GRADIENT), frame(rows_of(1.0))], dense_step)
    members = [PlannedMember(micro, 10 * step + micro, 1.0) for micro in range(len(dense_steps))]
    asked = part.measure(Measure(1, step, members, 1 / len(dense_steps), damping=True))
    factors = {micro: factor for micro, _, factor in asked.damping or []}
    members = [PlannedMember(m.micro, m.serial, m.weight, factors[m.micro]) for m in members]
    applied = part.apply(Apply(1, step, members, 1 / len(dense_steps), 0.1, LRS, 0))
    assert (applied.failed, applied.missing, applied.missed) == ("", [], 0)
    return part.dense.values.copy()


def rows_in(part: Partition, *keys: int) -> np.ndarray:
    """float32 [n, dim]"""
    return gather(part._memory, part.mine, [frame(np.array(keys))])[0]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_steps_of_fresh_pushes_are_bit_for_bit_those_without_gap_aware(
    make_part: Callable[..., Partition], optimizer: str
) -> None:
    damped, plain = make_part(optimizer), make_part(optimizer, rule="none")
    for step in range(1, 5):
        newest = [step - 1, step - 1]
        np.testing.assert_array_equal(train(damped, step, newest), train(plain, step, newest))
    np.testing.assert_array_equal(rows_in(damped, 0, 1, 2), rows_in(plain, 0, 1, 2))


def test_a_server_damps_a_push_that_was_computed_with_older_values(make_part: Callable[..., Partition]) -> None:
    part = make_part()
    first = train(part, 1, [0])
    rows_before = rows_in(part, 3)
    second = train(part, 2, [0])
    # One step of SGD lies between: the gap is lr |g|, which is the usual step.
    np.testing.assert_allclose(second - first, 0.5 * first, rtol=1e-5)
    np.testing.assert_allclose(rows_in(part, 3) - rows_before, np.full((1, 4), -0.05), rtol=1e-4)


def test_with_adam_the_usual_step_is_the_measured_one(make_part: Callable[..., Partition]) -> None:
    part = make_part("Adam")
    train(part, 1, [0])
    np.testing.assert_allclose(part.rule.damping(0).dense, np.full(N, 0.5), rtol=1e-5)


def test_other_rules_keep_no_old_values(make_part: Callable[..., Partition]) -> None:
    assert type(make_part(rule="none").rule) is Plain
    assert type(make_part(mode="async").rule) is GapAware


def test_a_server_that_was_killed_goes_on_with_a_fresh_start(make_part: Callable[..., Partition]) -> None:
    part = make_part()
    train(part, 1, [0])
    values = train(part, 2, [1])
    part.close()
    again = make_part(resumed=True)
    np.testing.assert_array_equal(again.dense.values, values)
    assert train(again, 3, [0])[0] == pytest.approx(values[0] - 0.1)  # in full
    assert again.rule.damping(2).rows == pytest.approx(0.5, rel=1e-5)


# --- several servers -------------------------------------------------------------------------------------------------

DENSE_SIZES = [5, 3, 0]  # numbers of the dense part at each of three servers
START_OF = [np.linspace(-1, 1, n).astype(np.float32) for n in DENSE_SIZES]


class Fleet:
    """Parts of one model at some servers, and the coordinator's part of a step with them."""

    def __init__(self, folder: Path, at_server: list[list[int]]) -> None:
        """at_server: for each server which of the tensors of `DENSE_SIZES` it has."""
        folder.mkdir()
        optimizer, self.at_server = SGD(lr=1.0), at_server
        layout = Layout.of({"user": (40, 4)}, optimizer.slots, 3, seed=3, init_std=0.1)
        self.owner = np.array([shard % len(at_server) for shard in range(3)], np.int32)
        self.memory = ShardMemory.create_or_open(folder, "fleet", layout, grace_s=0)
        self.memory.reserve([0, 1, 2])
        for shard in range(3):
            self.memory.init_shard(shard, 0)
        spec = spec_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
        servers = [Endpoint(0, i, "127.0.0.1", 1, 2) for i in range(len(at_server))]
        self.parts = []
        for me, tensors in enumerate(at_server):
            values = np.concatenate([np.empty(0, np.float32), *(START_OF[t] for t in tensors)])
            self.enter = Enter(
                1, servers, me, self.owner.tolist(), JobPosition(), 64, 16, 8, {"name": "gba"}, "global", 1.0, [0.1],
                [(f"w{t}", [DENSE_SIZES[t]], 0) for t in tensors], spec, rule="gap_aware",
            )  # fmt: skip
            frames = [frame(values), state_codec.encode([{} for _ in tensors])]
            path = folder / f"dense{me}"
            self.parts.append(Partition.begin(self.enter, frames, path, self.memory, optimizer, 1 << 32))

    def step(self, number: int, dense_steps: list[int]) -> list[float]:
        """A step of pushes computed with the values of these steps; what their rows were multiplied by."""
        for micro, dense_step in enumerate(dense_steps):
            words, counts = pack_by_owner([every_row()], self.owner, len(self.parts))
            for part, tensors, rows in zip(
                self.parts, self.at_server, np.split(words, np.cumsum(counts)[:-1]), strict=True
            ):
                gradient = np.concatenate([np.empty(0, np.float32), *(START_OF[t] * number for t in tensors)])
                assert part.push(micro, 10 * number + micro, [frame(gradient), frame(rows)], dense_step)
        plan = StepPlan(number, tuple(Member(m, 10 * number + m, 1.0, 8, 0) for m in range(len(dense_steps))), 16)
        measure = Measure(1, number, weighed(plan, 8, Discipline(), "global").members, 0.5, damping=True)
        answers = [line for part in self.parts for line in part.measure(measure).damping or []]
        plan = replace(plan, row_damping=tuple(row_damping(plan, answers)))
        members = weighed(plan, 8, Discipline(), "global").members
        for part in self.parts:
            applied = part.apply(Apply(1, number, members, 0.5, 1.0, [0.1], 99))
            assert (applied.failed, applied.missing, applied.missed) == ("", [], 0)
        return [member.row_damping for member in members]

    def rows(self) -> np.ndarray:
        return gather(self.memory, np.ones(3, bool), [frame(np.arange(40, dtype=np.int64))])[0]

    def close(self) -> None:
        for part in self.parts:
            part.close()
        self.memory.close()


def every_row() -> RowGrad:
    return RowGrad(np.arange(40, dtype=np.int64), np.ones((40, 4), np.float32))


@pytest.mark.parametrize("at_server", [[[0], [1]], [[0, 1], []], [[], [0, 1]], [[1], [2], [0]]], ids=str)
def test_rows_are_damped_alike_on_every_server_as_on_one(tmp_path: Path, at_server: list[list[int]]) -> None:
    one, some = Fleet(tmp_path / "one", [[0, 1]]), Fleet(tmp_path / "some", at_server)
    try:
        begun = one.rows()
        for number, dense_steps in enumerate([[0, 0], [1, 0], [2, 1], [3, 0]], start=1):
            factors = one.step(number, dense_steps)
            np.testing.assert_allclose(some.step(number, dense_steps), factors, rtol=1e-6)
            assert factors[0] == 1.0
            assert (factors[1] < 0.7) == (dense_steps[1] < number - 1), "the old one is damped, the fresh one is not"
            before, begun = begun, one.rows()
            np.testing.assert_allclose(begun - before, np.full((40, 4), -sum(factors) / 2), rtol=1e-4)
            np.testing.assert_allclose(some.rows(), begun, rtol=1e-5, atol=1e-6)
    finally:
        one.close()
        some.close()


def test_a_push_that_some_servers_lost_is_damped_as_the_others_say() -> None:
    plan = StepPlan(1, (Member(4, 1, 1.0, 8, 0), Member(5, 2, 1.0, 8, 0), Member(6, 3, 1.0, 8, 0)), 24)
    found = row_damping(plan, [(4, 30, 0.5), (4, 10, 0.9), (5, 10, 0.9), (4, 0, 1.0)])
    assert found == [pytest.approx(0.6), pytest.approx(0.9), 1.0]
    nobody_has_dense = [(4, 0, 0.5), (4, 0, 0.7)]
    assert row_damping(plan, nobody_has_dense)[0] == pytest.approx(0.6)
