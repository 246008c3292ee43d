"""DCT-MP (arXiv 2010.08899): embeddings between hosts as thresholded activations, and their gradients with that mask.

    ask      the keys of single-valued fields, distinct; of bags which rows each one has (`embedding.bags`)
    lend     the owner's activations: rows, and for each bag of each sample the sum of its rows. Elements with |a| at or
             above one threshold for all tables of a dimension, or one for each table; the worker computes with 0 in
             place of the others
    return   the gradients of exactly those elements; nothing is stored of the others (no error feedback)

For a single-valued field all samples with the same row have the same activation and so the same mask: it travels once,
and its gradients are added before they return. That changes nothing but the bytes.

Pure, as `row_codec`. In allreduce mode the owner keeps what it lent, with its mask, until the gradients are back;
servers of asynchronous modes keep nothing, so a push repeats both.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from gba_hvd.compression import index_codec, sparse_message
from gba_hvd.compression.row_codec import (
    gradients_of,
    n_keys,
    read_keys,
    read_present,
    sections,
    split,
    write_keys,
    write_present,
)
from gba_hvd.compression.sparse_message import BadMessage
from gba_hvd.compression.spec import Spec
from gba_hvd.compression.thresholds import Thresholds
from gba_hvd.embedding.bags import NOTHING, Borrowed, PoolRequest
from gba_hvd.embedding.row_gradients import RowGrad, pack_by_owner, with_access_column
from gba_hvd.shm.layout import Layout

_MASK = struct.Struct("<BxxxI")  # kind of indices, elements
_BAGS = struct.Struct("<IIIBBBx")  # bags, values, micro-batches; kinds of lengths, numbers and factors
_UINTS: tuple[Any, ...] = (np.uint8, np.uint16, np.uint32)
_NO_FACTORS, _BY_BAG, _BY_VALUE = range(3)


class ActivationThresholds:
    """One sender's thresholds, by group of tables, or by table with `spec.per_table`. Not thread-safe.

    n: of groups, or of tables
    """

    def __init__(self, spec: Spec, n: int) -> None:
        self.spec, self._thresholds = spec, Thresholds(spec, n)

    def masks_of(
        self, layout: Layout, group: int, asked: Sequence[tuple[np.ndarray, PoolRequest]], parts: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """As `masks`. parts: of each that was asked for, the rows of its keys, then its bags"""
        if not self.spec.per_table:
            return self.masks(group, parts)
        tables = [layout.tables_of(np.append(keys, bags.first_keys), layout.groups[group]) for keys, bags in asked]
        masks = [np.zeros(part.shape, bool) for part in parts]
        for table in np.unique(np.concatenate(tables)).tolist() if tables else ():
            of_table = [some == table for some in tables]
            own = [part[rows] for part, rows in zip(parts, of_table, strict=True)]
            for mask, rows, part, sent in zip(masks, of_table, own, self.masks(table, own), strict=True):
                is_sent = np.zeros(part.size, bool)
                is_sent[sent] = True
                mask[rows] = is_sent.reshape(part.shape)
        return [np.flatnonzero(mask).astype(np.int32) for mask in masks]

    def masks(self, number: int, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For each part, float32 [n, dim], which of its elements are sent: int32 [k], ascending.

        number: of the threshold. Called once a step (at a server: once an answer) with all that is sent by it then:
        thresholds age by that.
        """
        flat = np.concatenate([part.reshape(-1) for part in parts]) if parts else np.empty(0, np.float32)
        if not len(flat):
            return [np.empty(0, np.int32) for _ in parts]
        if self._thresholds.is_due(number):
            self._thresholds.find(number, flat)
        least = np.float32(self._thresholds.least(number))
        masks = [np.flatnonzero(~(np.abs(part.reshape(-1)) < least)).astype(np.int32) for part in parts]  # NaN is sent
        self._thresholds.sent(number, sum(map(len, masks)), len(flat))
        return masks


# --- ask -------------------------------------------------------------------------------------------------------------


def write_request(keys: np.ndarray, request: PoolRequest) -> bytes:
    """keys: int64 [n], ascending and distinct, of single-valued fields."""
    if not request.n_bags:
        return sections([write_keys(keys), b"", b""])
    lengths = np.diff(request.offsets)
    starts = np.flatnonzero(np.diff(request.micro, prepend=-1))
    kind, factors = _factors_of(request.factors, request.offsets)
    of_lengths, of_numbers = _width(lengths), _width(request.number)
    body = [
        _BAGS.pack(len(lengths), len(request.number), len(starts), of_lengths, of_numbers, kind),
        np.column_stack([request.micro[starts], starts]).astype(np.uint32).tobytes(),
        lengths.astype(_UINTS[of_lengths]).tobytes(),
        request.number.astype(_UINTS[of_numbers]).tobytes(),
        factors.astype(np.float32).tobytes(),
    ]
    return sections([write_keys(keys), write_keys(request.distinct), b"".join(body)])


def read_request(data: Any, limit: int) -> tuple[np.ndarray, PoolRequest]:
    """What `write_request` wrote. limit: keys are below it. Raises BadMessage."""
    singles, distinct, body = split(data, 3)
    keys = read_keys(singles, limit)
    if not len(body) and not len(distinct):
        return keys, NOTHING
    if len(body) < _BAGS.size:
        raise BadMessage(f"bags have a head of {_BAGS.size} bytes, {len(body)} came")
    m, n, n_micro, of_lengths, of_numbers, kind = _BAGS.unpack(body[: _BAGS.size].tobytes())
    if max(of_lengths, of_numbers, kind) > 2:
        raise BadMessage(f"bags with lengths, numbers and factors of kinds {of_lengths}, {of_numbers}, {kind}")
    n_factors = (0, m, n)[kind]
    sizes = [8 * n_micro, m * _UINTS[of_lengths]().itemsize, n * _UINTS[of_numbers]().itemsize, 4 * n_factors]
    if len(body) != _BAGS.size + sum(sizes) or not m or not n_micro:
        raise BadMessage(f"{m} bags of {n} values: {_BAGS.size + sum(sizes)} bytes were announced, {len(body)} came")
    ends = _BAGS.size + np.cumsum([0, *sizes])
    pieces = [np.array(body[a:b]) for a, b in itertools.pairwise(ends)]
    micros = pieces[0].view(np.uint32).astype(np.int64).reshape(-1, 2)
    lengths = pieces[1].view(_UINTS[of_lengths]).astype(np.int64)
    number = pieces[2].view(_UINTS[of_numbers]).astype(np.int64)
    factors = pieces[3].view(np.float32)
    rows = read_keys(distinct, limit)
    starts, numbers = np.append(micros[:, 1], m), micros[:, 0]
    are_cut = starts[0] == 0 and (np.diff(starts) > 0).all() and (np.diff(numbers) > 0).all() and numbers[-1] < 2**31
    if not are_cut or lengths.min() < 1 or lengths.sum() != n or (n and number.max() >= len(rows)):
        raise BadMessage(f"{m} bags of {n} values of {len(rows)} rows do not fit each other")
    if kind == _BY_BAG:
        factors = np.repeat(factors, lengths)
    micro = np.repeat(numbers, np.diff(starts)).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return keys, PoolRequest(rows, number.astype(np.int32), offsets, factors, micro)


# --- lend ------------------------------------------------------------------------------------------------------------


def encode(activations: np.ndarray, indices: np.ndarray, spec: Spec) -> bytes:
    """The elements at `indices` (int32 [k], ascending) of float32 [n, dim]."""
    flat = activations.reshape(-1)
    return sparse_message.write(indices, flat[indices], len(flat), spec.values, flat[:0], sees=False)[0]


def decode(data: Any, n: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [n, dim] with 0 where nothing was sent, the indices that were). Raises BadMessage."""
    sent = sparse_message.read(data, n * dim, 0)
    indices = np.arange(n * dim, dtype=np.int32) if sent.indices is None else sent.indices
    return sent.whole().reshape(n, dim), indices


# --- return ----------------------------------------------------------------------------------------------------------


def write_back(borrowed: Borrowed, grad: RowGrad, spec: Spec, dim: int) -> bytes:
    """The masked gradients of what was borrowed; what has none stays out. Columns beyond dim travel as they are.

    grad: int64 keys [n], distinct, in any order, also others; float32 [n, dim + more]; accesses go as one more column
    """
    present, values = gradients_of(borrowed.keys, with_access_column(grad))
    what = np.ascontiguousarray(values[:, :dim])[_mask(borrowed, dim)[present]]
    more = np.ascontiguousarray(values[:, dim:]).reshape(-1)
    sent, _ = sparse_message.write(None, what, len(what), spec.values, more, sees=False)
    return write_present(present, len(borrowed.keys), sent)


def read_back(data: Any, borrowed: Borrowed, dim: int, extra: int, counted: bool = False) -> RowGrad:
    """The gradients of rows that `write_back` wrote. Raises BadMessage.

    extra: columns beyond the dimension. counted: accesses came with the gradients
    """
    width = extra + counted
    present, sent = read_present(data, len(borrowed.keys), "activations")
    n, mask = len(present), _mask(borrowed, dim)[present]
    got = sparse_message.read(sent, int(mask.sum()), n * width)
    values = np.zeros((n, dim + width), np.float32)
    values[:, :dim][mask] = got.whole()
    values[:, dim:] = got.plain.reshape(n, width)
    return borrowed.spread(present, values, extra, counted)


# --- a push, which repeats what was asked for ------------------------------------------------------------------------


def pack(grads: Sequence[RowGrad], borrowed: Sequence[Borrowed], spec: Spec, dims: Sequence[int]) -> bytes:
    """Gradients for one server, by group."""
    parts = []
    for grad, mine, dim in zip(grads, borrowed, dims, strict=True):
        kind, mask = index_codec.encode(mine.indices, len(mine.keys) * dim)
        parts += [
            write_request(mine.keys[: mine.n_rows], mine.request),
            _MASK.pack(kind, len(mine.indices)) + mask,
            write_back(mine, grad, spec, dim),
        ]
    return sections(parts)


def unpack(data: Any, layout: Layout, extra: int, most_bytes: int, counted: bool = False) -> np.ndarray:
    """The words of `row_gradients.pack_by_owner` with the gradients of rows that `pack` was made from.

    counted: accesses came with the gradients. most_bytes: that they, and the activations of a group, may take. Raises
    BadMessage.
    """
    parts = split(data, 3 * len(layout.groups))
    n_bytes = 0
    for group, asked in zip(layout.groups, parts[::3], strict=True):
        singles, distinct, body = split(asked, 3)
        n_rows = n_keys(singles) + n_keys(distinct)
        n_bags = _BAGS.unpack(body[: _BAGS.size].tobytes())[0] if len(body) >= _BAGS.size else 0
        n_bytes += 4 * (2 + n_rows * (2 + group.dim + extra + counted))
        if max(n_bytes, 4 * (n_bags + n_keys(singles)) * group.dim) > most_bytes:
            raise BadMessage(
                f"gradients that take {n_bytes:,} bytes when opened, of {n_bags:,} bags; {most_bytes:,} may come"
            )
    grads = []
    for group, asked, mask, back in zip(layout.groups, parts[::3], parts[1::3], parts[2::3], strict=True):
        keys, request = read_request(asked, group.rows_per_shard * layout.n_shards)
        borrowed = lent(keys, request, _read_mask(mask, (len(keys) + request.n_bags) * group.dim))
        grads.append(read_back(back, borrowed, group.dim, extra, counted))
    opened, _ = pack_by_owner(grads, np.zeros(layout.n_shards, dtype=np.int32), 1)
    return opened


def lent(keys: np.ndarray, request: PoolRequest, indices: np.ndarray) -> Borrowed:
    """As `Borrowed`, at the owner: activations go without keys there."""
    return Borrowed(np.concatenate([keys, np.full(request.n_bags, -1)]), request, indices)


def _read_mask(data: np.ndarray, n: int) -> np.ndarray:
    if len(data) < _MASK.size:
        raise BadMessage(f"a mask has a head of {_MASK.size} bytes, {len(data)} came")
    kind, count = _MASK.unpack(data[: _MASK.size].tobytes())
    if kind not in index_codec.KINDS or count > n:
        raise BadMessage(f"a mask of {count} of {n} elements, of kind {kind}")
    indices = index_codec.decode(data[_MASK.size :], kind, n, count)
    if isinstance(indices, str):
        raise BadMessage(f"a mask of {count} of {n} elements: {indices}")
    return indices


def _mask(borrowed: Borrowed, dim: int) -> np.ndarray:
    """bool [n, dim]"""
    mask = np.zeros(len(borrowed.keys) * dim, bool)
    mask[borrowed.indices] = True
    return mask.reshape(-1, dim)


def _factors_of(factors: np.ndarray, offsets: np.ndarray) -> tuple[int, np.ndarray]:
    """(kind, the numbers that travel): one for each bag where all of its values have the same."""
    if not len(factors):
        return _NO_FACTORS, factors
    by_bag = factors[offsets[:-1]]  # no bag is empty
    if np.array_equal(np.repeat(by_bag, np.diff(offsets)), factors):
        return _BY_BAG, by_bag
    return _BY_VALUE, factors


def _width(numbers: np.ndarray) -> int:
    most = int(numbers.max(initial=0))
    return 0 if most < 1 << 8 else 1 if most < 1 << 16 else 2
