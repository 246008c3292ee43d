"""Recall@k and NDCG@k of a retrieval: which items a query finds, from vectors of queries and items.

Decided here: the order of items, also of ties, and the two figures. Items may be divided in any way: `best` of each
part and `merge` give the same order. Not here: who has which items (`modes.retrieval`).

An item's score is the dot product with the query's vector, added up in float64 and rounded to float32, so that equal
items have equal scores in however large a product they are computed. Ties are in the order of the items' numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gba_hvd.errors import BadInput

_NO_ITEM = np.iinfo(np.int64).max  # fills up a list of fewer than k items
_AT_ONCE = 1 << 22  # scores in memory
_HEADER_SUMS = 5


@dataclass(frozen=True)
class RetrievalScores:
    """What an evaluation of a retrieval found.

    recall, ndcg: by k, means over the queries; NaN where `note` says why
    n: queries that count; n_left_out: queries without a relevant item, which do not. n_items: that were ranked
    n_unknown: relevant items, over all queries, that are not among the items; these count as not found
    n_seen: relevant items that the query has also seen; these are not ranked, so they count as not found
    """

    recall: Mapping[int, float]
    ndcg: Mapping[int, float]
    n: int
    n_left_out: int
    n_items: int
    n_unknown: int
    n_seen: int = 0
    note: str = ""

    @property
    def values(self) -> dict[str, float]:
        """By name, for `state.report`: `recall_at_10`, `ndcg_at_10` and so on."""
        return {
            **{f"recall_at_{k}": value for k, value in self.recall.items()},
            **{f"ndcg_at_{k}": value for k, value in self.ndcg.items()},
        }


@dataclass(frozen=True)
class ItemLists:
    """A list of items for each of n queries. values: int64 [all]; offsets: int64 [n], where each list starts."""

    values: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def of(self, query: int) -> NDArray[np.int64]:
        end = self.offsets[query + 1] if query + 1 < len(self.offsets) else len(self.values)
        return self.values[self.offsets[query] : end]

    @classmethod
    def none(cls, n: int) -> ItemLists:
        return cls(np.empty(0, np.int64), np.zeros(n, np.int64))


@dataclass(frozen=True)
class Items:
    """Some of the items. numbers: int64 [n], ascending and distinct; vectors: float32 [n, d]."""

    numbers: NDArray[np.int64]
    vectors: NDArray[np.float32]

    @property
    def all_finite(self) -> bool:
        return bool(np.isfinite(self.vectors).all())

    @classmethod
    def of(cls, parts: Sequence[Items]) -> Items:
        """All of some parts."""
        if not parts:
            return cls(np.empty(0, np.int64), np.empty((0, 0), np.float32))
        widths = {part.vectors.shape[1] for part in parts}
        if len(widths) > 1:
            raise BadInput(f"item vectors must have one width, got {sorted(widths)}")
        numbers = np.concatenate([part.numbers for part in parts])
        order = np.argsort(numbers, kind="stable")
        return cls(numbers[order], np.concatenate([part.vectors for part in parts])[order])


@dataclass(frozen=True)
class Queries:
    """Some of the queries.

    vectors: float32 [n, d]. relevant: what each of them should find; seen: what it must not find
    """

    vectors: NDArray[np.float32]
    relevant: ItemLists
    seen: ItemLists


@dataclass(frozen=True)
class Best:
    """The best items of n queries, best first. scores: float32 [n, k]; numbers: int64 [n, k].

    Where there are fewer than k, the rest has score -inf and no item's number.
    """

    scores: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    numbers: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))


def all_numbers(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The numbers of all items, ascending. Raises BadInput when an item occurs twice."""
    numbers = np.sort(np.concatenate(parts))
    twice = numbers[1:][numbers[1:] == numbers[:-1]]
    if len(twice):
        raise BadInput(
            f"evaluate_retrieval(): item {twice[0]} is more than once in the item dataset, and so are "
            f"{len(np.unique(twice)) - 1} others: it must have each item once"
        )
    return numbers


def best(items: Items, vectors: NDArray[np.float32], seen: ItemLists, k: int) -> Best:
    """The k best of these items for some queries, float32 [n, d], but for those in `seen`."""
    if len(items.numbers) and len(vectors) and items.vectors.shape[1] != vectors.shape[1]:
        raise BadInput(
            f"evaluate_retrieval(): vectors of queries have {vectors.shape[1]} values, those of items "
            f"{items.vectors.shape[1]}: both must be of one width d"
        )
    found = Best(np.full((len(vectors), k), -np.inf, np.float32), np.full((len(vectors), k), _NO_ITEM, np.int64))
    if not len(vectors):
        return found
    exact, size = vectors.astype(np.float64), max(1, _AT_ONCE // len(vectors))
    for at in range(0, len(items.numbers), size):
        numbers = items.numbers[at : at + size]
        with np.errstate(invalid="ignore", over="ignore"):  # vectors that are not finite are counted in `query_sums`
            scores = (exact @ items.vectors[at : at + size].astype(np.float64).T).astype(np.float32)
        part = Best(np.full_like(found.scores, -np.inf), np.full_like(found.numbers, _NO_ITEM))
        for query, row in enumerate(scores):
            candidates = _but_for(numbers, seen.of(query))
            if len(candidates) > k:  # all that may be among the k best; of equals the first ones
                limit = np.partition(row[candidates], len(candidates) - k)[len(candidates) - k]
                candidates = candidates[row[candidates] >= limit]
            order = candidates[np.argsort(-row[candidates], kind="stable")[:k]]
            part.scores[query, : len(order)], part.numbers[query, : len(order)] = row[order], numbers[order]
        found = merge([found, part], k)
    return found


def _but_for(numbers: NDArray[np.int64], seen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the numbers, which ascend, that are not among `seen`."""
    remain = np.ones(len(numbers), bool)
    remain[np.searchsorted(numbers, seen[_are_in(numbers, seen)])] = False
    return np.flatnonzero(remain)


def _are_in(ascending: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.bool_]:
    if not len(ascending):
        return np.zeros(len(values), bool)
    found: NDArray[np.bool_] = ascending[np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)] == values
    return found


def merge(parts: Sequence[Best], k: int) -> Best:
    """The k best of the best of each part of the items, of the same queries."""
    scores, numbers = (np.concatenate([getattr(p, name) for p in parts], axis=1) for name in ("scores", "numbers"))
    order = np.lexsort((numbers, -scores), axis=1)[:, :k]
    return Best(np.take_along_axis(scores, order, 1), np.take_along_axis(numbers, order, 1))


def query_sums(
    found: Best, queries: Queries, known: NDArray[np.int64], k: Sequence[int], all_finite: bool
) -> NDArray[np.float64]:
    """float64 [5 + 2 n_k]: queries that count, queries left out, relevant items that are not known, queries whose
    vectors, or whose items', are not finite, relevant items that were seen; then over the queries the sums of recall@k
    and of NDCG@k.

    known: the numbers of all items, ascending; all_finite: the items' vectors are. With R relevant items, some of them
    at the ranks r <= k, from 1:

        recall@k = hits / R        NDCG@k = sum of 1 / log2(r + 1) over hits / the same of the ranks 1 ... min(R, k)
    """
    sums = np.zeros(_HEADER_SUMS + 2 * len(k))
    discounts = 1 / np.log2(np.arange(max(k)) + 2.0)
    sums[3] = len(queries.vectors) if not all_finite else (~np.isfinite(queries.vectors).all(axis=1)).sum()
    for query in range(len(queries.vectors)):
        relevant = np.unique(queries.relevant.of(query))
        if not len(relevant):
            sums[1] += 1
            continue
        sums[0] += 1
        sums[2] += int((~_are_in(known, relevant)).sum())
        sums[4] += int(np.isin(relevant, queries.seen.of(query)).sum())
        is_hit = np.isin(found.numbers[query], relevant) & (found.numbers[query] != _NO_ITEM)
        for at, limit in enumerate(k):
            hits = is_hit[:limit]
            sums[_HEADER_SUMS + at] += hits.sum() / len(relevant)
            ideal = discounts[: min(len(relevant), limit)].sum()
            sums[_HEADER_SUMS + len(k) + at] += discounts[: len(hits)][hits].sum() / ideal
    return sums


def n_query_sums(k: Sequence[int]) -> int:
    return _HEADER_SUMS + 2 * len(k)


def retrieval_scores_from(sums: Sequence[float], k: Sequence[int], n_items: int) -> RetrievalScores:
    """Scores from the sums over all queries."""
    n, n_left_out, n_unknown, n_bad, n_seen = (round(value) for value in sums[:_HEADER_SUMS])
    note = ""
    if n_bad:
        note = f"vectors of items or of {n_bad} of {n + n_left_out} queries are not finite: the model has diverged"
    elif not n:
        note = f"none of {n_left_out} queries has a relevant item"
    means = [math.nan if note else value / n for value in sums[_HEADER_SUMS:]]
    recall, ndcg = dict(zip(k, means[: len(k)], strict=True)), dict(zip(k, means[len(k) :], strict=True))
    return RetrievalScores(recall, ndcg, n, n_left_out, n_items, n_unknown, n_seen, note)
