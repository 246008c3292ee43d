"""Read a saved model with numpy and the standard library alone: `python consumer.py FOLDER TABLE ID...` prints rows.

The format is in docs/FORMAT.md; nothing of gba_hvd is used.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def key_of(id: int) -> int:
    """Of a hashed table: splitmix64's finaliser, the sign bit flipped before and after."""
    x = (id ^ 1 << 63) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ x >> shift) * factor % 2**64
    return int(np.array(x ^ 1 << 63, np.uint64).view(np.int64))


def rows_of(folder: Path, dim: int, part: dict[str, Any]) -> dict[int, np.ndarray]:
    """All stored rows by key."""
    found: dict[int, np.ndarray] = {}
    for shard in part["shards"]:
        data = (folder / "rows" / shard["sha256"][:2] / shard["sha256"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == shard["sha256"]
        n, first = shard["n_rows"], shard["bucket"] * part["rows_per_bucket"]
        keys = np.frombuffer(data, "<i8", n) if shard["has_keys"] else np.arange(first, first + n)
        rows = np.frombuffer(data, "<f4", offset=-(-8 * n // 64) * 64 if shard["has_keys"] else 0).reshape(n, dim)
        found |= zip(keys.tolist(), rows, strict=True)
    return found


def shared_row(table: dict[str, Any], shared: dict[int, np.ndarray], key: int) -> np.ndarray:
    """Of a key of a hashed table that has no row: one of the shared rows, or the sum of two."""
    if table.get("shared_hashes", 1) == 1:
        return shared[key % len(shared)]
    n, n_shards = len(shared) // 2, table["shared_in"]
    second: int = n + key % n_shards + n_shards * ((key % 2**64 >> 32) % (n // n_shards))
    row: np.ndarray = shared[key % n] + shared[second]
    return row


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    model = json.loads(max((folder / "versions").glob("??????.json")).read_bytes())["model"]
    table = next(one for one in model["tables"] if one["name"] == sys.argv[2])
    rows = rows_of(folder, table["dim"], table["rows"])
    for id in map(int, sys.argv[3:]):
        key = key_of(id) if table["keys"] == "hash64" else id
        if key not in rows and table["shared"] is not None:
            row = shared_row(table, rows_of(folder, table["dim"], table["shared"]), key)
        else:
            row = rows[key]
        print(id, *row.tolist())
