"""Compressed gradients and values at a server: opened and checked before anything is stored, made when asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gba_hvd.compression import push
from gba_hvd.compression.message import BadMessage
from gba_hvd.compression.mirror import Mirrors
from gba_hvd.compression.spec import SELECTORS, VALUES, Spec
from gba_hvd.errors import BadInput
from gba_hvd.ps.part import Part
from gba_hvd.ps.protocol import Compressor, Dense, ProtocolError, PullDense


def opened(part: Part, frames: Sequence[Any]) -> list[Any]:
    """The frames of a compressed push as those of one that is not. Raises ProtocolError."""
    if len(frames) != 2:
        raise ProtocolError(f"Push comes with two frames, got {len(frames)}")
    try:
        dense = push.read(frames[0], _sizes(part))
    except BadMessage as error:
        raise ProtocolError(f"dense gradient: {error}") from error
    return [dense.view(np.uint8).data, frames[1]]


def answer_pull(part: Part, request: PullDense) -> tuple[Dense, Sequence[Any]]:
    """The newest dense values, whole or as a difference to what the worker has."""
    dense = part.dense
    if dense.step <= request.newer_than:
        return Dense(dense.step), ()
    if request.compressor is None:
        return Dense(dense.step), (dense.shown.copy(),)
    spec = _spec_of(request.compressor)
    if part.mirrors is None or part.mirrors.spec != spec:
        part.mirrors = Mirrors(spec, [name for name, _, _ in part.enter.tensors], _sizes(part))
    base, frame = part.mirrors.answer(request.worker, request.newer_than, dense.shown, dense.step)
    return Dense(part.mirrors.step_of(request.worker), base), (frame,)


def _sizes(part: Part) -> list[int]:
    return [math.prod(shape) for _, shape, _ in part.enter.tensors]


def _spec_of(told: Compressor) -> Spec:
    if told.values not in VALUES or told.selector not in ("", *SELECTORS):
        raise ProtocolError(f"no compressor: {told.selector[:80]!r}, {told.values[:80]!r}")
    try:
        return Spec(told.selector, told.keep, told.refresh_every, told.drift, told.values)
    except BadInput as error:
        raise ProtocolError(f"no compressor: {error}") from error
