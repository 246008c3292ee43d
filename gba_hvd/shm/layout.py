"""Where every number of a host's shard memory stands. Pure arithmetic; no files.

A host's memory is S equal regions, one per shard, whether the host holds the shard or not (absent regions are holes and
take no space):

    region s:  [ marks, one page ][ per group of tables, a record for each row: weights | optimizer slots | counter;
                 of a hashed table also its vocabulary (`shm.vocabulary`) ]
               [ per table that has one, the list of sampled accesses (`recovery.selection.sampled_accesses`) ]

Tables of one dimension and one optimizer form a *group*. In a group the tables stand one after the other, each padded
to the same number of rows in every shard, so that a row has a single number, its **key**:

    key = n_shards * first[table] + row      key % n_shards = its shard      key // n_shards = its place in the shard

A *hashed* table (`Table(keys="hash64")`) is a group of its own. Its keys are 64-bit ids, mixed by a bijection, so that
key % n_shards spreads them over the shards; which row a key has, its shard's vocabulary says. Only what reads or writes
records translates keys to rows; everywhere else a key of a hashed table is a key like any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from gba_hvd import kernels
from gba_hvd.errors import BadInput
from recovery.hashed_ids import HASHES
from recovery.hashed_ids import ids_of as ids_of
from recovery.hashed_ids import keys_of_ids as keys_of_ids
from recovery.old_names import warn
from recovery.rows import NO_KEY as NO_KEY  # of an entry that no id has; the id of this number has no key
from recovery.selection.sampled_accesses import n_words

PAGE_WORDS = 1024  # 4 KiB of float32 words
FINISHED = 2  # which of a region's marks, int64 numbers, is the last step finished; see `shm.shard_memory`
_LINE_WORDS = 16  # groups start on a cache line
BUCKET = 16  # entries of a hashed table among which a key is looked for; each key has two such buckets
STATS = 16  # int64 numbers that a vocabulary keeps of itself, see `shm.vocabulary.Stat`
_COUNTERS = 4  # of the filter, for each entry: a word of a checkpoint's record


@dataclass(frozen=True)
class HashedSpec:
    """What a hashed table has in each shard, and which ids it admits and evicts.

    entries: rows that ids may have, a multiple of BUCKET; fallback: rows that ids without an entry share
    admit_after: lookups until an id is admitted. evict: "lfu", "ttl" or "": nothing is evicted
    evict_after_steps: with "ttl"; otherwise 0. std: of initial rows; None: `Layout.init_std`
    init: the function that gives ids their initial rows, `module:function`; empty: none, they are of `std`
    fallback_hashes: how many of the fallback rows an id without an entry is the sum of, see `recovery.hashed_ids`
    """

    entries: int
    fallback: int
    admit_after: int = 1
    evict: str = ""
    evict_after_steps: int = 0
    std: float | None = None
    init: str = ""
    fallback_hashes: int = 1

    def __post_init__(self) -> None:
        if self.fallback_hashes not in HASHES or self.fallback % self.fallback_hashes:
            raise BadInput(f"{self.fallback_hashes} hashes with {self.fallback} fallback rows of a shard")

    @classmethod
    def of(
        cls, capacity: int, fallback_rows: int, n_shards: int, fallback_hashes: int = 1, **settings: Any
    ) -> HashedSpec:
        """capacity, fallback_rows: of all shards together; both are rounded up."""
        entries = -(-capacity // (n_shards * BUCKET)) * BUCKET
        fallback = -(-fallback_rows // (n_shards * fallback_hashes)) * fallback_hashes
        return cls(entries, fallback, fallback_hashes=fallback_hashes, **settings)

    @property
    def rows(self) -> int:
        """Of a shard."""
        return self.entries + self.fallback

    @property
    def n_counters(self) -> int:
        """Of the filter that counts lookups of ids without an entry, a byte each."""
        return _COUNTERS * self.entries if self.has_filter else 0

    @property
    def has_filter(self) -> bool:
        return self.admit_after > 1 or self.evict == "lfu"


@dataclass(frozen=True)
class TableSpec:
    """One embedding table: its name, number of rows, dimension, and which of the tables' optimizers steps it.

    hashed: of a table whose ids are any 64-bit numbers; `n_rows` are its records, entries and fallback rows
    """

    name: str
    n_rows: int
    dim: int
    optimizer: int = 0
    hashed: HashedSpec | None = None

    def __post_init__(self) -> None:
        if self.n_rows < 1 or self.dim < 1:
            raise BadInput(f"table {self.name!r}: expected (rows, dim) of at least 1, got ({self.n_rows}, {self.dim})")


@dataclass(frozen=True)
class SlotSpec:
    """One array an optimizer keeps beside the weights: a number per row, or per weight."""

    name: str
    per_row: bool = False


@dataclass(frozen=True)
class VocabularyPlace:
    """Where the parts of a hashed table's vocabulary start in a region, in words.

    stats: int64 [STATS]; keys: int64 [rows]; uses: uint32 [rows, 2], see `shm.vocabulary`; filter: uint8 [rows, 4], or
    nothing; end: behind it
    """

    stats: int
    keys: int
    uses: int
    filter: int
    end: int


@dataclass(frozen=True)
class Group:
    """The tables of one dimension and one optimizer, and where their numbers stand, in words.

    vocabulary: of a hashed table, which is a group of its own
    """

    dim: int
    tables: tuple[TableSpec, ...]
    first: tuple[int, ...]  # index of each table's first row in a shard
    rows_per_shard: int  # of all tables together
    at: int  # where the records start in a region
    record: int  # words of one row: weights, slots, and the access counter last
    slots: tuple[int, ...]  # where each slot starts in a record
    optimizer: int = 0  # by number, of the tables' optimizers
    vocabulary: VocabularyPlace | None = None

    @property
    def hashed(self) -> HashedSpec | None:
        return self.tables[0].hashed

    @property
    def end(self) -> int:
        """The word of a region behind all that is the group's."""
        return self.vocabulary.end if self.vocabulary else self.at + self.rows_per_shard * self.record


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
        hashed: Mapping[str, HashedSpec] = MappingProxyType({}),
    ) -> Layout:
        """optimizers: by table, its number where it is not 0; own_slots: of optimizers 1, 2, ...

        hashed: those of the tables that are; their number of rows follows from it
        """
        if not tables:
            raise BadInput("EmbeddingTables needs at least one table: {'name': (rows, dim)}")
        n_rows = {name: int(n) for name, (n, _) in tables.items()}
        n_rows |= {name: n_shards * spec.rows for name, spec in hashed.items()}
        specs = tuple(
            TableSpec(name, n_rows[name], int(dim), optimizers.get(name, 0), hashed.get(name))
            for name, (_, dim) in tables.items()
        )
        return cls(specs, slots, n_shards, seed, init_std, None, own_slots)

    @classmethod
    def of_description(cls, description: Mapping[str, Any]) -> Layout:
        """The inverse of `describe`."""
        tables = {name: (rows, dim) for name, (rows, dim) in description["tables"].items()}
        own = description.get("optimizers", {"tables": {}, "slots": []})
        layout = cls.of(
            tables, _read_slots(description["slots"]), description["n_shards"], description["seed"],
            description["init_std"], own["tables"], tuple(map(_read_slots, own["slots"])),
            {name: HashedSpec(**spec) for name, spec in description.get("hashed", {}).items()},
        )  # fmt: skip
        if (sampled := description.get("sampled")) is None:
            return layout
        return replace(layout, sampled=SampledSpec(tuple(sampled["capacities"]), sampled["period"]))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        at = PAGE_WORDS
        groups = []
        for kind in dict.fromkeys(map(_kind, self.tables)):
            tables = tuple(t for t in self.tables if _kind(t) == kind)
            dim, optimizer, hashed = tables[0].dim, tables[0].optimizer, tables[0].hashed
            first, n_rows = [], 0
            for table in tables:
                first.append(n_rows)
                n_rows += -(-table.n_rows // self.n_shards)
            record, slots = dim, []
            for slot in self.slots_of(tables[0]):
                slots.append(record)
                record += 1 if slot.per_row else dim
            record += 1  # the access counter
            place = None if hashed is None else _vocabulary(_aligned(at + n_rows * record), hashed)
            groups.append(Group(dim, tables, tuple(first), n_rows, at, record, tuple(slots), optimizer, place))
            at = _aligned(groups[-1].end)
        return tuple(groups)

    def slots_of(self, table: TableSpec) -> tuple[SlotSpec, ...]:
        """What the optimizer of a table stores beside the weights."""
        return self.own_slots[table.optimizer - 1] if table.optimizer else self.slots

    @cached_property
    def lists_at(self) -> dict[int, int]:
        """Number of a table -> the word of a region at which its list starts, of those that have one."""
        at, found = self.groups[-1].end, {}
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
        end = self.groups[-1].end
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
        hashed = {t.name: asdict(t.hashed) for t in self.tables if t.hashed is not None}
        for spec_of in hashed.values():
            if not spec_of["init"]:
                del spec_of["init"]
            if spec_of["fallback_hashes"] == 1:
                del spec_of["fallback_hashes"]
        return {
            "tables": {t.name: [t.n_rows, t.dim] for t in self.tables},
            "slots": _write_slots(self.slots),
            "n_shards": self.n_shards,
            "seed": self.seed,
            "init_std": self.init_std,
            **sampled,
            **optimizers,
            **({"hashed": hashed} if hashed else {}),  # (memory and checkpoints of earlier versions name none of these)
        }

    def hashed_settings(self) -> dict[str, dict[str, Any]]:
        """By hashed table, what decides which ids have a row, and where rows start. Sizes are of all shards."""
        return {
            table.name: {
                "capacity": self.n_shards * spec.entries, "fallback_rows": self.n_shards * spec.fallback,
                "fallback_hashes": spec.fallback_hashes,
                "admit_after": spec.admit_after, "evict": spec.evict, "evict_after_steps": spec.evict_after_steps,
                "init": spec.init or (self.init_std if spec.std is None else spec.std), "seed": self.seed,
            }
            for table in self.tables
            if (spec := table.hashed) is not None
        }  # fmt: skip

    def record_starts(self, keys: np.ndarray, group: Group) -> np.ndarray:
        """uint64 [n]: the word of the host's memory at which each key's record starts.

        Of a hashed table, keys are those of its rows: `shm.shard_memory.ShardMemory.rows_of`.
        """
        out = np.empty(len(keys), dtype=np.uint64)
        kernels.place_records(keys, self.n_shards, self.region_words, group.at, group.record, out)
        return out

    def tables_of(self, keys: np.ndarray, group: Group) -> np.ndarray:
        """int64 [n]: the table of each key, by number in `tables`. Not of hashed tables."""
        numbers = np.array([self.tables.index(table) for table in group.tables])
        return numbers[np.searchsorted(group.first, keys // self.n_shards, side="right") - 1]

    def key_limit(self, group: Group) -> int:
        """Keys of the group, as unsigned numbers, are below it."""
        return 2**64 if group.hashed is not None else group.rows_per_shard * self.n_shards

    def places(self, keys: np.ndarray, group: Group) -> np.ndarray:
        """The old name of `record_starts`, for row optimizers of other distributions. Warns."""
        warn("Layout.places", "Layout.record_starts")
        return self.record_starts(keys, group)

    def locate(self, key: int, group: int) -> tuple[str, int]:
        """(table name, row) of a key, for messages; of a hashed table, its id."""
        in_shard, spec = key // self.n_shards, self.groups[group]
        if spec.hashed is not None:
            return spec.tables[0].name, int(ids_of(np.array([key]))[0])
        index = max(i for i, first in enumerate(spec.first) if first <= in_shard)
        return spec.tables[index].name, key - spec.first[index] * self.n_shards


def _kind(table: TableSpec) -> tuple[int, int, str | None]:
    """What the tables of a group have in common."""
    return table.dim, table.optimizer, None if table.hashed is None else table.name


def _aligned(word: int) -> int:
    return -(-word // _LINE_WORDS) * _LINE_WORDS


def _vocabulary(at: int, hashed: HashedSpec) -> VocabularyPlace:
    keys = at + 2 * STATS
    uses = _aligned(keys + 2 * hashed.rows)
    counters = _aligned(uses + 2 * hashed.rows)
    return VocabularyPlace(at, keys, uses, counters, counters + hashed.rows * hashed.has_filter)


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
