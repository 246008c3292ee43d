"""The servers' central copy of the dense parameters: what blends into it, what is ignored, what survives the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gba_hvd.ps.dense_file import DenseReader, DenseTensor
from gba_hvd.ps.messages import Blend, NotFinite, ProtocolError, Publish, SubmitReplica
from gba_hvd.ps.partition.central_copy import CentralCopy
from gba_hvd.ps.partition.dense_part import DensePart
from gba_hvd.torch_optimizers import spec_of
from recovery import state_codec

TENSORS = [DenseTensor("w", (2,), 0), DenseTensor("b", (), 0)]
N = 3


@pytest.fixture
def dense(tmp_path: Path) -> DensePart:
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=0.1)
    return DensePart.create(tmp_path / "dense", TENSORS, spec_of(optimizer), np.zeros(N, np.float32), [{}, {}], step=5)


def floats(*values: float) -> bytes:
    return np.array(values, dtype=np.float32).tobytes()


def state(step: float, moment: float) -> bytes:
    shapes: list[tuple[int, ...]] = [(2,), ()]
    return state_codec.encode([{"step": torch.tensor(step), "exp_avg": torch.full(shape, moment)} for shape in shapes])


def blend(number: int = 1, phase: int = 0, worker: int = 1, elasticity: float = 0.5) -> Blend:
    return Blend(worker, 7, number, phase, elasticity)


def hand_in(worker: int, phase: int, early: bool = False) -> SubmitReplica:
    return SubmitReplica(worker, 7, phase, early)


def test_a_blend_moves_the_copy_by_its_share_and_answers_with_it(dense: DensePart):
    central = CentralCopy(dense, 7)
    assert central.blend(blend(), [floats(2, 4, 8)]).tolist() == [1, 2, 4]
    assert central.blend(blend(worker=2), [floats(3, 2, 0)]).tolist() == [2, 2, 2]
    assert dense.values.tolist() == [2, 2, 2] and dense.step == 5


def test_a_blend_that_is_repeated_counts_once(dense: DensePart):
    central = CentralCopy(dense, 7)
    central.blend(blend(), [floats(2, 4, 8)])
    assert central.blend(blend(), [floats(2, 4, 8)]).tolist() == [1, 2, 4]


def test_the_copy_becomes_the_mean_of_what_was_submitted_once_each(dense: DensePart):
    central = CentralCopy(dense, 7)
    central.submit(hand_in(1, 1), [floats(1, 2, 3), state(10, 1.0)])
    central.submit(hand_in(1, 1), [floats(1, 2, 3), state(10, 1.0)])
    central.submit(hand_in(2, 1), [floats(3, 4, 5), state(30, 3.0)])
    assert dense.values.tolist() == [0, 0, 0], "not before somebody asks for it"
    central.gather(1)
    central.gather(1)
    assert dense.values.tolist() == [2, 3, 4]
    assert [(float(s["step"]), s["exp_avg"].tolist()) for s in dense.state()] == [(30.0, [2.0, 2.0]), (30.0, 2.0)]


def test_what_comes_after_the_mean_was_made_changes_nothing_until_the_next_phase(dense: DensePart):
    central = CentralCopy(dense, 7)
    central.submit(hand_in(1, 1), [floats(2, 2, 2), state(1, 1.0)])
    central.gather(1)
    central.blend(blend(phase=0), [floats(9, 9, 9)])
    central.publish(Publish(7, 0), [floats(9, 9, 9), b""])
    central.submit(hand_in(2, 1), [floats(9, 9, 9), state(1, 1.0)])
    central.gather(1)
    assert dense.values.tolist() == [2, 2, 2]
    assert central.blend(blend(number=2, phase=2), [floats(4, 4, 4)]).tolist() == [3, 3, 3]


def test_whoever_submits_when_the_mean_is_made_learns_so_and_whoever_repeats_is_not(dense: DensePart, tmp_path: Path):
    central = CentralCopy(dense, 7)
    in_time = hand_in(1, 1), [floats(2, 2, 2), state(1, 1.0)]
    late = hand_in(2, 1), [floats(9, 9, 9), state(1, 1.0)]
    assert central.submit(*in_time)
    central.gather(1)
    for server in (central, CentralCopy(DensePart.open(tmp_path / "dense"), 7)):
        assert server.submit(*in_time)
        assert not server.submit(*late)
        assert server.gather(1)[0].tolist() == [2, 2, 2]
    central.gather(3)
    assert not central.submit(*in_time), "of a phase long over"


def test_what_a_worker_submitted_early_counts_unless_it_comes_back(dense: DensePart):
    central = CentralCopy(dense, 7)
    central.submit(hand_in(1, 1, early=True), [floats(1, 1, 1), state(1, 1.0)])
    central.submit(hand_in(1, 1, early=True), [floats(2, 2, 2), state(2, 2.0)])
    central.submit(hand_in(2, 1, early=True), [floats(0, 0, 0), state(1, 1.0)])
    central.submit(hand_in(2, 1), [floats(6, 6, 6), state(5, 4.0)])
    assert central.submit(hand_in(2, 1, early=True), [floats(0, 0, 0), state(1, 1.0)]), "a request on its way for long"
    central.gather(1)
    assert dense.values.tolist() == [4, 4, 4] and float(dense.state()[0]["step"]) == 5
    assert central.submit(hand_in(1, 1, early=True), [floats(2, 2, 2), state(2, 2.0)]), "it is in the mean"


def test_an_early_replica_counts_once_though_the_mean_is_made_twice(
    dense: DensePart, monkeypatch: pytest.MonkeyPatch
) -> None:
    central, replace, failures = CentralCopy(dense, 7), DensePart.replace_, [OSError("no room")]
    central.submit(hand_in(1, 1, early=True), [floats(1, 1, 1), state(1, 1.0)])
    central.submit(hand_in(2, 1), [floats(4, 4, 4), state(1, 1.0)])

    def without_room(self: DensePart, *what: Any) -> None:
        if failures:
            raise failures.pop()
        replace(self, *what)

    monkeypatch.setattr(DensePart, "replace_", without_room)
    with pytest.raises(OSError, match="no room"):
        central.gather(1)
    assert central.gather(1)[0].tolist() == [2.5, 2.5, 2.5]


def test_whoever_asks_late_gets_the_mean_though_the_copy_has_moved_on(dense: DensePart):
    central = CentralCopy(dense, 7)
    central.submit(hand_in(1, 1), [floats(2, 2, 2), state(1, 1.0)])
    first, _ = central.gather(1)
    central.blend(blend(phase=2), [floats(4, 4, 4)])
    late, moments = central.gather(1)
    assert first.tolist() == late.tolist() == [2, 2, 2] and dense.values.tolist() == [3, 3, 3]
    assert float(state_codec.decode(moments)[0]["step"]) == 1


def test_without_anything_submitted_the_copy_stays(dense: DensePart):
    central = CentralCopy(dense, 7)
    central.publish(Publish(7, 0), [floats(1, 2, 3), b""])
    central.gather(1)
    assert dense.values.tolist() == [1, 2, 3]


def test_values_and_state_are_published_together_or_apart(dense: DensePart):
    central = CentralCopy(dense, 7)
    central.publish(Publish(7, 0), [b"", state(4, 2.0)])
    assert dense.values.tolist() == [0, 0, 0] and float(dense.state()[0]["step"]) == 4
    central.publish(Publish(7, 0), [floats(1, 2, 3), b""])
    assert dense.values.tolist() == [1, 2, 3] and float(dense.state()[0]["step"]) == 4


def test_a_successor_finds_the_last_blend(dense: DensePart, tmp_path: Path):
    CentralCopy(dense, 7).blend(blend(), [floats(2, 4, 8)])
    successor = DensePart.open(tmp_path / "dense")
    assert successor.values.tolist() == [1, 2, 4] and successor.step == 5


def test_a_successor_answers_with_the_mean_that_was_reported_though_the_copy_has_moved_on(
    dense: DensePart, tmp_path: Path
):
    central = CentralCopy(dense, 7)
    central.submit(hand_in(1, 1), [floats(2, 2, 2), state(1, 1.0)])
    central.gather(1)
    central.blend(blend(phase=2), [floats(4, 4, 4)])
    successor = CentralCopy(DensePart.open(tmp_path / "dense"), 7)
    assert successor.gather(1)[0].tolist() == [2, 2, 2]
    assert successor.blend(blend(number=2, phase=2), [floats(5, 5, 5)]).tolist() == [4, 4, 4]
    assert successor.blend(blend(number=3, phase=1), [floats(9, 9, 9)]).tolist() == [4, 4, 4]


def test_a_mean_of_an_earlier_session_is_none(dense: DensePart, tmp_path: Path):
    before = CentralCopy(dense, 6)
    before.submit(hand_in(1, 9), [floats(2, 2, 2), state(1, 1.0)])
    before.gather(9)
    central = CentralCopy(dense, 7)
    assert central.blend(blend(phase=0), [floats(4, 4, 4)]).tolist() == [3, 3, 3]


def test_readers_see_a_blend_though_the_step_is_the_same(dense: DensePart, tmp_path: Path):
    reader, out = DenseReader(tmp_path / "dense"), np.empty(N, np.float32)
    assert reader.read(out, -1) == 5
    CentralCopy(dense, 7).blend(blend(), [floats(2, 4, 8)])
    assert reader.read(out, -1) == 5 and out.tolist() == [1, 2, 4]


def test_steps_of_the_rows_leave_the_copy_alone(dense: DensePart):
    central = CentralCopy(dense, 7)
    central.blend(blend(), [floats(2, 4, 8)])
    dense.skip_(6)
    assert dense.values.tolist() == [1, 2, 4] and dense.step == 6


@pytest.mark.parametrize(
    ("request_", "frames", "words"),
    [
        (blend(elasticity=0.0), [floats(1, 2, 3)], "elasticity"),
        (blend(elasticity=float("nan")), [floats(1, 2, 3)], "elasticity"),
        (blend(), [floats(1, 2)], "2 numbers, the tensors here have 3"),
        (blend(), [], "1 frames, got 0"),
        (blend(), [floats(1, float("nan"), 3)], "replica has numbers that are not finite: w"),
        (hand_in(1, 1), [floats(1, 2, 3), b"?"], "optimizer state"),
        (hand_in(1, 1), [floats(1, 2, 3), state_codec.encode([{}])], "list of 2 dicts"),
        (Publish(7, 0), [b"", b"?"], "optimizer state"),
        (Publish(7, 0), [floats(1, 2, 3)], "two frames, got 1"),
    ],
)
def test_what_is_not_right_is_refused_and_changes_nothing(
    dense: DensePart, request_: Any, frames: list[Any], words: str
):
    central = CentralCopy(dense, 7)
    act = {Blend: central.blend, SubmitReplica: central.submit, Publish: central.publish}[type(request_)]
    with pytest.raises(ProtocolError, match=words):
        act(request_, frames)
    central.gather(1)
    assert dense.values.tolist() == [0, 0, 0]


def test_a_refused_replica_is_distinguished_from_a_message_that_makes_no_sense(dense: DensePart):
    with pytest.raises(NotFinite):
        CentralCopy(dense, 7).blend(blend(), [floats(1, float("inf"), 3)])
