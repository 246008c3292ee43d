"""Which rows of a table a save takes. What a row's importance is, and how many are taken, the caller says.

    full   all rows
    delta  those updated since they were last saved
    mfu    the share r with the most accesses since they were last saved     (CPR-MFU)
    scar   the share r whose weights changed most, in L2, since then         (SCAR)
    ssu    r * n rows out of a sub-sampled stream of accesses, see `sampled_accesses`  (CPR-SSU)

The share is of a whole table, not of each shard, and no process needs all of it: each shard makes a `Histogram`, small
and to be sent around; `threshold` says from all of them what is taken, `at_least` finds it in each shard. Bounded
memory: rows are looked at in pieces.

Importances are distinguished to 11 significant bits: access counts under 2048 exactly, larger ones to 0.1 %. Rows that
agree so far are tied, and those at lower indices (in lower shards) win.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recovery.errors import BadInput
from recovery.policies import SAVE_POLICIES
from recovery.rows import Schema

_PIECE = 1 << 20  # rows looked at at once
_PLACE_BYTES = 8  # at most, of a row that is not in a run
_DROPPED = 13  # of float32's 23 bits of mantissa
_N_KEYS = (0x7FFFFFFF >> _DROPPED) + 2


@dataclass(frozen=True)
class Histogram:
    """How many rows of a shard have which importance; rows of importance 0 are left out.

    keys: int64 [k] ascending, monotone in the importance. n_rows: int64 [k]
    """

    keys: np.ndarray
    n_rows: np.ndarray


@dataclass(frozen=True)
class ImportanceThreshold:
    """Take the rows above `key`, and of those at it the first `quotas[i]` in the i-th shard."""

    key: int
    quotas: tuple[int, ...]
    n_rows: int


def histogram(importance: np.ndarray) -> Histogram:
    """Histogram of one shard's rows. importance: [n], unsigned integers or float32; NaN counts as the largest."""
    if len(importance) <= _PIECE // 8:  # sorting a few rows is faster than going through all keys there may be
        pieces = [np.unique(keys, return_counts=True) for _, keys in _pieces(importance)]
        found, n_rows = pieces[0] if pieces else (np.empty(0, np.int64), np.empty(0, np.int64))
    else:
        total = np.zeros(_N_KEYS, np.int64)
        for _, keys in _pieces(importance):
            total += np.bincount(keys, minlength=_N_KEYS)
        found = np.flatnonzero(total)
        n_rows = total[found]
    unchanged = int(len(found) > 0 and found[0] == 0)  # such a row is never worth writing
    return Histogram(found[unchanged:], n_rows[unchanged:])


def threshold(histograms: Sequence[Histogram], k: int) -> ImportanceThreshold:
    """What to take in each shard so that it is the k most important rows of all; fewer if fewer have changed."""
    if k < 0:
        raise BadInput(f"the number of rows to take must not be negative, got {k}")
    none, n_changed = (0,) * len(histograms), sum(int(shard.n_rows.sum()) for shard in histograms)
    if k == 0 or n_changed <= k:
        return ImportanceThreshold(_N_KEYS, none, 0) if k == 0 else ImportanceThreshold(0, none, n_changed)
    keys, at = np.unique(np.concatenate([shard.keys for shard in histograms]), return_inverse=True)
    n_rows = np.zeros(len(keys), np.int64)
    np.add.at(n_rows, at, np.concatenate([shard.n_rows for shard in histograms]))
    from_top = np.cumsum(n_rows[::-1])
    last = int(np.searchsorted(from_top, k))
    key, left = int(keys[len(keys) - 1 - last]), k - (int(from_top[last - 1]) if last else 0)
    quotas = []
    for shard in histograms:
        quotas.append(min(left, int(shard.n_rows[shard.keys == key].sum())))
        left -= quotas[-1]
    return ImportanceThreshold(key, tuple(quotas), k)


def at_least(importance: np.ndarray, key: int, quota: int) -> np.ndarray:
    """Indices of a shard's rows above a threshold's key, and of the first `quota` at it. int64, ascending.

    Where rows were updated since the histogram was made, a few more or less are taken.
    """
    found = []
    for start, keys in _pieces(importance):
        taken = keys > key
        if quota > 0:
            tied = np.flatnonzero(keys == key)[:quota]
            taken[tied] = True
            quota -= len(tied)
        found.append(np.flatnonzero(taken) + start)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def largest(importance: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k most important rows of a table that is in one piece. int64, ascending."""
    limit = threshold([histogram(importance)], k)
    return at_least(importance, limit.key, limit.quotas[0])


def l2_change(now: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """SCAR's importance, squared: how far rows are from the kept copy. float32 [n, W] each; returns float32 [n]."""
    far = np.empty(len(now), np.float32)
    for start in range(0, len(now), _PIECE):
        apart = now[start : start + _PIECE] - kept[start : start + _PIECE]
        np.einsum("nw,nw->n", apart, apart, out=far[start : start + _PIECE])
    return far


def n_taken(policy: str, n_rows: int, r: float) -> int:
    """How many rows of a table one save takes at most."""
    SAVE_POLICIES.get(policy)
    if not 0 < r <= 1:
        raise BadInput(f"r, the share of rows that a save takes, must be above 0 and at most 1, got {r}")
    return n_rows if policy in ("full", "delta") else min(n_rows, max(1, round(r * n_rows)))


def share_within(schema: Schema, save_bytes: int) -> float:
    """The share of the rows of each table, but the small ones, so that a save has at most so many bytes of rows.

    A row also takes up to 8 bytes for its place. Raises BadInput when the small tables, and a row of each shard of the
    others, are more.
    """
    small = small_tables(schema)
    whole = sum(t.n_rows * t.record_bytes for number, t in enumerate(schema.tables) if number in small)
    others = [t for number, t in enumerate(schema.tables) if number not in small]
    costs = [t.record_bytes + _PLACE_BYTES for t in others]
    left, least = save_bytes - whole, schema.n_shards * sum(costs)  # (each shard may round up)
    if left < least:
        raise BadInput(
            f"save_bytes={save_bytes:,} is too little: small tables, which each save takes whole, and a row of each "
            f"shard of the others have {whole + least:,} bytes"
        )
    n_bytes = sum(t.n_rows * cost for t, cost in zip(others, costs, strict=True))
    return min(1.0, (left - least) / n_bytes + 1e-12) if others else 1.0


def list_capacities(schema: Schema, r: float) -> tuple[int, ...]:
    """How many rows of a shard the list of "ssu" holds, by table; 0 for those that every save takes whole."""
    small = small_tables(schema)
    return tuple(
        0 if number in small else n_taken("ssu", table.rows_in(0, schema.n_shards), r)
        for number, table in enumerate(schema.tables)
    )


def small_tables(schema: Schema, whole_share: float = 0.01, whole_rows: int = 1000) -> frozenset[int]:
    """Numbers of the tables that every save takes whole.

    The smallest ones that together hold less than `whole_share` of all bytes (in the paper 19 of Criteo's 26), and all
    of at most `whole_rows` rows: choosing among their rows gains nothing. What is not a row is always saved whole.
    """
    sizes = [table.n_rows * table.record_bytes for table in schema.tables]
    order = sorted(range(len(sizes)), key=lambda number: (sizes[number], number))
    held = np.cumsum([sizes[number] for number in order])
    small = {number for number, total in zip(order, held, strict=True) if total < whole_share * schema.n_bytes}
    return frozenset(small | {n for n, table in enumerate(schema.tables) if table.n_rows <= whole_rows})


def _pieces(importance: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(first place, int64 keys) of consecutive rows; the key of 0 is 0, of all else larger."""
    for start in range(0, len(importance), _PIECE):
        bits = np.abs(importance[start : start + _PIECE].astype(np.float32)).view(np.uint32)
        bits += (1 << _DROPPED) - 1  # rounded up, so that no change is too small to be one
        bits >>= _DROPPED
        yield start, bits.astype(np.int64)
