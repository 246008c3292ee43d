"""The loops over the vocabulary of a hashed table, compiled by numba. See `gba_hvd.kernels`, and `shm.vocabulary`.

`longs`, `words`, `small` are a host's complete shard memory as int64, uint32 and uint8; `region` the int64 words of one
shard; `keys_at`, `stats_at` where keys and statistics start in a region, in int64 words, `uses_at` in pairs of uint32,
`filter_at` in bytes. Rows are numbers as of `shm.layout`: place * n_shards + shard; places below `entries` are those of
ids, `fallback` more in each shard are shared.

What stands in separate kernels has to happen in this order: within one, the compiler may leave out a store that a later
one replaces.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gba_hvd.kernels import KernelFile
from gba_hvd.shm.layout import BUCKET as _BUCKET
from gba_hvd.shm.layout import NO_KEY as _NO_KEY

_FILE = KernelFile(globals())
load = _FILE.load
_inlined = functools.partial(_FILE.add, inline="always")
_compiled = functools.partial(_FILE.add, nogil=True, error_model="numpy")
# Numbers that a vocabulary keeps of itself, see `shm.vocabulary.Stat`.
_SIZE, _ADMITTED, _EVICTED, _NO_ROOM, _LOOKUPS, _MISSED, _USED, _COUNTED, _SWEPT = range(9)
_MOST = 2**32 - 1
_FULL_COUNTER = 255  # of the filter
_LINE = np.uint64(8)  # int64 words of a cache line
_AHEAD = 32  # keys whose buckets are read before the first of them is searched


@_inlined("uint64(uint64)")
def _mix(x: np.uint64) -> np.uint64:
    """The finaliser of splitmix64, as in `gba_hvd.kernels`."""
    x = np.uint64(x) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@_inlined("int64(uint64, int64)")
def _first_bucket(mixed: np.uint64, n_buckets: int) -> Any:
    return np.int64(((mixed & np.uint64(0xFFFFFFFF)) * np.uint64(n_buckets)) >> np.uint64(32))


@_inlined("int64(uint64, int64)")
def _second_bucket(mixed: np.uint64, n_buckets: int) -> Any:
    return np.int64(((mixed >> np.uint64(32)) * np.uint64(n_buckets)) >> np.uint64(32))


@_inlined("int64(int64)")
def _shift_of(n_shards: int) -> Any:
    """Of a power of two, as the number of shards is by default, its logarithm; else -1. A division takes as long as the
    search of a bucket."""
    shift = 0
    while (1 << shift) < n_shards:
        shift += 1
    return np.int64(shift) if (1 << shift) == n_shards else np.int64(-1)


@_inlined("int64(int64[::1], uint64, int64)")
def _find_in_bucket(longs: Any, start: np.uint64, key: int) -> Any:
    """1 + the position of a key among the 16 from `start` on; 0: it is not there. Without a branch on where it is."""
    found = np.int64(0)
    for j in range(np.uint64(_BUCKET)):
        found += np.int64(longs[start + j] == key) * np.int64(j + np.uint64(1))
    return found


@_compiled("int64(int64[::1], int64[::1], int64, int64, int64, int64, int64, int64[::1])")
def find_rows(
    longs: Any, keys: Any, n_shards: int, region: int, keys_at: int, entries: int, fallback: int, rows: Any
) -> int:
    """rows[i] = the row of keys[i]: its entry, or a fallback row. Returns how many have no entry."""
    n_buckets, n_missing, shift = entries // _BUCKET, 0, _shift_of(n_shards)
    for block in range(0, len(keys), _AHEAD):
        end, seen = min(block + _AHEAD, len(keys)), np.int64(0)
        for i in range(block, end):  # read the cache lines of both buckets of many keys: they come together
            key, mixed = keys[i], _mix(np.uint64(keys[i]))
            shard = key & (n_shards - 1) if shift >= 0 else key % n_shards
            base = np.uint64(shard * region + keys_at)
            a = base + np.uint64(_first_bucket(mixed, n_buckets) * _BUCKET)
            b = base + np.uint64(_second_bucket(mixed, n_buckets) * _BUCKET)
            seen ^= longs[a] ^ longs[a + _LINE] ^ longs[b] ^ longs[b + _LINE]
        rows[block] = seen  # (overwritten below: without a use the reads would be left out)
        for i in range(block, end):
            key, mixed = keys[i], _mix(np.uint64(keys[i]))
            shard = key & (n_shards - 1) if shift >= 0 else key % n_shards
            base, first = np.uint64(shard * region + keys_at), _first_bucket(mixed, n_buckets) * _BUCKET
            found = _find_in_bucket(longs, base + np.uint64(first), key)
            if found == 0:
                first = _second_bucket(mixed, n_buckets) * _BUCKET
                found = _find_in_bucket(longs, base + np.uint64(first), key)
            if found == 0:
                n_missing += 1
                rows[i] = entries * n_shards + key % (fallback * n_shards)
            else:
                rows[i] = (first + found - 1) * n_shards + shard
    return n_missing


@_compiled("int64(int64[::1], int64[::1], int64[::1], int64, int64, int64, int64, int64[::1])")
def find_moved(
    longs: Any, keys: Any, rows: Any, n_shards: int, region: int, keys_at: int, entries: int, moved: Any
) -> int:
    """moved: the positions of the keys whose entry, found before, has another key by now. Returns how many."""
    n, shift = 0, _shift_of(n_shards)
    for i in range(len(keys)):
        place = rows[i] >> shift if shift >= 0 else rows[i] // n_shards
        shard = rows[i] - place * n_shards
        if place < entries and longs[np.uint64(shard * region + keys_at + place)] != keys[i]:
            moved[n] = i
            n += 1
    return n


@_compiled(
    "int64(int64[::1], uint32[::1], int64[::1], int64[::1], uint32[::1], int64, int64, int64, int64, int64, int64)"
)
def note_lookups(
    longs: Any, words: Any, keys: Any, rows: Any, accesses: Any, step: int, n_shards: int, region: int, stats_at: int,
    uses_at: int, entries: int,
) -> int:  # fmt: skip
    """Count a step's lookups: in all, those without an entry, and those of each entry, which were last used then.

    Returns how many keys have no entry.
    """
    n_missing, shift = 0, _shift_of(n_shards)
    for i in range(len(keys)):
        place, n = rows[i] >> shift if shift >= 0 else rows[i] // n_shards, np.int64(accesses[i])
        shard = rows[i] - place * n_shards
        stats = shard * region + stats_at
        longs[stats + _LOOKUPS] += n
        if place < entries:
            at = 2 * (shard * region + uses_at + place)
            words[at] = np.uint32(min(np.int64(words[at]) + n, np.int64(_MOST)))
            words[at + 1] = np.uint32(step + 1)
        else:
            longs[stats + _MISSED] += n
            n_missing += 1
    return n_missing


@_compiled(
    "int64(int64[::1], uint32[::1], uint8[::1], int64[::1], int64[::1], uint32[::1], int64, int64, int64, int64,"
    " int64, int64, int64, int64, int64, int64, int64, int64, int64[::1], int64[::1])"
)
def choose_entries(
    longs: Any, words: Any, small: Any, keys: Any, rows: Any, accesses: Any, step: int, n_shards: int, region: int,
    stats_at: int, keys_at: int, uses_at: int, filter_at: int, entries: int, n_counters: int, admit_after: int,
    evict: int, evict_after: int, out_keys: Any, out_rows: Any,
) -> int:  # fmt: skip
    """Find entries for the keys without one that were looked up often enough; returns for how many.

    Each is free when this returns, and taken by `publish_keys`; until then it is marked as last used in this step. The
    key of an entry that is evicted for another one is cleared here.
    admit_after: 0: at once, not asking the filter; entries used in this step are not evicted
    evict: 0: nothing; 1: the least used, for a key that was looked up more often, or as often as the filter can count;
    2: what was not used for more than `evict_after` steps
    """
    n_buckets, n_chosen, now = entries // _BUCKET, 0, np.uint32(step + 1)
    for i in range(len(keys)):
        if rows[i] // n_shards < entries:
            continue
        key, seen = keys[i], np.int64(accesses[i])
        shard, mixed = key % n_shards, _mix(np.uint64(key))
        stats, base = shard * region + stats_at, shard * region + keys_at
        if n_counters and admit_after:
            again = _mix(mixed)
            a = 8 * shard * region + filter_at + _first_bucket(again, n_counters)
            b = 8 * shard * region + filter_at + _second_bucket(again, n_counters)
            longs[stats + _COUNTED] += seen
            longs[stats + _USED] += seen
            seen = min(np.int64(min(small[a], small[b])) + seen, np.int64(_FULL_COUNTER))
            small[a] = np.uint8(max(np.int64(small[a]), seen))
            small[b] = np.uint8(max(np.int64(small[b]), seen))
            if seen < admit_after:
                continue
        free, most_free, victim = -1, 0, -1
        least_uses, least_last = np.int64(_MOST + 1), np.int64(_MOST + 1)
        for half in range(2):
            bucket = _first_bucket(mixed, n_buckets) if half == 0 else _second_bucket(mixed, n_buckets)
            first_free, n_free = -1, 0
            for place in range(bucket * _BUCKET, (bucket + 1) * _BUCKET):
                at = 2 * (shard * region + uses_at + place)
                last = words[at + 1]
                if longs[base + place] == _NO_KEY:
                    if last != now:
                        n_free += 1
                        if first_free < 0:
                            first_free = place
                    continue
                if last == now and admit_after == 0:
                    continue
                uses, age = np.int64(words[at]), step + 1 - np.int64(last)
                if evict == 0 or (evict == 2 and age <= evict_after):
                    continue
                if evict == 2:
                    uses = np.int64(0)
                if uses < least_uses or (uses == least_uses and np.int64(last) < least_last):
                    victim, least_uses, least_last = place, uses, np.int64(last)
            if n_free > most_free:
                free, most_free = first_free, n_free
        if free < 0:
            free = victim
            if free < 0:
                longs[stats + _NO_ROOM] += 1
                continue
            if evict == 1 and admit_after and seen <= min(least_uses, np.int64(_FULL_COUNTER - 1)):
                continue
            longs[base + free] = _NO_KEY
            longs[stats + _SIZE] -= 1
            longs[stats + _EVICTED] += 1
        at = 2 * (shard * region + uses_at + free)
        words[at], words[at + 1] = np.uint32(seen), now
        out_keys[n_chosen], out_rows[n_chosen] = key, free * n_shards + shard
        n_chosen += 1
    return n_chosen


@_compiled("void(float32[::1], uint32[::1], uint64[::1], int64, int64)")
def clear_slots_and_count(flat: Any, words: Any, starts: Any, record: int, dim: int) -> None:
    """Zeros in the slots of records whose weights are new; each counter of changes goes up by one."""
    for i in range(len(starts)):
        for j in range(dim, record - 1):
            flat[starts[i] + np.uint64(j)] = 0.0
        words[starts[i] + np.uint64(record - 1)] += np.uint32(1)


@_compiled("void(int64[::1], int64[::1], int64[::1], int64, int64, int64, int64)")
def publish_keys(longs: Any, keys: Any, rows: Any, n_shards: int, region: int, stats_at: int, keys_at: int) -> None:
    """From here on these keys have these entries."""
    for i in range(len(keys)):
        shard, place = rows[i] % n_shards, rows[i] // n_shards
        longs[shard * region + keys_at + place] = keys[i]
        longs[shard * region + stats_at + _SIZE] += 1
        longs[shard * region + stats_at + _ADMITTED] += 1


@_compiled(
    "void(int64[::1], uint32[::1], uint8[::1], int64[::1], int64, int64, int64, int64, int64, int64, int64, int64,"
    " int64, int64, int64, int64, int64)"
)
def age_entries(
    longs: Any, words: Any, small: Any, shards: Any, step: int, region: int, stats_at: int, keys_at: int, uses_at: int,
    filter_at: int, entries: int, n_counters: int, evict: int, evict_after: int, used_most: int, records_at: int,
    record: int,
) -> None:  # fmt: skip
    """After a step: halve counts that have grown large, and evict a part of what was not used for too long.

    used_most: lookups of keys without an entry after which the counts of a shard's entries are halved. records_at: in
    float32 words
    """
    for k in range(len(shards)):
        shard = shards[k]
        stats, base = shard * region + stats_at, shard * region + keys_at
        uses = 2 * (shard * region + uses_at)
        if evict == 1 and longs[stats + _USED] >= used_most:
            longs[stats + _USED] = 0
            for place in range(entries):
                words[uses + 2 * place] >>= np.uint32(1)
        if n_counters and longs[stats + _COUNTED] >= n_counters:
            longs[stats + _COUNTED] = 0
            start = 8 * shard * region + filter_at
            for j in range(start, start + n_counters):
                small[j] >>= np.uint8(1)
        if evict != 2:
            continue
        start = longs[stats + _SWEPT]
        stop = min(entries, start + max(_BUCKET, 4 * entries // evict_after))
        longs[stats + _SWEPT] = stop if stop < entries else 0
        for place in range(start, stop):
            if longs[base + place] != _NO_KEY and step + 1 - np.int64(words[uses + 2 * place + 1]) > evict_after:
                longs[base + place] = _NO_KEY
                longs[stats + _SIZE] -= 1
                longs[stats + _EVICTED] += 1
                words[2 * shard * region + records_at + (place + 1) * record - 1] += np.uint32(1)
    for k in range(len(shards)):  # (beside the first shared record, which is saved)
        stats, shared = shards[k] * region + stats_at, 2 * (shards[k] * region + uses_at + entries)
        words[shared] = np.uint32(min(longs[stats + _USED], np.int64(_MOST)))
        words[shared + 1] = np.uint32(longs[stats + _SWEPT])
        if n_counters:
            at = 2 * shards[k] * region + filter_at // 4 + entries
            words[at] = np.uint32(min(longs[stats + _COUNTED], np.int64(_MOST)))


@_compiled("void(uint8[::1], uint8[::1])")
def resize_filter(was: Any, now: Any) -> None:
    """Fill the counters of a filter from those of one of another size, of the same keys: none is less than it was.

    Counter j of n is that of the hashes from j / n to (j + 1) / n of their range.
    """
    for j in range(len(now)):
        most = np.uint8(0)
        for i in range(j * len(was) // len(now), ((j + 1) * len(was) - 1) // len(now) + 1):
            most = max(most, was[i])
        now[j] = most


@_compiled(
    "int64(int64[::1], uint32[::1], int64[::1], uint32[:, ::1], int64, int64, int64, int64, int64, int64, int64,"
    " int64[::1])"
)
def insert_entries(
    longs: Any, words: Any, keys: Any, uses: Any, shard: int, region: int, stats_at: int, keys_at: int, uses_at: int,
    entries: int, evicts: int, rows: Any,
) -> int:  # fmt: skip
    """Give keys of one shard, which no process reads, entries: rows[i] = the place in the shard, -1: none.

    A key that is there keeps the newer use. Of a full bucket the least used gives way, if that is less used than the
    key; uses: uint32 [n, 2]. Returns how many keys, these or others, have no entry for lack of room. evicts: 0: then a
    key that finds no room counts, and all that are there stay
    """
    n_buckets, n_dropped = entries // _BUCKET, 0
    base, stats = shard * region + keys_at, shard * region + stats_at
    for i in range(len(keys)):
        key, mixed = keys[i], _mix(np.uint64(keys[i]))
        free, most_free, victim, own = -1, 0, -1, -1
        least_uses, least_last = np.int64(uses[i, 0]), np.int64(uses[i, 1])
        for half in range(2):
            bucket = _first_bucket(mixed, n_buckets) if half == 0 else _second_bucket(mixed, n_buckets)
            first_free, n_free = -1, 0
            for place in range(bucket * _BUCKET, (bucket + 1) * _BUCKET):
                at = 2 * (shard * region + uses_at + place)
                if longs[base + place] == key:
                    own = place
                if longs[base + place] == _NO_KEY:
                    n_free += 1
                    if first_free < 0:
                        first_free = place
                    continue
                its, last = np.int64(words[at]), np.int64(words[at + 1])
                if its < least_uses or (its == least_uses and last < least_last):
                    victim, least_uses, least_last = place, its, last
            if n_free > most_free:
                free, most_free = first_free, n_free
        if own >= 0:
            at = 2 * (shard * region + uses_at + own)
            if words[at + 1] >= uses[i, 1]:
                rows[i] = -1
                continue
            free = own
        elif free < 0:
            n_dropped += 1
            if victim < 0 or evicts == 0:
                rows[i] = -1
                continue
            free = victim
        else:
            longs[stats + _SIZE] += 1
        at = 2 * (shard * region + uses_at + free)
        longs[base + free], words[at], words[at + 1] = key, uses[i, 0], uses[i, 1]
        rows[i] = free
    return n_dropped


@_compiled("int64(int64[::1], uint32[::1], int64, int64, int64, int64, int64, int64, int64)")
def clear_doubles(
    longs: Any, words: Any, shard: int, n_shards: int, region: int, stats_at: int, keys_at: int, uses_at: int,
    entries: int,
) -> int:  # fmt: skip
    """Of a key that two entries of a shard have, clear the one used before; count the rest. Returns how many went."""
    n_buckets, n_cleared, size = entries // _BUCKET, 0, 0
    base, uses = shard * region + keys_at, 2 * (shard * region + uses_at)
    for place in range(entries):
        key = longs[base + place]
        if key == _NO_KEY:
            continue
        mixed, mine = _mix(np.uint64(key)), place // _BUCKET
        first, second = _first_bucket(mixed, n_buckets), _second_bucket(mixed, n_buckets)
        is_out = key % n_shards != shard or (mine != first and mine != second)
        for half in range(2):
            bucket = first if half == 0 else second
            for other in range(bucket * _BUCKET, (bucket + 1) * _BUCKET):
                if other != place and longs[base + other] == key:
                    its, last = words[uses + 2 * other + 1], words[uses + 2 * place + 1]
                    is_out = is_out or its > last or (its == last and other < place)
        if is_out:
            longs[base + place] = _NO_KEY
            n_cleared += 1
        else:
            size += 1
    longs[shard * region + stats_at + _SIZE] = size
    return n_cleared
