"""What a worker tells the coordinator while it saves the model, and what it reports of a save that was not alone."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from gba_hvd.callbacks import Event
from gba_hvd.modes.parameter_server import ParameterServerMode
from gba_hvd.ps.worker.worker import PsWorker


def a_mode(spans: list[tuple[int, int]], reported: list[Event]) -> ParameterServerMode:
    """spans: of the rows, when they are looked at."""
    memory = SimpleNamespace(step_span=lambda: spans.pop(0))
    tables = SimpleNamespace(memory=memory, config=SimpleNamespace(lease_s=60.0))
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(tables=tables), progress=SimpleNamespace(step=7),
        emit=lambda event, only_here: reported.append(event),
    )  # fmt: skip
    servers: Any = SimpleNamespace(name="gba", contact=SimpleNamespace(saving=False))
    return ParameterServerMode(engine, servers)


def test_others_learn_that_a_worker_saves_the_model_and_nothing_is_reported_of_rows_that_stood_still() -> None:
    reported: list[Event] = []
    mode = a_mode([(7, 7), (7, 7)], reported)
    with mode.while_saved():
        assert mode.servers.contact.saving
    assert not mode.servers.contact.saving and not reported


def test_a_save_while_others_trained_is_reported_with_its_steps() -> None:
    reported: list[Event] = []
    with a_mode([(7, 7), (9, 10)], reported).while_saved():
        pass
    (event,) = reported
    assert (event.kind, event.level, event.data) == ("saved_while_training", "warning", {"first": 7, "last": 10})
    assert "from step 7 to 10" in event.message and "between two epochs" in event.message


def test_a_save_that_fails_is_over_for_the_others() -> None:
    mode = a_mode([(7, 7)], [])
    with pytest.raises(TimeoutError), mode.while_saved():
        raise TimeoutError
    assert not mode.servers.contact.saving


def test_a_worker_that_has_left_the_mode_tells_servers_nothing_of_what_it_saves() -> None:
    worker = PsWorker.__new__(PsWorker)
    worker.client, worker._values = Mock(), Mock()
    worker._tables = Mock(while_saved=lambda: Mock())
    worker.close()
    assert worker._tables.while_saved is contextlib.nullcontext
