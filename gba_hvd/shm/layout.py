"""Where every number of a host's shard memory stands. Pure arithmetic; no files.

A host's memory is S equal regions, one per shard, whether the host holds the shard or not (absent regions are holes and
take no space):

    region s:  [ marks, one page ][ per group of tables, a record for each row: weights | optimizer slots | counter ]

Tables of one dimension form a *group*. In a group the tables stand one after the other, each padded to the same
number of rows in every shard, so that a row has a single number, its **key**:

    key = n_shards * first[table] + row      key % n_shards = its shard      key // n_shards = its place in the shard
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gba_hvd import kernels
from gba_hvd.errors import BadInput

PAGE_WORDS = 1024  # 4 KiB of float32 words
_LINE_WORDS = 16  # groups start on a cache line


@dataclass(frozen=True)
class TableSpec:
    """One embedding table: its name, number of rows, and dimension."""

    name: str
    n_rows: int
    dim: int

    def __post_init__(self) -> None:
        if self.n_rows < 1 or self.dim < 1:
            raise BadInput(f"table {self.name!r}: expected (rows, dim) of at least 1, got ({self.n_rows}, {self.dim})")


@dataclass(frozen=True)
class SlotSpec:
    """One array an optimizer keeps beside the weights: a number per row, or per weight."""

    name: str
    per_row: bool = False


@dataclass(frozen=True)
class Group:
    """The tables of one dimension, and where their numbers stand, in words."""

    dim: int
    tables: tuple[TableSpec, ...]
    first: tuple[int, ...]  # place of each table's first row in a shard
    places: int  # rows per shard, all tables
    at: int  # where the records start in a region
    record: int  # words of one row: weights, slots, and the access counter last
    slots: tuple[int, ...]  # where each slot starts in a record


@dataclass(frozen=True)
class Layout:
    """The memory of all tables, cut in `n_shards` shards."""

    tables: tuple[TableSpec, ...]
    slots: tuple[SlotSpec, ...]
    n_shards: int
    seed: int
    init_std: float

    @classmethod
    def of(
        cls,
        tables: Mapping[str, tuple[int, int]],
        slots: tuple[SlotSpec, ...],
        n_shards: int,
        seed: int,
        init_std: float,
    ) -> Layout:
        if not tables:
            raise BadInput("EmbeddingTables needs at least one table: {'name': (rows, dim)}")
        return cls(tuple(TableSpec(n, int(r), int(d)) for n, (r, d) in tables.items()), slots, n_shards, seed, init_std)

    @classmethod
    def of_description(cls, description: Mapping[str, Any]) -> Layout:
        """The inverse of `describe`."""
        slots = tuple(SlotSpec(name, kind == "row") for name, kind in description["slots"].items())
        tables = {name: (rows, dim) for name, (rows, dim) in description["tables"].items()}
        return cls.of(tables, slots, description["n_shards"], description["seed"], description["init_std"])

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        at = PAGE_WORDS
        groups = []
        for dim in dict.fromkeys(t.dim for t in self.tables):
            tables = tuple(t for t in self.tables if t.dim == dim)
            first, places = [], 0
            for table in tables:
                first.append(places)
                places += -(-table.n_rows // self.n_shards)
            record, slots = dim, []
            for slot in self.slots:
                slots.append(record)
                record += 1 if slot.per_row else dim
            record += 1  # the access counter
            groups.append(Group(dim, tables, tuple(first), places, at, record, tuple(slots)))
            at = -(-(at + places * record) // _LINE_WORDS) * _LINE_WORDS
        return tuple(groups)

    @cached_property
    def region_words(self) -> int:
        last = self.groups[-1]
        return -(-(last.at + last.places * last.record) // PAGE_WORDS) * PAGE_WORDS

    @property
    def region_bytes(self) -> int:
        """Bytes of one shard."""
        return 4 * self.region_words

    @property
    def n_bytes(self) -> int:
        """Bytes of all shards together: one copy of the tables with slots and counters."""
        return self.n_shards * self.region_bytes

    @cached_property
    def place_of_table(self) -> dict[str, tuple[int, int]]:
        """Table name -> (group number, key of its row 0)."""
        return {
            table.name: (g, first * self.n_shards)
            for g, group in enumerate(self.groups)
            for table, first in zip(group.tables, group.first, strict=True)
        }

    def describe(self) -> dict[str, Any]:
        """JSON values from which two workers see whether they mean the same memory."""
        return {
            "tables": {t.name: [t.n_rows, t.dim] for t in self.tables},
            "slots": {s.name: "row" if s.per_row else "weight" for s in self.slots},
            "n_shards": self.n_shards,
            "seed": self.seed,
            "init_std": self.init_std,
        }

    def places(self, keys: np.ndarray, group: Group) -> np.ndarray:
        """uint64 [n]: the word of the host's memory at which each key's record starts."""
        out = np.empty(len(keys), dtype=np.uint64)
        kernels.place_records(keys, self.n_shards, self.region_words, group.at, group.record, out)
        return out

    def locate(self, key: int, group: int) -> tuple[str, int]:
        """(table name, row) of a key, for messages."""
        place, spec = key // self.n_shards, self.groups[group]
        index = max(i for i, first in enumerate(spec.first) if first <= place)
        return spec.tables[index].name, key - spec.first[index] * self.n_shards


def table_seed(seed: int, table: str) -> int:
    """64 bits from the job's seed and a table's name: the initial rows depend on nothing else."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{table}".encode(), digest_size=8).digest(), "little")


def digest(description: Mapping[str, Any]) -> int:
    """A signed 64-bit fingerprint of JSON values; the order of keys counts."""
    return int.from_bytes(
        hashlib.blake2b(json.dumps(description).encode(), digest_size=8).digest(), "little", signed=True
    )
