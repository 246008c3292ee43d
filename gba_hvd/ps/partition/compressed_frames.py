"""Compressed gradients and values at a server: opened and checked before anything is stored, made when asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gba_hvd.compression import activation_codec, dense_push, row_codec, row_push, value_codec
from gba_hvd.compression.activation_codec import ActivationThresholds
from gba_hvd.compression.dense_deltas import DenseDeltas
from gba_hvd.compression.sparse_message import BadMessage
from gba_hvd.compression.spec import SELECTORS, Spec
from gba_hvd.errors import BadInput
from gba_hvd.ps import messages
from gba_hvd.ps.messages import Compressor, Dense, ProtocolError, PullDense, PullRows, Push
from gba_hvd.ps.partition.partition import Partition, gather
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.shard_memory import ShardMemory


def decompress_push(part: Partition, layout: Layout, request: Push, frames: Sequence[Any]) -> list[Any]:
    """The frames of a compressed push as those of one that is not. Raises ProtocolError."""
    if len(frames) != 2:
        raise ProtocolError(f"Push comes with two frames, got {len(frames)}")
    dense_frame, rows_frame = frames
    try:
        if request.compressed:
            dense_frame = dense_push.read(dense_frame, _sizes(part), set(request.whole)).view(np.uint8).data
        if request.rows_compressed:
            extra = int(part.enter.row_average != "global")
            opener = activation_codec if request.rows_masked else row_push
            opened = opener.unpack(rows_frame, layout, extra, part.most_bytes, part.enter.accesses)
            rows_frame = opened.view(np.uint8).data
    except BadMessage as error:
        raise ProtocolError(f"a compressed push: {error}") from error
    return [dense_frame, rows_frame]


class RowPulls:
    """What a server remembers of the rows it has sent: the thresholds of `dct_mp`. Belongs to the thread of pulls."""

    def __init__(self) -> None:
        self._thresholds: ActivationThresholds | None = None

    def thresholds(self, spec: Spec, n_tables: int) -> ActivationThresholds:
        if self._thresholds is None or self._thresholds.spec != spec:
            self._thresholds = ActivationThresholds(spec, n_tables)
        return self._thresholds


def encode_rows(
    memory: ShardMemory, mine: np.ndarray, request: PullRows, frames: Sequence[Any], pulls: RowPulls
) -> Sequence[Any]:
    """The answer to a pull of rows, a frame for each group of tables. Raises ProtocolError."""
    if request.compressor is None:
        return gather(memory, mine, frames)
    spec, groups = _spec_of(request.compressor), memory.layout.groups
    if len(frames) != len(groups):
        raise ProtocolError(f"{len(frames)} frames of keys, expected one for each of {len(groups)} groups")
    if spec.pools:
        return _encode_activations(memory, mine, spec, frames, pulls)
    try:
        keys = [
            row_codec.read_keys(frame, memory.layout.key_limit(group))
            for frame, group in zip(frames, groups, strict=True)
        ]
    except BadMessage as error:
        raise ProtocolError(str(error)) from error
    found = gather(memory, mine, [one.view(np.uint8).data for one in keys])
    return [row_codec.encode_rows(one, spec) for one in found]


def _encode_activations(
    memory: ShardMemory, mine: np.ndarray, spec: Spec, frames: Sequence[Any], pulls: RowPulls
) -> Sequence[Any]:
    layout = memory.layout
    try:
        asked = [
            activation_codec.read_request(frame, group.rows_per_shard * layout.n_shards)
            for frame, group in zip(frames, layout.groups, strict=True)
        ]
    except BadMessage as error:
        raise ProtocolError(str(error)) from error
    n_bytes = sum(4 * g.dim * (len(keys) + bags.n_bags) for g, (keys, bags) in zip(layout.groups, asked, strict=True))
    if n_bytes > messages.MAX_ANSWER_BYTES:
        raise ProtocolError(
            f"these activations take {n_bytes:,} bytes, the limit is {messages.MAX_ANSWER_BYTES:,}: ask for fewer"
        )
    single = gather(memory, mine, [keys.view(np.uint8).data for keys, _ in asked])
    of_bags = gather(memory, mine, [bags.distinct.view(np.uint8).data for _, bags in asked])
    thresholds, answer = pulls.thresholds(spec, len(layout.tables)), []
    for number, (rows, pooled, (keys, bags)) in enumerate(zip(single, of_bags, asked, strict=True)):
        activations = np.concatenate([rows, bags.pool(pooled)])
        (indices,) = thresholds.masks_of(layout, number, [(keys, bags)], [activations])
        answer.append(activation_codec.encode(activations, indices, spec))
    return answer


def answer_pull(part: Partition, request: PullDense) -> tuple[Dense, Sequence[Any]]:
    """The newest dense values, complete or as a difference to what the worker has."""
    dense = part.dense
    if dense.step <= request.newer_than:
        return Dense(dense.step), ()
    if request.compressor is None:
        return Dense(dense.step), (dense.shown.copy(),)
    spec = _spec_of(request.compressor)
    if part.mirrors is None or part.mirrors.spec != spec:
        part.mirrors = DenseDeltas(spec, [name for name, _, _ in part.enter.tensors], _sizes(part))
    base, frame = part.mirrors.answer(request.worker, request.newer_than, dense.shown, dense.step)
    return Dense(part.mirrors.step_of(request.worker), base), (frame,)


def _sizes(part: Partition) -> list[int]:
    return [math.prod(shape) for _, shape, _ in part.enter.tensors]


def _spec_of(compressor: Compressor) -> Spec:
    if compressor.values not in value_codec.names() or compressor.selector not in ("", *SELECTORS):
        raise ProtocolError(f"no compressor: {compressor.selector[:80]!r}, {compressor.values[:80]!r}")
    try:
        return Spec(
            compressor.selector, compressor.keep, compressor.refresh_every, compressor.drift, compressor.values,
            per_table=compressor.per_table,
        )  # fmt: skip
    except BadInput as error:
        raise ProtocolError(f"no compressor: {error}") from error
