"""The loops over rows that have to be fast, compiled by numba.

Plain arithmetic on numpy arrays: nothing here knows processes, files or modes. Signatures are explicit: all kernels are
compiled together (and cached on disk), by `load` at set-up or else at the first call, never in the middle of training.
Importing this file does not import numba, which takes half a second.

Rows are addressed by *key*: `key % n_shards` is the shard, `key // n_shards` the row's place in it (`shm.layout`).
`flat` is a host's complete shard memory as float32 words; `region` the words of one shard; `at` where its records
start; `record` the words of one row with its slots and counter.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from gba_hvd import kernel_cache
from gba_hvd.gc_pause import gc_paused

F = TypeVar("F", bound=Callable[..., Any])


class KernelFile:
    """The kernels of one file, whose names are `names` (`globals()`). Compiled functions take the place of Python's.

    Callers say `kernels.gather_rows(...)`: a name imported from the file would stay the one that compiles first.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names, self._lock = names, threading.Lock()
        self._python: list[tuple[Callable[..., Any], Sequence[str], dict[str, Any]]] = []
        self._operations: list[Callable[[], Any]] = []

    def add(self, *signatures: str, **options: Any) -> Callable[[F], F]:
        """Decorator: a kernel for these signatures, with these options of `numba.njit`."""

        def added(function: F) -> F:
            @functools.wraps(function)
            def first_call(*args: Any) -> Any:
                self.load()
                return self._names[function.__name__](*args)

            self._python.append((function, signatures, options))
            return cast(F, first_call)

        return added

    def add_operation(self, make: Callable[[], Any]) -> Callable[..., Any]:
        """Decorator: `make()` is an operation for kernels to use under its name, made when they are compiled."""

        def not_compiled(*args: Any) -> Any:
            raise TypeError(f"{make.__name__} is an operation of compiled kernels")

        self._operations.append(make)
        return not_compiled

    def load(self) -> None:
        """Compile all, in the order of the file, or read them from the cache. From any thread; again does nothing."""
        with self._lock:
            if self._python:
                with gc_paused():
                    self._load()
                self._python.clear()

    def _load(self) -> None:
        is_cached = kernel_cache.ensure(Path(self._names["__file__"]))
        import numba  # not before a kernel is needed

        _import_numba_without_scipy()
        for make in self._operations:
            self._names[make.__name__] = make()
        for function, signatures, options in self._python:
            self._names[function.__name__] = numba.njit(list(signatures), cache=is_cached, **options)(function)


_IMPORTING = threading.Lock()


def _import_numba_without_scipy() -> None:
    """Import the part of numba that imports scipy.linalg, to see that there is one: a third of a second a process.

    A function that calls np.dot and its like imports it when it is compiled, as always.
    """
    with _IMPORTING:
        if "numba.np.arraymath" in sys.modules or importlib.util.find_spec("scipy") is None:
            return
        from numba.np import linalg

        ensure, linalg.ensure_blas = linalg.ensure_blas, lambda: None
        try:
            arraymath: Any = importlib.import_module("numba.np.arraymath")
        finally:
            linalg.ensure_blas = ensure
        arraymath.ensure_blas = ensure


_ROWS_AHEAD = 32  # rows that are looked for before the first of them is copied
_PREFETCHED = 8  # rows that are on their way to the cache while one is read
_LINE = 16  # float32 of a cache line
_PAIRS = 256  # of normal numbers, computed together
_LOG_2 = math.log(2.0)
_ONE, _SQRT_HALF = 0x3FF0000000000000, 0x3FE6A09E667F3BCD  # bits of 1 and sqrt(1/2)

_FILE = KernelFile(globals())
load = _FILE.load
_inlined = functools.partial(_FILE.add, inline="always")
_exact = functools.partial(_FILE.add, nogil=True, error_model="numpy")  # the same bits on every processor
_compiled = functools.partial(_exact, fastmath={"contract", "reassoc", "nsz"})


# --- memory ---------------------------------------------------------------------------------------------------------


@_FILE.add_operation
def _prefetch() -> Any:
    """_prefetch(array, at): bring the cache line of array[at] on its way. Does nothing where there is no memory."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    def prefetch(typing_context: Any, array: Any, at: Any) -> Any:
        def generated(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            place = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
            read, to_all_caches, data = number(0), number(3), number(1)
            call = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            builder.call(call, [builder.bitcast(place, byte), read, to_all_caches, data])
            return context.get_dummy_value()

        return types.void(array, at), generated

    return intrinsic(prefetch)


@_inlined("void(float32[::1], uint64[::1], uint64, uint64, uint64)")
def _prefetch_record(flat: Any, starts: Any, i: np.uint64, skip: np.uint64, width: np.uint64) -> None:
    """Of record i, if there is one: its `width` words from `skip` on."""
    if i < np.uint64(len(starts)):
        for j in range(np.uint64(0), width, np.uint64(_LINE)):
            _prefetch(flat, starts[i] + skip + j)


# --- numbers from a counter ------------------------------------------------------------------------------------------


@_inlined("uint64(uint64)")
def _mix(x: np.uint64) -> np.uint64:
    """The finaliser of splitmix64 (Steele et al. 2014): a bijection of 64 bits that looks random."""
    x = np.uint64(x) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@_exact("void(uint64[::1], int64, float64, float32[::1], float32[::1], float64[::1], float64[::1])")
def _normals(bits: Any, n: int, std: float, first: Any, second: Any, radius: Any, mantissa: Any) -> None:
    """first[i], second[i] = normal(0, std) of the two halves of bits[i], for i < n (Box-Muller).

    radius, mantissa: float64 [n], overwritten. Logarithm, sine and cosine are series without branches, so that a
    processor computes several at once. The result differs from that of C's functions by the last bit of float32, in
    about one number of 10^7.
    """
    exponents, mantissas = radius.view(np.int64), mantissa.view(np.int64)
    for i in range(n):  # u1 * 2**32, of the upper half; by way of int32: AVX2 cannot convert int64 to float64
        upper = np.int32(np.int64(bits[i] >> np.uint64(32)) - np.int64(1 << 31))
        radius[i] = np.float64(upper) + (2147483648.0 + 0.5)
    for i in range(n):  # = 2**exponent * mantissa, from sqrt(1/2) to sqrt(2)
        number = exponents[i] - _SQRT_HALF + _ONE
        mantissas[i] = (number & np.int64((1 << 52) - 1)) + _SQRT_HALF
        exponents[i] = number >> np.int64(52)
    for i in range(n):  # log(mantissa) = 2 atanh(s)
        exponent = np.float64(np.int32(exponents[i])) - (1023.0 + 32.0)
        s = (mantissa[i] - 1.0) / (mantissa[i] + 1.0)
        z = s * s
        odd = 1 / 15 + z * (1 / 17 + z * (1 / 19 + z * (1 / 21 + z * (1 / 23))))
        odd = 1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z * odd)))))
        log = exponent * _LOG_2 + (2.0 * s + 2.0 * s * (z * odd))
        radius[i] = std * math.sqrt(-2.0 * log)
    for i in range(n):  # u2, the lower half, of a turn: whole quarters, and an angle of an eighth at most
        turn = np.int32(bits[i] & np.uint64(0xFFFFFFFF))
        quarters = (turn + np.int32(1 << 29)) >> np.int32(30)
        a = np.float64(np.int32(turn - (quarters << np.int32(30)))) * (2.0 * math.pi / 4294967296.0)
        z = a * a
        sine = -1 / 5040 + z * (1 / 362880 + z * (-1 / 39916800 + z * (1 / 6227020800 + z * (-1 / 1307674368000))))
        sine = a + a * z * (-1 / 6 + z * (1 / 120 + z * sine))
        cosine = 1 / 40320 + z * (-1 / 3628800 + z * (1 / 479001600 + z * (-1 / 87178291200 + z / 20922789888000)))
        cosine = 1.0 + z * (-1 / 2 + z * (1 / 24 + z * (-1 / 720 + z * cosine)))
        is_odd = (quarters & 1) != 0
        x, y = (sine, cosine) if is_odd else (cosine, sine)
        first[i] = radius[i] * (-x if ((quarters + 1) & 2) != 0 else x)
        second[i] = radius[i] * (-y if (quarters & 2) != 0 else y)


@_exact("void(float32[::1], uint64[::1], int64[::1], int64, uint64, float32)")
def init_rows_at(flat: Any, starts: Any, ids: Any, dim: int, seed: np.uint64, std: np.float32) -> None:
    """Write the initial weights of some rows at these words: normal(0, std), a function of (seed, id, column) only.

    `seed` already carries the table's name.
    """
    n_pairs = (dim + 1) // 2
    n_rows = max(1, min(len(ids), _PAIRS // n_pairs))  # that are computed together
    bits, first, second, radius, mantissa = (
        np.empty(n_rows * n_pairs, np.uint64),
        np.empty(n_rows * n_pairs, np.float32),
        np.empty(n_rows * n_pairs, np.float32),
        np.empty(n_rows * n_pairs, np.float64),
        np.empty(n_rows * n_pairs, np.float64),
    )
    for begin in range(0, len(ids), n_rows):
        end, i = min(len(ids), begin + n_rows), 0
        for row in range(begin, end):
            state = _mix(seed ^ _mix(np.uint64(ids[row])))
            for pair in range(n_pairs):
                bits[i + pair] = _mix(state + np.uint64(2 * pair))
            i += n_pairs
        _normals(bits, i, np.float64(std), first, second, radius, mantissa)
        i = 0
        for row in range(begin, end):
            base = np.int64(starts[row])
            for pair in range(dim // 2):
                flat[base + 2 * pair], flat[base + 2 * pair + 1] = first[i + pair], second[i + pair]
            if dim % 2:
                flat[base + dim - 1] = first[i + dim // 2]
            i += n_pairs


@_exact("void(float32[::1], int64, int64, int64, int64, int64, int64, uint64, float32)")
def init_rows(
    flat: Any,
    start: int,
    record: int,
    n_rows: int,
    shard: int,
    n_shards: int,
    dim: int,
    seed: np.uint64,
    std: np.float32,
) -> None:
    """`init_rows_at` for one table in one shard, whose records begin at the word `start`."""
    n_local = max(0, (n_rows - shard + n_shards - 1) // n_shards)
    starts, ids = np.empty(_PAIRS, np.uint64), np.empty(_PAIRS, np.int64)
    for begin in range(0, n_local, _PAIRS):
        n = min(_PAIRS, n_local - begin)
        for i in range(n):
            starts[i] = np.uint64(start + (begin + i) * record)
            ids[i] = shard + (begin + i) * n_shards
        init_rows_at(flat, starts[:n], ids[:n], dim, seed, std)


@_compiled("void(int64, int64, uint64, int64[::1])")
def shuffled(n: int, first: int, seed: np.uint64, out: Any) -> None:
    """out[i] = place of `first + i` in a permutation of 0..n-1: a Feistel network with cycle walking, no table."""
    bits = 1
    while (1 << (2 * bits)) < n:
        bits += 1
    mask = np.uint64((1 << bits) - 1)
    half = np.uint64(bits)
    for i in range(len(out)):
        x = np.uint64(first + i)
        while True:
            left, right = x >> half, x & mask
            for rounds in range(6):
                left, right = right, left ^ (_mix(right ^ _mix(seed + np.uint64(rounds))) & mask)
            x = (left << half) | right
            if x < np.uint64(n):
                break
        out[i] = np.int64(x)


# --- distinct keys ---------------------------------------------------------------------------------------------------


@_compiled("int64(int64[::1], int64, int64, int64[::1])")
def fill_keys(ids: Any, base: int, n_rows: int, out: Any) -> int:
    """Keys of one table's ids; the position of the first id outside the table, or -1."""
    n, last, signs = len(ids), n_rows - 1, 0
    for i in range(n):
        row = ids[i]
        signs |= row | (last - row)  # negative for a row outside; without a branch, several ids are done at once
        out[i] = base + row
    if signs < 0:
        for i in range(n):
            if ids[i] < 0 or ids[i] > last:
                return i
    return -1


@_compiled("int64(int64[:, ::1], int64[::1], int64[::1], int64[:, ::1])")
def fill_keys_of_columns(ids: Any, first_key: Any, n_rows: Any, out: Any) -> int:
    """out[b, f] = first_key[f] + ids[f, b]; returns an f with an id outside 0 to n_rows[f] - 1, or -1."""
    n_fields, n = ids.shape
    at_once = 64  # samples, whose part of `out` stays in the cache meanwhile
    for begin in range(0, n, at_once):
        end = min(begin + at_once, n)
        for f in range(n_fields):
            base, last, signs = first_key[f], n_rows[f] - 1, 0
            for b in range(begin, end):
                row = ids[f, b]
                signs |= row | (last - row)
                out[b, f] = base + row
            if signs < 0:
                return f
    return -1


@_compiled("int64(int64[::1], int64[::1])")
def fill_hashed_keys(ids: Any, out: Any) -> int:
    """`shm.layout.keys_of_ids`; the position of the first id that has no key, or -1."""
    sign = np.uint64(1) << np.uint64(63)
    for i in range(len(ids)):
        x = np.uint64(ids[i]) ^ sign
        if x == np.uint64(0):
            return i
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        out[i] = np.int64((x ^ (x >> np.uint64(31))) ^ sign)
    return -1


@_compiled("int64(int64[::1], int32[::1], int64[::1], int32[::1])")
def number_distinct(keys: Any, slots: Any, distinct: Any, number: Any) -> int:
    """Number the distinct keys in order of first appearance: keys[i] == distinct[number[i]]. Returns how many.

    slots: scratch of the open-addressing hash table, all -1, a power of two of at least 2 * len(keys).
    """
    mask = np.uint64(len(slots) - 1)
    count = 0
    for i in range(len(keys)):
        key = keys[i]
        at = _mix(np.uint64(key)) & mask
        while True:
            j = slots[at]
            if j < 0:
                slots[at] = count
                distinct[count] = key
                number[i] = count
                count += 1
                break
            if distinct[j] == key:
                number[i] = j
                break
            at = (at + np.uint64(1)) & mask
    return count


@_compiled("int64(int64[::1], int64[::1], int32[::1], int64[::1], int32[::1])")
def number_distinct_parts(keys: Any, ends: Any, slots: Any, distinct: Any, number: Any) -> int:
    """As `number_distinct`, of parts of the keys that have none in common: each part has a table that fits it.

    ends: int64 [parts], where each part ends. slots: room for the table of the longest part
    """
    count, lo = 0, 0
    for hi in ends:
        size = 16
        while size < 2 * (hi - lo):
            size *= 2
        slots[:size] = -1
        found = number_distinct(keys[lo:hi], slots[:size], distinct[count:], number[lo:hi])
        for i in range(lo, hi):
            number[i] += count
        count += found
        lo = hi
    return count


@_compiled("int64(int64[::1], int64, int32[::1], int64[::1], int64[::1])")
def keys_by_owner(keys: Any, n_shards: int, owner: Any, start: Any, out: Any) -> int:
    """Stable counting sort of keys by the owner of each key's shard. Returns how many have one.

    owner: int32 [n_shards], -1: none, its keys are left out; start: int64 [n_owners + 1], filled
    out: int64 [n], filled so far
    """
    start[:] = 0
    owners = np.empty(len(keys), np.int32)
    for i in range(len(keys)):
        owners[i] = owner[keys[i] % n_shards]
        if owners[i] >= 0:
            start[owners[i] + 1] += 1
    for r in range(1, len(start)):
        start[r] += start[r - 1]
    place = start.copy()
    for i in range(len(keys)):
        if owners[i] >= 0:
            out[place[owners[i]]] = keys[i]
            place[owners[i]] += 1
    return int(start[len(start) - 1])


@_compiled("void(int64[::1], int64[::1], int32[::1], int64[::1])")
def find_distinct_parts(keys: Any, start: Any, slots: Any, distinct: Any) -> None:
    """The distinct keys of each part, in order of first appearance, one part after the other; no two parts have a key
    in common.

    start: int64 [parts + 1], where parts begin: of `keys` before, of `distinct` afterwards
    slots: as `number_distinct` takes and leaves it
    """
    mask, count = np.uint64(len(slots) - 1), 0
    for part in range(len(start) - 1):
        lo, hi = start[part], start[part + 1]
        start[part] = count
        for i in range(lo, hi):
            key = keys[i]
            at = _mix(np.uint64(key)) & mask
            while slots[at] >= 0 and distinct[slots[at]] != key:
                at = (at + np.uint64(1)) & mask
            if slots[at] < 0:
                slots[at] = count
                distinct[count] = key
                count += 1
    start[len(start) - 1] = count


@_compiled("void(int32[::1], uint32[::1])")
def count_numbers(number: Any, counts: Any) -> None:
    """counts[k] += how many of the numbers are k"""
    for i in range(len(number)):
        counts[np.uint64(number[i])] += np.uint32(1)


@_compiled("int64(int64[::1], int32[::1], int64[::1], int32[::1])")
def find_keys(keys: Any, slots: Any, distinct: Any, number: Any) -> int:
    """Look keys up in a table that `number_distinct` filled; the position of the first that is missing, or -1."""
    mask = np.uint64(len(slots) - 1)
    for i in range(len(keys)):
        key = keys[i]
        at = _mix(np.uint64(key)) & mask
        while True:
            j = slots[at]
            if j < 0:
                return i
            if distinct[j] == key:
                number[i] = j
                break
            at = (at + np.uint64(1)) & mask
    return -1


# --- rows out of shard memory, and by owner --------------------------------------------------------------------------


@_compiled("void(int64[::1], int64, int64, int64, int64, uint64[::1])")
def place_records(keys: Any, n_shards: int, region: int, at: int, record: int, out: Any) -> None:
    """The word at which each key's record starts. A pass of its own, so that the accesses that follow overlap."""
    shards, words, first, size = np.uint64(n_shards), np.uint64(region), np.uint64(at), np.uint64(record)
    for i in range(len(keys)):
        key = np.uint64(keys[i])
        place = key // shards
        out[i] = (key - place * shards) * words + first + place * size


@_compiled("void(float32[::1], uint64[::1], int64, float32[:, ::1])")
def gather_rows(flat: Any, starts: Any, offset: int, out: Any) -> None:
    """out[i] = the words of record i from `offset` on."""
    to, width, skip = out.ravel(), np.uint64(out.shape[1]), np.uint64(offset)
    for i in range(np.uint64(len(starts))):
        _prefetch_record(flat, starts, i + np.uint64(_PREFETCHED), skip, width)
        base, p = starts[i] + skip, i * width
        for j in range(width):
            to[p + j] = flat[base + j]


@_compiled(
    "int64(int64[::1], int64, int64[::1], int64[::1], int64[::1], int64[::1], float32[::1], int64[::1],float32[:, ::1])"
)
def gather_stored(
    keys: Any, start: int, first_key: Any, first_bucket: Any, bits: Any, words: Any, memory: Any, missing: Any, out: Any
) -> int:
    """out[i] = the row of keys[i], from `start` on. Returns -1, or where to continue after a bucket in no memory.

    Tables stand one after the other: table t has the keys from first_key[t] on, the last of which is of no table, and
    the buckets from first_bucket[t] on, of 2 ** bits[t] rows each. words: where each bucket starts in `memory`, or -1
    missing: int64 [1], gets the key whose bucket that is
    """
    to, dim, t, n_tables = out.ravel(), np.uint64(out.shape[1]), 0, len(first_key) - 1
    found = np.empty(_ROWS_AHEAD, np.uint64)
    for block in range(start, len(keys), _ROWS_AHEAD):
        n = min(_ROWS_AHEAD, len(keys) - block)
        for j in range(n):
            key = keys[block + j]
            while key < first_key[t] or key >= first_key[t + 1]:  # (usually the same or the next table)
                t = t + 1 if t + 1 < n_tables else 0
            row = key - first_key[t]
            bucket = row >> bits[t]
            at = words[first_bucket[t] + bucket]
            if at < 0:
                missing[0] = key
                return block
            found[j] = np.uint64(at) + np.uint64(row - (bucket << bits[t])) * dim
            to[np.uint64(block + j) * dim] = memory[found[j]]  # independent reads: the rows come to the cache together
        for j in range(n):
            base, p = found[j], np.uint64(block + j) * dim
            for c in range(dim):
                to[p + c] = memory[base + c]
    return -1


@_compiled("void(int64[::1], int64, int32[::1], int64[::1], int32[::1])")
def order_by_owner(keys: Any, n_shards: int, owner: Any, start: Any, order: Any) -> None:
    """Stable counting sort of positions by the owner of each key's shard.

    owner: int32 [n_shards]; start: int64 [n_owners + 1], filled; order: int32 [n], filled.
    """
    start[:] = 0
    owners = np.empty(len(keys), np.int32)
    for i in range(len(keys)):
        owners[i] = owner[keys[i] % n_shards]
        start[owners[i] + 1] += 1
    for r in range(1, len(start)):
        start[r] += start[r - 1]
    place = start.copy()
    for i in range(len(keys)):
        order[place[owners[i]]] = i
        place[owners[i]] += 1


@_compiled("void(int64[::1], float32[:, ::1], int32[::1], int64[::1], float32[:, ::1])")
def take_rows(keys: Any, rows: Any, order: Any, out_keys: Any, out_rows: Any) -> None:
    dim = rows.shape[1]
    for i in range(len(order)):
        j = order[i]
        out_keys[i] = keys[j]
        for c in range(dim):
            out_rows[i, c] = rows[j, c]


@_compiled("void(float32[:, ::1], int32[::1], float32, float32[:, ::1])")
def add_rows(rows: Any, number: Any, weight: np.float32, out: Any) -> None:
    """out[number[i]] += weight * rows[i]"""
    dim = rows.shape[1]
    for i in range(len(number)):
        k = np.uint64(number[i])
        for c in range(dim):
            out[k, c] += weight * rows[i, c]


@_compiled("boolean(int32[::1], int32[::1], int64, int32[:, ::1])")
def fill_terms(number: Any, rows: Any, term: int, out: Any) -> bool:
    """out[number[i], term] = rows[i]; False: a number comes twice. out: -1 before"""
    for i in range(len(number)):
        k = np.uint64(number[i])
        if out[k, term] >= 0:
            return False
        out[k, term] = rows[i]
    return True


@_compiled("void(float32[:, ::1], float32[:, ::1], int32[:, ::1], float32[::1])")
def add_terms(first: Any, second: Any, terms: Any, out: Any) -> None:
    """out[i] = first[terms[i, 0]] + second[terms[i, 1]], of rows one after the other; -1 is no row."""
    dim, a, b = np.uint64(first.shape[1]), first.ravel(), second.ravel()
    for i in range(np.uint64(len(terms))):
        j, k, p = terms[i, 0], terms[i, 1], i * dim
        at, also = np.uint64(max(j, 0)) * dim, np.uint64(max(k, 0)) * dim
        if j >= 0 and k >= 0:
            for c in range(dim):
                out[p + c] = a[at + c] + b[also + c]
        elif j >= 0:
            for c in range(dim):
                out[p + c] = a[at + c]
        else:
            for c in range(dim):
                out[p + c] = b[also + c]


# --- checks of what others sent --------------------------------------------------------------------------------------

_FINITE_BLOCK = 4096


@_compiled("boolean(float32[::1])")
def all_finite(values: Any) -> bool:
    """Whether no number is NaN or infinite: no exponent has all its bits."""
    words, exponent = values.view(np.uint32), np.uint32(0x7F800000)
    for lo in range(0, len(words), _FINITE_BLOCK):
        found = np.uint32(0)
        for i in range(lo, min(lo + _FINITE_BLOCK, len(words))):
            found |= np.uint32((words[i] & exponent) == exponent)
        if found:
            return False
    return True


@_compiled("int64(int64[::1], int64, boolean[::1], int64[::1], int64[::1])")
def find_bad_key(keys: Any, n_shards: int, mine: Any, first: Any, n_rows: Any) -> int:
    """The position of the first key that is no row of a table in a shard of `mine`, or -1.

    first: int64 [tables], the place of each table's first row in a shard, ascending; n_rows: int64 [tables]
    """
    t, shards = 0, np.uint64(n_shards)
    for i in range(len(keys)):
        if keys[i] < 0:
            return i
        place = np.int64(np.uint64(keys[i]) // shards)
        if not mine[keys[i] - place * n_shards]:
            return i
        while t + 1 < len(first) and place >= first[t + 1]:
            t += 1
        while place < first[t]:
            t -= 1
        if keys[i] - first[t] * n_shards >= n_rows[t]:
            return i
    return -1


# --- pooling ---------------------------------------------------------------------------------------------------------


@_compiled("void(float32[:, ::1], int32[::1], int64, int64, float32[:, :, ::1])")
def stack_rows(rows: Any, number: Any, n_fields: int, batch: int, out: Any) -> None:
    """out[b, f] = rows[number[f * batch + b]]"""
    dim = rows.shape[1]
    for b in range(batch):
        for f in range(n_fields):
            k = np.uint64(number[f * batch + b])
            for c in range(dim):
                out[b, f, c] = rows[k, c]


@_compiled("void(float32[:, :, ::1], int32[::1], int64, int64, float32[:, ::1])")
def stack_rows_backward(grad: Any, number: Any, n_fields: int, batch: int, out: Any) -> None:
    dim = out.shape[1]
    for b in range(batch):
        for f in range(n_fields):
            k = np.uint64(number[f * batch + b])
            for c in range(dim):
                out[k, c] += grad[b, f, c]


# Of the results and their gradients, float32 [m, F, dim], a kernel writes or reads those of one `field`: features that
# the model wants side by side are pooled in their places.


_NARROW = 16  # up to so many numbers, a bag's rows are still in the cache when its next 8 columns are summed


# Without "reassoc": the rows of a bag are added in their order.
@_compiled(
    "void(float32[:, ::1], int32[::1], int64[::1], float32[::1], boolean, int64, float32[:, :, ::1])",
    fastmath={"contract", "nsz"},
)
def _pool_narrow(rows: Any, number: Any, offsets: Any, weights: Any, mean: bool, field: int, out: Any) -> None:
    """As `pool_rows`, for dimensions that 8 divides: sums of 8 columns stay in registers."""
    read, write, weighted = rows.ravel(), out.ravel(), len(weights) > 0
    dim, n_fields = np.uint64(rows.shape[1]), np.uint64(out.shape[1])
    for b in range(np.uint64(len(offsets) - 1)):
        lo, hi = np.uint64(offsets[b]), np.uint64(offsets[b + 1])
        share = np.float32(1.0 / (hi - lo)) if mean and hi > lo else np.float32(1.0)
        for c in range(np.uint64(0), dim, np.uint64(8)):
            s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0.0)
            for i in range(lo, hi):
                w = weights[i] * share if weighted else share
                p = np.uint64(number[i]) * dim + c
                s0 += w * read[p]
                s1 += w * read[p + np.uint64(1)]
                s2 += w * read[p + np.uint64(2)]
                s3 += w * read[p + np.uint64(3)]
                s4 += w * read[p + np.uint64(4)]
                s5 += w * read[p + np.uint64(5)]
                s6 += w * read[p + np.uint64(6)]
                s7 += w * read[p + np.uint64(7)]
            p = (b * n_fields + np.uint64(field)) * dim + c
            write[p] = s0
            write[p + np.uint64(1)] = s1
            write[p + np.uint64(2)] = s2
            write[p + np.uint64(3)] = s3
            write[p + np.uint64(4)] = s4
            write[p + np.uint64(5)] = s5
            write[p + np.uint64(6)] = s6
            write[p + np.uint64(7)] = s7


@_compiled("void(float32[:, ::1], int32[::1], int64[::1], float32[::1], boolean, int64, float32[:, :, ::1])")
def pool_rows(rows: Any, number: Any, offsets: Any, weights: Any, mean: bool, field: int, out: Any) -> None:
    """out[b, field] = sum (or mean) of weights[i] * rows[number[i]] over sample b's values. Empty weights mean ones.

    offsets: int64 [B + 1]. As in `nn.EmbeddingBag`, a sample without values gives zeros.
    """
    dim = rows.shape[1]
    weighted = len(weights) > 0
    if dim % 8 == 0 and dim <= _NARROW:
        _pool_narrow(rows, number, offsets, weights, mean, field, out)
        return
    for b in range(len(offsets) - 1):
        lo, hi = offsets[b], offsets[b + 1]
        if lo == hi:
            for c in range(dim):
                out[b, field, c] = 0.0
            continue
        share = np.float32(1.0 / (hi - lo)) if mean else np.float32(1.0)
        w = weights[lo] * share if weighted else share
        k = np.uint64(number[lo])
        for c in range(dim):
            out[b, field, c] = w * rows[k, c]
        for i in range(lo + 1, hi):
            w = weights[i] * share if weighted else share
            k = np.uint64(number[i])
            for c in range(dim):
                out[b, field, c] += w * rows[k, c]


@_compiled("void(float32[:, :, ::1], int64, int32[::1], int64[::1], float32[::1], boolean, float32[:, ::1])")
def pool_rows_backward(grad: Any, field: int, number: Any, offsets: Any, weights: Any, mean: bool, out: Any) -> None:
    """out[number[i]] += weights[i] * grad[b, field] (over the sample's count for the mean)"""
    dim = out.shape[1]
    weighted = len(weights) > 0
    for b in range(len(offsets) - 1):
        lo, hi = offsets[b], offsets[b + 1]
        share = np.float32(1.0 / (hi - lo)) if mean and hi > lo else np.float32(1.0)
        for i in range(lo, hi):
            w = weights[i] * share if weighted else share
            k = np.uint64(number[i])
            for c in range(dim):
                out[k, c] += w * grad[b, field, c]


@_compiled("void(float32[:, :, ::1], int64, float32[:, ::1], int32[::1], int64[::1], boolean, float32[::1])")
def pool_weights_backward(grad: Any, field: int, rows: Any, number: Any, offsets: Any, mean: bool, out: Any) -> None:
    """Gradient of the per-sample weights: out[i] = <grad[b, field], rows[number[i]]>, over the count for the mean."""
    dim = rows.shape[1]
    for b in range(len(offsets) - 1):
        lo, hi = offsets[b], offsets[b + 1]
        share = np.float32(1.0 / (hi - lo)) if mean and hi > lo else np.float32(1.0)
        for i in range(lo, hi):
            k = np.uint64(number[i])
            total = np.float32(0.0)
            for c in range(dim):
                total += grad[b, field, c] * rows[k, c]
            out[i] = share * total


@_compiled("void(float32[:, ::1], int32[::1], int64[::1], int64, float32[:, :, ::1], int32[:, ::1])")
def pool_rows_max(rows: Any, number: Any, offsets: Any, field: int, out: Any, chosen: Any) -> None:
    """out[b, field] = maximum of rows[number[i]] over sample b's values, element by element; of equal ones, the first.

    chosen: the row that each element is of, -1 in a sample without values, which gives zeros. NaN is the maximum.
    """
    dim = rows.shape[1]
    for b in range(len(offsets) - 1):
        for c in range(dim):
            out[b, field, c] = 0.0
            chosen[b, c] = -1
        for i in range(offsets[b], offsets[b + 1]):
            k = np.uint64(number[i])
            for c in range(dim):
                value, most = rows[k, c], out[b, field, c]
                if chosen[b, c] < 0 or value > most or (value != value and most == most):
                    out[b, field, c] = value
                    chosen[b, c] = number[i]


@_compiled("void(float32[:, :, ::1], int64, int32[:, ::1], float32[:, ::1])")
def pool_rows_max_backward(grad: Any, field: int, chosen: Any, out: Any) -> None:
    for b in range(len(chosen)):
        for c in range(out.shape[1]):
            k = chosen[b, c]
            if k >= 0:
                out[k, c] += grad[b, field, c]


# --- row optimizers: one pass over the touched records, in place ---------------------------------------------------
# A row's record is [weights: dim | slots | access counter], all on one page of memory or two: random access to pages is
# what a pass costs. `words` is `flat` seen as uint32, for the counters. The gradient of a row is
# scale * gradient + decay * weights, where the gradient is first[i], or with `terms` what `add_terms` makes of `first`
# and `second`. Records are brought into small contiguous blocks, where the arithmetic is one vectorised loop, and
# written back.

_BLOCK = 256


@_compiled("void(float32[::1], uint64[::1], int64, int64, int64, float32[::1])")
def _read_weights(flat: Any, starts: Any, block: int, record: int, dim: int, out: Any) -> None:
    """The weights of `_BLOCK` records from number `block` on; the rest of them is on its way to the cache."""
    size, words = np.uint64(dim), np.uint64(record)
    for i in range(np.uint64(min(_BLOCK, len(starts) - block))):
        _prefetch_record(flat, starts, np.uint64(block) + i + np.uint64(_PREFETCHED), np.uint64(0), words)
        base, p = starts[np.uint64(block) + i], i * size
        for j in range(size):
            out[p + j] = flat[base + j]


@_compiled("void(float32[::1], uint64[::1], int64, int64, float32[::1])")
def _read_block(flat: Any, starts: Any, offset: int, width: int, out: Any) -> None:
    skip, size = np.uint64(offset), np.uint64(width)
    for i in range(np.uint64(len(starts))):
        base, p = starts[i] + skip, i * size
        for j in range(size):
            out[p + j] = flat[base + j]


@_compiled("float32[::1](float32[:, ::1], float32[:, ::1], int32[:, ::1], int64, int64, float32[::1])")
def _gradients(first: Any, second: Any, terms: Any, block: int, n: int, scratch: Any) -> Any:
    """Of n rows from number `block` on: [n * dim]."""
    dim = first.shape[1]
    if len(terms) == 0:
        return first.ravel()[block * dim : (block + n) * dim]
    add_terms(first, second, terms[block : block + n], scratch)
    return scratch[: n * dim]


@_compiled("void(float32[::1], uint64[::1], int64, int64, float32[::1])")
def _write_block(flat: Any, starts: Any, offset: int, width: int, block: Any) -> None:
    skip, size = np.uint64(offset), np.uint64(width)
    for i in range(np.uint64(len(starts))):
        base, p = starts[i] + skip, i * size
        for j in range(size):
            flat[base + j] = block[p + j]


@_compiled("void(uint32[::1], uint64[::1], int64)")
def _count(words: Any, starts: Any, record: int) -> None:
    """Count one update of each row, modulo 2^32: two counts show whether, and how often, a row changed in between."""
    last = np.uint64(record - 1)
    for i in range(len(starts)):
        words[starts[i] + last] += np.uint32(1)


@_compiled("void(uint32[::1], uint64[::1], int64, uint32[::1])")
def count_more(words: Any, starts: Any, record: int, accesses: Any) -> None:
    """Count the accesses of each updated row beyond the one that its update counted, modulo 2^32."""
    last = np.uint64(record - 1)
    for i in range(len(starts)):
        words[starts[i] + last] += accesses[i] - np.uint32(1)


@_compiled("void(uint32[::1], int64[::1], uint32[::1], int64, int64, int64[:, ::1], int64, uint64)")
def sample_accesses(
    words: Any, keys: Any, accesses: Any, n_shards: int, region: int, lists: Any, period: int, seed: np.uint64
) -> None:
    """List the rows of every `period`-th access of a step; see `recovery.selection.sampled_accesses` for the lists.

    lists: int64 [tables of the group, 4]: the place of the table's first row in a shard, the word of a region at which
    its list starts, its capacity (0: none), words of its marks. seed: another one for each step
    """
    skip = np.int64(_mix(seed) % np.uint64(period))
    drawn = np.uint64(0)
    for i in range(len(keys)):
        n = np.int64(accesses[i])
        if skip >= n:
            skip -= n
            continue
        skip += ((n - skip - 1) // period + 1) * period - n
        shard, place = keys[i] % n_shards, keys[i] // n_shards
        t = len(lists) - 1
        while lists[t, 0] > place:
            t -= 1
        capacity = lists[t, 2]
        if capacity == 0:
            continue
        row, base = place - lists[t, 0], shard * region + lists[t, 1]
        marks = base + 2 + 2 * (1 + capacity)
        asked = words[base]
        at = base + 2 + np.int64(asked & np.uint32(1)) * (1 + capacity)
        if asked != words[base + 1]:
            for j in range(marks, marks + lists[t, 3]):
                words[j] = 0
            words[at] = 0
            words[base + 1] = asked
        mark, bit = marks + row // 32, np.uint32(1) << np.uint32(row % 32)
        if words[mark] & bit:
            continue
        length = np.int64(words[at])
        if length < capacity:
            words[at + 1 + length] = row
            words[at] = length + 1
        else:
            drawn += np.uint64(1)
            slot = at + 1 + np.int64(_mix(seed + drawn) % np.uint64(capacity))
            old = np.int64(words[slot])
            words[marks + old // 32] &= ~(np.uint32(1) << np.uint32(old % 32))
            words[slot] = row
        words[mark] |= bit


_HEAD = (
    "float32[::1], uint32[::1], uint64[::1], float32[:, ::1], float32[:, ::1], int32[:, ::1], float32, int64, float32,"
    "float32"
)


@_compiled(f"void({_HEAD})")
def apply_sgd(
    flat: Any, words: Any, starts: Any, first: Any, second: Any, terms: Any, scale: np.float32, record: int,
    lr: np.float32, decay: np.float32,
) -> None:  # fmt: skip
    dim = first.shape[1]
    w, sums = np.empty(_BLOCK * dim, dtype=np.float32), np.empty(_BLOCK * dim, dtype=np.float32)
    for lo in range(0, len(starts), _BLOCK):
        block = starts[lo : lo + _BLOCK]
        g = _gradients(first, second, terms, lo, len(block), sums)
        _read_weights(flat, starts, lo, record, dim, w)
        for j in range(len(g)):
            w[j] -= lr * (scale * g[j] + decay * w[j])
        _write_block(flat, block, 0, dim, w)
        _count(words, block, record)


@_compiled(f"void({_HEAD}, float32)")
def apply_adagrad(
    flat: Any, words: Any, starts: Any, first: Any, second: Any, terms: Any, scale: np.float32, record: int,
    lr: np.float32, decay: np.float32, eps: np.float32,
) -> None:  # fmt: skip
    """Slots: sum [dim]."""
    dim, sums = first.shape[1], np.empty(_BLOCK * first.shape[1], dtype=np.float32)
    w, s = np.empty(_BLOCK * dim, dtype=np.float32), np.empty(_BLOCK * dim, dtype=np.float32)
    for lo in range(0, len(starts), _BLOCK):
        block = starts[lo : lo + _BLOCK]
        g = _gradients(first, second, terms, lo, len(block), sums)
        _read_weights(flat, starts, lo, record, dim, w)
        _read_block(flat, block, dim, dim, s)
        for j in range(len(g)):
            gradient = scale * g[j] + decay * w[j]
            total = s[j] + gradient * gradient
            s[j] = total
            w[j] -= lr * gradient / (np.sqrt(total) + eps)
        _write_block(flat, block, 0, dim, w)
        _write_block(flat, block, dim, dim, s)
        _count(words, block, record)


@_compiled(f"void({_HEAD}, float32)")
def apply_row_adagrad(
    flat: Any, words: Any, starts: Any, first: Any, second: Any, terms: Any, scale: np.float32, record: int,
    lr: np.float32, decay: np.float32, eps: np.float32,
) -> None:  # fmt: skip
    """Slots: sum [1]."""
    dim, sums = first.shape[1], np.empty(_BLOCK * first.shape[1], dtype=np.float32)
    w, s = np.empty(_BLOCK * dim, dtype=np.float32), np.empty(_BLOCK, dtype=np.float32)
    gradient = np.empty(_BLOCK * dim, dtype=np.float32)
    for lo in range(0, len(starts), _BLOCK):
        block = starts[lo : lo + _BLOCK]
        g = _gradients(first, second, terms, lo, len(block), sums)
        _read_weights(flat, starts, lo, record, dim, w)
        _read_block(flat, block, dim, 1, s)
        for j in range(len(g)):
            gradient[j] = scale * g[j] + decay * w[j]
        for i in range(len(block)):
            squares = np.float32(0.0)
            for j in range(i * dim, (i + 1) * dim):
                squares += gradient[j] * gradient[j]
            s[i] += squares / np.float32(dim)
            rate = lr / (np.sqrt(s[i]) + eps)
            for j in range(i * dim, (i + 1) * dim):
                w[j] -= rate * gradient[j]
        _write_block(flat, block, 0, dim, w)
        _write_block(flat, block, dim, 1, s)
        _count(words, block, record)


@_compiled(f"void({_HEAD}, float32, float32, float32, float32, float32)")
def apply_adam(
    flat: Any, words: Any, starts: Any, first: Any, second: Any, terms: Any, scale: np.float32, record: int,
    lr: np.float32, decay: np.float32, eps: np.float32, beta1: np.float32, beta2: np.float32, correction1: np.float32,
    correction2: np.float32,
) -> None:  # fmt: skip
    """Slots: exp_avg [dim], exp_avg_sq [dim]. corrections: 1 - beta ** t, with t the number of steps of the job."""
    dim, sums = first.shape[1], np.empty(_BLOCK * first.shape[1], dtype=np.float32)
    one, root = np.float32(1.0), np.float32(math.sqrt(correction2))
    w = np.empty(_BLOCK * dim, dtype=np.float32)
    m, v = np.empty(_BLOCK * dim, dtype=np.float32), np.empty(_BLOCK * dim, dtype=np.float32)
    for lo in range(0, len(starts), _BLOCK):
        block = starts[lo : lo + _BLOCK]
        g = _gradients(first, second, terms, lo, len(block), sums)
        _read_weights(flat, starts, lo, record, dim, w)
        _read_block(flat, block, dim, dim, m)
        _read_block(flat, block, 2 * dim, dim, v)
        for j in range(len(g)):
            gradient = scale * g[j] + decay * w[j]
            m[j] = beta1 * m[j] + (one - beta1) * gradient
            v[j] = beta2 * v[j] + (one - beta2) * gradient * gradient
            w[j] -= lr * (m[j] / correction1) / (np.sqrt(v[j]) / root + eps)
        _write_block(flat, block, 0, dim, w)
        _write_block(flat, block, dim, dim, m)
        _write_block(flat, block, 2 * dim, dim, v)
        _count(words, block, record)
