"""Rows of other hosts, pulled from their servers before a micro-batch begins. Those of this host are read in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gba_hvd.collectives import worker_lost
from gba_hvd.compression import row_push
from gba_hvd.compression.message import BadMessage
from gba_hvd.compression.rows import RowCoder, write_keys
from gba_hvd.gba.answers import answer_of
from gba_hvd.gba.session import Session, compressor_of
from gba_hvd.gradients import distinct
from gba_hvd.ps.client import Client
from gba_hvd.ps.protocol import PullRows
from gba_hvd.tables import EmbeddingTables, RemoteRows


class FarRows:
    """One worker's. Tells the tables which shards are local.

    are_there: some shard is on another host than this worker
    """

    def __init__(
        self, session: Session, host: int, tables: EmbeddingTables, client: Client, coder: RowCoder | None
    ) -> None:
        self._session, self._tables, self._client = session, tables, client
        self._shard_server = np.array(session.shard_servers, dtype=np.int32)
        at_home = ~np.array(session.far_from(host))[self._shard_server]
        self.are_there = not bool(at_home.all())
        self._coder = coder if self.are_there else None
        tables.local = at_home if self.are_there else None
        tables.remote = [None] * len(tables.layout.groups)

    def fetch(self, keys: Sequence[np.ndarray], whole: bool) -> list[RemoteRows | None]:
        """Per group the keys that will be used next; what is local among them is left out.

        whole: as they are, whatever compresses rows otherwise; no gradients follow.
        """
        if not self.are_there:
            return [None] * len(keys)
        assert self._tables.local is not None
        layout, local = self._tables.layout, self._tables.local
        far = [distinct(k[~local[k % layout.n_shards]]) for k in keys]
        if self._coder is not None and not whole:
            return self._fetch_compressed([np.sort(wanted) for wanted, _, _ in far], self._coder)
        owners = [self._shard_server[wanted % layout.n_shards] for wanted, _, _ in far]
        replies = {}
        for s in range(len(self._session.servers)):
            asked = [np.ascontiguousarray(w[o == s]) for (w, _, _), o in zip(far, owners, strict=True)]
            if any(map(len, asked)):
                replies[s] = self._client.send(s, PullRows(self._session.generation), asked, pull=True)
        rows = [np.empty((len(w), g.dim), np.float32) for (w, _, _), g in zip(far, layout.groups, strict=True)]
        for s, future in replies.items():
            frames = answer_of(future).frames
            for number, group in enumerate(layout.groups):
                rows[number][owners[number] == s] = np.frombuffer(frames[number], np.float32).reshape(-1, group.dim)
        return [RemoteRows(wanted, slots, values) for (wanted, _, slots), values in zip(far, rows, strict=True)]

    def _fetch_compressed(self, wanted: list[np.ndarray], coder: RowCoder) -> list[RemoteRows | None]:
        layout = self._tables.layout
        owners = [self._shard_server[w % layout.n_shards] for w in wanted]
        replies = {}
        for s in range(len(self._session.servers)):
            asked = [w[o == s] for w, o in zip(wanted, owners, strict=True)]
            if any(map(len, asked)):
                body = PullRows(self._session.generation, compressor_of(coder.spec))
                replies[s] = asked, self._client.send(s, body, list(map(write_keys, asked)), pull=True)
        rows = [np.zeros((len(w), g.dim), np.float32) for w, g in zip(wanted, layout.groups, strict=True)]
        for s, (asked, future) in replies.items():
            try:
                found = row_push.take(answer_of(future).frames, asked, coder, layout)
            except BadMessage as error:
                raise worker_lost(f"server {s} sent rows that are none: {error}") from error
            for number, part in enumerate(found):
                rows[number][owners[number] == s] = part
        return [RemoteRows(w, distinct(w)[2], r) for w, r in zip(wanted, rows, strict=True)]
