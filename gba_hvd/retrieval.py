"""`evaluate_retrieval`: recall@k and NDCG@k of a model that gives vectors to queries and items."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from gba_hvd.batch import Bag
from gba_hvd.batch_keys import BatchKeys, FindIds
from gba_hvd.callbacks import Event
from gba_hvd.elastic import TorchState
from gba_hvd.errors import BadInput
from gba_hvd.evaluation_reader import open_reader, read_settings, ready_engine
from gba_hvd.metrics.accumulators import Frames, Part
from gba_hvd.metrics.ranking import (
    ItemLists,
    Items,
    Queries,
    RetrievalScores,
    all_numbers,
    best,
    n_query_sums,
    query_sums,
    retrieval_scores_from,
)
from gba_hvd.reading.datasets import Dataset, MapDataset
from gba_hvd.reading.settings import Collate
from gba_hvd.training.engine import Engine
from gba_hvd.training.mode import EvaluationRun, Pull, RetrievalRun, SampleReader

FindLists = Callable[[Any], Tensor | Bag]
_SEEN = (
    "evaluate_retrieval(): {:,} relevant items are also in `seen`, so they are not ranked and count as not found: "
    "leave items that a query should find out of what it has seen"
)
_warned: WeakSet[Engine] = WeakSet()  # of relevant items that were seen, once each


def evaluate_retrieval(
    model: nn.Module,
    queries: Dataset | MapDataset,
    items: Dataset | MapDataset,
    state: TorchState,
    *,
    query_vectors: Callable[[Any], Tensor],
    item_vectors: Callable[[Any], Tensor],
    relevant: FindLists,
    seen: FindLists | None = None,
    item_ids: Callable[[Any], Tensor] | None = None,
    k: int | Sequence[int] = (10, 100),
    batch: int | None = None,
    padding: int = -1,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    prefetch: int | None = None,
    ids: FindIds | None = None,
) -> RetrievalScores:
    """Recall@k and NDCG@k of ranking all items for each query (user) by dot products; the same result on every rank.

        scores = gba_hvd.evaluate_retrieval(
            model, valid_users, all_items, state, query_vectors=model.user_vectors, item_vectors=model.item_vectors,
            relevant=lambda b: b.next_item, seen=lambda b: b.history, k=(10, 100),
        )
        state.report(**{f"valid_{name}": value for name, value in scores.values.items()})

    queries, items: datasets as `batches` takes them; the second has each item once.
    query_vectors, item_vectors: of a batch, float [B, d]. They are called in the model's evaluation mode, without
    gradients; scale vectors to length 1 there for cosine similarity.
    relevant: of a batch of queries, the items that each should find: int64 [B], one each; int64 [B, L] with `padding`
    where a query has fewer; a `Bag` or a jagged nested tensor of any number. A query without any is left out and
    counted.
    seen: the same, items that are not ranked for the query, such as those of its training samples. A relevant item that
    was seen counts as not found, since it cannot be; `n_seen` counts these, and the event `relevant_seen` warns of
    them. Where users return to items, leave such items out of `seen`.
    padding: stands for no item in [B, L].
    item_ids: of a batch of items, their ids, int64 [B], which `relevant` and `seen` name. Default: an item's position
    in the dataset.
    k: lengths of the lists.
    batch: queries, or items, of a forward pass; default `micro_batch`. ids: as in `batches`; where a batch has
    none, `query_vectors` or `item_vectors` finds them, as `forward` does there.
    collate_fn, num_workers, prefetch: as `evaluate` takes them, for each of the two datasets; `collate_fn` for those
    without `take`.

    Recall@k is the share of a query's relevant items that are among the k best, NDCG@k has gain 1 for each of these;
    both are means over the queries. Items of equal score are in the order of their ids (`ranking`).

    A collective in allreduce mode: each worker has the vectors of its part of the items, and the k best of all parts
    are merged. In asynchronous modes workers take parts of the queries as they come, and each of them computes and
    holds the vectors of all items (4 d bytes an item). Where and how to call it: as `evaluate`.

    Raises BadInput for an item that is in the dataset twice, vectors, ids or lists of another shape or type, and
    offsets of a Bag that do not begin at 0.
    """
    engine = ready_engine(state, "evaluate_retrieval()")
    lengths = _checked((k,) if isinstance(k, int) else tuple(k))
    given = {"query_vectors": query_vectors, "item_vectors": item_vectors, "relevant": relevant, "seen": seen}
    for name, function in {**given, "item_ids": item_ids}.items():
        if function is not None and not callable(function):
            raise BadInput(
                f"evaluate_retrieval(): {name} must be a function that gets a batch, such as lambda b: b.{name}, got "
                f"{type(function).__name__}"
            )

    def items_of(loaded: Any, first: int) -> Items:
        vectors = _vectors(item_vectors(loaded), "item_vectors")
        engine.reports.pauses.evaluated()
        if item_ids is None:
            return Items(np.arange(first, first + len(vectors), dtype=np.int64), vectors)
        numbers = _whole_numbers(item_ids(loaded), "item_ids")
        if len(numbers) != len(vectors):
            raise BadInput(f"evaluate_retrieval(): {len(vectors)} item vectors for {len(numbers)} item_ids in a batch")
        return Items(numbers, vectors)

    def queries_of(loaded: Any) -> Queries:
        vectors = _vectors(query_vectors(loaded), "query_vectors")
        engine.reports.pauses.evaluated()
        n = len(vectors)
        excluded = ItemLists.none(n) if seen is None else _lists(seen(loaded), n, "seen", padding)
        return Queries(vectors, _lists(relevant(loaded), n, "relevant", padding), excluded)

    engine.reports.pauses.evaluation_begins()
    takes_both = hasattr(items, "take") and hasattr(queries, "take")  # then there is nothing to collate: refused
    with engine.loop_time.apart(), contextlib.ExitStack() as stack:

        def opened(dataset: Dataset | MapDataset, find: Callable[[Any], Tensor]) -> SampleReader:
            collate = None if hasattr(dataset, "take") and not takes_both else collate_fn
            settings = read_settings(num_workers, prefetch, collate)
            return stack.enter_context(open_reader(engine, dataset, batch, _keys(engine, model, ids, find), settings))

        all_items, all_queries = opened(items, item_vectors), opened(queries, query_vectors)
        alone = _evaluation(model, all_items, all_queries, items_of, queries_of, lengths)
        assert engine.mode is not None
        found = engine.mode.retrieve(RetrievalRun(model, all_items, all_queries, items_of, queries_of, lengths, alone))
    engine.reports.pauses.evaluated()
    scores = retrieval_scores_from(found, lengths, len(items))
    if scores.n_seen and engine not in _warned:
        _warned.add(engine)
        engine.emit(Event("relevant_seen", engine.progress.step, _SEEN.format(scores.n_seen), level="warning"))
    return scores


def _keys(
    engine: Engine, model: nn.Module, ids: FindIds | None, vectors: Callable[[Any], Tensor]
) -> Callable[[list[Any]], list[np.ndarray]]:
    """The rows that batches use: by their ids, and where they have none by a pass of what computes their vectors."""
    by_ids, by_pass = (BatchKeys(engine.model.tables, model, ids, forward) for forward in (None, vectors))

    def keys(batches: list[Any]) -> list[np.ndarray]:
        return (by_pass if any(map(by_ids.runs_model, batches)) else by_ids).of(batches)

    return keys


def _evaluation(
    model: nn.Module,
    items: SampleReader,
    queries: SampleReader,
    items_of: Callable[[Any, int], Items],
    queries_of: Callable[[Any], Queries],
    k: tuple[int, ...],
) -> EvaluationRun:
    """The same as an evaluation of the queries in which this worker has all items."""
    held: list[Items] = []

    def prepare(pull: Pull) -> None:
        items.expect(range(0, items.n_samples, items.batch))
        parts = []
        for first in range(0, items.n_samples, items.batch):
            loaded = items.rows(first, items.batch)
            pull(items, [loaded])
            parts.append(items_of(loaded, first))
        all_numbers([part.numbers for part in parts])
        held.append(Items.of(parts))

    def measure(loaded: Any) -> list[Frames]:
        (every,), some = held, queries_of(loaded)
        found = best(every, some.vectors, some.seen, max(k))
        return [[query_sums(found, some, every.numbers, k, every.all_finite)]]

    part = Part("sums", f"retrieval of {items.n_samples} items, k={k}", n_sums=n_query_sums(k))
    return EvaluationRun(model, queries, (part,), measure, prepare)


def _checked(k: tuple[Any, ...]) -> tuple[int, ...]:
    wrong = [one for one in k if isinstance(one, bool) or not isinstance(one, int) or one < 1]
    if wrong or not k:
        raise BadInput(f"evaluate_retrieval(): k must be whole numbers, 1 or more, got {wrong[0]!r}" if wrong else
                       "evaluate_retrieval(): k is empty; give it a length such as 10")  # fmt: skip
    if len(set(k)) < len(k):
        raise BadInput(f"evaluate_retrieval(): a length is in k={k} twice")
    return k


def _vectors(value: Any, name: str) -> np.ndarray:
    """float32 [n, d]"""
    if not isinstance(value, Tensor) or value.ndim != 2 or not value.is_floating_point() or not value.shape[1]:
        shape = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise BadInput(f"evaluate_retrieval(): {name} must return a float tensor [B, d], got {shape}")
    vectors: np.ndarray = value.detach().float().cpu().numpy()
    return vectors


def _whole_numbers(value: Any, name: str) -> np.ndarray:
    """int64 [n]"""
    is_whole = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    if not is_whole or value.ndim != 1:
        shape = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise BadInput(f"evaluate_retrieval(): {name} must be an int64 tensor with one dimension, got {shape}")
    return np.asarray(value.cpu().numpy(), dtype=np.int64)


def _lists(value: Any, n: int, name: str, padding: int) -> ItemLists:
    """One list for each of n queries: of one item each, of padded ones, of a `Bag` or a jagged tensor."""
    if isinstance(value, Bag):
        if value.weights is not None:
            raise BadInput(
                f"evaluate_retrieval(): the weights of a Bag from {name} would have no effect: leave them out"
            )
        found = ItemLists(_whole_numbers(value.values, name), _whole_numbers(value.offsets, f"offsets of {name}"))
        bounds = [*found.offsets.tolist(), len(found.values)]
        if bounds[0] != 0 or bounds != sorted(bounds):
            raise BadInput(
                f"evaluate_retrieval(): offsets of {name} must ascend from 0 to at most the number of values, "
                f"{len(found.values)}, got {bounds[:-1]}"
            )
    elif isinstance(value, Tensor) and value.is_nested:
        if value.layout != torch.jagged or value.ndim != 2:
            raise BadInput(
                f"evaluate_retrieval(): nested {name} must be [B, j] with layout torch.jagged, got {value.layout} with "
                f"{value.ndim} dimensions"
            )
        parts: Any = value.unbind()
        found = _concatenated([_whole_numbers(part, name) for part in parts])
    elif isinstance(value, Tensor) and value.ndim == 2:
        rows = _whole_numbers(value.reshape(-1), name).reshape(value.shape)
        found = _concatenated([row[row != padding] for row in rows])
    else:
        values = _whole_numbers(value, name)
        found = ItemLists(values, np.arange(len(values), dtype=np.int64))
    if len(found.offsets) != n:
        raise BadInput(
            f"evaluate_retrieval(): {name} has {len(found.offsets)} queries, query_vectors {n}, of one batch"
        )
    return found


def _concatenated(lists: Sequence[np.ndarray]) -> ItemLists:
    starts = np.cumsum([0, *map(len, lists)])[:-1].astype(np.int64)
    return ItemLists(np.concatenate([np.empty(0, np.int64), *lists]), starts)
