"""Rows of other hosts, pulled from their servers before a micro-batch begins. Those of this host are read in place.

Whether they are compressed is decided for each server by how long its answers take (`bypass`), and holds for the
gradients of its rows as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from gba_hvd.comm.collectives import worker_lost
from gba_hvd.compression import activation_codec, row_push
from gba_hvd.compression.bypass import Bypass, StepTiming
from gba_hvd.compression.row_codec import RowCoder, write_keys
from gba_hvd.compression.sparse_message import BadMessage
from gba_hvd.embedding.bags import BagLookups, Borrowed, PooledBag, PoolRequest, split
from gba_hvd.embedding.passes import PulledRows
from gba_hvd.embedding.row_gradients import distinct, distinct_by_owner
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.ps.client import Client, Reply
from gba_hvd.ps.messages import PullRows
from gba_hvd.ps.worker.replies import wait_reply
from gba_hvd.ps.worker.session import PsSession, compressor_of
from gba_hvd.shm.layout import Layout


class RemoteRows:
    """One worker's. Sets which shards of the tables are local. Belongs to the thread that fetches, all but `are_coded`.

    are_there: some shard is on another host than this worker
    """

    def __init__(
        self, session: PsSession, host: int, tables: EmbeddingTables, client: Client, coder: RowCoder | None
    ) -> None:
        self._session, self._tables, self._client = session, tables, client
        self._shard_server = np.array(session.shard_servers, dtype=np.int32)
        is_remote = session.remote_servers(host)
        is_local = ~np.array(is_remote)[self._shard_server]
        self._remote_server = np.where(is_local, np.int32(-1), self._shard_server)
        self.are_there = not bool(is_local.all())
        self._coder = coder if self.are_there else None
        self._ways = [
            _RemoteServer(s, coder) if remote and coder is not None else None for s, remote in enumerate(is_remote)
        ]
        tables.local = is_local if self.are_there else None
        tables.remote = [None] * len(tables.layout.groups)
        tables.write_rows = None

    def are_coded(self, server: int) -> bool:
        """Its rows travel compressed, as of now. From any thread."""
        way = self._ways[server]
        return way is not None and way.is_coded

    def fetch(self, keys: Sequence[np.ndarray], whole: bool, bags: BagLookups | None = None) -> list[PulledRows | None]:
        """Per group the keys that will be used next; what is local among them is left out.

        whole: uncompressed, even where rows are compressed otherwise; no gradients follow. bags: see `EpochRun.bags`
        """
        if not self.are_there:
            return [None] * len(self._tables.layout.groups)
        assert self._tables.local is not None
        if bags is not None and not whole:
            return self._fetch_activations(keys, bags)
        layout, n_servers = self._tables.layout, len(self._session.servers)
        ascend = not whole and any(map(self.are_coded, range(n_servers)))  # compressed keys do
        wanted = [distinct_by_owner(k, self._remote_server, n_servers, ascend) for k in keys]
        asked = []
        for s in range(n_servers):
            mine = [found[start[s] : start[s + 1]] for found, start, _ in wanted]
            if any(map(len, mine)):
                asked.append(self._ask(s, mine, whole))
        parts = [self._take(one, layout) for one in asked]
        rows = [_joined([some[number] for some in parts], group.dim) for number, group in enumerate(layout.groups)]
        return [PulledRows(found, slots, values) for (found, _, slots), values in zip(wanted, rows, strict=True)]

    def _fetch_activations(self, keys: Sequence[np.ndarray], bags: BagLookups) -> list[PulledRows | None]:
        """Compressed ones as activations, by `activation_codec`; those of servers that are bypassed as they are."""
        assert self._tables.local is not None and self._coder is not None
        layout, local, n_servers = self._tables.layout, self._tables.local, len(self._session.servers)
        is_coded = np.array([self.are_coded(s) for s in range(n_servers)])
        owner = np.where(~local & is_coded[self._shard_server], self._shard_server, -1)
        plain: list[list[np.ndarray]] = [[] for _ in range(n_servers)]
        asked: list[list[tuple[np.ndarray, PoolRequest]]] = [[] for _ in range(n_servers)]
        mine: list[list[np.ndarray]] = [[] for _ in range(n_servers)]  # by server and group: the keys of its answer
        left: list[list[PooledBag]] = []
        for number, group in enumerate(layout.groups):
            shards = keys[number] % layout.n_shards
            rows, _, _ = distinct(keys[number][~local[shards] & (owner[shards] < 0)])
            pooled, requests, activations = split(
                bags.bags[number], owner, n_servers, group.rows_per_shard * layout.n_shards
            )
            single = np.sort(distinct(bags.single[number])[0])
            left.append(pooled)
            for s in range(n_servers):
                plain[s].append(np.ascontiguousarray(rows[self._shard_server[rows % layout.n_shards] == s]))
                own = single[owner[single % layout.n_shards] == s]
                asked[s].append((own, requests[s]))
                mine[s].append(np.concatenate([own, activations[s]]) if is_coded[s] else plain[s][-1])
        waits = [
            self._ask_activations(s, mine[s], asked[s]) if is_coded[s] else self._ask(s, plain[s], whole=False)
            for s in range(n_servers)
            if any(map(len, mine[s]))
        ]
        found = [([np.empty(0, np.int64)], [np.empty((0, g.dim), np.float32)]) for g in layout.groups]
        borrowed: list[dict[int, Borrowed]] = [{} for _ in layout.groups]
        for one in waits:
            for number, part in enumerate(self._take(one, layout)):
                found[number][0].append(mine[one.server][number])
                found[number][1].append(part)
                if one.is_coded:
                    request, indices = asked[one.server][number][1], one.indices[number]
                    borrowed[number][one.server] = Borrowed(mine[one.server][number], request, indices)
        pulled: list[PulledRows | None] = []
        for number, (some, values) in enumerate(found):
            all_keys = np.concatenate(some)
            slots = distinct(all_keys)[2]
            pulled.append(PulledRows(all_keys, slots, np.concatenate(values), left[number], borrowed[number]))
        return pulled

    def _ask_activations(
        self, server: int, keys: list[np.ndarray], parts: Sequence[tuple[np.ndarray, PoolRequest]]
    ) -> _PendingPull:
        assert self._coder is not None
        began_s = time.perf_counter()
        frames = [activation_codec.write_request(*part) for part in parts]
        return self._send(_PendingPull(server, keys, True, self._ways[server]), frames, began_s)

    def _ask(self, server: int, keys: list[np.ndarray], whole: bool) -> _PendingPull:
        began_s = time.perf_counter()
        is_coded = self.are_coded(server) and not whole
        frames = list(map(write_keys, keys)) if is_coded else list[Any](keys)
        asked = _PendingPull(server, keys, is_coded, None if whole else self._ways[server])
        return self._send(asked, frames, began_s)

    def _send(self, asked: _PendingPull, frames: list[Any], began_s: float) -> _PendingPull:
        coder = self._coder
        compressor = compressor_of(coder.spec) if asked.is_coded and coder is not None else None
        asked.codec_s = time.perf_counter() - began_s
        asked.answer = self._client.send(
            asked.server, PullRows(self._session.generation, compressor), frames, pull=True
        )
        asked.answer.add_done_callback(asked.came)
        return asked

    def _take(self, asked: _PendingPull, layout: Layout) -> list[np.ndarray]:
        """float32 [n, dim] of each group."""
        assert asked.answer is not None
        frames = wait_reply(asked.answer).frames
        began_s = time.perf_counter()
        if not asked.is_coded:
            found = [
                np.frombuffer(f, np.float32).reshape(-1, g.dim) for f, g in zip(frames, layout.groups, strict=True)
            ]
        else:
            try:
                found = self._opened(asked, frames, layout)
            except BadMessage as error:
                raise worker_lost(f"server {asked.server} sent rows that are none: {error}") from error
        if asked.way is not None:
            wire_s = asked.wire_s or began_s - asked.sent_s  # a waiting thread may be notified before `came` is called
            asked.way.took(asked.is_coded, wire_s, asked.codec_s + time.perf_counter() - began_s)
        for values, keys in zip(found, asked.keys, strict=True):
            if len(values) != len(keys):
                raise worker_lost(f"server {asked.server} sent {len(values)} rows, {len(keys)} were asked for")
        return found

    def _opened(self, asked: _PendingPull, frames: Sequence[Any], layout: Layout) -> list[np.ndarray]:
        coder = self._coder
        assert coder is not None
        if not coder.spec.pools:
            return row_push.take(frames, asked.keys, layout)
        if len(frames) != len(asked.keys):
            raise BadMessage(f"activations of {len(asked.keys)} groups were asked for, {len(frames)} frames came")
        found = []
        for number, (frame, keys, group) in enumerate(zip(frames, asked.keys, layout.groups, strict=True)):
            values, indices = activation_codec.decode(frame, len(keys), group.dim)
            coder.received(number, len(indices), values.size)
            asked.indices.append(indices)
            found.append(values)
        return found


def _joined(parts: Sequence[np.ndarray], dim: int) -> np.ndarray:
    """float32 [n, dim], which is not a copy where it came from one server."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.empty((0, dim), np.float32), *parts])


class _PendingPull:
    """A request for rows. wire_s: until its answer came; codec_s: writing and reading it.

    indices: by group, which elements of activations came
    """

    def __init__(self, server: int, keys: list[np.ndarray], is_coded: bool, way: _RemoteServer | None) -> None:
        self.server, self.keys, self.is_coded, self.way = server, keys, is_coded, way
        self.answer: Future[Reply] | None = None
        self.indices: list[np.ndarray] = []
        self.codec_s = self.wire_s = 0.0
        self.sent_s = time.perf_counter()

    def came(self, _: Future[Reply]) -> None:
        self.wire_s = time.perf_counter() - self.sent_s


class _RemoteServer:
    """How rows of one server of another host travel. is_coded: compressed, as of now"""

    def __init__(self, server: int, coder: RowCoder) -> None:
        self._coder = coder
        self._bypass = Bypass(["rows"], coder.spec.is_forced, f"rows of server {server}", "a request takes")
        self.is_coded = self._bypass.tensors_next()[0]
        self._before_s = time.perf_counter()

    def took(self, coded: bool, wire_s: float, codec_s: float) -> None:
        now = time.perf_counter()
        decision = self._bypass.saw(coded, [StepTiming(wire_s, codec_s, now - self._before_s)])
        self._before_s = now
        if decision is not None and decision.changed:
            self._coder.decisions.append(decision)
        self.is_coded = self._bypass.tensors_next()[0]
