"""Rows that stay in their store: what is looked up, what is read for it, and what happens where that fails."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.serving.block_cache import BlockCache
from gba_hvd.serving.block_index import BLOCK_BYTES, read_index
from gba_hvd.serving.frozen_rows import StoredRows
from gba_hvd.serving.manifest import BuilderRecord, Initial, ModelManifest, StoredObject, StoredTable, read_manifest
from gba_hvd.serving.row_shards import ShardWriter
from recovery.errors import Damaged, StoreError
from recovery.storage.open import open_store
from recovery.storage.retry import RetryingStore, RetryPolicy
from recovery.testing import RamStore
from tests.recovery.conftest import BUCKET
from tests.recovery.conftest import s3_options as s3_options
from tests.recovery.stores import FaultyStore
from tests.unit.serving.conftest import CODE, batch, change_rows, evaluated
from tests.unit.serving.test_save_and_load import raw_users

Trained = Callable[..., nn.Module]


@dataclass
class Rows:
    """A table with random rows. ids: of a hashed one. trained: of a numbered one with initial rows, which changed"""

    dim: int
    n_rows: int = 0
    ids: int = 0
    trained: int = 0
    name: str = "t"
    initial: Initial | None = None
    shared_hashes: int = 1
    shared_in: int = 1

    def __post_init__(self) -> None:
        self.capacity = self.ids
        if self.trained:
            self.initial = Initial(3, 0.5)

    # Random numbers are drawn when a test needs them: every process collects all tests.

    @cached_property
    def values(self) -> np.ndarray:
        """[rows, dim], float32"""
        rng = np.random.default_rng(self.dim)
        values = rng.normal(size=(self.n_rows + self.ids, self.dim)).astype(np.float32)
        if self.initial is not None and self.trained:
            from gba_hvd.serving.row_shards import initial_rows

            kept = rng.choice(self.n_rows, self.n_rows - self.trained, replace=False)
            values[kept] = initial_rows(self.initial, np.sort(kept), self.dim)[np.argsort(np.argsort(kept))]
        return values

    @cached_property
    def _keys(self) -> np.ndarray:
        return np.unique(np.random.default_rng([self.dim, 1]).integers(-(2**63) + 1, 2**63 - 1, self.ids))

    @cached_property
    def _shared(self) -> np.ndarray:
        return np.random.default_rng([self.dim, 2]).normal(size=(5000, self.dim)).astype(np.float32)

    def numbered(self, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop]

    def keys(self) -> np.ndarray:
        return self._keys

    def of_keys(self, keys: np.ndarray) -> np.ndarray:
        return self.values[np.searchsorted(self._keys, keys)]

    def shared(self) -> np.ndarray:
        return self._shared


def written(store: Any, *rows: Rows, shard_bytes: int | None = None) -> ModelManifest:
    writer = ShardWriter(store, only_trained=any(one.trained for one in rows), shard_bytes=shard_bytes)
    tables = tuple(writer.table(one) for one in rows)
    nothing = StoredObject("files/x", 0, "")
    return ModelManifest(1, 0.0, BuilderRecord("a:b"), tables, nothing, blocks=writer.put_index())


def cache_of(store: Any, manifest: ModelManifest, n_bytes: int = 1 << 30, indexed: bool = True) -> BlockCache:
    index = read_index(store, manifest) if indexed else {}
    return BlockCache(store, n_bytes, index, BLOCK_BYTES if indexed else 0)


def remote(store: Any, table: StoredTable, cache: BlockCache) -> StoredRows:
    return StoredRows(store, table, cache=cache)


TABLES = [
    Rows(16, n_rows=30_000), Rows(3, n_rows=20_000), Rows(5000, n_rows=20), Rows(4, n_rows=100),
    Rows(4, ids=40_000, shared_hashes=2, shared_in=5), Rows(7, ids=9000), Rows(5000, ids=30), Rows(4, ids=50),
    Rows(5, n_rows=20_000, trained=9000),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("shard_bytes", [4096, 300_000])
@pytest.mark.parametrize("rows", TABLES, ids=lambda rows: f"{rows.n_rows}x{rows.dim}, {rows.ids} hashed")
def test_rows_are_those_of_a_table_in_memory(rows: Rows, shard_bytes: int, indexed: bool) -> None:
    store, rng = RamStore(), np.random.default_rng(2)
    manifest = written(store, rows, shard_bytes=shard_bytes)
    assert (manifest.blocks is not None) == (max(shard.n_bytes for _, shard in manifest.shards()) > BLOCK_BYTES)
    (table,) = manifest.tables
    expected, found = StoredRows(store, table), remote(store, table, cache_of(store, manifest, indexed=indexed))
    if rows.ids:
        some = np.concatenate([rng.choice(rows.keys(), min(rows.ids, 3000)), rng.integers(-(2**62), 2**62, 1000)])
        keys = np.unique(np.concatenate([some, [-(2**63), 2**63 - 1], rows.keys()[[0, -1]]]))
    else:
        keys = np.unique(np.append(rng.integers(0, rows.n_rows, 3000), [0, rows.n_rows - 1]))
    outs = [np.full((len(keys), rows.dim), np.nan, np.float32) for _ in range(2)]
    expected.gather(keys, outs[0])
    found.gather(keys, outs[1])
    assert np.array_equal(*outs)
    assert np.array_equal(found.has(keys), expected.has(keys))
    assert np.array_equal(np.sort(found.keys()), np.sort(expected.keys()))


def test_a_lookup_reads_its_blocks_once_and_no_others() -> None:
    rows, store = Rows(16, n_rows=30_000), FaultyStore(RamStore())
    manifest = written(store, rows, shard_bytes=1 << 20)
    cache = cache_of(store, manifest)
    reader, out = remote(store, manifest.tables[0], cache), np.empty((3, 16), np.float32)
    store.calls.clear()
    for _ in range(2):
        reader.gather(np.array([0, 1, 20_000]), out)
        assert np.array_equal(out, rows.values[[0, 1, 20_000]])
    assert len(store.calls) == 2
    assert sum(block.data.nbytes for block in cache._blocks.values()) == 2 * BLOCK_BYTES
    reader.gather(np.arange(256, 1024), out := np.empty((768, 16), np.float32))
    assert np.array_equal(out, rows.values[256:1024])
    assert len(store.calls) == 3, "neighbours are one read"


def test_the_cache_keeps_the_blocks_used_last_and_no_more_than_its_bytes() -> None:
    rows, store = Rows(16, n_rows=30_000), FaultyStore(RamStore())
    manifest = written(store, rows, shard_bytes=1 << 20)
    cache = cache_of(store, manifest, n_bytes=4 * BLOCK_BYTES)
    reader, out = remote(store, manifest.tables[0], cache), np.empty((1, 16), np.float32)
    store.calls.clear()
    for block in (0, 2, 4, 0, 6, 8, 0):  # 0 is used again and again, so it stays
        reader.gather(np.array([block * 256]), out)
    assert len(store.calls) == 5
    reader.gather(np.array([2 * 256]), out)
    assert len(store.calls) == 6
    reader.gather(np.arange(30_000), out := np.empty((30_000, 16), np.float32))  # more than there is room for
    assert np.array_equal(out, rows.values)
    assert sum(block.data.nbytes for block in cache._blocks.values()) <= 4 * BLOCK_BYTES


@pytest.mark.slow
def test_requests_of_several_threads_see_whole_rows_while_blocks_are_dropped() -> None:
    rows, store = Rows(16, n_rows=30_000), RamStore()
    manifest = written(store, rows, shard_bytes=1 << 20)
    reader = remote(store, manifest.tables[0], cache_of(store, manifest, n_bytes=8 * BLOCK_BYTES))
    wrong: list[int] = []

    def look_up(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            keys = np.unique(rng.integers(0, 30_000, 40))
            out = np.empty((len(keys), 16), np.float32)
            reader.gather(keys, out)
            wrong.extend(np.flatnonzero((out != rows.values[keys]).any(axis=1)))

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Together(RamStore):
    """Reads of row shards return when `n` of them are at it."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.barrier, self.waits = threading.Barrier(n), False

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        if self.waits and name.startswith("rows/"):
            self.barrier.wait(60)  # it breaks where fewer come
        return super().get(name, start, n_bytes)


@pytest.mark.parametrize("hashed", [False, True])
def test_all_tables_of_a_request_are_read_at_once(
    trained: Trained, hashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"users": 100, "hashed": hashed}
    model, one, store = trained(**arguments), batch(20), Together(2)
    monkeypatch.setattr("gba_hvd.serving.save.open_store", lambda url: store)
    monkeypatch.setattr("gba_hvd.serving.load.open_store", lambda url: store)
    one = gba_hvd.Batch(
        {**one.ids, "item": torch.full((20,), 3), "history": torch.full((20,), 3)}, one.dense, one.label
    )
    if hashed:  # keys of users beside rows of items; then the rows of users are in the blocks that are there
        users = torch.from_numpy(model.tables.vocabulary("user")[:20])
        one = gba_hvd.Batch({**one.ids, "user": users}, one.dense, one.label)
    gba_hvd.save_model(model, "x", build=CODE, arguments=arguments, shard_bytes=1 << 20)
    opened = gba_hvd.load_for_inference("x", tables="remote")
    store.waits = True
    assert torch.equal(opened(one), evaluated(model, one))
    assert torch.equal(opened(one), evaluated(model, one)), "now without a read"


def test_reads_that_fail_for_a_while_are_tried_again() -> None:
    rows, inner = Rows(16, n_rows=3000), RamStore()
    manifest = written(inner, rows, shard_bytes=1 << 20)
    faulty = FaultyStore(inner).fails("get", 2).fails("get", 3)
    store = RetryingStore(faulty, RetryPolicy(tries=3, sleep=lambda s: None))
    reader = remote(store, manifest.tables[0], cache_of(store, manifest))
    reader.gather(np.array([5, 2999]), out := np.empty((2, 16), np.float32))
    assert np.array_equal(out, rows.values[[5, 2999]])
    assert faulty.fired == faulty.planned


def damage(store: RamStore, name: str, at: int) -> None:
    data = bytearray(store.objects[name])
    data[at] ^= 1
    store.objects[name] = bytes(data)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_damaged_block_is_named_and_others_are_served(indexed: bool) -> None:
    rows, store = Rows(16, n_rows=30_000), RamStore()
    manifest = written(store, rows, shard_bytes=1 << 20)
    reader = remote(store, manifest.tables[0], cache_of(store, manifest, indexed=indexed))
    name = manifest.tables[0].rows.shards[0].name
    damage(store, name, 5 * BLOCK_BYTES + 17)
    for row in (0, 29_999) if indexed else (29_999,):
        reader.gather(np.array([row]), out := np.empty((1, 16), np.float32))
        assert np.array_equal(out[0], rows.values[row])
    words = f"{name} is not what was saved: bytes {'81,920 to 98,304' if indexed else '0 to 1,048,576'} have another"
    for _ in range(2):
        with pytest.raises(Damaged, match=words):
            reader.gather(np.array([5 * 256, 29_999]), np.empty((2, 16), np.float32))
    damage(store, name, 5 * BLOCK_BYTES + 17)  # it is repaired
    reader.gather(np.array([5 * 256]), out := np.empty((1, 16), np.float32))
    assert np.array_equal(out[0], rows.values[5 * 256])


def test_a_damaged_index_is_found_when_the_model_is_opened(trained: Trained, tmp_path: Path) -> None:
    model = trained(users=5000)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, arguments={"users": 5000}, shard_bytes=1 << 20)
    (path,) = (tmp_path / "m" / "files").glob("*.blocks")
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"\.blocks is not what was saved"):
        gba_hvd.load_for_inference(tmp_path / "m", tables="remote")
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(batch()), evaluated(model, batch()))


def test_a_model_that_was_deleted_meanwhile(trained: Trained) -> None:
    model, url, one = trained(users=5000), f"memory://{uuid.uuid4().hex}", batch()
    gba_hvd.save_model(model, url, build=CODE, arguments={"users": 5000}, shard_bytes=1 << 20)
    opened, store = gba_hvd.load_for_inference(url, tables="remote"), open_store(url)
    store.delete(list(store.names("rows/")))
    with pytest.raises(Damaged, match=r"is gone: the model, or this version of it, was deleted since it was opened"):
        opened(one)


def test_a_truncated_shard(trained: Trained, tmp_path: Path) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE)
    path = tmp_path / "m" / read_manifest(open_store(tmp_path / "m")).tables[0].rows.shards[0].name
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(Damaged, match="truncated or overwritten: bytes 0 to 800 were asked for, 796 came"):
        gba_hvd.load_for_inference(tmp_path / "m", tables="remote")(batch())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"tables": "remote", "row_dtype": "int8"}, "reads parts of the files, which are float32; row_dtype='int8'"),
        ({"tables": "remote", "cache_bytes": 1000}, "must be a whole number of at least 1,048,576, got 1000"),
        ({"tables": "remote", "cache_bytes": 1.5}, "cache_bytes must be a whole number of at least 1,048,576, got 1.5"),
        ({"tables": "remote", "cache_bytes": "1GB"}, "must be a whole number of at least 1,048,576, got '1GB'"),
        ({"cache_bytes": 1 << 30}, "cache_bytes is of tables='remote'; tables='memory' has no cache"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        gba_hvd.load_for_inference(tmp_path, **how)


def test_an_id_outside_its_table_is_named_with_its_sample(trained: Trained, tmp_path: Path) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE)
    model, one = gba_hvd.load_for_inference(tmp_path / "m", tables="remote"), batch()
    with pytest.raises(BadInput, match="table 'user' has rows 0 to 49, got id 50 in sample 0 of the batch"):
        model(gba_hvd.Batch({**one.ids, "user": one.ids["user"] + 50 - one.ids["user"][0]}, one.dense, one.label))


# --- a server that speaks the S3 protocol ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["all", "touched"])
@pytest.mark.parametrize("hashed", [False, True])
def test_predictions_from_s3_are_those_of_rows_in_memory(
    trained: Trained, s3_options: dict[str, Any], hashed: bool, stored: str
) -> None:
    arguments = {"users": 20_000, "hashed": hashed}
    model, url = trained(touched=9000, **arguments), f"s3://{BUCKET}/{uuid.uuid4().hex}"
    if hashed:
        change_rows(model, "user", np.random.default_rng(8).integers(-(2**62), 2**62, 9000))
    one = raw_users(batch(64), model) if hashed else batch(64, 20_000)
    how = {"build": CODE, "arguments": arguments, "tables": stored, "shard_bytes": 1 << 18}
    gba_hvd.save_model(model, url, **how, **s3_options)
    assert read_manifest(open_store(url, **s3_options)).blocks is not None
    opened = gba_hvd.load_for_inference(url, tables="remote", **s3_options)
    expected = gba_hvd.load_for_inference(url, **s3_options)(one)
    for _ in range(2):
        assert torch.equal(opened(one), expected)
    assert torch.equal(expected, evaluated(model, one))


class Server:
    """One of its own, whose answers to reads of rows are what `status` says, as often as `left`."""

    def __init__(self, port: int = 0) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
        self._server.start()
        host, self.port = self._server.get_host_and_port()
        once = {"retries": {"total_max_attempts": 1}}
        self.options = {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{self.port}", "config_kwargs": once}
        self.asked, self.fails_at = count(1), set[int]()
        server: Any = self._server._server
        inner = server.app

        def app(environ: Any, start_response: Any) -> Any:
            if (
                "/rows/" in environ["PATH_INFO"]
                and environ["REQUEST_METHOD"] == "GET"
                and next(self.asked) in self.fails_at
            ):
                start_response("500 Internal Server Error", [("Content-Length", "0")])
                return [b""]
            return inner(environ, start_response)

        server.app = app

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def server() -> Iterator[Server]:
    import boto3

    one = Server()
    try:
        names = {"region_name": "us-east-1", "aws_access_key_id": "k", "aws_secret_access_key": "s"}
        client = boto3.client("s3", endpoint_url=one.options["endpoint_url"], **names)
        client.create_bucket(Bucket="mine")
        client.close()
        yield one
    finally:
        one.stop()


@pytest.mark.slow
def test_errors_of_the_server_are_tried_again_and_then_said(trained: Trained, server: Server) -> None:
    model, one = trained(users=5000), batch(64, 5000)
    url = f"s3://mine/{uuid.uuid4().hex}"
    gba_hvd.save_model(model, url, build=CODE, arguments={"users": 5000}, shard_bytes=1 << 20, **server.options)
    opened = gba_hvd.load_for_inference(url, tables="remote", tries=2, timeout_s=60, **server.options)
    server.fails_at = {1}
    assert torch.equal(opened(one), evaluated(model, one))
    assert next(server.asked) > 2
    opened = gba_hvd.load_for_inference(url, tables="remote", tries=2, timeout_s=60, **server.options)
    server.fails_at = set(range(10_000))
    with pytest.raises(StoreError, match=r"cannot be read.*\(tried 2 times\)"):
        opened(one)
    server.fails_at = set()
    assert torch.equal(opened(one), evaluated(model, one)), "nothing of the failed request is left"


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back(trained: Trained, server: Server) -> None:
    model, url = trained(users=5000), f"s3://mine/{uuid.uuid4().hex}"
    gba_hvd.save_model(model, url, build=CODE, arguments={"users": 5000}, shard_bytes=1 << 20, **server.options)
    opened = gba_hvd.load_for_inference(url, tables="remote", tries=2, timeout_s=60, **server.options)
    first, other = batch(4, 5000, seed=1), batch(64, 5000, seed=2)
    assert torch.equal(opened(first), evaluated(model, first))
    server.stop()
    assert torch.equal(opened(first), evaluated(model, first)), "its blocks are in the cache"
    with pytest.raises(StoreError, match=r"rows/.* cannot be read"):
        opened(other)
    again = Server(server.port)
    try:
        assert torch.equal(opened(other), evaluated(model, other))
    finally:
        again.stop()
