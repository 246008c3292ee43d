"""Rows and row gradients between a worker and the servers of other hosts, compressed: the way of asynchronous modes.

Servers keep nothing of what they lent, so a push says its keys again, and which elements it has: those that came with
the pull, no others. A host's own server is reached through memory; nothing here concerns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gba_hvd.compression import message
from gba_hvd.compression import rows as coding
from gba_hvd.compression.message import BadMessage
from gba_hvd.compression.rows import RowCoder
from gba_hvd.compression.spec import Spec
from gba_hvd.compression.values import CHUNK
from gba_hvd.gradients import RowGrad, pack_by_owner
from gba_hvd.shard.layout import Layout
from gba_hvd.tables import RemoteRows


def pack(grads: Sequence[RowGrad], pulled: Sequence[RemoteRows | None], dims: Sequence[int], spec: Spec) -> bytes:
    """Row gradients for one server, by group. pulled: what was pulled for this micro-batch; dims: of the rows.

    Columns beyond a row's dimension (its number of contributors) travel as they are.
    """
    parts = []
    for grad, remote, dim in zip(grads, pulled, dims, strict=True):
        order = np.argsort(grad.keys)
        keys, values = grad.keys[order], grad.values[order]
        flat, where = np.ascontiguousarray(values[:, :dim]).reshape(-1), None
        if remote is not None and remote.sent is not None and len(keys):
            by_key = np.argsort(remote.keys)
            at = by_key[np.searchsorted(remote.keys, keys, sorter=by_key)]
            where = np.flatnonzero(remote.sent[at]).astype(np.int32)
            flat = flat[where]
        more = np.ascontiguousarray(values[:, dim:]).reshape(-1)
        chunk = CHUNK if spec.selector else dim
        sent, _ = message.write(where, flat, len(keys) * dim, spec.values, more, chunk)
        parts += [coding.write_keys(keys), sent]
    return coding.sections(parts)


def unpack(data: Any, layout: Layout, extra: int, most_bytes: int) -> np.ndarray:
    """The words of `gradients.pack_by_owner` that `pack` was made from.

    most_bytes: that they may take. A key of one byte stands for a whole row, so that is looked at before anything is
    opened. Raises BadMessage.
    """
    parts = coding.split(data, 2 * len(layout.groups))
    words = [2 + coding.n_keys(part) * (2 + g.dim + extra) for part, g in zip(parts[::2], layout.groups, strict=True)]
    if 4 * sum(words) > most_bytes:
        raise BadMessage(f"gradients of rows that take {4 * sum(words):,} bytes when opened, {most_bytes:,} may come")
    grads = []
    for group, keys_data, values_data in zip(layout.groups, parts[::2], parts[1::2], strict=True):
        keys = coding.read_keys(keys_data, group.places * layout.n_shards)
        got = message.read(values_data, len(keys) * group.dim, len(keys) * extra)
        values = np.zeros(len(keys) * group.dim, np.float32)
        got.add_to(values)
        both = np.hstack([values.reshape(len(keys), group.dim), got.plain.reshape(len(keys), extra)])
        grads.append(RowGrad(keys, np.ascontiguousarray(both)))
    opened, _ = pack_by_owner(grads, np.zeros(layout.n_shards, dtype=np.int32), 1)
    return opened


def take(frames: Sequence[Any], asked: Sequence[np.ndarray], coder: RowCoder, layout: Layout) -> list[RemoteRows]:
    """A server's answer for the keys (ascending) that it was asked for, by group. Raises BadMessage."""
    if len(frames) != len(asked):
        raise BadMessage(f"rows of {len(asked)} groups were asked for, {len(frames)} frames came")
    found = []
    for frame, keys, group in zip(frames, asked, layout.groups, strict=True):
        rows, lent = coder.borrow(frame, keys, group.dim)
        sent = None
        if lent.places is not None:
            sent = np.zeros(rows.shape, dtype=bool)
            sent.reshape(-1)[lent.places] = True
        found.append(RemoteRows(keys, np.empty(0, np.int32), rows, sent))
    return found
