"""`CheckpointCallback(keep_best=...)`: the step of the best model, and that its checkpoint is due."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from recovery.callback import CheckpointCallback
from recovery.catalog.best_so_far import BestSoFar
from recovery.errors import BadInput


def test_the_best_step_is_that_of_the_largest_value_and_of_equals_the_first() -> None:
    callback = CheckpointCallback("memory://x", every_steps=100, keep_best="valid_auc")
    for step, value in ((10, 0.7), (20, math.nan), (25, math.inf), (30, 0.8), (40, 0.8), (50, 0.6)):
        callback.on_metrics(step, {"valid_auc": value, "loss": 9.0})
        callback.began(step, 1.0)
    assert callback.best_step == 30
    callback = CheckpointCallback("memory://x", every_steps=100, keep_best="-valid_logloss")
    for step, value in ((10, 0.7), (20, 0.5), (30, 0.6)):
        callback.on_metrics(step, {"valid_logloss": value})
        callback.began(step, 1.0)
    assert callback.best == {"best_step": 20, "best_metric": "valid_logloss", "best_value": 0.5, "best_until": 30}
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
    before.began(10, 1.0)
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


def keeps_best(metric: str = "auc") -> CheckpointCallback:
    return CheckpointCallback("memory://x", every_steps=1000, keep_best=metric)


def reports(callback: CheckpointCallback, *scores: tuple[int, float], saves: bool = True) -> None:
    for step, value in scores:
        callback.on_metrics(step, {"auc": value})
        if saves and callback.best_is_due(step):
            callback.began(step, 1.0)
            callback.done(step)


def test_a_best_model_that_was_not_saved_before_a_worse_one_is_named_and_no_later_checkpoint_bears_its_score() -> None:
    callback = keeps_best()
    reports(callback, (10, 0.6))
    reports(callback, (20, 0.9), saves=False)
    assert callback.best["best_step"] == 20 and callback.unsaved_best is None, "the next save may still be of it"
    assert callback.best_so_far is not None
    callback.best_so_far.why_not = "server 0 is not up"
    reports(callback, (30, 0.7))
    assert callback.unsaved_best is not None
    assert callback.unsaved_best.words == "the best model, auc 0.9000 of step 20, was not saved: server 0 is not up"
    assert callback.best == {
        "best_step": 30, "best_value": 0.7, "best_metric": "auc",
        "best_unsaved_step": 20, "best_unsaved_value": 0.9, "best_unsaved_why": "server 0 is not up",
    }  # fmt: skip
    reports(callback, (40, 0.65))
    assert callback.best["best_step"] == 30 and callback.best["best_until"] == 40
    reports(callback, (50, 0.9))
    assert callback.best == {"best_step": 50, "best_value": 0.9, "best_metric": "auc"}, "it is saved now, as good"


def test_the_best_one_before_counts_again_where_a_better_one_was_not_saved() -> None:
    callback = keeps_best("-auc")
    reports(callback, (10, 0.6))
    reports(callback, (20, 0.1), (30, 0.7), saves=False)
    assert callback.best["best_step"] == 10 and callback.best["best_value"] == 0.6
    assert callback.best["best_unsaved_value"] == 0.1


def test_a_save_of_the_best_model_that_fails_makes_it_unsaved_and_another_failure_does_not() -> None:
    for fails_late in (False, True):
        callback = keeps_best()
        callback.on_metrics(10, {"auc": 0.8})
        callback.began(10, 1.0)
        if not fails_late:
            callback.failed("the disk is full")
        callback.on_metrics(20, {"auc": 0.7})
        if fails_late:
            callback.failed("the disk is full")
        assert callback.unsaved_best is not None and callback.unsaved_best.why == "the disk is full"
    saved = keeps_best()
    reports(saved, (10, 0.8))
    saved.began(15, 1.0)
    saved.failed("the disk is full")
    reports(saved, (20, 0.7))
    assert saved.unsaved_best is None and saved.best["best_step"] == 10


def test_a_checkpoint_after_a_worse_evaluation_does_not_make_the_best_model_saved() -> None:
    callback = keeps_best()
    callback.on_metrics(10, {"auc": 0.8})
    callback.began(11, 1.0)
    callback.on_metrics(20, {"auc": 0.7})
    callback.done(25)  # the one of step 11 was never reported
    callback.began(30, 1.0)
    callback.failed("the disk is full")
    assert callback.unsaved_best is not None and callback.unsaved_best.step == 10


def test_what_is_saved_and_what_was_missed_outlives_a_launch() -> None:
    before = keeps_best()
    reports(before, (10, 0.6))
    reports(before, (20, 0.9), (30, 0.5), saves=False)
    after = keeps_best()
    after.load_state_dict(before.state_dict())
    after.restored(30, 1.0)
    assert after.best == before.best and after.unsaved_best == before.unsaved_best
    reports(after, (40, 0.55))
    assert after.best["best_step"] == 10


def test_a_checkpoint_has_the_best_model_that_its_own_state_calls_yet_to_be_saved() -> None:
    before = keeps_best()
    before.on_metrics(10, {"auc": 0.6})
    after = keeps_best()
    after.load_state_dict(before.state_dict())
    after.restored(10, 1.0)
    after.on_metrics(20, {"auc": 0.5})
    assert after.best["best_step"] == 10 and after.unsaved_best is None


def test_only_rank_0_which_knows_what_is_saved_takes_a_model_for_unsaved() -> None:
    callback = keeps_best()
    callback.on_job(SimpleNamespace(is_chief=False))
    reports(callback, (10, 0.6), (20, 0.5), saves=False)
    assert callback.best["best_until"] == 20 and callback.unsaved_best is None


def test_a_best_model_whose_checkpoint_came_after_the_next_evaluation_is_not_saved() -> None:
    best = BestSoFar("auc")
    best.measured(20, 0.5)
    best.begun(20)
    best.done(20)
    best.measured(40, 0.9)
    best.begun(41)
    best.measured(42, 0.8)
    best.done(43)
    assert best.unsaved is not None and (best.unsaved.step, best.unsaved.value) == (40, 0.9)
    assert "step 43, after the next evaluation" in best.unsaved.why
    best.measured(60, 0.85)
    assert best.best is not None and best.best.step == 60 and best.is_due
