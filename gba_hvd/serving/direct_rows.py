"""Lookups of rows wherever they are in this process, in one call of a compiled kernel: of all tables of a group that
have every row, in arrays and mapped files alike. Without locks, but where a bucket is opened; nothing is copied twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from gba_hvd import kernels

_BASE = 64  # an array cannot start at address 0


@dataclass(frozen=True)
class Buckets:
    """All rows of a table, cut in equal buckets. opened(b): float32 [n, dim], which stays where it is."""

    n_rows: int
    per_bucket: int
    opened: Callable[[int], np.ndarray]


class DirectRows:
    """The rows of some tables of one dimension. first_key: of each table, ascending"""

    def __init__(self, first_key: Sequence[int], tables: Sequence[Buckets], dim: int) -> None:
        self._tables = tables
        self._bits = np.array([max(0, one.per_bucket - 1).bit_length() for one in tables], np.int64)
        counts = [-(-one.n_rows // (1 << int(bits))) for one, bits in zip(tables, self._bits, strict=True)]
        self._first_key = np.array([*first_key, first_key[-1] + tables[-1].n_rows], np.int64)
        self._first_bucket = np.cumsum([0, *counts])
        self._words = np.full(self._first_bucket[-1], -1, np.int64)
        self._opened: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        self._memory = all_memory()

    def gather(self, keys: np.ndarray, out: np.ndarray) -> None:
        """out[i] = the row of keys[i]. keys: int64 [n], each of a table; out: float32 [n, dim]"""
        at, missing = 0, np.empty(1, np.int64)
        where = self._first_key, self._first_bucket, self._bits, self._words, self._memory
        while (at := kernels.gather_stored(keys, at, *where, missing, out)) >= 0:
            self._open(int(missing[0]))

    def _open(self, key: int) -> None:
        table = int(np.searchsorted(self._first_key[:-1], key, side="right")) - 1
        bucket = (key - int(self._first_key[table])) >> int(self._bits[table])
        number = int(self._first_bucket[table]) + bucket
        with self._lock:
            rows = self._tables[table].opened(bucket)
            assert rows.dtype == np.float32 and rows.flags.c_contiguous
            self._opened[number] = rows  # its address is used, so it must live
            self._words[number] = word_of(rows)


def all_memory() -> np.ndarray:
    """float32 [2 ** 45]: the addresses of this process as one array, so that a kernel reads any row."""
    about: Any = {"shape": (1 << 45,), "typestr": "<f4", "data": (_BASE, False), "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=about))


def word_of(array: np.ndarray) -> int:
    """Where an array begins in `all_memory`."""
    return (int(array.__array_interface__["data"][0]) - _BASE) // 4
