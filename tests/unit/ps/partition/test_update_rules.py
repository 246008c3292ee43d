"""A server's part under a rule that takes over the momentum: what is shown, what is the model, what a kill leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from gba_hvd import SGD, BadInput, Compression
from gba_hvd.compression.dense_deltas import DenseDeltas
from gba_hvd.embedding.row_gradients import RowGrad, pack_by_owner
from gba_hvd.ps.dense_file import DenseReader
from gba_hvd.ps.messages import Apply, Endpoint, Enter, JobPosition, PlannedMember
from gba_hvd.ps.partition.checkpoint_state import part_state
from gba_hvd.ps.partition.partition import Partition
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.update_rules.dana_zero import DanaZero
from recovery import state_codec

N, LR, MOMENTUM = 6, 0.1, 0.9
START = np.linspace(-1, 1, N).astype(np.float32)
BUFFER = np.linspace(2, 1, N).astype(np.float32)
GRADIENT = np.arange(1, N + 1, dtype=np.float32)
WORKERS = (11, 22)
LOOK = ["dana_zero", "delayed_nesterov"]


def frame(array: np.ndarray) -> bytearray:
    return bytearray(array.tobytes())


@pytest.fixture
def make_part(tmp_path: Path) -> Iterator[Callable[..., Partition]]:
    made: list[Partition] = []
    row_optimizer = SGD(lr=0.1)
    layout = Layout.of({"user": (40, 4)}, row_optimizer.slots, 3, seed=3, init_std=0.1)
    memory = ShardMemory.create_or_open(tmp_path, "part", layout, grace_s=0)
    memory.reserve([0, 1, 2])
    for shard in range(3):
        memory.init_shard(shard, 0)

    def make(rule: str, *, resumed: bool = False, momentum: float = MOMENTUM) -> Partition:
        spec = spec_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(N))], lr=LR, momentum=momentum))
        workers = [(worker, rank, 0, 1) for rank, worker in enumerate(WORKERS)]
        enter = Enter(
            1, [Endpoint(0, 0, "127.0.0.1", 1, 2)], 0, [0, 0, 0], JobPosition(), 64, 16, 8, {"name": "async"}, "global",
            0.1, [LR], [("w", [2, 3], 0)], spec, workers, rule,
        )  # fmt: skip
        if resumed:
            made.append(Partition.resume(enter, tmp_path / "dense", memory, row_optimizer, 1 << 32)[0])
        else:
            state = state_codec.encode([{"momentum_buffer": torch.from_numpy(BUFFER.reshape(2, 3))}])
            made.append(
                Partition.begin(enter, [frame(START), state], tmp_path / "dense", memory, row_optimizer, 1 << 32)
            )
        return made[-1]

    yield make
    for part in made:
        part.close()
    memory.close()


def train(
    part: Partition, step: int, worker: int, living: Sequence[int] = WORKERS, residual: Sequence[np.ndarray] = ()
) -> None:
    none = RowGrad(np.empty(0, np.int64), np.empty((0, 4), np.float32))
    rows = pack_by_owner([none], np.zeros(3, np.int32), 1)[0]
    assert part.push(step, step, [frame(GRADIENT), frame(rows), *map(frame, residual)], step - 1, worker)
    applied = part.apply(Apply(1, step, [PlannedMember(step, step, 1.0)], 1.0, 0.1, [LR], 0, list(living)))
    assert (applied.failed, applied.missing, applied.missed) == ("", [], 0)


def buffer_of(part: Partition) -> np.ndarray:
    state = state_codec.decode(part.export()[2])
    found: np.ndarray = state[0]["momentum_buffer"].numpy().ravel()
    return found


def read_by_a_worker(part: Partition, path: Path) -> np.ndarray:
    reader, out = DenseReader(path / "dense"), np.empty(N, np.float32)
    assert reader.read(out, -1) == part.dense.step
    reader.close()
    return out


@pytest.mark.parametrize("rule", [*LOOK, "dana_slim", "look_ahead"])
def test_entering_and_leaving_at_once_changes_no_bit(make_part: Callable[..., Partition], rule: str) -> None:
    part = make_part(rule)
    np.testing.assert_array_equal(part.export()[1], START)
    np.testing.assert_array_equal(buffer_of(part), BUFFER)


@pytest.mark.parametrize("rule", LOOK)
def test_workers_are_shown_the_look_ahead_and_exports_have_the_model(
    make_part: Callable[..., Partition], tmp_path: Path, rule: str
) -> None:
    part = make_part(rule)
    np.testing.assert_allclose(read_by_a_worker(part, tmp_path), START - LR * MOMENTUM * BUFFER, rtol=1e-5)
    train(part, 1, 11)
    _, model, _ = part.export()
    moved = MOMENTUM * BUFFER / 2 + GRADIENT if rule == "dana_zero" else MOMENTUM * BUFFER + (1 - MOMENTUM) * GRADIENT
    np.testing.assert_allclose(model, START - LR * moved, rtol=1e-5)
    total = BUFFER / 2 + moved if rule == "dana_zero" else moved
    np.testing.assert_allclose(buffer_of(part), total, rtol=1e-5)
    np.testing.assert_allclose(read_by_a_worker(part, tmp_path), model - LR * MOMENTUM * total, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(read_by_a_worker(part, tmp_path), part.dense.shown)


@pytest.mark.parametrize("rule", ["none", "look_ahead"])
def test_look_ahead_hands_over_what_the_optimizer_alone_makes_and_shows_other_values(
    make_part: Callable[..., Partition], tmp_path: Path, rule: str
) -> None:
    """A switch takes over what is exported, bit for bit; the file has what workers compute with."""
    alone = torch.nn.Parameter(torch.from_numpy(START.copy()))
    optimizer = torch.optim.SGD([alone], lr=LR, momentum=MOMENTUM)
    optimizer.state[alone]["momentum_buffer"] = torch.from_numpy(BUFFER.copy())
    part = make_part(rule)
    np.testing.assert_array_equal(read_by_a_worker(part, tmp_path), START)  # no step was seen yet
    for step in (1, 2, 3):
        before = part.export()[1]
        train(part, step, WORKERS[step % 2])
        alone.grad = torch.from_numpy(GRADIENT.copy())
        optimizer.step()
    model = part.export()[1]
    np.testing.assert_array_equal(model, alone.detach().numpy())
    np.testing.assert_array_equal(buffer_of(part), optimizer.state[alone]["momentum_buffer"].numpy())
    ahead = np.float32(0.9) * (model - before) if rule == "look_ahead" else np.float32(0)
    shown = read_by_a_worker(part, tmp_path)
    np.testing.assert_array_equal(shown, ahead + model)
    assert (shown != model).any() == (rule == "look_ahead")


def test_under_look_ahead_a_server_that_was_killed_shows_the_same_values(
    make_part: Callable[..., Partition], tmp_path: Path
) -> None:
    part = make_part("look_ahead")
    train(part, 1, 11)
    model, state, shown = part.export()[1], part.export()[2], part.dense.shown.copy()
    part.close()
    again = make_part("look_ahead", resumed=True)
    np.testing.assert_array_equal(again.export()[1], model)
    assert again.export()[2] == state
    np.testing.assert_array_equal(read_by_a_worker(again, tmp_path), shown)
    again.dense.skip_(2)  # a step that it missed
    np.testing.assert_array_equal(read_by_a_worker(again, tmp_path), shown)


def test_dana_slim_shows_the_model(make_part: Callable[..., Partition], tmp_path: Path) -> None:
    part = make_part("dana_slim")
    train(part, 1, 11)
    np.testing.assert_allclose(part.export()[1], START - LR * GRADIENT, rtol=1e-5)
    np.testing.assert_array_equal(read_by_a_worker(part, tmp_path), part.export()[1])


@pytest.mark.parametrize("rule", [*LOOK, "dana_slim"])
def test_a_server_that_was_killed_goes_on_with_the_same_sum(
    make_part: Callable[..., Partition], tmp_path: Path, rule: str
) -> None:
    part = make_part(rule)
    train(part, 1, 11)
    train(part, 2, 22)
    model, buffer, shown = part.export()[1], buffer_of(part), part.dense.shown.copy()
    part.close()
    again = make_part(rule, resumed=True)
    np.testing.assert_array_equal(again.export()[1], model)
    np.testing.assert_array_equal(buffer_of(again), buffer)
    np.testing.assert_array_equal(read_by_a_worker(again, tmp_path), shown)
    train(again, 3, 22)
    expected = {
        "dana_zero": LR * (MOMENTUM * buffer / 2 + GRADIENT),
        "delayed_nesterov": LR * (MOMENTUM * buffer + (1 - MOMENTUM) * GRADIENT),
        "dana_slim": LR * GRADIENT,
    }[rule]
    np.testing.assert_allclose(again.export()[1], model - expected, rtol=1e-5, atol=1e-6)


def test_the_server_learns_of_the_dead_with_a_step(make_part: Callable[..., Partition]) -> None:
    part = make_part("dana_zero")
    train(part, 1, 11)
    train(part, 2, 22)
    train(part, 3, 11, living=[11])
    assert isinstance(part.rule, DanaZero)
    assert part.rule.workers == [11]


def test_a_step_that_cannot_be_written_leaves_rule_and_values_as_they_were(
    make_part: Callable[..., Partition], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = make_part("dana_zero")
    train(part, 1, 11)
    model, shown, buffer = part.export()[1], part.dense.shown.copy(), buffer_of(part)
    assert isinstance(part.rule, DanaZero)
    before = part.rule.of(22)

    def full(step: int) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(part.dense, "_publish", full)
        none = RowGrad(np.empty(0, np.int64), np.empty((0, 4), np.float32))
        rows = pack_by_owner([none], np.zeros(3, np.int32), 1)[0]
        assert part.push(2, 2, [frame(GRADIENT), frame(rows)], 1, 22)
        applied = part.apply(Apply(1, 2, [PlannedMember(2, 2, 1.0)], 1.0, 0.1, [LR], 0))
    assert "no space left" in applied.failed
    np.testing.assert_array_equal(part.export()[1], model)
    np.testing.assert_array_equal(part.dense.shown, shown)
    np.testing.assert_array_equal(buffer_of(part), buffer)
    np.testing.assert_array_equal(part.rule.of(22), before)


def test_an_optimizer_without_momentum_is_refused_before_anything_is_taken_over(
    make_part: Callable[..., Partition], tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="group 0 of SGD has none"):
        make_part("dana_zero", momentum=0.0)
    assert not (tmp_path / "dense").exists()


def test_who_is_gone_is_forgotten_with_the_next_step(make_part: Callable[..., Partition]) -> None:
    part, late_joiner = make_part("none"), 33
    part.mirrors = DenseDeltas(Compression.topk(0.5), ["w"], [N])
    for worker in (*WORKERS, late_joiner):
        part.mirrors.answer(worker, -1, START, 0)
    train(part, 1, 11)
    assert [part.mirrors.step_of(worker) for worker in (*WORKERS, late_joiner)] == [0, 0, 0]
    train(part, 2, 11, living=[11])
    assert [part.mirrors.step_of(worker) for worker in (*WORKERS, late_joiner)] == [0, -1, 0]


def test_a_residual_counts_from_the_step_of_its_push_on_and_outlives_the_server(
    make_part: Callable[..., Partition],
) -> None:
    part, (first, second, third) = make_part("none"), np.eye(3, 8, dtype=np.float32)
    part.residuals.came(11, frame(first))
    train(part, 1, 11, residual=[second])
    none = pack_by_owner([RowGrad(np.empty(0, np.int64), np.empty((0, 4), np.float32))], np.zeros(3, np.int32), 1)[0]
    assert part.push(2, 2, [frame(GRADIENT), frame(none), frame(third)], 1, 11)  # it waits
    np.testing.assert_array_equal(state_codec.decode(part_state(part))["rest"], second)
    again = make_part("none", resumed=True)
    np.testing.assert_array_equal(state_codec.decode(part_state(again))["rest"], second)
    train(again, 2, 22)
    train(again, 3, 22, living=[22])
    assert state_codec.decode(part_state(again))["rest"] is None
    again.forget_worker(22, finished=True)
    assert again.residuals.workers == []
