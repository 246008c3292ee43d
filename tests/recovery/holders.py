"""Comparing rows bit for bit."""

from __future__ import annotations

import numpy as np

from recovery.rows import RowSource


def shard_values(holder: RowSource, shard: int) -> list[bytes]:
    """Every byte of a shard."""
    return [
        np.ascontiguousarray(column).tobytes()
        for table in range(len(holder.schema.tables))
        for column in holder.slab(table, shard).columns
    ]


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), f"table {name!r} differs"
