"""The normal numbers that rows begin with: those of Box and Muller, whatever is computed together."""

from __future__ import annotations

import numpy as np
import pytest

from gba_hvd import kernels

SEED, STD = np.uint64(1234567), np.float32(0.02)


def normals(bits: np.ndarray, std: float = 1.0) -> np.ndarray:
    """float32 [2, n], as the kernel computes them."""
    kernels.load()
    n = len(bits)
    found = np.empty((2, n), np.float32)
    kernels._normals(bits, n, std, found[0], found[1], np.empty(n), np.empty(n))
    return found


def box_muller(bits: np.ndarray, std: float = 1.0) -> np.ndarray:
    """The same in float64, by numpy's functions."""
    u1 = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
    angle = 2 * np.pi * (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2**32
    return std * np.sqrt(-2 * np.log(u1)) * np.array([np.cos(angle), np.sin(angle)])


@pytest.mark.slow
def test_they_are_the_formula_rounded_once() -> None:
    bits = np.random.default_rng(1).integers(0, 2**64, 1_000_000, np.uint64)
    found, expected = normals(bits, 0.02), box_muller(bits, 0.02).astype(np.float32)
    assert np.count_nonzero(found != expected) <= 10
    np.testing.assert_array_max_ulp(found, expected, 1)


def test_at_the_ends_of_both_halves() -> None:
    halves = np.array(
        [0, 1, 2**29 - 1, 2**29, 2**29 + 1, 2**30, 2**31 - 1, 2**31, 3 << 30, 7 << 29, 2**32 - 1], np.uint64
    )
    bits = (halves[:, None] << np.uint64(32) | halves).reshape(-1)
    np.testing.assert_allclose(normals(bits), box_muller(bits), rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("dim", [1, 2, 3, 16, 33, 600])
def test_a_row_does_not_depend_on_what_is_computed_with_it(dim: int) -> None:
    ids = np.array([0, 5, 6, 1 << 40, 999, *range(20, 700)])
    together, alone = np.full((len(ids), dim + 1), 7, np.float32), np.full((len(ids), dim + 1), 7, np.float32)
    starts = np.arange(len(ids), dtype=np.uint64) * np.uint64(dim + 1)
    kernels.init_rows_at(together.reshape(-1), starts, ids, dim, SEED, STD)
    for one in range(len(ids)):
        kernels.init_rows_at(alone.reshape(-1), starts[one : one + 1], ids[one : one + 1], dim, SEED, STD)
    assert np.array_equal(together, alone) and (together[:, dim] == 7).all()
    table = np.full((340, dim + 1), 7, np.float32)
    kernels.init_rows(table.reshape(-1), 0, dim + 1, 700, 20, 2, dim, SEED, STD)  # rows 20, 22, ... of two shards
    assert np.array_equal(table, together[5::2])


def test_no_rows_are_no_work() -> None:
    none = np.empty(0, np.float32)
    kernels.init_rows_at(none, np.empty(0, np.uint64), np.empty(0, np.int64), 4, SEED, STD)
    kernels.init_rows(none, 0, 4, 1, 1, 2, 4, SEED, STD)  # a shard with none of the table's rows
