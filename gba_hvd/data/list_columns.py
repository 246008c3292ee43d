"""Columns of lists: which they are, and their values one after the other; and columns in chunks as one array."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def flattened(lists: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """The values [v] of n lists, and where each list starts among them, int64 [n + 1]. A list that is null is empty."""
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lists.flatten(), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def one_array(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
