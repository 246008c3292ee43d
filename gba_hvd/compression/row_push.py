"""Rows and row gradients between a worker and the servers of other hosts, compressed: the way of asynchronous modes.

Servers store nothing of the rows they sent, so a push repeats its keys. A host's own server is reached through memory;
nothing here concerns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gba_hvd.compression import row_codec as coding
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.compression.sparse_message import BadMessage
from gba_hvd.embedding.row_gradients import RowGrad, pack_by_owner, with_access_column, without_access_column
from gba_hvd.shm.layout import Layout


def pack(grads: Sequence[RowGrad], coder: RowCoder) -> bytes:
    """Row gradients for one server, by group. Between `coder.begin` and `coder.settle`."""
    parts = []
    for group, grad in enumerate(grads):
        ascending = with_access_column(coding.in_order(grad))
        parts += [coding.write_keys(ascending.keys), coder.write(group, ascending)]
    return coding.sections(parts)


def unpack(data: Any, layout: Layout, extra: int, most_bytes: int, counted: bool = False) -> np.ndarray:
    """The words of `row_gradients.pack_by_owner` that `pack` was made from.

    extra: columns beyond a row's dimension. counted: accesses came with the gradients. most_bytes: that they may take:
    a key of one byte stands for a whole row, so that is looked at before anything is opened. Raises BadMessage.
    """
    parts, more = coding.split(data, 2 * len(layout.groups)), extra + counted
    words = [2 + coding.n_keys(part) * (2 + g.dim + more) for part, g in zip(parts[::2], layout.groups, strict=True)]
    if 4 * sum(words) > most_bytes:
        raise BadMessage(f"gradients of rows that take {4 * sum(words):,} bytes when opened, {most_bytes:,} may come")
    grads = []
    for group, keys_data, values_data in zip(layout.groups, parts[::2], parts[1::2], strict=True):
        keys = coding.read_keys(keys_data, layout.key_limit(group))
        grad = coding.read(values_data, keys, group.dim, more)
        grads.append(without_access_column(grad) if counted else grad)
    opened, _ = pack_by_owner(grads, np.zeros(layout.n_shards, dtype=np.int32), 1)
    return opened


def take(frames: Sequence[Any], asked: Sequence[np.ndarray], layout: Layout) -> list[np.ndarray]:
    """A server's rows float32 [n, dim] for the keys that it was asked for, by group. Raises BadMessage."""
    if len(frames) != len(asked):
        raise BadMessage(f"rows of {len(asked)} groups were asked for, {len(frames)} frames came")
    return [
        coding.decode_rows(frame, len(keys), group.dim)
        for frame, keys, group in zip(frames, asked, layout.groups, strict=True)
    ]
