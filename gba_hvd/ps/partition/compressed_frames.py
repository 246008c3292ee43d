"""Compressed gradients and values at a server: opened and checked before anything is stored, made when asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gba_hvd.compression import dense_push, row_codec, row_push, value_codec
from gba_hvd.compression.dense_deltas import DenseDeltas
from gba_hvd.compression.sparse_message import BadMessage
from gba_hvd.compression.spec import SELECTORS, Spec
from gba_hvd.errors import BadInput
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
            extra = int(part.enter.row_average == "contributors")
            rows_frame = row_push.unpack(rows_frame, layout, extra, part.most_bytes).view(np.uint8).data
    except BadMessage as error:
        raise ProtocolError(f"a compressed push: {error}") from error
    return [dense_frame, rows_frame]


def encode_rows(memory: ShardMemory, mine: np.ndarray, request: PullRows, frames: Sequence[Any]) -> Sequence[Any]:
    """The answer to a pull of rows, a frame for each group of tables. Raises ProtocolError."""
    if request.compressor is None:
        return gather(memory, mine, frames)
    spec, groups = _spec_of(request.compressor), memory.layout.groups
    if len(frames) != len(groups):
        raise ProtocolError(f"{len(frames)} frames of keys, expected one for each of {len(groups)} groups")
    try:
        keys = [
            row_codec.read_keys(frame, group.places * memory.layout.n_shards)
            for frame, group in zip(frames, groups, strict=True)
        ]
    except BadMessage as error:
        raise ProtocolError(str(error)) from error
    found = gather(memory, mine, [one.view(np.uint8).data for one in keys])
    return [row_codec.encode_rows(one, spec) for one in found]


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


def _spec_of(told: Compressor) -> Spec:
    if told.values not in value_codec.names() or told.selector not in ("", *SELECTORS):
        raise ProtocolError(f"no compressor: {told.selector[:80]!r}, {told.values[:80]!r}")
    try:
        return Spec(told.selector, told.keep, told.refresh_every, told.drift, told.values)
    except BadInput as error:
        raise ProtocolError(f"no compressor: {error}") from error
