"""Recall@k and NDCG@k: against a computation with loops and against scikit-learn's; parts of items give the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gba_hvd.errors import BadInput
from gba_hvd.metrics.ranking import (
    ItemLists,
    Items,
    Queries,
    RetrievalScores,
    all_numbers,
    best,
    merge,
    query_sums,
    retrieval_scores_from,
)

K = (1, 3, 10)


def some_items(n: int = 23, seed: int = 1) -> Items:
    """Vectors of few whole numbers: many items have the same score."""
    rng = np.random.default_rng(seed)
    numbers = np.sort(rng.choice(100, n, replace=False)).astype(np.int64)
    return Items(numbers, rng.integers(-1, 2, (n, 3)).astype(np.float32))


def lists(rng: np.random.Generator, n: int, longest: int) -> ItemLists:
    each = [rng.integers(0, 100, rng.integers(0, longest + 1)) for _ in range(n)]
    starts = np.cumsum([0, *map(len, each)])[:-1]
    return ItemLists(np.concatenate(each).astype(np.int64), starts.astype(np.int64))


def some_queries(n: int = 17, seed: int = 2) -> Queries:
    rng = np.random.default_rng(seed)
    return Queries(rng.integers(-1, 2, (n, 3)).astype(np.float32), lists(rng, n, 6), lists(rng, n, 30))


def ranked(items: Items, queries: Queries, query: int) -> list[int]:
    """All items but those seen, best first, ties by their numbers."""
    scores = items.vectors @ queries.vectors[query]
    seen = set(queries.seen.of(query).tolist())
    return [int(n) for _, n in sorted(zip(-scores, items.numbers, strict=True)) if n not in seen]


def by_loops(items: Items, queries: Queries, k: int) -> tuple[float, float, int]:
    """Mean recall and NDCG, and how many queries count."""
    recalls, ndcgs = [], []
    for query in range(len(queries.vectors)):
        relevant = set(queries.relevant.of(query).tolist())
        if relevant:
            hits = [item in relevant for item in ranked(items, queries, query)[:k]]
            recalls.append(sum(hits) / len(relevant))
            ideal = sum(1 / math.log2(rank + 2) for rank in range(min(k, len(relevant))))
            ndcgs.append(sum(hit / math.log2(rank + 2) for rank, hit in enumerate(hits)) / ideal)
    return float(np.mean(recalls)), float(np.mean(ndcgs)), len(recalls)


def scores(parts: list[Items], queries: Queries) -> RetrievalScores:
    found = merge([best(part, queries.vectors, queries.seen, max(K)) for part in parts], max(K))
    known = all_numbers([part.numbers for part in parts])
    finite = all(part.all_finite for part in parts)
    return retrieval_scores_from(query_sums(found, queries, known, K, finite), K, len(known))


@pytest.mark.parametrize("n_parts", [1, 2, 3, 7])
@pytest.mark.parametrize("at_once", [1 << 22, 40])
def test_figures_are_those_of_loops_over_all_items_however_they_are_divided(
    monkeypatch: pytest.MonkeyPatch, n_parts: int, at_once: int
) -> None:
    monkeypatch.setattr("gba_hvd.metrics.ranking._AT_ONCE", at_once)
    items, queries = some_items(), some_queries()
    part_of = np.random.default_rng(3).integers(0, n_parts, len(items.numbers))
    part_of[part_of == n_parts - 1] = 0 if n_parts > 1 else n_parts - 1  # the last part is empty
    parts = [Items(items.numbers[part_of == p], items.vectors[part_of == p]) for p in range(n_parts)]
    found = scores(parts, queries)
    for k in K:
        recall, ndcg, n = by_loops(items, queries, k)
        assert (found.recall[k], found.ndcg[k]) == (pytest.approx(recall, rel=1e-12), pytest.approx(ndcg, rel=1e-12))
        assert (found.n, found.n_left_out) == (n, 17 - n)
    assert found.n_items == 23 and found.n_unknown > 0 and 0 < found.recall[10] < 1 and found.note == ""
    both = [set(queries.relevant.of(i).tolist()) & set(queries.seen.of(i).tolist()) for i in range(17)]
    assert found.n_seen == sum(map(len, both)) > 0
    assert list(found.values) == [f"{name}_at_{k}" for name in ("recall", "ndcg") for k in K]


def test_lists_and_their_order_are_those_of_loops() -> None:
    items, queries = some_items(), some_queries()
    found = best(items, queries.vectors, queries.seen, 5)
    for query in range(17):
        expected = ranked(items, queries, query)[:5]
        assert found.numbers[query, : len(expected)].tolist() == expected
        assert np.isneginf(found.scores[query, len(expected) :]).all()


@pytest.mark.slow
def test_ndcg_is_scikit_learn_s_where_no_scores_are_equal() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(5)
    items = Items(np.arange(40), rng.normal(size=(40, 4)).astype(np.float32))
    relevant = ItemLists(rng.integers(0, 40, 60), np.arange(0, 60, 3))
    queries = Queries(rng.normal(size=(20, 4)).astype(np.float32), relevant, ItemLists.none(20))
    truth = np.zeros((20, 40))
    for query in range(20):
        truth[query, relevant.of(query)] = 1
    found = scores([items], queries)
    for k in K:
        expected = metrics.ndcg_score(truth, queries.vectors.astype(float) @ items.vectors.T.astype(float), k=k)
        assert found.ndcg[k] == pytest.approx(expected, rel=1e-12)


def test_an_item_that_is_there_twice_is_refused() -> None:
    with pytest.raises(BadInput, match=r"item 7 is more than once in the item dataset, and so are 1 others"):
        all_numbers([np.array([3, 7]), np.array([7, 9, 9])])


@pytest.mark.parametrize("bad", ["items", "queries"])
def test_vectors_that_are_not_finite_give_no_figures_and_a_reason(bad: str) -> None:
    items, queries = some_items(), some_queries()
    (items if bad == "items" else queries).vectors[1, 0] = np.nan
    found = scores([items], queries)
    assert all(math.isnan(value) for value in found.values.values())
    assert f"of {17 if bad == 'items' else 1} of 17 queries are not finite" in found.note


def test_queries_without_a_relevant_item_give_no_figures_and_a_reason() -> None:
    queries = Queries(np.ones((4, 3), np.float32), ItemLists.none(4), ItemLists.none(4))
    found = scores([some_items()], queries)
    assert (found.n, found.n_left_out) == (0, 4) and math.isnan(found.recall[1])
    assert found.note == "none of 4 queries has a relevant item"


@pytest.mark.parametrize("width", [2, 4])
def test_vectors_of_other_widths_are_refused(width: int) -> None:
    with pytest.raises(BadInput, match=f"queries have {width} values, those of items 3"):
        best(some_items(), np.zeros((2, width), np.float32), ItemLists.none(2), 3)


def test_parts_without_items_or_queries_are_no_special_case() -> None:
    nothing: Any = Items.of([])
    assert best(nothing, np.ones((2, 3), np.float32), ItemLists.none(2), 4).scores.shape == (2, 4)
    assert best(some_items(), np.empty((0, 0), np.float32), ItemLists.none(0), 4).numbers.shape == (0, 4)
