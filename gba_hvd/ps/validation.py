"""Checks of frames, before anything of it is stored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gba_hvd import kernels
from gba_hvd.embedding.row_gradients import ROW_AVERAGES
from gba_hvd.errors import BadInput
from gba_hvd.gradients.clipping import Clip
from gba_hvd.mode_names import REPLICA_MODES
from gba_hvd.ps.messages import Apply, Enter, Measure, NotFinite, ProtocolError
from gba_hvd.shm.layout import NO_KEY, Layout
from gba_hvd.torch_optimizers import is_numeric
from recovery import state_codec


def array_of(frame: Any, dtype: str, what: str) -> np.ndarray:
    """A frame as an array, a view where its place in memory allows."""
    size = np.dtype(dtype).itemsize
    if len(frame) % size:
        raise ProtocolError(f"{what}: {len(frame)} bytes are no whole number of {dtype}")
    array = np.frombuffer(frame, dtype=dtype)
    return array if array.flags.aligned else array.copy()


def optimizer_state(frame: Any, n_tensors: int) -> list[Mapping[str, Any]]:
    """The state of each dense tensor (state_codec). Raises ProtocolError."""
    try:
        state = state_codec.decode(bytes(frame))
    except Exception as error:  # any error that bytes not written by the codec may cause
        raise ProtocolError(f"optimizer state: {type(error).__name__}: {error}") from error
    if not isinstance(state, list) or len(state) != n_tensors or not all(isinstance(e, dict) for e in state):
        raise ProtocolError(f"optimizer state: expected a list of {n_tensors} dicts, one for each tensor")
    return state


def check_keys(layout: Layout, group: int, keys: np.ndarray, mine: np.ndarray) -> None:
    """Raises ProtocolError unless every key is a row of a table, in a shard of `mine` (bool [S])."""
    if len(keys) == 0:
        return
    spec = layout.groups[group]
    if spec.hashed is not None:
        if (keys == NO_KEY).any():
            raise ProtocolError(f"table {spec.tables[0].name!r}: {NO_KEY} is no key")
        _refuse_foreign(layout, keys, mine)
        return
    first, n_rows = np.array(spec.first, np.int64), np.array([table.n_rows for table in spec.tables], np.int64)
    if kernels.find_bad_key(np.require(keys, np.int64, ("C", "A", "W")), layout.n_shards, mine, first, n_rows) < 0:
        return
    if keys.min() < 0 or keys.max() >= spec.rows_per_shard * layout.n_shards:
        raise ProtocolError(
            f"tables of dimension {spec.dim}: keys {keys.min()} to {keys.max()}, "
            f"expected 0 to {spec.rows_per_shard * layout.n_shards - 1}"
        )
    table = np.searchsorted(first, keys // layout.n_shards, side="right") - 1
    rows = keys - first[table] * layout.n_shards
    beyond = np.flatnonzero(rows >= n_rows[table])
    if len(beyond):
        at = beyond[0]
        found = spec.tables[table[at]]
        raise ProtocolError(f"table {found.name!r} has rows 0 to {found.n_rows - 1}, got {rows[at]}")
    _refuse_foreign(layout, keys, mine)


def _refuse_foreign(layout: Layout, keys: np.ndarray, mine: np.ndarray) -> None:
    foreign = np.flatnonzero(~mine[keys % layout.n_shards])
    if len(foreign):
        raise ProtocolError(f"shard {keys[foreign[0]] % layout.n_shards} is not served here")


def check_row_message(layout: Layout, message: np.ndarray, mine: np.ndarray, extra: int, counted: bool = False) -> None:
    """Raises ProtocolError unless `message` is row gradients of shards served here (`row_gradients.pack_by_owner`).

    extra: words that follow a row's gradient (its number of contributors, when rows are averaged over them).
    counted: a row's accesses come with it.
    """
    at = 0
    for number, group in enumerate(layout.groups):
        if at + 2 > len(message):
            raise ProtocolError(f"row gradients end in group {number} of {len(layout.groups)}")
        n = int(message[at : at + 2].view(np.int64)[0])
        width = 2 + group.dim + extra + counted
        if n < 0 or at + 2 + n * width > len(message):
            raise ProtocolError(f"row gradients of dimension {group.dim}: {n} rows do not fit {len(message)} words")
        keys = message[at + 2 : at + 2 + 2 * n].view(np.int64)
        check_keys(layout, number, keys, mine)
        values = message[at + 2 + 2 * n : at + 2 + n * (width - counted)]
        if not all_finite(values):
            bad = np.flatnonzero(~np.isfinite(values.reshape(n, -1)).all(axis=1))[0]
            table, row = layout.locate(int(keys[bad]), number)
            raise NotFinite(f"the gradient of row {row} of table {table!r} is not finite")
        if extra and (values.reshape(n, group.dim + extra)[:, group.dim :] != 1.0).any():
            raise ProtocolError(f"row gradients of dimension {group.dim}: a micro-batch contributes once to a row")
        if counted and not message[at + 2 + n * (width - 1) : at + 2 + n * width].view(np.uint32).all():
            raise ProtocolError(f"row gradients of dimension {group.dim}: a row that was not looked up has no gradient")
        at += 2 + n * width
    if at != len(message):
        raise ProtocolError(f"row gradients: {len(message) - at} words too many")


def check_finite(values: np.ndarray, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Raises NotFinite naming the dense tensor whose gradient is not finite."""
    if all_finite(values):
        return
    at = 0
    for name, size in zip(names, sizes, strict=True):
        if not np.isfinite(values[at : at + size]).all():
            raise NotFinite(f"the gradient of {name} is not finite")
        at += size


def all_finite(values: np.ndarray) -> bool:
    """Whether no number is NaN or infinite."""
    if values.dtype == np.float32:
        return bool(kernels.all_finite(np.require(values, requirements=("C", "A", "W")).reshape(-1)))
    # A float64 sum of float32 numbers cannot overflow.
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(values.sum(dtype=np.float64)))


def check_rates(lrs: Sequence[float], expected: int) -> None:
    """Raises ProtocolError unless these are learning rates for so many optimizer groups."""
    if len(lrs) != expected or not all(math.isfinite(lr) for lr in lrs):
        raise ProtocolError(f"expected {expected} finite learning rates, got {list(lrs)[:10]}")


def check_settings(settings: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ProtocolError unless these are numbers for settings beside `lr` that the optimizer's groups have."""
    if settings and len(settings) != len(groups):
        raise ProtocolError(f"expected settings of {len(groups)} optimizer groups, got {len(settings)}")
    for number, (changed, group) in enumerate(zip(settings, groups, strict=False)):
        for name, value in changed.items():
            if name == "lr" or name not in group or not is_numeric(value):
                raise ProtocolError(
                    f"optimizer group {number}: expected finite numbers for settings that it has, got "
                    f"{name[:80]}={str(value)[:80]}"
                )


def check_enter(enter: Enter, layout: Layout) -> None:
    """Raises ProtocolError for an `Enter` that contradicts itself or the tables."""
    n_servers = len(enter.servers)
    if not 0 <= enter.me < n_servers:
        raise ProtocolError(f"server {enter.me} of {n_servers} servers")
    if len(enter.shard_servers) != layout.n_shards:
        raise ProtocolError(f"{len(enter.shard_servers)} shards, this job has {layout.n_shards}")
    if not all(0 <= server < n_servers for server in enter.shard_servers):
        raise ProtocolError(f"shards are at servers 0 to {n_servers - 1}, got {sorted(set(enter.shard_servers))[:10]}")
    if enter.row_average not in ROW_AVERAGES:
        raise ProtocolError(f"rows are averaged in one of {list(ROW_AVERAGES)}, got {enter.row_average[:80]!r}")
    for name, shape, _ in enter.tensors:
        if any(size < 0 for size in shape):
            raise ProtocolError(f"{name} has the shape {shape}")
    check_rates([*enter.lrs, enter.row_lr], len(enter.optimizer.get("groups", ())) + 1)
    try:
        clip = Clip(enter.max_norm, enter.max_row_norm)
    except BadInput as error:
        raise ProtocolError(f"Enter: {error}") from error
    if not clip.is_none and enter.discipline.get("name") in REPLICA_MODES:
        raise ProtocolError(f"steps of replicas are not clipped, got {clip}")


def check_apply(request: Apply, last_step: int, n_groups: int, counts: bool = False) -> None:
    """Raises ProtocolError unless this step follows `last_step` and nothing in it would destroy parameters."""
    check_members(request, last_step, counts)
    if not all(0.0 <= factor <= 1.0 for factor in (request.dense_factor, request.row_factor)):
        raise ProtocolError(
            f"step {request.step}: gradients are clipped by factors from 0 to 1, got {request.dense_factor} and "
            f"{request.row_factor}"
        )
    check_rates([*request.lrs, request.row_lr], n_groups + 1)


def check_members(request: Apply | Measure, last_step: int, counts: bool = False) -> None:
    """Raises ProtocolError unless this step follows `last_step` and is a sum of gradients with sensible weights.

    counts: rows are averaged over their contributors
    """
    if request.step != last_step + 1:
        raise ProtocolError(f"step {request.step} cannot follow step {last_step}")
    if not all(math.isfinite(m.weight) and m.weight > 0 for m in request.members):
        raise ProtocolError(f"step {request.step}: weights are positive numbers")
    if not all(0.0 <= m.row_damping <= 1.0 for m in request.members):
        raise ProtocolError(f"step {request.step}: gradients of rows are damped by factors from 0 to 1")
    if not (math.isfinite(request.scale) and request.scale > 0):
        raise ProtocolError(f"step {request.step}: the scale is a positive number, got {request.scale}")
    n_named = len(request.members) + len(request.dropped)
    if counts and not max(1, n_named) <= request.n_micro:
        raise ProtocolError(f"step {request.step}: {n_named} gradients of {request.n_micro} micro-batches")
