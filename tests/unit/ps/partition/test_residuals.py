"""What workers had not sent, as servers have it for checkpoints: of the newest step, through a kill of the server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gba_hvd.ps.messages import JobPosition, ProtocolError
from gba_hvd.ps.partition.checkpoint_state import asynchronous_state
from gba_hvd.ps.partition.push_buffer import BufferedPush
from gba_hvd.ps.partition.residuals import Residuals
from gba_hvd.shm.snapshot_file import SnapshotFile
from recovery import state_codec

NONE = np.empty(0, np.float32)


def residual(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def push(worker: int, serial: int, residual: np.ndarray | None) -> BufferedPush:
    return BufferedPush(serial, serial, NONE, NONE, -1, worker, residual)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "residuals"


def test_the_newest_push_of_a_step_says_what_waits(path: Path) -> None:
    residuals = Residuals.none(path, 1)
    residuals.came(7, residual(1, 2).tobytes())
    residuals.came(8, b"")
    assert residuals.workers == [7, 8]
    np.testing.assert_array_equal(residuals.total(), residual(1, 2))
    residuals.applied(
        [push(7, 5, residual(3, 4)), push(7, 3, residual(9, 9)), push(8, 4, residual(1, 1)), push(9, 6, None)]
    )
    np.testing.assert_array_equal(residuals.total(), residual(4, 5))
    residuals.applied([push(7, 2, residual(0, 0))])  # an older lease that was late
    residuals.came(7, residual(1, 2).tobytes())  # reported again
    np.testing.assert_array_equal(residuals.total(), residual(4, 5))
    residuals.forget(7)
    np.testing.assert_array_equal(residuals.total(), residual(1, 1))
    residuals.forget(8)
    assert residuals.total() is None and residuals.workers == []


def test_a_successor_of_a_killed_server_has_them_and_another_mode_has_not(path: Path) -> None:
    first = Residuals.none(path, 1)
    first.came(7, residual(1, 2).tobytes())
    first.came(8, b"")
    first.applied([push(7, 5, residual(3, 4))])
    again = Residuals.resume(path, 1)  # nothing of the first one was closed
    assert again.workers == [7, 8]
    np.testing.assert_array_equal(again.total(), residual(3, 4))
    again.applied([push(7, 4, residual(0, 0)), push(8, 6, residual(1, 1))])
    np.testing.assert_array_equal(Residuals.resume(path, 1).total(), residual(4, 5))
    assert Residuals.resume(path, 2).workers == []
    assert Residuals.none(path, 2).workers == [] and not path.exists()
    assert Residuals.resume(path, 2).workers == []


def test_a_memory_that_is_full_costs_the_successor_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    residuals = Residuals.none(path, 1)
    residuals.came(7, residual(1, 2).tobytes())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SnapshotFile, "write", full)
    residuals.applied([push(7, 5, residual(3, 4))])
    np.testing.assert_array_equal(residuals.total(), residual(3, 4))
    monkeypatch.undo()
    residuals.applied([push(7, 6, residual(5, 6))])
    np.testing.assert_array_equal(residuals.total(), residual(5, 6))
    assert Residuals.resume(path, 1).workers == [], "rather nothing than what is old"


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"123", "no whole number of float32"),
        (residual(1, 2, 3).tobytes(), "a residual of 3 numbers, others have"),
        (residual(1, np.nan).tobytes(), "not finite"),
    ],
)
def test_what_is_no_residual_is_refused(path: Path, frame: bytes, words: str) -> None:
    residuals = Residuals.none(path, 1)
    residuals.came(7, residual(1, 2).tobytes())
    with pytest.raises(ProtocolError, match=words):
        residuals.came(8, frame)
    assert residuals.workers == [7]


def part(workers: list[int], residual: np.ndarray | None) -> bytes:
    return state_codec.encode({"dense": {}, "workers": workers, "rest": residual})


def test_a_checkpoint_has_the_sum_and_says_of_how_many_it_is_not_known() -> None:
    snapshot, position = state_codec.encode({"position": {}}), JobPosition()
    parts = [part([7], residual(1, 2)), part([8], None), part([9], residual(3, 4))]
    state = state_codec.decode(asynchronous_state(snapshot, parts, position, [7, 8, 10]))
    np.testing.assert_array_equal(state["compression"]["rest"], residual(4, 6))
    assert state["compression"]["missing"] == 1
    nothing = state_codec.decode(asynchronous_state(snapshot, parts[1:2], position, [8]))
    assert nothing["compression"] == {"rest": None, "missing": 0}
    assert "compression" not in state_codec.decode(asynchronous_state(snapshot, parts, position))
