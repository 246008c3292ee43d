"""The scores of the best epoch as metrics of their own."""

from __future__ import annotations

import json

from gba_hvd.tracking.best_metrics import BestMetrics
from gba_hvd.tracking.epochs import is_quality


def test_validation_chooses_and_the_other_scores_are_of_the_same_epoch():
    best = BestMetrics()
    first = {"best_valid_auc": 0.7, "best_valid_logloss": 0.3, "best_step": 10.0, "best_epoch": 0.0}
    assert best.add(10, 0, {"valid_auc": 0.7, "valid_logloss": 0.3, "epoch": 0}) == first
    assert best.add(20, 1, {"valid_auc": 0.6, "valid_logloss": 0.2}) == {}
    assert best.values == first
    assert best.add(30, 2, {"valid_auc": 0.9})["best_valid_auc"] == 0.9
    assert best.add(30, 2, {"test_auc": 0.8}) == {
        "best_valid_auc": 0.9, "best_test_auc": 0.8, "best_step": 30.0, "best_epoch": 2.0
    }  # fmt: skip


def test_without_a_validation_metric_nothing_is_best():
    best = BestMetrics()
    assert best.add(10, 0, {"test_auc": 0.9, "train/loss": 0.1}) == {} == best.values
    assert best.step is None


def test_a_job_that_resumes_continues_with_the_best_of_its_checkpoint():
    best = BestMetrics()
    best.add(10, 0, {"valid_auc": 0.7})
    saved = json.loads(json.dumps(best.state_dict()))
    best.add(20, 1, {"valid_auc": 0.9})
    best.load_state_dict(saved)
    assert (best.values["best_valid_auc"], best.step) == (0.7, 10)
    best.load_state_dict({})
    assert best.values == {}


def test_what_the_script_reports_under_such_a_name_stays_its_own():
    best = BestMetrics()
    assert best.add(10, None, {"valid_auc": 0.7, "best_valid_auc": 0.71}) == {"best_step": 10.0}
    resumed = BestMetrics()
    resumed.load_state_dict(best.state_dict())
    assert resumed.values == {"best_step": 10.0}


def test_a_metric_of_the_best_epoch_is_no_measurement():
    assert is_quality("valid_auc") and not is_quality("best_valid_auc")
