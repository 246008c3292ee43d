"""The synthetic log is a function of its arguments, follows the laws it states, and its Bayes AUC is the true one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gba_hvd.batch import Batch
from gba_hvd.data import SyntheticClickLog
from gba_hvd.data.synthetic import DEFAULT_TABLES, Zipf, expected_auc

TABLES = {"user": 1000, "item": 37, "one": 1}


def plain_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    positive, negative = scores[labels == 1], np.sort(scores[labels == 0])
    below, up_to = (np.searchsorted(negative, positive, side=side) for side in ("left", "right"))
    return float((below + up_to).sum() / 2 / (len(positive) * len(negative)))


def assert_same(one: Batch, other: Batch) -> None:
    assert torch.equal(one.label, other.label)
    assert torch.equal(one.dense, other.dense)
    assert list(one.ids) == list(other.ids)
    for name, ids in one.ids.items():
        assert torch.equal(ids, other.ids[name])  # type: ignore[arg-type]


def test_a_row_is_the_same_whoever_asks() -> None:
    log = SyntheticClickLog(10_000, TABLES, seed=5)
    rows = np.array([7, 9999, 7, 0])
    whole = log.take(np.arange(10_000))
    some = SyntheticClickLog(10_000, TABLES, seed=5).take(rows)
    assert torch.equal(some.label, whole.label[rows])
    assert torch.equal(some.dense, whole.dense[rows])
    assert torch.equal(some.ids["user"], whole.ids["user"][rows])  # type: ignore[index, arg-type]


def test_start_makes_another_split_of_the_same_truth() -> None:
    whole, tail = SyntheticClickLog(500, TABLES), SyntheticClickLog(200, TABLES, start=300)
    assert_same(whole.take(np.arange(300, 500)), tail.take(np.arange(200)))
    np.testing.assert_array_equal(whole.probability(np.arange(300, 500)), tail.probability(np.arange(200)))


def test_another_seed_is_another_log() -> None:
    one, other = (SyntheticClickLog(1000, TABLES, seed=seed).take(np.arange(1000)) for seed in (1, 2))
    assert not torch.equal(one.label, other.label)
    assert not torch.equal(one.ids["user"], other.ids["user"])  # type: ignore[arg-type]


def test_shapes_and_types_are_those_of_a_batch() -> None:
    batch = SyntheticClickLog(100, TABLES, n_dense=3).take(np.arange(10))
    assert {
        name: (ids.dtype, tuple(ids.shape)) for name, ids in batch.ids.items() if isinstance(ids, torch.Tensor)
    } == {name: (torch.int64, (10,)) for name in TABLES}
    assert (batch.dense.dtype, tuple(batch.dense.shape)) == (torch.float32, (10, 3))
    assert (batch.label.dtype, len(batch)) == (torch.float32, 10)
    assert SyntheticClickLog(100, TABLES, n_dense=0).take(np.arange(10)).dense.shape == (10, 0)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.05, 2.0])
def test_ids_follow_the_law(exponent: float) -> None:
    law, n = Zipf(1000, exponent), 200_000
    ranks = law.ranks((np.arange(n) + 0.5) / n)
    assert ranks.min() == 0
    assert ranks.max() <= 999
    edges = np.arange(1, 1002, dtype=float)
    below = np.log(edges) if exponent == 1 else (edges ** (1 - exponent) - 1) / (1 - exponent)
    expected = np.diff(below) / below[-1] * n
    np.testing.assert_allclose(np.bincount(ranks, minlength=1000), expected, atol=2)


def test_frequent_ids_are_spread_over_the_table_and_every_id_can_occur() -> None:
    batch = SyntheticClickLog(50_000, {"item": 50}, zipf=0.3).take(np.arange(50_000))
    ids = batch.ids["item"]
    assert isinstance(ids, torch.Tensor)
    assert sorted(set(ids.tolist())) == list(range(50))
    top = torch.bincount(ids).argsort(descending=True)[:5].tolist()
    assert max(top) - min(top) > 5


def test_the_expected_auc_is_the_sum_over_pairs() -> None:
    p = np.random.default_rng(0).random(50)
    pairs = [(i, j) for i in range(50) for j in range(50) if i != j]
    wins = sum(p[i] * (1 - p[j]) * (p[i] > p[j]) for i, j in pairs)
    assert expected_auc(p) == pytest.approx(wins / sum(p[i] * (1 - p[j]) for i, j in pairs))


@pytest.mark.slow
@pytest.mark.parametrize("pairwise", [0.0, 0.4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_bayes_auc_is_what_the_true_probabilities_reach(seed: int, pairwise: float) -> None:
    log = SyntheticClickLog(100_000, seed=seed, pairwise=pairwise)
    rows = np.arange(len(log))
    labels = log.take(rows).label.numpy()
    assert log.bayes_auc() == pytest.approx(plain_auc(log.probability(rows), labels), abs=0.006)
    assert 0.74 < log.bayes_auc() < 0.82
    assert labels.mean() == pytest.approx(log.probability(rows).mean(), abs=0.006)
    assert labels.mean() == pytest.approx(0.25, abs=0.02)


def test_what_it_is_can_be_written_as_json() -> None:
    assert json.loads(json.dumps(SyntheticClickLog(10).description))["tables"] == DEFAULT_TABLES


def test_day_0_of_a_log_that_drifts_is_the_log_that_does_not() -> None:
    rows = np.arange(500)
    still, drifting = SyntheticClickLog(500), SyntheticClickLog(500, drift=0.3)
    assert_same(drifting.take(rows), still.take(rows))
    assert drifting.bayes_auc() == still.bayes_auc()


def logits(log: SyntheticClickLog) -> np.ndarray:
    p = log.probability(np.arange(len(log)))
    return np.asarray(np.log(p / (1 - p)))


@pytest.mark.slow
def test_the_truth_moves_by_the_drift_from_day_to_day() -> None:
    """Logits of the same samples on two days correlate by sqrt(1 - drift) for each day between them."""
    many = {f"f{i}": 1000 for i in range(40)}  # the mean over many effects

    def on_day(day: int) -> np.ndarray:
        return logits(SyntheticClickLog(4000, many, n_dense=0, day=day, drift=0.2))

    first = on_day(0)
    found = [np.corrcoef(first, on_day(day))[0, 1] for day in (1, 2, 6)]
    assert found == pytest.approx([0.8**0.5, 0.8, 0.8**3], abs=0.1)
    assert found[0] > found[1] > found[2]
    assert np.std(on_day(6)) == pytest.approx(np.std(first), rel=0.2), "its variance stays"


def test_every_day_a_share_of_the_ids_is_new() -> None:
    def ids(day: int) -> set[int]:
        log = SyntheticClickLog(20_000, {"item": 4000}, zipf=0.1, day=day, new_ids=0.25)
        return set(log.take(np.arange(20_000)).ids["item"].tolist())

    first, second, third = ids(0), ids(1), ids(2)
    assert max(first | second | third) < 4000
    assert len(first) == pytest.approx(1000, abs=5), "a quarter of the rows are in use at a time"
    assert len(second - first) / len(second) == pytest.approx(0.25, abs=0.05)
    assert len(third - second - first) / len(third) == pytest.approx(0.25, abs=0.05)


@pytest.mark.slow
def test_the_bayes_auc_of_a_day_is_what_the_true_probabilities_reach() -> None:
    log = SyntheticClickLog(100_000, day=5, drift=0.2, new_ids=0.1)
    rows = np.arange(len(log))
    assert log.bayes_auc() == pytest.approx(plain_auc(log.probability(rows), log.take(rows).label.numpy()), abs=0.006)


@pytest.mark.parametrize("wrong", [{"day": -1}, {"drift": 1.5}, {"new_ids": -0.1}, {"day": 1}])
def test_a_day_of_a_log_that_does_not_drift_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"day .*drift"):
        SyntheticClickLog(10, TABLES, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", [-1, 100])
def test_a_row_outside_is_refused(row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} is outside the click log, which has rows 0 to 99"):
        SyntheticClickLog(100, TABLES).take(np.array([row]))


@pytest.mark.parametrize(
    "wrong", [{"n_samples": 0}, {"tables": {}}, {"tables": {"user": 0}}, {"zipf": 0.0}, {"start": -1}, {"n_dense": -1}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"expected|out of range"):
        SyntheticClickLog(**({"n_samples": 10, "tables": TABLES} | wrong))  # type: ignore[arg-type]
