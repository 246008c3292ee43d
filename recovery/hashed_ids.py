"""The keys of a hashed table: its 64-bit ids, mixed by a bijection that spreads them over the shards.

A checkpoint of a hashed table, a keyed one (`recovery.rows`), has these keys. The mix is splitmix64's finaliser, with
the sign bit flipped before and after, so that NO_KEY stays what it is.

An id without a row of its own is the sum of `hashes` rows, 1 or 2, of those that such ids share. With two, the shared
rows are halves and the id has one of each (as in Hash Embeddings, Tito Svenstrup et al. 2017, but without importance
weights): the remainder of its key chooses the first, the key's upper 32 bits the second. Both are in the shard of the
key, and two ids that have the first in common rarely have the second.
"""

from __future__ import annotations

import numpy as np

_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64's finaliser, and what undoes them
_BACK_1, _BACK_2 = pow(_MIX_1, -1, 2**64), pow(_MIX_2, -1, 2**64)
_SIGN = np.uint64(2**63)
HASHES = (1, 2)


def keys_of_ids(ids: np.ndarray) -> np.ndarray:
    """int64 [n], the keys of a hashed table's ids (int64 [n]): a bijection, under which NO_KEY stays what it is."""
    x = ids.astype(np.int64).view(np.uint64) ^ _SIGN
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    return (x ^ _SIGN).view(np.int64)


def ids_of(keys: np.ndarray) -> np.ndarray:
    """int64 [n], the ids of a hashed table's keys: the inverse of `keys_of_ids`."""
    x = keys.astype(np.int64).view(np.uint64) ^ _SIGN
    x ^= x >> np.uint64(31) ^ x >> np.uint64(62)
    x *= np.uint64(_BACK_2)
    x ^= x >> np.uint64(27) ^ x >> np.uint64(54)
    x *= np.uint64(_BACK_1)
    x ^= x >> np.uint64(30) ^ x >> np.uint64(60)
    return (x ^ _SIGN).view(np.int64)


def shared_rows_of(keys: np.ndarray, n_shared: int, n_shards: int, hashes: int) -> np.ndarray:
    """int64 [hashes, n]: the shared rows, numbered from 0 in all shards, whose sum a key (int64 [n]) without a row has.

    Row r is in shard r mod n_shards. n_shared: of all shards; a multiple of hashes * n_shards
    """
    n = n_shared // hashes
    found = np.empty((hashes, len(keys)), np.int64)
    found[0] = keys % n
    if hashes == 2:
        upper = (keys.view(np.uint64) >> np.uint64(32)).view(np.int64)
        found[1] = n + keys % n_shards + n_shards * (upper % (n // n_shards))
    return found


def newest_rows(keys: np.ndarray, last_used: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(keys int64 [k], ascending and distinct; the row of each), of rows that may be several of one key.

    The one used last counts, then the lower row, as a restore does (`KeyedRowSource.settle`).
    keys: int64 [n]; last_used: uint32 [n], steps; rows: int64 [n]
    """
    order = np.lexsort((rows, -last_used.astype(np.int64), keys))
    keys, rows = keys[order], rows[order]
    first = np.ones(len(keys), np.bool_)
    first[1:] = keys[1:] != keys[:-1]
    return keys[first], rows[first]
