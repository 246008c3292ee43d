"""GAUC and errors of ratings: against scikit-learn, or loops; however the samples are divided."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gba_hvd.errors import BadInput
from gba_hvd.metrics.accumulators import Part, accumulator, combined
from gba_hvd.metrics.grouped_auc import GroupedScores, grouped_auc, grouped_auc_from
from gba_hvd.metrics.scores import error_sums, errors_from, exact_auc
from gba_hvd.tracking.epochs import chooser


def some_clicks(n: int = 400, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores with many ties; some groups are small and have one class only."""
    rng = np.random.default_rng(seed)
    groups = (rng.zipf(1.3, n) % 60).astype(np.int64) - 5
    return rng.integers(-4, 5, n).astype(np.float32), (rng.random(n) < 0.3).astype(np.float32), groups


def by_loops(logits: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> tuple[float, int, int]:
    weighted, n_samples, n_left_out = 0.0, 0, 0
    counted = 0
    for group in np.unique(groups):
        inside = groups == group
        auc = exact_auc(logits[inside], labels[inside])
        if math.isnan(auc):
            n_left_out += 1
        else:
            weighted, n_samples, counted = weighted + auc * inside.sum(), n_samples + int(inside.sum()), counted + 1
    return weighted / n_samples, counted, n_left_out


def test_gauc_is_the_mean_of_the_groups_auc_weighted_by_samples() -> None:
    logits, labels, groups = some_clicks()
    found, expected = grouped_auc(logits, labels, groups), by_loops(logits, labels, groups)
    assert (found.gauc, found.n_groups, found.n_groups_left_out) == (
        pytest.approx(expected[0], rel=1e-12),
        *expected[1:],
    )
    assert found.n_groups > 5 and found.n_groups_left_out > 5


@pytest.mark.slow
def test_gauc_is_scikit_learn_s_auc_of_each_group() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    logits, labels, groups = some_clicks()
    aucs, sizes = [], []
    for group in np.unique(groups):
        inside = groups == group
        if 0 < labels[inside].sum() < inside.sum():
            aucs.append(metrics.roc_auc_score(labels[inside], logits[inside]))
            sizes.append(inside.sum())
    assert grouped_auc(logits, labels, groups).gauc == pytest.approx(np.average(aucs, weights=sizes), rel=1e-12)


@pytest.mark.parametrize("n_parts", [2, 3])
def test_the_division_of_the_samples_changes_nothing(n_parts: int) -> None:
    logits, labels, groups = some_clicks()
    workers = [GroupedScores() for _ in range(n_parts + 1)]  # the last one has none
    part_of = np.random.default_rng(4).integers(0, n_parts, len(logits))
    for part, worker in enumerate(workers[:-1]):
        worker.add(logits[part_of == part], labels[part_of == part], groups[part_of == part])
    assert grouped_auc_from([worker.state() for worker in workers]) == grouped_auc(logits, labels, groups)


def test_groups_of_one_class_each_have_no_gauc() -> None:
    found = grouped_auc(np.zeros(4, np.float32), np.array([0, 0, 1, 1]), np.array([1, 1, 2, 2]))
    assert math.isnan(found.gauc) and (found.n_groups, found.n_groups_left_out) == (0, 2)
    nothing = grouped_auc_from([GroupedScores().state()])
    assert math.isnan(nothing.gauc) and (nothing.n_groups, nothing.n_groups_left_out) == (0, 0)


# --- ratings ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_errors_are_scikit_learn_s() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(6)
    outputs, labels = rng.normal(size=100).astype(np.float32), rng.integers(1, 6, 100).astype(np.float32)
    sums = error_sums(outputs[:30], labels[:30]) + error_sums(outputs[30:30], labels[30:30])
    values, n, note = errors_from(sums + error_sums(outputs[30:], labels[30:]))
    assert (n, note) == (100, "")
    assert values["mse"] == pytest.approx(metrics.mean_squared_error(labels.astype(float), outputs.astype(float)))
    assert values["mae"] == pytest.approx(metrics.mean_absolute_error(labels.astype(float), outputs.astype(float)))
    assert values["rmse"] == pytest.approx(math.sqrt(values["mse"]))


def test_outputs_that_are_nan_and_no_samples_give_no_errors_and_a_reason() -> None:
    values, n, note = errors_from(error_sums([1.0, math.nan], [1.0, 2.0]))
    assert math.isnan(values["mse"]) and n == 2 and note.startswith("1 of 2 outputs are NaN")
    assert errors_from(error_sums([], []))[1:] == (0, "no samples")


def test_labels_that_are_not_finite_are_refused() -> None:
    with pytest.raises(BadInput, match="label must be a finite number, got inf in a batch of 2"):
        error_sums([1.0, 2.0], [1.0, math.inf])


# --- parts -----------------------------------------------------------------------------------------------------------


def test_frames_that_do_not_fit_a_part_are_named() -> None:
    x, y, g = np.zeros(3, np.float32), np.zeros(3, np.float32), np.zeros(3, np.int64)
    assert Part("grouped scores").wrong([x, y, g], 3) == ""
    assert Part("grouped scores").wrong([x, y, g[:2]], 3) == "columns of [2, 3] values"
    assert Part("scores").wrong([x[:2], y[:2]], 3) == "2 scores of 3 samples"
    assert Part("scores", is_masked=True).wrong([x[:2], y[:2]], 3) == ""
    assert Part("scores", is_masked=True).wrong([x, y], 2) == "3 scores of 2 samples"
    assert Part("scores").wrong([x, y + 2], 3) == "labels must be 0 or 1"
    assert Part("sums", n_sums=2).wrong([np.zeros(3)], 3) == "3 sums, expected 2"


def test_a_part_comes_together_from_the_states_of_several_workers() -> None:
    logits, labels, groups = some_clicks(50)
    part, sums = Part("grouped scores", exact_limit=100), Part("sums", n_sums=2)
    workers = [accumulator(part) for _ in range(2)]
    workers[0].add([logits[:20], labels[:20], groups[:20]])
    workers[1].add([logits[20:], labels[20:], groups[20:]])
    found = combined(part, [worker.state() for worker in workers])
    assert found["auc"] == exact_auc(logits, labels)
    assert (found["gauc"], found["n_groups"]) == pytest.approx(by_loops(logits, labels, groups)[:2])
    adders = [accumulator(sums) for _ in range(2)]
    for adder in adders:
        adder.add([np.array([1.0, 2.0])])
    assert combined(sums, [adder.state() for adder in adders]) == {"sums": [2.0, 4.0]}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["valid_gauc", "valid_logloss"], ("valid_gauc", True)),
        (["valid_auc", "valid_gauc"], ("valid_auc", True)),
        (["valid_cvr_gauc"], ("valid_cvr_gauc", True)),
        (["valid_recall_at_10", "valid_ndcg_at_10"], ("valid_ndcg_at_10", True)),
        (["valid_recall_at_50"], ("valid_recall_at_50", True)),
        (["valid_mse"], ("valid_mse", False)),
        (["valid_stars_mae"], ("valid_stars_mae", False)),
        (["valid_a_auc", "valid_auc"], ("valid_auc", True)),
    ],
)
def test_the_names_of_these_metrics_choose_the_best_epoch(names: list[str], expected: tuple[str, bool]) -> None:
    found = chooser(names)
    assert found is not None
    assert (found.name, found.more_is_better, found.words) == (*expected, expected[0])


def test_where_only_the_alphabet_chooses_that_is_said() -> None:
    found = chooser(["valid_click_auc", "valid_buy_auc", "valid_buy_logloss"])
    assert found is not None and (found.name, found.plain) == ("valid_buy_auc", "valid_auc")
    assert found.others == ("valid_click_auc",) and "before valid_click_auc" in found.words
    assert chooser(["valid_click_auc", "train_loss"]).others == ()  # type: ignore[union-attr]
    assert chooser(["train_auc"]) is None
