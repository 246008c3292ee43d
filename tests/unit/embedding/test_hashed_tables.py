"""Hashed tables in training: what a user says and gets, and the same vocabulary whoever trains."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gba_hvd_tools import cli
from gba_hvd_tools.commands.job import facts
from safetensors.torch import load_file

import gba_hvd
from gba_hvd import BadInput, Bag, GbaError, Table
from gba_hvd.callbacks import OWN_POINT, Event
from gba_hvd.embedding.apply_rows import apply_rows, write_rows
from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.shm import job_board
from gba_hvd.shm.checkpoint_rows import ShardRows
from gba_hvd.shm.layout import NO_KEY, keys_of_ids
from gba_hvd.tracking import gauges
from recovery.config import Config
from recovery.errors import BadInput as NotThisCheckpoint
from recovery.restore import restore
from recovery.restore.open_checkpoint import open_checkpoint
from recovery.selection.selector import Selection
from recovery.storage.open import open_store
from recovery.write.multipart import SaveTarget, commit_parts, save_part
from tests.unit.conftest import Clicks
from tests.unit.thread_world import EventLog, Workers

USERS = Table(dim=4, keys="hash64", capacity=300, admit_after=2, evict="lfu", fallback_rows=10)


class RawClicks(Clicks):
    """Users have ids of 64 bits, some of them negative; few come often."""

    def __init__(self, n: int = 200, seed: int = 3) -> None:
        super().__init__(n, users=40, seed=seed)
        popular = np.random.default_rng(seed).integers(-(2**63) + 1, 2**63 - 1, 40)
        self.user = popular[np.minimum(self.user, np.random.default_rng(seed + 1).integers(0, 40, n))]


def state_of(jobs: list[Any]) -> dict[str, Any]:
    """Of all hosts together."""
    ids = np.unique(np.concatenate([job.tables.vocabulary("user") for job in jobs]))
    return {"ids": ids.tolist(), "dense": np.concatenate([v.ravel() for v in jobs[0].all_dense().values()])}


def rows_of(job: Any, ids: list[int]) -> dict[str, np.ndarray]:
    return {what: job.tables.rows("user", ids, what) for what in ("weights", "sum")}


def rows_by_id(ids: np.ndarray) -> np.ndarray:
    return np.sin(ids[:, None] % 1000 + np.arange(4))


def drawn_rows(ids: np.ndarray) -> np.ndarray:
    return np.random.default_rng().normal(size=(len(ids), 4))


def known_rows(ids: np.ndarray) -> np.ndarray:
    known = {id_: np.zeros(4) for id_ in range(100)}
    return np.stack([known[id_] for id_ in ids.tolist()])


def narrow_rows(ids: np.ndarray) -> np.ndarray:
    return np.zeros((len(ids), 3), np.float32)


# --- what a user says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (Table(10, 4, capacity=5), "capacity would have no effect without keys='hash64'"),
        (Table(10, 4, admit_after=3, evict="lfu"), "admit_after, evict would have no effect"),
        (Table(10, 4, keys="hash64", capacity=5), "give dim and capacity, and no n_rows; got n_rows=10$"),
        (Table(dim=4, keys="hash32", capacity=5), "keys must be 'hash64'"),
        (Table(keys="hash64", capacity=5), "table 't': give dim, how many numbers a row has$"),
        (Table(dim=4, keys="hash64"), "needs capacity="),
        (Table(dim=4, keys="hash64", capacity=0), "capacity, .* must be a whole number of at least 1, got 0"),
        (Table(dim=4, keys="hash64", capacity=True), "must be a whole number of at least 1, got True"),
        (Table(dim=4, keys="hash64", capacity=1e6), "must be a whole number of at least 1, got 1000000.0"),  # type: ignore[arg-type]
        (Table(dim=4, keys="hash64", capacity="1GB"), "must be a whole number of at least 1, got '1GB'"),  # type: ignore[arg-type]
        (Table(dim=4, keys="hash64", capacity=5, admit_after=0), "admit_after must be a whole number from 1 to 255"),
        (Table(dim=4, keys="hash64", capacity=5, admit_after=256), "whole number from 1 to 255, got 256"),
        (Table(dim=4, keys="hash64", capacity=5, evict="lru"), "evict must be 'lfu', 'ttl' or None"),
        (Table(dim=4, keys="hash64", capacity=5, evict="ttl"), "needs evict_after_steps="),
        (Table(dim=4, keys="hash64", capacity=5, evict="lfu", evict_after_steps=9), "no effect without evict='ttl'"),
        (Table(dim=4, keys="hash64", capacity=5, evict_after_steps=9), "no effect without evict='ttl'"),
        (
            Table(dim=4, keys="hash64", capacity=5, fallback_rows=0),
            "fallback_rows must be a whole number of at least 1",
        ),
        (Table(dim=4, keys="hash64", capacity=5, fallback_rows=1.5), "whole number of at least 1, got 1.5"),  # type: ignore[arg-type]
        (Table(10, 4, fallback_hashes=1), "fallback_hashes would have no effect without keys='hash64'"),
        (Table(dim=4, keys="hash64", capacity=5, fallback_hashes=3), "fallback_hashes must be 1 or 2"),
        (Table(dim=4, keys="hash64", capacity=5, fallback_hashes=0), "fallback_hashes must be 1 or 2"),
        (Table(dim=4, keys="hash64", capacity=5, fallback_hashes=True), "fallback_hashes must be 1 or 2"),
        (Table(dim=4, keys="hash64", capacity=5, fallback_rows=1), "fallback_rows=1 is too few for fallback_hashes=2"),
        (Table(dim=4, keys="hash64", capacity=5, init=lambda ids: ids), "at the top level of a module other than the"),
        (Table(dim=4, keys="hash64", capacity=5, padding_idx=-(2**63)), "padding_idx must be an id"),
    ],
)
def test_options_that_do_not_go_together_are_refused(make_tables: Any, table: Table, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        make_tables({"t": table})


@pytest.mark.parametrize(
    ("init", "why"),
    [
        (drawn_rows, "init of table 't' must depend on the ids only"),
        (known_rows, r"init of table 't' raises KeyError: .* give any int64 id a row, also those that your data"),
        (narrow_rows, r"init of table 't': expected float32 \[16, 4\], got float32 \[16, 3\]"),
    ],
)
def test_functions_that_do_not_give_every_id_its_row_are_refused_at_the_start(
    make_tables: Any, init: Any, why: str
) -> None:
    with pytest.raises(BadInput, match=why):
        make_tables({"t": Table(dim=4, keys="hash64", capacity=5, init=init)})


def test_activations_of_bags_cannot_be_told_from_ids(training: Any) -> None:
    with pytest.raises(BadInput, match=r"row_compression=dct_mp .* table 'user' has keys='hash64'"):
        training(tables={"user": USERS, "item": (7, 3)}, row_compression=gba_hvd.Compression.dct_mp())


def test_ids_of_another_type_are_refused_with_what_to_do(make_tables: Any) -> None:
    tables = make_tables({"t": Table(dim=4, keys="hash64", capacity=50)})
    with pytest.raises(BadInput, match=r"got torch.uint64 \[2\]; view hashes as int64: ids.view\(torch.int64\)"):
        tables({"t": torch.zeros(2, dtype=torch.uint64)})
    with pytest.raises(BadInput, match=r"ids must be a tensor .* got list; strings become ids .*hash_strings\(pyarrow"):
        tables({"t": ["x"]})
    with pytest.raises(BadInput, match=r"id -9223372036854775808 in sample 1 .* stands for no value"):
        tables({"t": torch.tensor([3, -(2**63)])})
    assert tables({"t": torch.tensor([-5, 3], dtype=torch.int32)})["t"].shape == (2, 4)


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (["x"], r"table 't': ids must be whole numbers \[n\], got <U1 \[1\]; strings become ids of .*hash_strings"),
        ([1.5], r"table 't': ids must be whole numbers \[n\], got float64 \[1\]$"),
        ([[1], [2, 3]], "table 't': ids must be whole numbers .n., got lists of different lengths"),
    ],
)
def test_ids_that_are_no_whole_numbers_are_refused_where_rows_are_looked_at(
    make_tables: Any, ids: Any, why: str
) -> None:
    tables = make_tables({"t": Table(dim=4, keys="hash64", capacity=50)})
    tables.admitted("t", [1, 2])
    for look in (tables.admitted, tables.rows):
        with pytest.raises(BadInput, match=why):
            look("t", ids)


def test_tables_without_memory_say_so_whatever_is_asked_of_them(tmp_path: Path) -> None:
    tables = gba_hvd.EmbeddingTables(
        {"t": Table(dim=4, keys="hash64", capacity=50), "plain": (10, 4)}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path
    )
    ids = torch.tensor([1])
    for look in (tables.admitted, tables.rows, lambda name, _: tables.vocabulary(name), lambda n, i: tables({n: i})):
        with pytest.raises(GbaError, match=r"the tables have no memory yet: iterate gba_hvd\.batches"):
            look("t", ids)
    with pytest.raises(BadInput, match="table 'plain' is not hashed"):
        tables.vocabulary("plain")
    with pytest.raises(BadInput, match=r"table 't': ids must be whole numbers \[n\], got <U1 .*strings become ids"):
        tables.assign("t", ["x"], np.zeros((1, 4)))


def test_every_form_of_ids_works_and_padding_is_left_out(make_tables: Any) -> None:
    tables = make_tables({"t": Table(dim=4, keys="hash64", capacity=500, padding_idx=-1)})
    big = 2**62
    bag = tables({"t": Bag(torch.tensor([big, -1, 5, -7]), torch.tensor([0, 2]))})["t"]
    padded = tables({"t": torch.tensor([[big, -1], [5, -7]])})["t"]
    assert torch.equal(bag, padded)
    rows = tables.rows("t", [big, 5, -7])
    assert np.allclose(bag.detach().numpy(), [rows[0], rows[1] + rows[2]])
    assert not tables.admitted("t", [big, 5]).any() and tables.vocabulary("t").tolist() == []


@pytest.mark.slow
def test_a_compiled_model_looks_up_raw_ids(make_tables: Any) -> None:
    tables = make_tables({"t": Table(dim=4, keys="hash64", capacity=500)})
    ids = {"t": torch.tensor([2**62, -3, 2**62])}
    compiled = torch.compile(lambda ids: tables(ids)["t"] * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ids), tables(ids)["t"] * 2)


@pytest.mark.parametrize(
    ("evict", "hashes", "n_shared"), [("lfu", 1, 500), (None, 1, 10), ("lfu", 2, 1000), (None, 2, 12)]
)
def test_a_table_that_is_meant_to_be_too_small_has_more_shared_rows(
    make_tables: Any, evict: str | None, hashes: int, n_shared: int
) -> None:
    tables = make_tables(
        {"t": Table(dim=4, keys="hash64", capacity=1000, evict=evict, fallback_hashes=hashes)}, n_shards=2
    )
    assert tables.layout.hashed_settings()["t"]["fallback_rows"] == n_shared
    distinct = len(np.unique(tables.rows("t", np.arange(50_000)), axis=0))
    assert distinct == n_shared if hashes == 1 else distinct > 1.4 * n_shared


@pytest.mark.parametrize("n_shards", [1, 2])
def test_each_shared_row_gets_the_gradients_of_all_ids_that_are_its_sums(make_tables: Any, n_shards: int) -> None:
    table = Table(dim=4, keys="hash64", capacity=32, admit_after=250, fallback_rows=4 * n_shards)
    tables = make_tables({"t": table}, gba_hvd.Adagrad(lr=0.5, eps=1e-3), n_shards=n_shards)
    memory, group = tables.memory, tables.layout.groups[0]
    keys = keys_of_ids(np.arange(40))
    values = np.random.default_rng(5).normal(size=(40, 4)).astype(np.float32)
    accesses = np.arange(1, 41, dtype=np.uint32)
    rows = memory.vocabulary(group).shared_rows(keys)
    starts = tables.layout.record_starts(np.unique(rows), group).astype(np.int64)
    before = memory.flat[starts[:, None] + np.arange(4)]
    apply_rows(
        memory, gba_hvd.Adagrad(lr=0.5, eps=1e-3), group, RowGrad(keys, values, accesses), np.arange(n_shards),
        scale=1.0, lr=0.5, number=1, step=1,
    )  # fmt: skip
    assert len(starts) == 4 * n_shards and (rows[0] != rows[1]).all()
    for row, at, was in zip(np.unique(rows), starts, before, strict=True):
        mine = (rows == row).any(axis=0)
        gradient = values[mine].astype(np.float64).sum(axis=0)
        step = 0.5 * gradient / (np.sqrt(gradient**2) + 1e-3)
        assert np.allclose(memory.flat[at : at + 4], was - step, atol=1e-5)
        assert memory.words[at + group.record - 1] == accesses[mine].sum()
    stats = memory.vocabulary(group).stats(list(range(n_shards)))
    assert stats.lookups == stats.missed == accesses.sum()
    assert stats.size == 0


def test_a_table_of_numbered_rows_has_no_vocabulary(make_tables: Any) -> None:
    with pytest.raises(BadInput, match="table 't' is not hashed: its ids are 0 to 9"):
        make_tables({"t": (10, 4)}).vocabulary("t")


def test_assigned_ids_are_admitted_before_and_during_training(training: Any) -> None:
    job = training(tables={"user": USERS, "item": (7, 3)}, epoch=0)
    ids = [-(2**60), 0, 12]
    job.tables.assign("user", ids, np.arange(12, dtype=np.float32).reshape(3, 4))
    job.state.sync()
    assert job.tables.admitted("user", ids).all()
    assert np.array_equal(job.tables.rows("user", ids).ravel(), np.arange(12))
    job.tables.assign("user", [12, 99], np.full((2, 4), 7, np.float32))
    assert job.tables.vocabulary("user").tolist() == sorted([*ids, 99])
    assert (job.tables.rows("user", [12, 99]) == 7).all()


def test_more_assigned_ids_than_there_is_room_for_are_refused(training: Any) -> None:
    small = Table(dim=4, keys="hash64", capacity=10)
    job = training(tables={"user": small, "item": (7, 3)}, epoch=0)
    job.state.sync()
    with pytest.raises(GbaError, match=r"table 'user': .* assigned ids found no room"):
        job.tables.assign("user", np.arange(100), np.ones((100, 4), np.float32))


def test_with_all_ids_admitted_a_hashed_table_trains_like_a_plain_one(training: Any, clicks: Any) -> None:
    hashed = Table(dim=4, keys="hash64", capacity=300)
    jobs = [training(tables={"user": user, "item": (7, 3)}, epoch=0) for user in (hashed, (20, 4))]
    start = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    for job in jobs:
        job.tables.assign("user", np.arange(20), start)
        job.epoch(clicks(100))
    assert np.array_equal(*(job.tables.rows("user", np.arange(20)) for job in jobs))
    assert all(np.array_equal(a, b) for a, b in zip(*(job.all_dense().values() for job in jobs), strict=True))


def test_an_admitted_id_starts_as_the_function_of_its_table_says_also_when_it_comes_back(make_tables: Any) -> None:
    table = Table(dim=4, keys="hash64", capacity=16, evict="lfu", init=rows_by_id, fallback_rows=4)
    tables, ids = make_tables({"plain": (10, 4), "t": table}, n_shards=1), np.array([-(2**60), 7, 2**62])
    shared = tables.rows("t", ids)
    assert not np.isclose(shared, rows_by_id(ids)).any() and 0 < np.abs(shared).max() < 0.1
    look_up(tables, ids, 1)
    assert tables.admitted("t", ids).all()
    assert np.array_equal(tables.rows("t", ids), rows_by_id(ids).astype(np.float32))
    write_rows(tables.memory, tables.layout.groups[1], keys_of_ids(ids), np.ones((3, 4), np.float32), 1)
    for step in (2, 3):
        look_up(tables, np.arange(100, 116), step)
    assert not tables.admitted("t", ids).any()
    for step in range(4, 8):  # they have to be looked up more often than those
        look_up(tables, ids, step)
    assert np.array_equal(tables.rows("t", ids), rows_by_id(ids).astype(np.float32))


# --- whoever trains --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("init", [None, rows_by_id])
@pytest.mark.parametrize("hosts", ["a", "aa", "aaa", "ab", "aab"])
def test_any_number_of_workers_and_hosts_gives_the_same_vocabulary_and_model(
    on_host: Callable[..., Any], workers: Workers, hosts: str, init: Any
) -> None:
    users = replace(USERS, init=init)

    def train(where: str) -> list[Any]:
        jobs = [on_host(f"{len(where)}{host}", tables={"user": users, "item": (7, 3)}) for host in where]

        def run(job: Any) -> None:
            job.state.sync()
            job.epoch(RawClicks())

        workers.together(jobs, run)
        return jobs

    alone, jobs = train("a"), train(hosts)
    expected, found = state_of(alone), state_of(jobs)
    assert 0 < len(expected["ids"]) < len(np.unique(RawClicks().user))
    assert found["ids"] == expected["ids"]
    assert np.allclose(found["dense"], expected["dense"], atol=1e-5)
    ids = np.unique(RawClicks().user)
    for job in jobs:
        here = ids if job.tables.local is None else ids[job.tables.local[keys_of_ids(ids) % 5]]
        for what, rows in rows_of(job, here).items():
            assert np.allclose(rows, rows_of(alone[0], here)[what], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("row_average", ["contributors", "kept_contributors"])
def test_rows_are_averaged_over_contributors_with_large_keys(
    on_host: Callable[..., Any], workers: Workers, row_average: str
) -> None:
    found = []
    for where, sync in (("a", None), ("aa", None), ("a", 8)):
        more = {} if sync is None else {"sync_micro_batch": sync}
        tables = {"user": USERS, "item": (7, 3)}
        jobs = [on_host(f"{where}{sync}", tables=tables, row_average=row_average, more=more) for _ in where]

        def run(job: Any) -> None:
            job.state.sync()
            job.epoch(RawClicks())

        workers.together(jobs, run)
        found.append(state_of(jobs))
    assert found[0]["ids"] == found[1]["ids"] == found[2]["ids"]
    assert all(np.allclose(found[0]["dense"], other["dense"], atol=1e-5) for other in found[1:])


@pytest.mark.slow
def test_compressed_rows_between_hosts_carry_keys_of_64_bits(on_host: Callable[..., Any], workers: Workers) -> None:
    few = gba_hvd.Compression.ternary_ef(keep=0.5)
    jobs = [on_host(host, tables={"user": USERS, "item": (7, 3)}, row_compression=few) for host in "ab"]

    def run(job: Any) -> None:
        job.state.sync()
        job.epoch(RawClicks())

    workers.together(jobs, run)
    alone = on_host("c", tables={"user": USERS, "item": (7, 3)})
    workers.together([alone], run)
    assert state_of(jobs)["ids"] == state_of([alone])["ids"]


# --- checkpoints -----------------------------------------------------------------------------------------------------


def filled(make_tables: Any, n: int = 150, **settings: Any) -> Any:
    """Tables with ids 0 to n - 1, whose rows are their numbers, and shared rows of -1."""
    n_shards = settings.pop("n_shards", 4)
    table = Table(dim=3, keys="hash64", **{"capacity": 200, "fallback_rows": 8, **settings})
    tables = make_tables({"plain": (10, 2), "t": table}, gba_hvd.Adagrad(lr=0.1), n_shards=n_shards)
    group = tables.layout.groups[tables.layout.place_of_table["t"][0]]
    vocabulary, rows = tables.memory.vocabulary(group), np.arange(n)
    for step in (1, 2):
        some = keys_of_ids(rows[: n if step == 1 else n // 2])
        vocabulary.looked_up(some, vocabulary.rows(some), np.full(len(some), 1, np.uint32), np.arange(n_shards), step)
    rows = rows[vocabulary.has(keys_of_ids(rows))]
    starts = tables.memory.record_starts(keys_of_ids(rows), group).astype(np.int64)
    tables.memory.flat[starts[:, None] + np.arange(6)] = np.repeat(rows[:, None], 6, axis=1)
    return tables


def saved(
    rows: ShardRows, selection: Selection, url: str, config: Config, number: int = 1, parent: str | None = None
) -> str:
    store, kind = open_store(url), config.policy if parent else "full"
    target = SaveTarget(1, number, kind, parent, number, number, rows.schema, {})
    part = save_part(rows, selection, store, target, config)
    return commit_parts(store, selection, target, [part], lambda _: None)[0].name


def save_all(tables: Any, url: str, **settings: Any) -> None:
    rows, config = ShardRows(tables.memory), Config(**settings)
    saved(rows, Selection(rows, config), url, config)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_checkpoint_has_keys_and_uses_exactly_also_where_weights_are_rounded(
    make_tables: Any, tmp_path: Path, bits: int | None
) -> None:
    before = filled(make_tables)
    save_all(before, str(tmp_path / "store"), bits=bits)
    after = make_tables({"plain": (10, 2), "t": before.tables["t"]}, gba_hvd.Adagrad(lr=0.1), n_shards=4)
    report = restore(open_store(str(tmp_path / "store")), ShardRows(after.memory, filling=True))
    assert report is not None and report.n_lost == 0 and not report.without_room
    assert after.vocabulary("t").tolist() == before.vocabulary("t").tolist()
    a, b = (one.memory.vocabulary(one.layout.groups[1]) for one in (before, after))
    assert all(np.array_equal(a.uses(s), b.uses(s)) and np.array_equal(a.keys(s), b.keys(s)) for s in range(4))
    assert np.array_equal(before.rows("t", range(150), "sum"), after.rows("t", range(150), "sum"))
    assert bits or np.array_equal(before.rows("t", range(200)), after.rows("t", range(200)))
    assert b.stats([0, 1, 2, 3]).size == len(after.vocabulary("t"))


@pytest.mark.parametrize(("capacity", "n_shards"), [(400, 4), (4000, 4), (200, 3), (300, 7), (200, 1)])
def test_growth_and_resharding_keep_every_row_by_its_id(
    make_tables: Any, tmp_path: Path, capacity: int, n_shards: int
) -> None:
    before = filled(make_tables)
    save_all(before, str(tmp_path / "store"))
    after = filled(make_tables, n=0, capacity=capacity, n_shards=n_shards, fallback_rows=8 * n_shards)
    report = restore(open_store(str(tmp_path / "store")), ShardRows(after.memory, filling=True))
    ids = before.vocabulary("t")
    assert report is not None and not report.without_room and report.n_lost == 0
    assert after.vocabulary("t").tolist() == ids.tolist() and len(ids) > 140
    for what in ("weights", "sum"):
        assert np.array_equal(before.rows("t", ids, what), after.rows("t", ids, what))
    new = np.arange(1000, 1100)  # they find the very rows that they shared, now that there are as many times as many
    if n_shards == 4:
        assert np.array_equal(before.rows("t", new), after.rows("t", new))


@pytest.mark.parametrize("n_shards", [1, 2, 4, 8])
def test_one_shared_row_of_an_id_stays_in_another_number_of_shards(
    make_tables: Any, tmp_path: Path, n_shards: int
) -> None:
    before = filled(make_tables, fallback_hashes=1)
    save_all(before, str(tmp_path / "store"))
    after = filled(make_tables, n=0, n_shards=n_shards, fallback_rows=8 * n_shards, fallback_hashes=1)
    restore(open_store(str(tmp_path / "store")), ShardRows(after.memory, filling=True))
    new = np.arange(1000, 1100)
    assert np.array_equal(before.rows("t", new), after.rows("t", new))


@pytest.mark.parametrize(("hashes", "n_shards"), [(1, 4), (1, 2), (2, 2)])
def test_second_shared_rows_that_were_none_or_others_start_as_zeros(
    make_tables: Any, tmp_path: Path, hashes: int, n_shards: int
) -> None:
    before = filled(make_tables, fallback_hashes=hashes)
    url = str(tmp_path / "store")
    save_all(before, url)
    after = filled(make_tables, n=0, n_shards=n_shards, fallback_rows=16)
    report = restore(open_store(url), ShardRows(after.memory, filling=True))
    assert report is not None and after.vocabulary("t").tolist() == before.vocabulary("t").tolist()
    new = np.arange(1000, 1100)
    first = shared_parts(before, new)[0]
    assert np.array_equal(after.rows("t", new), first) and len(np.unique(first, axis=0)) == 8 // hashes
    vocabulary = after.memory.vocabulary(after.layout.groups[1])
    assert (np.concatenate([vocabulary.keys(s)[vocabulary.spec.entries :] for s in range(n_shards)]) == NO_KEY).all()


def test_a_checkpoint_of_sums_gives_the_first_of_two_rows_to_a_table_with_one(make_tables: Any, tmp_path: Path) -> None:
    before = filled(make_tables)
    save_all(before, str(tmp_path / "store"))
    after = filled(make_tables, n=0, fallback_hashes=1)
    restore(open_store(str(tmp_path / "store")), ShardRows(after.memory, filling=True))
    new = np.arange(1000, 1100)
    assert np.array_equal(after.rows("t", new), shared_parts(before, new)[0])


@pytest.mark.parametrize("hashes", [1, 2])
def test_an_open_checkpoint_gives_every_id_the_row_of_training(make_tables: Any, tmp_path: Path, hashes: int) -> None:
    before = filled(make_tables, fallback_hashes=hashes)
    save_all(before, str(tmp_path / "store"))
    opened = open_checkpoint(str(tmp_path / "store"))
    ids = np.random.default_rng(3).permutation(np.arange(-50, 250))
    for what in (None, "sum"):
        assert np.array_equal(opened.rows("t", ids, what), before.rows("t", ids, what or "weights"))
    assert (opened.tables["t"].shared_rows, opened.tables["t"].shared_hashes) == (8, hashes)
    assert json.loads(opened._store.get(opened.name))["format"] == hashes


def shared_parts(tables: Any, ids: np.ndarray) -> list[np.ndarray]:
    """float32 [n, dim], for each hash the row that ids without one share."""
    memory, group = tables.memory, tables.layout.groups[1]
    rows = memory.vocabulary(group).shared_rows(keys_of_ids(ids))
    starts = [memory.layout.record_starts(some, group).astype(np.int64) for some in rows]
    return [memory.flat[at[:, None] + np.arange(group.dim)] for at in starts]


def test_a_smaller_table_takes_the_most_used_or_is_refused(make_tables: Any, tmp_path: Path) -> None:
    before = filled(make_tables)
    save_all(before, str(tmp_path / "store"))
    small = filled(make_tables, n=0, capacity=64, evict="lfu")
    report = restore(open_store(str(tmp_path / "store")), ShardRows(small.memory, filling=True))
    kept = small.vocabulary("t")
    n_left = len(before.vocabulary("t")) - len(kept)
    assert report is not None and report.without_room == {"t": (n_left, 64)} and n_left > 0
    assert (kept < 75).mean() > 0.95  # those used twice
    assert np.array_equal(small.rows("t", kept), before.rows("t", kept))
    tight = filled(make_tables, n=0, capacity=64)
    why = r"table 't': \d+ ids .* the table evicts nothing: raise capacity \(now 64 in 4 shards\) to \d+"
    with pytest.raises(NotThisCheckpoint, match=why) as refused:
        restore(open_store(str(tmp_path / "store")), ShardRows(tight.memory, filling=True))
    enough = re.search(r"to (\d+) or more", str(refused.value))
    assert enough is not None
    wide = filled(make_tables, n=0, capacity=int(enough[1]))
    restore(open_store(str(tmp_path / "store")), ShardRows(wide.memory, filling=True))
    assert wide.vocabulary("t").tolist() == before.vocabulary("t").tolist()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["delta", "mfu", "scar"])
def test_a_chain_gives_each_id_its_newest_row_and_one_entry(make_tables: Any, tmp_path: Path, policy: str) -> None:
    tables = filled(make_tables, n=60, capacity=64, evict="lfu")
    group = tables.layout.groups[1]
    vocabulary, rows = tables.memory.vocabulary(group), ShardRows(tables.memory)
    config = Config(policy=policy, **({} if policy == "delta" else {"row_fraction": 0.5}))
    selection, url, parent = Selection(rows, config), str(tmp_path / "store"), None
    for number in range(1, 5):
        keys = keys_of_ids(np.arange(40 * number, 40 * number + 60))
        vocabulary.looked_up(keys, vocabulary.rows(keys), np.full(60, number, np.uint32), np.arange(4), 10 * number)
        parent = saved(rows, selection, url, config, number, parent)
    after = filled(make_tables, n=0, capacity=64, evict="lfu")
    restore(open_store(url), ShardRows(after.memory, filling=True))
    found = after.memory.vocabulary(group)
    ids = found.ids([0, 1, 2, 3])
    assert len(np.unique(ids)) == len(ids) == found.stats([0, 1, 2, 3]).size > 30
    if policy == "delta":
        assert ids.tolist() == vocabulary.ids([0, 1, 2, 3]).tolist()
    grown = filled(make_tables, n=0, capacity=640, evict="lfu")
    restore(open_store(url), ShardRows(grown.memory, filling=True))
    assert grown.vocabulary("t").tolist() == ids.tolist()


def look_up(tables: Any, ids: np.ndarray, step: int) -> None:
    """A step that looks these ids up, once each."""
    vocabulary, keys = tables.memory.vocabulary(tables.layout.groups[1]), keys_of_ids(ids)
    shards = np.arange(tables.layout.n_shards)
    vocabulary.looked_up(keys, vocabulary.rows(keys), np.ones(len(keys), np.uint32), shards, step)


def looked_up_twice(make_tables: Any, **settings: Any) -> Any:
    """Tables that admit at the third lookup, and ids 0 to 59 that have had two."""
    tables = filled(make_tables, n=0, admit_after=3, **settings)
    for step in (1, 2):
        look_up(tables, np.arange(60), step)
    assert not len(tables.vocabulary("t"))
    return tables


@pytest.mark.parametrize("capacity", [200, 260, 800, 100])
def test_lookups_of_ids_without_a_row_are_counted_on_after_a_restart(
    make_tables: Any, tmp_path: Path, capacity: int
) -> None:
    before = looked_up_twice(make_tables)
    save_all(before, str(tmp_path / "store"), bits=4)
    after = filled(make_tables, n=0, admit_after=3, capacity=capacity)
    report = restore(open_store(str(tmp_path / "store")), ShardRows(after.memory, filling=True))
    assert report is not None and report.without_filter == ()
    for tables in (before, after):
        look_up(tables, np.arange(40), 3)
        look_up(tables, np.arange(1000, 1200), 4)  # for the first time
    expected, found = (set(tables.vocabulary("t").tolist()) for tables in (before, after))
    assert set(range(40)) <= expected and len(expected) < 60  # a filter takes few for others
    assert set(range(40)) <= found and (found == expected or capacity != 200)


@pytest.mark.parametrize("n_shards", [2, 3, 8])
def test_counts_of_another_number_of_shards_are_left_out_and_reported(
    make_tables: Any, tmp_path: Path, n_shards: int
) -> None:
    save_all(looked_up_twice(make_tables), str(tmp_path / "store"))
    after = filled(make_tables, n=0, admit_after=3, n_shards=n_shards, fallback_rows=8 * n_shards)
    report = restore(open_store(str(tmp_path / "store")), ShardRows(after.memory, filling=True))
    assert report is not None and report.without_filter == ("t",)
    look_up(after, np.arange(40), 3)
    assert not len(after.vocabulary("t"))
    for step in (4, 5):
        look_up(after, np.arange(40), step)
    assert after.vocabulary("t").tolist() == list(range(40))


@pytest.mark.parametrize(("was", "now", "is_reported"), [(1, 3, True), (3, 1, False), (3, 2, False)])
def test_a_checkpoint_fits_a_table_that_admits_otherwise(
    make_tables: Any, tmp_path: Path, was: int, now: int, is_reported: bool
) -> None:
    before = filled(make_tables, admit_after=was)
    save_all(before, str(tmp_path / "store"))
    after = filled(make_tables, n=0, admit_after=now)
    report = restore(open_store(str(tmp_path / "store")), ShardRows(after.memory, filling=True))
    ids = before.vocabulary("t")
    assert report is not None and report.without_filter == (("t",) if is_reported else ())
    assert after.vocabulary("t").tolist() == ids.tolist()
    for what in ("weights", "sum"):
        assert np.array_equal(before.rows("t", range(150), what), after.rows("t", range(150), what))
    opened = open_checkpoint(str(tmp_path / "store"))
    assert opened.tables["t"].slots == {"sum": 3} and np.array_equal(opened.rows("t"), before.rows("t", ids))


def test_a_chain_has_the_counts_of_its_base_and_newer_ones_beside_rows_that_changed(
    make_tables: Any, tmp_path: Path
) -> None:
    tables, url = looked_up_twice(make_tables), str(tmp_path / "store")
    rows, config = ShardRows(tables.memory), Config(policy="delta")
    selection = Selection(rows, config)
    base = saved(rows, selection, url, config)
    look_up(tables, np.arange(20), 3)
    saved(rows, selection, url, config, 2, base)
    after = filled(make_tables, n=0, admit_after=3)
    restore(open_store(url), ShardRows(after.memory, filling=True))
    assert after.vocabulary("t").tolist() == list(range(20))
    look_up(after, np.arange(60), 4)
    assert after.vocabulary("t").tolist() == list(range(60))


# --- what is reported ------------------------------------------------------------------------------------------------


def test_vocabularies_are_gauges_a_line_of_status_and_an_event_where_a_table_is_full(training: Any) -> None:
    job, log = training(tables={"user": Table(dim=4, keys="hash64", capacity=16), "item": (7, 3)}, epoch=0), EventLog()
    job.state.register_callbacks([log])
    dataset = RawClicks()
    dataset.user = np.random.default_rng(0).integers(0, 2**60, len(dataset))
    job.epoch(dataset)
    (full,) = log.of("table_full")
    assert "% of 200 lookups had no row of their own" in full.message
    assert "capacity, which is 16 (48 rows: a multiple of 16 in each of 3 shards), to 96 and more" in full.message
    assert full.message.endswith('or have it evict (evict="lfu")')
    assert full.data["table"] == "user" and "it evicts nothing" in full.message and full.level == "warning"
    last = [event.data["vocabulary"]["user"] for event in log.of("rates") if "vocabulary" in event.data][-1]
    assert last["size"] == len(job.tables.vocabulary("user")) <= last["capacity"] == 48
    assert last["lookups"] == 200 and last["no_room"] > 0 and 0 < last["missed_share"] <= 1
    values = gauges.Readings().take({"vocabulary": {"user: raw": last}})
    assert values["job/vocabulary/user_ raw/size"] == last["size"]
    shown = job_board.read(job.state.engine.folder)
    assert shown is not None and shown["vocabulary"]["user"] == last
    words = f"{last['size']} of 48 rows taken on this host, 0 evicted, {last['no_room']:,} times no room; "
    assert ("ids of user", words + f"{last['missed_share']:.1%} of lookups without a row") in facts(shown)
    job.state.engine.emit(Event("resumed", 5, "which ends the warning"))
    job.state.engine.reports.vocabularies(now=True)
    assert len(log.of("table_full")) == 2  # the table is still full


def hashed_job(training: Any) -> tuple[Any, Any]:
    """(a job with a hashed table, its events)"""
    job, log = training(tables={"user": USERS, "item": (7, 3)}, epoch=0), EventLog()
    job.state.register_callbacks([log])
    return job, log


def own_points(log: Any) -> list[tuple[int, dict[str, Any]]]:
    found = [event for event in log.of("rates") if event.data.get(OWN_POINT)]
    return [(event.step, event.data["vocabulary"]["user"]) for event in found]


@pytest.mark.slow
def test_the_end_of_an_epoch_has_a_point_of_its_own_with_what_the_table_has_then(training: Any) -> None:
    job, log = hashed_job(training)
    sizes = []
    for job.state.epoch in range(2):
        job.epoch(RawClicks(seed=3 + job.state.epoch))
        sizes.append(len(job.tables.vocabulary("user")))
    assert [(step, found["size"]) for step, found in own_points(log)] == [(13, sizes[0]), (26, sizes[1])]
    assert 0 < sizes[0] < sizes[1]
    shares = [found["missed_share"] for _, found in own_points(log)]
    with pytest.warns(UserWarning, match="epoch 1 is done and has no batches left"):
        job.epoch(RawClicks(seed=4))
    job.state.close()
    assert len(own_points(log)) == 2, "nothing was trained since"
    last = [event.data["vocabulary"]["user"] for event in log.of("rates") if "vocabulary" in event.data][-1]
    assert last["missed_share"] == shares[-1] > 0, "of the newest lookups, since there were none after them"


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, KeyboardInterrupt("SIGTERM")])
def test_a_launch_that_finishes_within_an_epoch_reports_what_its_tables_have(training: Any, error: Any) -> None:
    """One that is interrupted waits for nothing."""
    job, log = hashed_job(training)
    for number, batch in enumerate(gba_hvd.batches(RawClicks(), job.state)):
        job.micro_step(batch)
        if number == 4 * 5 - 1:
            break
    assert own_points(log) == []
    size = len(job.tables.vocabulary("user"))
    job.state.close("FINISHED" if error is None else "KILLED", error)
    assert [(step, found["size"]) for step, found in own_points(log)] == ([(5, size)] if error is None else [])


def test_a_full_table_that_evicts_is_not_advised_to_evict(training: Any) -> None:
    user = Table(dim=4, keys="hash64", capacity=16, evict="ttl", evict_after_steps=50)
    job, log = training(tables={"user": user, "item": (7, 3)}, epoch=0), EventLog()
    job.state.register_callbacks([log])
    dataset = RawClicks()
    dataset.user = np.random.default_rng(0).integers(0, 2**60, len(dataset))
    job.epoch(dataset)
    (full,) = log.of("table_full")
    assert full.message.endswith("until that share is small; a restart from a checkpoint may")


# --- tools -----------------------------------------------------------------------------------------------------------


def test_an_export_has_the_id_of_every_row(make_tables: Any, tmp_path: Path) -> None:
    tables, url = filled(make_tables, admit_after=2), str(tmp_path / "store")
    save_all(tables, url)
    assert cli.main(["checkpoint", "export", url, "--out", str(tmp_path / "rows.safetensors")]) == 0
    found = load_file(tmp_path / "rows.safetensors")
    ids, rows = found["t/id"].numpy(), found["t"].numpy()
    assert set(found) == {"plain", "plain/sum", "t", "t/sum", "t/id"}
    mine = ids != -(2**63)
    assert sorted(ids[mine].tolist()) == tables.vocabulary("t").tolist()
    assert np.array_equal(rows[mine], tables.rows("t", ids[mine]))


@pytest.mark.slow
@pytest.mark.parametrize("compared_bytes", [100, 1 << 20])
def test_show_counts_the_ids_of_a_hashed_table_and_diff_those_that_came_and_left(
    make_tables: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    compared_bytes: int,
) -> None:
    url, config = str(tmp_path / "store"), Config(policy="delta")
    monkeypatch.setattr("gba_hvd_tools.commands.checkpoint._COMPARED_BYTES", compared_bytes)
    names, counts = list[str](), list[int]()
    for number, n in enumerate((150, 100), 1):
        tables = filled(make_tables, n=n)
        rows = ShardRows(tables.memory)
        selection = Selection(rows, config)
        names.append(saved(rows, selection, url, config, number))
        counts.append(len(tables.vocabulary("t")))
    look_up(tables, np.arange(500, 530), 3)
    names.append(saved(rows, selection, url, config, 3, names[-1]))
    counts.append(len(tables.vocabulary("t")))

    def printed(*args: str) -> Any:
        assert cli.main(["checkpoint", args[0], url, *args[1:], "--json"]) == 0
        return json.loads(capsys.readouterr().out)["tables"]

    assert [[one["ids"] for one in printed("show", name)] for name in names] == [[None, n] for n in counts]
    assert counts[2] == 130
    plain, hashed = printed("diff", names[0], names[2])
    assert (plain["ids_came"], plain["ids_left"]) == (None, None)
    assert (hashed["ids_came"], hashed["ids_left"]) == (30, counts[0] - 100)
    cli.main(["checkpoint", "diff", url, names[0], names[2]])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["t"])
    assert line.split()[-2:] == ["30", "50"]


@pytest.mark.slow
def test_show_counts_the_ids_of_a_large_table_only_when_asked(
    make_tables: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "store")
    save_all(filled(make_tables, n=40), url)
    monkeypatch.setattr("gba_hvd_tools.commands.checkpoint._COUNTED_BYTES", 100)
    assert cli.main(["checkpoint", "show", url]) == 0
    assert "not counted: the ids of t, whose rows are large: --ids reads them" in capsys.readouterr().out
    assert cli.main(["checkpoint", "show", url, "--ids", "--json"]) == 0
    assert [one["ids"] for one in json.loads(capsys.readouterr().out)["tables"]] == [None, 40]


def test_a_checkpoint_is_read_by_raw_ids_and_other_ids_give_the_row_that_they_share(
    make_tables: Any, tmp_path: Path
) -> None:
    tables, url = filled(make_tables), str(tmp_path / "store")
    save_all(tables, url)
    opened, own = open_checkpoint(url), tables.vocabulary("t")
    assert opened.tables["t"].is_hashed
    assert np.array_equal(opened.ids("t"), own)
    assert np.array_equal(opened.rows("t"), tables.rows("t", own))
    asked = np.concatenate([own[::-1], own[:3], np.random.default_rng(8).integers(-(2**62), 2**62, 100)])
    assert np.array_equal(opened.rows("t", asked), tables.rows("t", asked))
    assert np.array_equal(opened.rows("t", asked, "sum"), tables.rows("t", asked, "sum"))
    assert np.array_equal(opened.rows("plain"), tables.rows("plain", opened.ids("plain")))
    with pytest.raises(BadInput, match="has no row"):
        opened.rows("t", [-(2**63)])


@pytest.mark.slow
def test_checkpoints_of_hashed_tables_of_different_sizes_are_not_compared_row_by_row(
    make_tables: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(tmp_path / "store")
    tables = [filled(make_tables), filled(make_tables, capacity=400)]
    for number, one in enumerate(tables, 1):
        rows = ShardRows(one.memory)
        saved(rows, Selection(rows, Config()), url, Config(), number)
    names = sorted(open_store(url).names("manifests/"))
    assert cli.main(["checkpoint", "diff", url, *names]) == 1
    assert "hashed tables or the shards have another size" in capsys.readouterr().err
    rows = ShardRows(filled(make_tables, admit_after=2).memory)
    saved(rows, Selection(rows, Config()), url, Config(), 3)
    assert cli.main(["checkpoint", "diff", url, names[0], sorted(open_store(url).names("manifests/"))[-1]]) == 1
    assert "admit_after above 1" in capsys.readouterr().err
    assert cli.main(["checkpoint", "verify", url]) == 0
