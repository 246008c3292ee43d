"""AUC and log loss against their definitions, in every way the samples can be divided."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from gba_hvd.errors import BadInput
from gba_hvd.metrics.scores import ScoreAccumulator, Scores, exact_auc, logits_of, scores_from


def some_scores(n: int, seed: int = 0, decimals: int = 6) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    labels = (rng.random(n) < 0.3).astype(np.float32)
    logits = np.round(rng.normal(labels - 1.0, 1.5), decimals).astype(np.float32)
    return logits, labels


def score(logits: NDArray[np.float32], labels: NDArray[np.float32], parts: int = 1, exact_limit: int = 10**6) -> Scores:
    workers = [ScoreAccumulator(exact_limit) for _ in range(parts)]
    for i, (x, y) in enumerate(zip(np.array_split(logits, 3 * parts), np.array_split(labels, 3 * parts), strict=True)):
        workers[i % parts].add(x, y)
    return scores_from([worker.state() for worker in workers])


def auc_by_definition(logits: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    positive, negative = logits[labels == 1, None], logits[None, labels == 0]
    return float(((positive > negative) + 0.5 * (positive == negative)).mean())


@pytest.mark.parametrize("decimals", [6, 1, 0], ids=["few ties", "many ties", "mostly ties"])
def test_exact_auc_is_the_share_of_pairs_in_the_right_order(decimals: int) -> None:
    logits, labels = some_scores(700, decimals=decimals)
    assert exact_auc(logits, labels) == pytest.approx(auc_by_definition(logits, labels), abs=1e-12)


def test_equal_scores_everywhere_are_worth_one_half() -> None:
    assert exact_auc(np.zeros(10), np.arange(10) % 2) == 0.5


def test_log_loss_is_the_mean_negative_log_likelihood() -> None:
    logits, labels = some_scores(1000)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    assert score(logits, labels).logloss == pytest.approx(expected, abs=1e-9)


def test_extreme_logits_neither_overflow_nor_vanish() -> None:
    scores = score(np.array([900.0, -900.0, 900.0], np.float32), np.array([1.0, 0.0, 0.0], np.float32))
    assert scores.logloss == pytest.approx(300.0)
    assert scores.auc == 0.75


@pytest.mark.parametrize("exact_limit", [10**6, 100], ids=["exact", "histogram"])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_the_number_of_workers_changes_no_digit_of_the_auc(parts: int, exact_limit: int) -> None:
    logits, labels = some_scores(5000, decimals=2)
    alone, together = score(logits, labels, 1, exact_limit), score(logits, labels, parts, exact_limit)
    assert together.auc == alone.auc
    assert together.n == alone.n == 5000
    assert together.logloss == pytest.approx(alone.logloss, rel=1e-12)


def test_above_the_limit_the_auc_comes_from_a_histogram_and_says_so() -> None:
    logits, labels = some_scores(50_000)
    exact, binned = score(logits, labels), score(logits, labels, exact_limit=49_999)
    assert exact.exact and not binned.exact
    assert binned.auc == pytest.approx(exact.auc, abs=1e-4)
    assert binned.logloss == pytest.approx(exact.logloss, rel=1e-12)


def test_the_limit_holds_for_all_workers_together() -> None:
    logits, labels = some_scores(300)
    assert score(logits, labels, parts=3, exact_limit=300).exact
    assert not score(logits, labels, parts=3, exact_limit=299).exact


def test_a_worker_past_the_limit_and_one_below_it_add_up() -> None:
    logits, labels = some_scores(1000)
    long, short = ScoreAccumulator(exact_limit=500), ScoreAccumulator(exact_limit=500)
    long.add(logits[:900], labels[:900])
    short.add(logits[900:], labels[900:])
    scores = scores_from([long.state(), short.state()])
    assert (scores.n, scores.exact) == (1000, False)
    assert scores.auc == pytest.approx(exact_auc(logits, labels), abs=1e-3)


def test_a_worker_without_samples_changes_nothing() -> None:
    logits, labels = some_scores(100)
    full = ScoreAccumulator()
    full.add(logits, labels)
    assert scores_from([full.state(), ScoreAccumulator().state()]) == score(logits, labels)


@pytest.mark.parametrize("exact_limit", [10, 1])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_alone_has_no_auc_but_a_log_loss_and_a_reason(label: float, exact_limit: int) -> None:
    scores = score(np.array([0.5, -0.5], np.float32), np.full(2, label, np.float32), exact_limit=exact_limit)
    assert math.isnan(scores.auc)
    assert math.isfinite(scores.logloss)
    assert "needs both classes" in scores.note


def test_no_samples_at_all_give_no_figures_and_a_reason() -> None:
    scores = scores_from([ScoreAccumulator().state()])
    assert math.isnan(scores.auc) and math.isnan(scores.logloss)
    assert "0 positive and 0 negative" in scores.note


@pytest.mark.parametrize("exact_limit", [10, 1])
def test_nan_logits_are_reported_and_never_scored(exact_limit: int) -> None:
    scores = score(np.array([0.1, np.nan, 0.3], np.float32), np.array([0, 1, 1], np.float32), exact_limit=exact_limit)
    assert math.isnan(scores.auc) and math.isnan(scores.logloss)
    assert scores.note.startswith("1 of 3 logits are NaN")


def test_labels_other_than_0_and_1_are_refused() -> None:
    with pytest.raises(BadInput, match=r"must be 0 or 1, got 2 in 1 of 3 samples"):
        ScoreAccumulator().add(np.zeros(3), np.array([0.0, 1.0, 2.0]))


def test_labels_and_logits_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="got 2 labels and 3 logits"):
        ScoreAccumulator().add(np.zeros(3), np.zeros(2))


def test_accumulators_with_different_settings_do_not_mix() -> None:
    with pytest.raises(ValueError, match="same exact_limit"):
        scores_from([ScoreAccumulator(10).state(), ScoreAccumulator(20).state()])


def test_outputs_outside_zero_and_one_are_no_probabilities() -> None:
    with pytest.raises(BadInput, match=r"probabilities, got 1\.5 in 1 of 3; if the model gives logits"):
        logits_of(np.array([0.2, 1.5, np.nan], np.float32), "none")


def test_logits_of_probabilities_are_finite_at_their_limits() -> None:
    logits = logits_of(np.array([0.0, 0.5, 1.0, np.nan], np.float32), "none")
    assert logits[1] == 0 and np.isfinite(logits[:3]).all() and np.isnan(logits[3])
    raw = np.array([-4.0, 0.3], np.float32)
    assert logits_of(raw, None) is raw is logits_of(raw, "sigmoid")
