"""Ranking items for queries over all workers, in rounds of collectives; asynchronous modes use `evaluation.by_leases`.

    1. items    each rank computes the vectors of its batches of the item dataset, once, and keeps them
    2. gather   the numbers of all items, so that every rank knows which there are
    3. queries  in each round every rank computes the vectors of one batch; all ranks receive all of these, rank their
                own items for them, and return the k best; who computed a query merges what comes and counts hits
    4. gather   the sums of all ranks

A rank with nothing to compute takes part in every round, since each is a collective.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from gba_hvd.comm.collectives import World, agree_on
from gba_hvd.embedding.module_placement import evaluating
from gba_hvd.metrics.ranking import Best, ItemLists, Items, Queries, all_numbers, best, merge, n_query_sums, query_sums
from gba_hvd.modes.allreduce_exchange import AllreduceExchange
from gba_hvd.modes.evaluation import firsts_of_rank, share_buffers
from gba_hvd.training.mode import RetrievalRun, SampleReader
from recovery import state_codec


def together(job: RetrievalRun, world: World, exchange: AllreduceExchange, step: int) -> list[float]:
    """The sums over all queries, the same on all ranks. A collective; buffers are those of rank 0."""
    agree_on(
        world, "retrieval",
        {
            "items to rank": job.items.n_samples, "queries to evaluate": job.queries.n_samples,
            "batch": job.queries.batch, "step": step, "values of k": zlib.crc32(repr(job.k).encode()),
        },
    )  # fmt: skip
    share_buffers(world, job.model)
    exchange.await_rows(step)
    sums, k = np.zeros(n_query_sums(job.k)), max(job.k)
    job.items.expect(firsts_of_rank(job.items, world))
    job.queries.expect(firsts_of_rank(job.queries, world))
    with evaluating(job.model):
        parts = []
        for first in range(0, job.items.n_batches, world.size):
            at = (first + world.rank) * job.items.batch
            loaded = _load(job.items, at, exchange)
            if loaded is not None:
                parts.append(job.items_of(loaded, at))
        mine = Items.of(parts)
        everyone = _gathered(world, "items", {"numbers": mine.numbers, "all_finite": mine.all_finite})
        known, all_finite = all_numbers([one["numbers"] for one in everyone]), all(o["all_finite"] for o in everyone)
        for first in range(0, job.queries.n_batches, world.size):
            loaded = _load(job.queries, (first + world.rank) * job.queries.batch, exchange)
            queries = None if loaded is None else job.queries_of(loaded)
            asked = [_decoded(one) for one in _gathered(world, "queries", _encoded(queries))]
            found = [best(mine, vectors, seen, k) for vectors, seen in asked]
            merged = _returned(world, found, 0 if queries is None else len(queries.vectors), k)
            if queries is not None:
                sums += query_sums(merged, queries, known, job.k, all_finite)
    return list(np.sum([one["sums"] for one in _gathered(world, "sums", {"sums": sums})], axis=0).tolist())


def _load(reader: SampleReader, first: int, exchange: AllreduceExchange) -> Any:
    """One batch, with its rows of other hosts. A collective."""
    loaded = reader.rows(first, reader.batch)
    if exchange.several_hosts:
        exchange.pull(reader.keys([] if loaded is None else [loaded]), whole=True)
    return loaded


def _gathered(world: World, what: str, mine: Any) -> list[Any]:
    """The values of all ranks, in rank order. A collective."""
    parts = world.gather_bytes(f"retrieval.{what}", state_codec.encode(mine))
    return [state_codec.decode(part.tobytes()) for part in parts]


def _encoded(queries: Queries | None) -> dict[str, Any]:
    if queries is None:
        return {"vectors": np.empty((0, 0), np.float32), "values": np.empty(0, np.int64), "offsets": np.empty(0, int)}
    return {"vectors": queries.vectors, "values": queries.seen.values, "offsets": queries.seen.offsets}


def _decoded(asked: dict[str, Any]) -> tuple[np.ndarray, ItemLists]:
    return asked["vectors"], ItemLists(asked["values"], asked["offsets"])


def _returned(world: World, found: list[Best], n: int, k: int) -> Best:
    """What all ranks found for this rank's n queries. found: what this rank found, by the rank that asked."""
    words = [np.concatenate([f.scores.ravel(), f.numbers.ravel().view(np.float32)]) for f in found]
    splits = np.array([len(part) for part in words], dtype=np.int64)
    received, _ = world.alltoall("retrieval.best", np.concatenate(words), splits)
    by_rank = received.reshape(world.size, -1)
    return merge(
        [Best(one[: n * k].reshape(n, k), one[n * k :].copy().view(np.int64).reshape(n, k)) for one in by_rank], k
    )
