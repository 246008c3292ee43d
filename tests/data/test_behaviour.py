"""The behaviour log is a function of its arguments and follows its laws, and its best figures are the true ones."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gba_hvd.batch import Batch
from gba_hvd.data import SyntheticBehaviourLog
from gba_hvd.data.behaviour import PADDING
from gba_hvd.errors import BadInput
from gba_hvd.metrics.scores import exact_auc

SMALL: dict[str, Any] = {"n_users": 50, "n_items": 40, "n_categories": 8, "max_length": 12}


def column(batch: Batch, name: str) -> np.ndarray:
    ids = batch.ids[name]
    assert isinstance(ids, Tensor)
    return ids.numpy()


def lengths(batch: Batch) -> np.ndarray:
    return np.asarray((column(batch, "history") != PADDING).sum(1))


@pytest.mark.parametrize("more", [{}, {"negatives": True}, {"target": "next_item"}])
def test_a_row_is_the_same_in_any_batch_and_any_split(more: dict[str, Any]) -> None:
    whole = SyntheticBehaviourLog(500, seed=5, **SMALL, **more).take(np.arange(500))
    tail = SyntheticBehaviourLog(200, seed=5, start=300, **SMALL, **more).take(np.array([7, 199, 7]))
    assert torch.equal(tail.label, whole.label[[307, 499, 307]])
    assert list(tail.ids) == list(whole.ids)
    for name in whole.ids:
        np.testing.assert_array_equal(column(tail, name), column(whole, name)[[307, 499, 307]])


def test_another_seed_is_another_log() -> None:
    one, other = (SyntheticBehaviourLog(300, seed=seed, **SMALL).take(np.arange(300)) for seed in (1, 2))
    for name in one.ids:
        assert not np.array_equal(column(one, name), column(other, name)), name
    assert not torch.equal(one.label, other.label)


def test_histories_have_1_to_max_length_clicks_and_padding_behind_them() -> None:
    batch = SyntheticBehaviourLog(5000, **SMALL, negatives=True).take(np.arange(5000))
    n = lengths(batch)
    assert set(n) == set(range(1, 13)), "every length occurs"
    assert np.bincount(n)[1] > np.bincount(n)[12], "short ones more often"
    clicked = np.arange(12) < n[:, None]
    for name in ("history", "history_category", "negative", "negative_category"):
        ids = column(batch, name)
        assert ids.dtype == np.int64 and ids.shape == (5000, 12)
        np.testing.assert_array_equal(ids != PADDING, clicked)
    assert column(batch, "candidate").min() > 0
    assert (batch.dense.shape, batch.dense.dtype, batch.label.dtype) == ((5000, 0), torch.float32, torch.float32)


def test_negatives_are_there_only_where_they_are_wanted() -> None:
    assert "negative" not in SyntheticBehaviourLog(10, **SMALL).take(np.arange(3)).ids


def test_ids_are_rows_of_the_tables_and_every_item_has_one_category() -> None:
    log = SyntheticBehaviourLog(5000, **SMALL)
    batch = log.take(np.arange(5000))
    assert log.tables == {"user": 50, "item": 41, "category": 9}
    assert set(np.unique(column(batch, "history"))) == set(range(41)), "all items, and padding"
    assert set(np.unique(column(batch, "candidate_category"))) <= set(range(1, 9))
    for name in ("history", "candidate"):
        np.testing.assert_array_equal(log.category_of(column(batch, name)), column(batch, f"{name}_category"))
    assert np.bincount(log.category_of(np.arange(1, 41)), minlength=9).tolist() == [0, *[5] * 8]


def test_recent_clicks_are_of_few_categories_and_older_ones_of_others() -> None:
    history = column(SyntheticBehaviourLog(4000, max_length=12).take(np.arange(4000)), "history_category")
    history = history[(history != PADDING).all(1)]
    neighbours, apart = (np.mean(history[:, gap:] == history[:, :-gap]) for gap in (1, 6))
    assert neighbours > apart + 0.2, "clicks come in runs"


def test_the_relevance_is_the_sum_of_the_weights_of_matching_clicks() -> None:
    log = SyntheticBehaviourLog(20, **SMALL, decay=0.5)
    batch = log.take(np.arange(20))
    history, category = column(batch, "history"), column(batch, "history_category")
    expected = np.zeros((20, 8))
    for row, n in enumerate(lengths(batch)):
        for at in range(n):
            expected[row, category[row, at] - 1] += 0.5 ** (n - 1 - at)
    np.testing.assert_allclose(log._relevance(history), expected / sum(0.5**age for age in range(12)))


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.7, 1.0])
def test_the_bayes_auc_is_what_the_true_probabilities_reach(decay: float) -> None:
    log = SyntheticBehaviourLog(60_000, max_length=20, decay=decay)
    rows = np.arange(len(log))
    labels = np.concatenate([log.take(part).label.numpy() for part in np.array_split(rows, 6)])
    probability = log.probability(rows)
    assert log.bayes_auc() == pytest.approx(exact_auc(probability, labels), abs=0.006)
    assert 0.8 < log.bayes_auc() < 0.95
    assert labels.mean() == pytest.approx(probability.mean(), abs=0.006)
    assert labels.mean() == pytest.approx(0.3, abs=0.02)


@pytest.mark.slow
def test_which_clicks_match_and_how_old_they_are_both_tell_more() -> None:
    """So there is something to gain for attention, and then for the order."""
    log, rows = SyntheticBehaviourLog(30_000, max_length=20), np.arange(30_000)
    batch = log.take(rows)
    matching = column(batch, "history_category") == column(batch, "candidate_category")[:, None]
    labels = batch.label.numpy()
    order = exact_auc(log.probability(rows), labels)
    count, length = exact_auc(matching.sum(1), labels), exact_auc(lengths(batch), labels)
    assert order > count + 0.04 > length + 0.2


@pytest.mark.slow
def test_the_next_item_is_drawn_from_the_softmax_and_the_bayes_recall_is_what_it_reaches() -> None:
    log, rows = SyntheticBehaviourLog(30_000, **SMALL, target="next_item"), np.arange(30_000)
    probability, clicked = log.item_probability(rows), column(log.take(rows), "candidate")
    assert probability.shape == (30_000, 41)
    np.testing.assert_allclose(probability.sum(1), 1)
    assert (probability[:, PADDING] == 0).all()
    # The frequency of each item is what its probabilities add up to; variance of a sum of independent draws.
    found, expected = np.bincount(clicked, minlength=41), probability.sum(0)
    assert (np.abs(found - expected) < 5 * np.sqrt((probability * (1 - probability)).sum(0)) + 1e-9).all()
    best = np.argsort(-probability, axis=1)[:, :5]
    assert log.bayes_recall(5, len(rows)) == pytest.approx((best == clicked[:, None]).any(1).mean(), abs=0.01)
    assert log.bayes_recall(40) == pytest.approx(1)
    assert log.bayes_recall(5) > log.popularity()[np.argsort(-log.popularity())[:5]].sum() + 0.05


def test_the_softmax_has_the_logits_it_states() -> None:
    log, rows = SyntheticBehaviourLog(50, **SMALL, target="next_item", concentration=3.0), np.arange(50)
    relevance = log._relevance(column(log.take(rows), "history"))
    category = log.category_of(np.arange(41))
    by_category = np.stack([log.item_probability(rows)[:, category == c].sum(1) for c in range(1, 9)], axis=1)
    logits = np.log(by_category) - 3.0 * relevance - np.log(log._categories.probability())
    np.testing.assert_allclose(logits, np.repeat(logits[:, :1], 8, axis=1), atol=1e-9)


def test_the_catalogue_has_each_item_once() -> None:
    log = SyntheticBehaviourLog(10, **SMALL, target="next_item")
    items = log.items()
    batch = items.take(np.arange(len(items)))
    assert column(batch, "candidate").tolist() == list(range(1, 41))
    np.testing.assert_array_equal(column(batch, "candidate_category"), log.category_of(np.arange(1, 41)))
    with pytest.raises(IndexError):
        items.take(np.array([40]))


def test_what_it_is_can_be_written_as_json() -> None:
    assert json.loads(json.dumps(SyntheticBehaviourLog(10).description))["target"] == "click"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_samples": 0}, "n_samples 0, .* expected at least 1"),
        ({"max_length": 0}, "max_length 0"),
        ({"start": -1}, "start -1"),
        ({"n_items": 41}, "n_items 41: expected a multiple of n_categories, 8"),
        ({"target": "buy"}, "target must be .*, got 'buy'"),
        ({"decay": 1.5}, "decay 1.5"),
        ({"concentration": -1.0}, "concentration -1"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        SyntheticBehaviourLog(**({"n_samples": 10} | SMALL | wrong))


def test_what_is_of_the_other_target_is_refused() -> None:
    clicks, items = (SyntheticBehaviourLog(10, **SMALL, target=target) for target in ("click", "next_item"))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match='item_probability is of a log with target "next_item", this one has "click"'):
        clicks.bayes_recall(5)
    with pytest.raises(BadInput, match='probability is of a log with target "click", this one has "next_item"'):
        items.bayes_auc()
    with pytest.raises(BadInput, match="k is a number of items, from 1 to 40, got 41"):
        items.bayes_recall(41)
    with pytest.raises(IndexError, match="row 10 is outside"):
        clicks.take(np.array([10]))
