"""Rows of other hosts: what is asked for comes, its gradients go back without keys, and only where there are some."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd.comm.collectives import World
from gba_hvd.comm.traffic import Traffic
from gba_hvd.embedding.row_gradients import Packed, RowGrad
from gba_hvd.errors import GbaError
from gba_hvd.modes.whole_rows import WholeRows
from tests.unit.thread_world import Meeting, ThreadWorld

SERVER = np.array([0, 1, 2], np.int32)  # of three shards; ranks 0 and 1 are on one host
HERE = ([0, 1], [0, 1], [2])
MakeTables = Callable[..., gba_hvd.EmbeddingTables]


class CountedWorld(ThreadWorld):
    """Notes its all-to-alls: their names, and the words that this rank sent in each."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(meeting, rank)
        self.sent: list[tuple[str, int]] = []

    def alltoall(self, name: str, words: np.ndarray, splits: np.ndarray, expected: Any = None) -> Any:
        self.sent.append((name, len(words)))
        received, counts = super().alltoall(name, words, splits)
        assert expected is None or counts.tolist() == expected.tolist()
        return received, counts


def on_all(act: Callable[[CountedWorld], Any]) -> list[Any]:
    meeting, found = Meeting(3), [None] * 3

    def work(rank: int) -> None:
        try:
            found[rank] = act(CountedWorld(meeting, rank))
        except BaseException as error:
            meeting.barrier.abort()
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def whole_rows(tables: gba_hvd.EmbeddingTables, rank: int, extra: int = 0) -> WholeRows:
    dims = [group.dim + extra for group in tables.layout.groups]
    return WholeRows(tables, SERVER, 3, HERE[rank], dims, Traffic())


def sent(whole: WholeRows, world: World, grads: Sequence[RowGrad]) -> dict[int, list[RowGrad]]:
    return whole.send(Packed.of(grads, SERVER, 3, written=[]), world.alltoall)


def gradient(keys: Sequence[int], dim: int, rank: int, counted: bool) -> RowGrad:
    found = np.array(keys, np.int64)
    values = np.float32(100 * rank) + found[:, None].astype(np.float32) + np.arange(dim, dtype=np.float32)
    return RowGrad(found, values, (found + 1).astype(np.uint32) if counted else None)


def as_dict(grad: RowGrad) -> dict[int, tuple[Any, Any]]:
    accesses = [None] * len(grad.keys) if grad.accesses is None else grad.accesses.tolist()
    return dict(zip(grad.keys.tolist(), zip(grad.values.tolist(), accesses, strict=True), strict=True))


PULLED = [5, 0, 2, 8, 8, 1, 17, 4, 11]
GIVEN = {
    "all, in the order of the pull": [5, 0, 2, 8, 1, 17, 4, 11],
    "all, in another order": [11, 8, 4, 17, 2, 5, 1, 0],
    "some": [11, 0, 2, 4],
    "of one owner": [1, 4],
    "none": [],
}


@pytest.fixture(params=[{"a": (40, 4)}, {"a": (40, 4), "b": (20, 3)}], ids=["one group", "two groups"])
def of_ranks(request: pytest.FixtureRequest, make_tables: MakeTables) -> list[gba_hvd.EmbeddingTables]:
    """Each rank's tables; all have the same rows."""
    return [make_tables(request.param) for _ in range(3)]


def pulled(whole: WholeRows, world: World, keys: Sequence[int], n_groups: int, returns: bool = True) -> None:
    whole.pull([np.array(keys, np.int64)] * n_groups, world.alltoall, returns)


@pytest.mark.slow
@pytest.mark.parametrize("counted", [False, True], ids=["", "accesses are counted"])
@pytest.mark.parametrize("extra", [0, 1], ids=["", "contributors are counted"])
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_gradients_of_pulled_rows_reach_their_owners_bit_for_bit(
    of_ranks: list[gba_hvd.EmbeddingTables], given: list[int], extra: int, counted: bool
) -> None:
    groups = of_ranks[0].layout.groups

    def work(world: CountedWorld) -> dict[int, list[RowGrad]]:
        tables = of_ranks[world.rank]
        tables.counts_accesses = counted
        whole = whole_rows(tables, world.rank, extra)
        pulled(whole, world, PULLED, len(groups))
        return sent(whole, world, [gradient(given, g.dim + extra, world.rank, counted) for g in groups])

    for me, received in enumerate(on_all(work)):
        assert sorted(received) == [rank for rank in range(3) if rank not in HERE[me]]
        for rank, grads in received.items():
            for group, grad in zip(groups, grads, strict=True):
                expected = gradient([key for key in given if key % 3 == me], group.dim + extra, rank, counted)
                assert as_dict(grad) == as_dict(expected)


def test_rows_of_other_hosts_come_each_once(of_ranks: list[gba_hvd.EmbeddingTables]) -> None:
    def work(world: CountedWorld) -> None:
        pulled(whole_rows(of_ranks[world.rank], world.rank), world, PULLED, len(of_ranks[0].layout.groups))

    on_all(work)
    for me, tables in enumerate(of_ranks):
        assert tables.memory is not None
        for group, found in zip(tables.layout.groups, tables.remote, strict=True):
            assert found is not None
            assert sorted(found.keys) == sorted({key for key in PULLED if key % 3 not in HERE[me]})
            expected = np.empty((len(found.keys), group.dim), np.float32)
            tables.memory.gather(found.keys, group, 0, expected)
            assert np.array_equal(found.values, expected)


def test_a_step_is_three_exchanges_for_all_groups_and_gradients_travel_without_keys(
    of_ranks: list[gba_hvd.EmbeddingTables],
) -> None:
    groups, given = of_ranks[0].layout.groups, GIVEN["all, in another order"]

    def work(world: CountedWorld) -> list[tuple[str, int]]:
        whole = whole_rows(of_ranks[world.rank], world.rank)
        pulled(whole, world, PULLED, len(groups))
        sent(whole, world, [gradient(given, g.dim, world.rank, False) for g in groups])
        return world.sent

    n_rows = [[sum(key % 3 == owner for key in given) for owner in range(3)] for _ in range(3)]
    columns = sum(group.dim for group in groups)
    for me, names_and_words in enumerate(on_all(work)):
        away = [rank for rank in range(3) if rank not in HERE[me]]
        asked, lent = sum(n_rows[me][rank] for rank in away), sum(n_rows[rank][me] for rank in away)
        assert names_and_words == [
            ("pull.keys", 2 * len(groups) * (len(away) + asked)),
            ("pull.rows", columns * lent),
            ("rows", columns * asked + len(groups) * len(away)),  # a word has the bits of each owner's rows
        ]


def test_rows_that_are_only_read_in_between_do_not_change_what_is_given_back(
    of_ranks: list[gba_hvd.EmbeddingTables],
) -> None:
    groups = of_ranks[0].layout.groups

    def work(world: CountedWorld) -> dict[int, list[RowGrad]]:
        whole = whole_rows(of_ranks[world.rank], world.rank)
        pulled(whole, world, PULLED, len(groups))
        pulled(whole, world, [1, 2, 3, 9], len(groups), returns=False)
        return sent(whole, world, [gradient(PULLED[:4], g.dim, world.rank, False) for g in groups])

    assert [as_dict(grad) for grad in on_all(work)[2][0]] == [
        as_dict(gradient([5, 2, 8], group.dim, 0, False)) for group in groups
    ]


def test_a_step_that_is_given_up_leaves_nothing_to_the_next_one(of_ranks: list[gba_hvd.EmbeddingTables]) -> None:
    groups = of_ranks[0].layout.groups

    def work(world: CountedWorld) -> dict[int, list[RowGrad]]:
        whole = whole_rows(of_ranks[world.rank], world.rank)
        pulled(whole, world, [5, 0, 2], len(groups))
        pulled(whole, world, [8, 1, 9], len(groups))
        return sent(whole, world, [gradient([1, 9, 8], g.dim, world.rank, False) for g in groups])

    received = on_all(work)
    for me, rank, keys in ((2, 0, [8]), (2, 1, [8]), (0, 2, [9]), (1, 2, [1])):
        assert [grad.keys.tolist() for grad in received[me][rank]] == [keys] * len(groups)


@pytest.mark.parametrize(
    ("keys", "why"),
    [([5, 14], "key 14 has a gradient for rank 2"), ([5, 8, 5, 2], "a key has two gradients for rank 2")],
    ids=["not fetched", "twice"],
)
def test_a_gradient_that_would_not_arrive_is_refused(
    of_ranks: list[gba_hvd.EmbeddingTables], keys: list[int], why: str
) -> None:
    groups = of_ranks[0].layout.groups

    def work(world: CountedWorld) -> None:
        whole = whole_rows(of_ranks[world.rank], world.rank)
        pulled(whole, world, PULLED, len(groups))
        sent(whole, world, [gradient(keys, g.dim, world.rank, False) for g in groups])

    errors = [error for error in on_all(work) if isinstance(error, GbaError)]  # the first breaks the others' barrier
    assert errors and why in str(errors[0]), errors
