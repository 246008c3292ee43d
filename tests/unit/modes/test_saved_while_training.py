"""What a worker tells the coordinator while others are to wait for it, and what it reports where they trained."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import gba_hvd
from gba_hvd.callbacks import Event
from gba_hvd.modes.allreduce import AllreduceMode
from gba_hvd.modes.parameter_server import ParameterServerMode
from gba_hvd.ps.worker.heartbeat import Heartbeat
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.shm.shard_memory import Marks, ShardMemory

Step = tuple[list[int], list[int]]  # of each shard: the last step that was begun, and finished
QUIET: Step = [7, 7], [7, 7]


class Memory(ShardMemory):
    """The marks of shards 0 and 1, without rows."""

    def __init__(self, at: Step) -> None:
        self.at = at

    def marks(self) -> Marks:
        begun, finished = map(np.array, self.at)
        return Marks(np.ones(2), begun, finished, np.zeros(2))

    def ready(self) -> list[int]:
        return [0, 1]


def a_mode(at: Step, reported: list[Event], model_step: int = 7) -> tuple[ParameterServerMode, Memory]:
    memory = Memory(at)
    tables = SimpleNamespace(memory=memory, config=SimpleNamespace(lease_s=60.0))
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(tables=tables), progress=SimpleNamespace(step=7),
        emit=lambda event, only_here: reported.append(event),
    )  # fmt: skip
    servers: Any = SimpleNamespace(name="gba", contact=Heartbeat(1, 0, 0, 1, 1), model_step=model_step)
    return ParameterServerMode(engine, servers), memory


@pytest.mark.parametrize("at", [QUIET, ([7, 6], [7, 6])])
@pytest.mark.parametrize("model_step", [7, -1])
def test_others_learn_that_a_worker_saves_the_model_and_nothing_is_reported_of_rows_that_stood_still(
    at: Step, model_step: int
) -> None:
    """Also where a server that was started again has missed the last step."""
    reported: list[Event] = []
    mode, _ = a_mode(at, reported, model_step)
    with mode.while_saved():
        assert mode.servers.contact.awaited
    assert not mode.servers.contact.awaited and not reported


@pytest.mark.parametrize(
    ("before", "after", "model_step", "steps"),
    [
        (QUIET, ([10, 9], [9, 9]), 7, (7, 10)),
        (([8, 8], [7, 8]), ([8, 8], [7, 8]), 8, (7, 8)),
        (([8, 8], [7, 7]), ([8, 8], [8, 8]), 8, (7, 8)),
        (QUIET, QUIET, 5, (5, 7)),
    ],
    ids=["steps begun and ended", "a step in flight all the while", "a step that ended", "an older dense part"],
)
def test_a_save_while_others_trained_is_reported_with_its_steps(
    before: Step, after: Step, model_step: int, steps: tuple[int, int]
) -> None:
    reported: list[Event] = []
    mode, memory = a_mode(before, reported, model_step)
    with mode.while_saved():
        memory.at = after
    (event,) = reported
    assert (event.kind, event.level) == ("saved_while_training", "warning")
    assert event.data == {"first": steps[0], "last": steps[1]}
    trained, older = "from step {} to {}", "the dense part is of step {}, and the rows are of step {}"
    found = (older if model_step == 5 else trained).format(*steps)
    assert found in event.message and "between two epochs" in event.message


def test_a_save_that_fails_is_over_for_the_others() -> None:
    mode, _ = a_mode(QUIET, [])
    with pytest.raises(TimeoutError), mode.while_saved():
        raise TimeoutError
    assert not mode.servers.contact.awaited


def test_others_wait_for_code_of_the_script_and_for_a_save_in_it() -> None:
    reported: list[Event] = []
    mode, memory = a_mode(QUIET, reported)
    state: Any = SimpleNamespace(engine=SimpleNamespace(mode=mode))
    with gba_hvd.others_wait(state):
        with mode.while_saved():
            pass
        assert mode.servers.contact.message().awaited
    assert not mode.servers.contact.message().awaited and not reported
    with gba_hvd.others_wait(state):
        memory.at = [8, 8], [7, 7]
    (event,) = reported
    assert (event.kind, event.level, event.data) == ("others_trained", "warning", {"first": 7, "last": 8})
    assert event.message.startswith("others trained from step 7 to 8 before others_wait had ended: its code may have")


@pytest.mark.parametrize("mode", [None, AllreduceMode.__new__(AllreduceMode)])
def test_code_of_the_script_runs_as_ever_where_there_are_no_servers(mode: Any) -> None:
    state: Any = SimpleNamespace(engine=SimpleNamespace(mode=mode))
    with gba_hvd.others_wait(state):
        pass


def test_a_worker_that_has_left_the_mode_tells_servers_nothing_of_what_it_saves() -> None:
    worker = PsWorker.__new__(PsWorker)
    worker.client, worker._values = Mock(), Mock()
    worker._tables = Mock(while_saved=Mock)
    worker.close()
    assert worker._tables.while_saved is contextlib.nullcontext
