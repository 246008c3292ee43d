"""What a chaos job learns: a click if user and item are of certain kinds, which a linear model can learn well."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import gba_hvd
from gba_hvd.data import ParquetStream, ShardedStream

FILES, ROW_GROUP, SHARDS, IN_SEGMENT = 3, 50, 20, 8


class ChaosClicks:
    """n samples: two fields of 300 users and 40 items, two dense numbers that mean nothing, a label.

    features: also "seen", two items of each user's past, of the table of items
    raw: users have 64-bit ids, half of them negative
    """

    def __init__(self, n: int, features: bool = False, raw: bool = False) -> None:
        rng = np.random.default_rng(7)
        self.user, self.item = rng.integers(0, 300, n), rng.integers(0, 40, n)
        self.dense = rng.normal(size=(n, 2)).astype(np.float32)
        self.user_ids = raw_ids(self.user) if raw else self.user
        self.label = ((self.user % 7 + self.item % 3) > 4).astype(np.float32)
        self.seen = np.stack([self.user % 40, (self.item * 3 + self.user) % 40], axis=1) if features else None

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        ids: dict[str, torch.Tensor | gba_hvd.Bag] = {
            "user": torch.from_numpy(self.user_ids[rows]),
            "item": torch.from_numpy(self.item[rows]),
        }
        if self.seen is not None:
            ids["seen"] = torch.from_numpy(self.seen[rows])
        return gba_hvd.Batch(ids, torch.from_numpy(self.dense[rows]), torch.from_numpy(self.label[rows]))


def files_of(clicks: ChaosClicks, folder: Path) -> ParquetStream:
    """The same in Parquet files, written if they are not there."""
    if not folder.exists():
        columns = {"user": clicks.user_ids, "item": clicks.item, "x": clicks.dense[:, 0], "y": clicks.dense[:, 1]}
        columns |= {} if clicks.seen is None else {"seen": pa.array(clicks.seen.tolist(), pa.list_(pa.int32(), 2))}
        table = pa.table(columns | {"click": clicks.label})
        folder.mkdir()
        for number, part in enumerate(np.array_split(np.arange(len(clicks)), FILES)):
            pq.write_table(table.take(pa.array(part)), folder / f"{number}.parquet", row_group_size=ROW_GROUP)
    ids = ["user", "item", *(["seen"] if clicks.seen is not None else [])]
    return ParquetStream(str(folder), ids=ids, dense=["x", "y"], label="click")


def shards_of(clicks: ChaosClicks) -> ShardedStream:
    """The same in shards of any size, some of them empty. `collate_fn` is then `lambda rows: clicks.take(rows)`."""
    limits = shard_limits(len(clicks))
    rows = {f"shard-{number}": range(*limit) for number, limit in enumerate(limits)}
    return ShardedStream(list(rows), rows.__getitem__, count=lambda name: len(rows[name]), segment=IN_SEGMENT)


def shard_limits(n: int) -> list[tuple[int, int]]:
    """The first sample of each shard, and the one after its last."""
    ends = [*sorted((number * 7919) % n for number in range(1, SHARDS - 1)), n, n]
    return list(pairwise([0, *ends]))


def raw_ids(users: np.ndarray) -> np.ndarray:
    """int64 [n]: what numbers from 0 to 299 are called in a hashed table."""
    return (users - 150) * 61_440_000_000_000_001
