"""Where every number of a host's shard memory stands. Pure arithmetic; no files.

A host's memory is S equal regions, one per shard, whether the host holds the shard or not (absent regions are holes and
take no space):

    region s:  [ marks, one page ][ per group of tables, a record for each row: weights | optimizer slots | counter ]
               [ per table that has one, the list of sampled accesses (`recovery.selection.sampled_accesses`) ]

Tables of one dimension and one optimizer form a *group*. In a group the tables stand one after the other, each padded
to the same number of rows in every shard, so that a row has a single number, its **key**:

    key = n_shards * first[table] + row      key % n_shards = its shard      key // n_shards = its place in the shard
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from gba_hvd import kernels
from gba_hvd.errors import BadInput
from recovery.old_names import warn
from recovery.selection.sampled_accesses import n_words

PAGE_WORDS = 1024  # 4 KiB of float32 words
_LINE_WORDS = 16  # groups start on a cache line


@dataclass(frozen=True)
class TableSpec:
    """One embedding table: its name, number of rows, dimension, and which of the tables' optimizers steps it."""

    name: str
    n_rows: int
    dim: int
    optimizer: int = 0

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
    """The tables of one dimension and one optimizer, and where their numbers stand, in words."""

    dim: int
    tables: tuple[TableSpec, ...]
    first: tuple[int, ...]  # index of each table's first row in a shard
    rows_per_shard: int  # of all tables together
    at: int  # where the records start in a region
    record: int  # words of one row: weights, slots, and the access counter last
    slots: tuple[int, ...]  # where each slot starts in a record
    optimizer: int = 0  # by number, of the tables' optimizers


@dataclass(frozen=True)
class SampledSpec:
    """Which accesses are listed. capacities: of each table, the most rows of a shard in a list; 0: there is none."""

    capacities: tuple[int, ...]
    period: int


@dataclass(frozen=True)
class Layout:
    """The memory of all tables, cut in `n_shards` shards.

    slots: of the tables' first optimizer, which is that of all tables that name none; own_slots: of the others.
    sampled: None where no accesses are listed
    """

    tables: tuple[TableSpec, ...]
    slots: tuple[SlotSpec, ...]
    n_shards: int
    seed: int
    init_std: float
    sampled: SampledSpec | None = None
    own_slots: tuple[tuple[SlotSpec, ...], ...] = ()

    @classmethod
    def of(
        cls,
        tables: Mapping[str, tuple[int, int]],
        slots: tuple[SlotSpec, ...],
        n_shards: int,
        seed: int,
        init_std: float,
        optimizers: Mapping[str, int] = MappingProxyType({}),
        own_slots: tuple[tuple[SlotSpec, ...], ...] = (),
    ) -> Layout:
        """optimizers: by table, its number where it is not 0; own_slots: of optimizers 1, 2, ..."""
        if not tables:
            raise BadInput("EmbeddingTables needs at least one table: {'name': (rows, dim)}")
        specs = tuple(TableSpec(n, int(r), int(d), optimizers.get(n, 0)) for n, (r, d) in tables.items())
        return cls(specs, slots, n_shards, seed, init_std, None, own_slots)

    @classmethod
    def of_description(cls, description: Mapping[str, Any]) -> Layout:
        """The inverse of `describe`."""
        tables = {name: (rows, dim) for name, (rows, dim) in description["tables"].items()}
        own = description.get("optimizers", {"tables": {}, "slots": []})
        layout = cls.of(
            tables, _read_slots(description["slots"]), description["n_shards"], description["seed"],
            description["init_std"], own["tables"], tuple(map(_read_slots, own["slots"])),
        )  # fmt: skip
        if (sampled := description.get("sampled")) is None:
            return layout
        return replace(layout, sampled=SampledSpec(tuple(sampled["capacities"]), sampled["period"]))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        at = PAGE_WORDS
        groups = []
        for dim, optimizer in dict.fromkeys((t.dim, t.optimizer) for t in self.tables):
            tables = tuple(t for t in self.tables if (t.dim, t.optimizer) == (dim, optimizer))
            first, n_rows = [], 0
            for table in tables:
                first.append(n_rows)
                n_rows += -(-table.n_rows // self.n_shards)
            record, slots = dim, []
            for slot in self.slots_of(tables[0]):
                slots.append(record)
                record += 1 if slot.per_row else dim
            record += 1  # the access counter
            groups.append(Group(dim, tables, tuple(first), n_rows, at, record, tuple(slots), optimizer))
            at = -(-(at + n_rows * record) // _LINE_WORDS) * _LINE_WORDS
        return tuple(groups)

    def slots_of(self, table: TableSpec) -> tuple[SlotSpec, ...]:
        """What the optimizer of a table stores beside the weights."""
        return self.own_slots[table.optimizer - 1] if table.optimizer else self.slots

    @cached_property
    def lists_at(self) -> dict[int, int]:
        """Number of a table -> the word of a region at which its list starts, of those that have one."""
        last, found = self.groups[-1], {}
        at = last.at + last.rows_per_shard * last.record
        for number, capacity in enumerate(() if self.sampled is None else self.sampled.capacities):
            if capacity:
                found[number] = at
                at += n_words(self.rows_per_shard(number), capacity)
        return found

    def rows_per_shard(self, number: int) -> int:
        """The rows that there is room for in each shard, of a table by its number."""
        return -(-self.tables[number].n_rows // self.n_shards)

    @cached_property
    def region_words(self) -> int:
        end = self.groups[-1].at + self.groups[-1].rows_per_shard * self.groups[-1].record
        for number, at in self.lists_at.items():
            assert self.sampled is not None
            end = at + n_words(self.rows_per_shard(number), self.sampled.capacities[number])
        return -(-end // PAGE_WORDS) * PAGE_WORDS

    @property
    def n_rows(self) -> int:
        """Rows of all tables together."""
        return sum(table.n_rows for table in self.tables)

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
        spec, sampled = self.sampled, {}
        if spec is not None:
            sampled = {"sampled": {"capacities": list(spec.capacities), "period": spec.period}}
        optimizers = {}
        if self.own_slots:
            own = {t.name: t.optimizer for t in self.tables if t.optimizer}
            optimizers = {"optimizers": {"tables": own, "slots": list(map(_write_slots, self.own_slots))}}
        return {
            "tables": {t.name: [t.n_rows, t.dim] for t in self.tables},
            "slots": _write_slots(self.slots),
            "n_shards": self.n_shards,
            "seed": self.seed,
            "init_std": self.init_std,
            **sampled,
            **optimizers,  # (memory and checkpoints of earlier versions name neither)
        }

    def record_starts(self, keys: np.ndarray, group: Group) -> np.ndarray:
        """uint64 [n]: the word of the host's memory at which each key's record starts."""
        out = np.empty(len(keys), dtype=np.uint64)
        kernels.place_records(keys, self.n_shards, self.region_words, group.at, group.record, out)
        return out

    def places(self, keys: np.ndarray, group: Group) -> np.ndarray:
        """The old name of `record_starts`, for row optimizers of other distributions. Warns."""
        warn("Layout.places", "Layout.record_starts")
        return self.record_starts(keys, group)

    def locate(self, key: int, group: int) -> tuple[str, int]:
        """(table name, row) of a key, for messages."""
        in_shard, spec = key // self.n_shards, self.groups[group]
        index = max(i for i, first in enumerate(spec.first) if first <= in_shard)
        return spec.tables[index].name, key - spec.first[index] * self.n_shards


def _write_slots(slots: tuple[SlotSpec, ...]) -> dict[str, str]:
    return {slot.name: "row" if slot.per_row else "weight" for slot in slots}


def _read_slots(slots: Mapping[str, str]) -> tuple[SlotSpec, ...]:
    return tuple(SlotSpec(name, kind == "row") for name, kind in slots.items())


def table_seed(seed: int, table: str) -> int:
    """64 bits from the job's seed and a table's name: the initial rows depend on nothing else."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{table}".encode(), digest_size=8).digest(), "little")


def digest(description: Mapping[str, Any]) -> int:
    """A signed 64-bit fingerprint of JSON values; the order of keys counts."""
    return int.from_bytes(
        hashlib.blake2b(json.dumps(description).encode(), digest_size=8).digest(), "little", signed=True
    )
