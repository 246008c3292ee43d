"""Which points a run takes that it may have already, and what it has of steps that were trained again."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.entities import Metric, RunTag

from gba_hvd.tracking.mlflow_run import JobRun
from gba_hvd.tracking.records import LogBatch, Point
from gba_hvd.tracking.recovery_records import RESUMED_FROM


class StoredRun:
    """A client of MLflow with one run. It keeps what it is sent, also twice."""

    def __init__(self) -> None:
        self.metrics: list[Metric] = []
        self.tags: dict[str, str] = {}

    def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
        return [one for one in self.metrics if one.key == key]

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric] = (), tags: Sequence[RunTag] = (), **others: Any
    ) -> None:
        self.metrics += metrics
        self.tags |= {tag.key: tag.value for tag in tags}

    def sender(self) -> JobRun:
        """A new one: what it has not sent itself it has to ask for."""
        info = SimpleNamespace(run_id="r", experiment_id="0", run_name="nights")
        run: Any = SimpleNamespace(info=info, data=SimpleNamespace(tags=dict(self.tags), params={}))
        client: Any = self
        return JobRun(client, run, "1:h", joined=True)

    def values(self, key: str) -> list[float]:
        return [one.value for one in self.get_metric_history("r", key)]


def batch(*points: Point) -> LogBatch:
    return LogBatch(0, list(points))


@pytest.fixture
def stored() -> StoredRun:
    """A launch resumed at step 200 and reported a score before its first step."""
    stored = StoredRun()
    stored.sender().send(batch(Point(RESUMED_FROM, 200.0, 1000, 200), Point("before_auc", 0.6903, 1500, 200)))
    return stored


def test_a_score_at_the_step_of_a_later_resume_is_taken(stored: StoredRun):
    stored.sender().send(batch(Point(RESUMED_FROM, 200.0, 3000, 200), Point("before_auc", 0.6897, 3500, 200)))
    assert stored.values("before_auc") == [0.6903, 0.6897]


def test_what_a_sender_repeats_after_a_crash_is_not_taken_again(stored: StoredRun):
    again = batch(Point(RESUMED_FROM, 200.0, 3000, 200), Point("before_auc", 0.6897, 3500, 200))
    for _ in range(3):
        stored.sender().send(again)
    assert stored.values("before_auc") == [0.6903, 0.6897]
    assert stored.values(RESUMED_FROM) == [200.0, 200.0]


def test_what_another_worker_measured_at_that_step_is_not_taken_again(stored: StoredRun):
    """It takes over from the one that reported, and has the time of its own clock."""
    stored.sender().send(batch(Point("before_auc", 0.6903, 1503, 200)))
    stored.sender().send(batch(Point(RESUMED_FROM, 200.0, 3000, 200), Point("before_auc", 0.6903, 1503, 200)))
    assert stored.values("before_auc") == [0.6903]
