"""`CheckpointCallback(keep_best=...)`: the step of the best model, and that its checkpoint is due."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from recovery.callback import CheckpointCallback
from recovery.errors import BadInput


def test_the_best_step_is_that_of_the_largest_value_and_of_equals_the_first() -> None:
    callback = CheckpointCallback("memory://x", every_steps=100, keep_best="valid_auc")
    for step, value in ((10, 0.7), (20, math.nan), (25, math.inf), (30, 0.8), (40, 0.8), (50, 0.6)):
        callback.on_metrics(step, {"valid_auc": value, "loss": 9.0})
    assert callback.best_step == 30
    callback = CheckpointCallback("memory://x", every_steps=100, keep_best="-valid_logloss")
    for step, value in ((10, 0.7), (20, 0.5), (30, 0.6)):
        callback.on_metrics(step, {"valid_logloss": value})
    assert callback.best == {"best_step": 20, "best_metric": "valid_logloss", "best_value": 0.5}
    assert CheckpointCallback("memory://x", keep_best="valid_auc").best == {}


def test_its_checkpoint_is_due_at_once_and_once() -> None:
    callback = CheckpointCallback("memory://x", every_steps=100, keep_best="valid_auc")
    callback.count_from(0, 0.0)
    callback.on_metrics(10, {"valid_auc": 0.7})
    assert callback.due(11, 1.0)
    callback.began(11, 1.0)
    assert not callback.due(12, 2.0)
    callback.on_metrics(20, {"valid_auc": 0.6})
    assert not callback.due(21, 3.0), "no better"
    callback.began(30, 4.0)
    callback.on_metrics(30, {"valid_auc": 0.9})
    assert not callback.due(31, 5.0) and callback.best_step == 30, "it was saved just before it was measured"


def test_a_worker_that_becomes_rank_0_saves_the_best_model_unless_that_was_done() -> None:
    for saved_step, is_due in ((471, False), (314, True)):
        callback = CheckpointCallback("memory://x", every_steps=1000, keep_best="valid_auc")
        callback.on_metrics(471, {"valid_auc": 0.7})  # while rank 0 died, or before
        callback.count_from(500, 1.0)
        callback.done(saved_step)  # of the newest checkpoint that it finds
        assert callback.due(501, 2.0) == is_due


def test_a_job_that_resumes_knows_the_best_so_far_unless_it_asks_for_another_metric(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = CheckpointCallback("memory://x", keep_best="valid_auc")
    before.on_metrics(10, {"valid_auc": 0.7})
    after = CheckpointCallback("memory://x", keep_best="valid_auc")
    after.load_state_dict(before.state_dict())
    after.on_metrics(20, {"valid_auc": 0.6})
    assert after.best_step == 10
    other = CheckpointCallback("memory://x", keep_best="test_auc")
    other.load_state_dict(before.state_dict())
    assert other.best_step is None
    none = CheckpointCallback("memory://x")
    none.load_state_dict(before.state_dict())
    for callback in (other, none):
        callback.load_state_dict({})
    assert [record.getMessage().rpartition(", stays ")[2] for record in caplog.records] == [
        "until a value of 'test_auc' is reported", "as long as no metric is named"
    ]  # fmt: skip
    before.load_state_dict(CheckpointCallback("memory://x", keep_best="valid_auc").state_dict())
    assert before.best_step is None, "the job rolled back to a step before the first evaluation"
    before.on_metrics(20, {"valid_auc": 0.1})
    assert before.best_step == 20


@pytest.mark.parametrize("between", ["test_auc", None])
def test_the_best_so_far_outlives_a_launch_that_measured_none_of_its_own(between: str | None) -> None:
    names = ("auc", between, "auc", "auc")
    first, second, third, fourth = (CheckpointCallback("memory://x", keep_best=name) for name in names)
    first.on_metrics(10, {"auc": 0.7})
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())
    third.on_metrics(20, {"auc": 0.6})
    assert third.best_step == 10
    second.on_metrics(20, {"test_auc": 0.6})
    fourth.load_state_dict(second.state_dict())
    assert fourth.best_step == (10 if between is None else None)


def test_a_metric_that_nobody_reports_is_a_warning_of_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    for is_chief in (False, True):
        callback = CheckpointCallback("memory://x", keep_best="vaild_auc")
        callback.on_job(SimpleNamespace(is_chief=is_chief))
        callback.on_metrics(10, {"valid_auc": 0.7})
        callback.on_end("FINISHED", None)
    (record,) = caplog.records
    assert "keep_best='vaild_auc' kept no checkpoint" in record.getMessage()


def test_a_metric_without_a_name_is_refused() -> None:
    with pytest.raises(BadInput, match="keep_best is the name of a metric"):
        CheckpointCallback("memory://x", keep_best="-")
