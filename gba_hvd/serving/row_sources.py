"""The rows of a model that is saved, `TableRows` of each table: from the memory of a job, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from gba_hvd import kernels
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import BadInput
from gba_hvd.reading import trained_scaling
from gba_hvd.reading.trained_vocabularies import Trained, of_state
from gba_hvd.serving.manifest import Initial
from gba_hvd.shm.layout import Group, table_seed
from gba_hvd.shm.shard_memory import Marks, ShardMemory
from recovery import state_codec
from recovery.hashed_ids import ids_of, keys_of_ids
from recovery.restore.open_checkpoint import OpenCheckpoint


class LiveRows:
    """Of a job that this process is a worker of. Also a `frozen_rows.RowReader`."""

    def __init__(self, tables: EmbeddingTables, name: str) -> None:
        about, self._tables = tables.tables[name], tables
        self.name, self.dim, self.n_rows = name, about.dim, about.n_rows
        self.capacity, self.initial = about.capacity or 0, initial_of(tables, name)
        self.shared_hashes, self.shared_in = (about.fallback_hashes, tables.layout.n_shards) if about.keys else (1, 1)

    def numbered(self, start: int, stop: int) -> np.ndarray:
        return self._tables.rows(self.name, np.arange(start, stop))

    def keys(self) -> np.ndarray:
        return np.sort(keys_of_ids(self._tables.vocabulary(self.name)))

    def of_keys(self, keys: np.ndarray) -> np.ndarray:
        return self._tables.rows(self.name, ids_of(keys))

    def shared(self) -> np.ndarray:
        memory, group = self._memory()
        vocabulary = memory.vocabulary(group)
        assert vocabulary is not None
        n = vocabulary.spec.fallback * memory.layout.n_shards
        out = np.empty((n, self.dim), np.float32)
        rows = np.arange(vocabulary.n_own_rows, vocabulary.n_own_rows + n)
        kernels.gather_rows(memory.flat, memory.layout.record_starts(rows, group), 0, out)
        return out

    def gather(self, keys: np.ndarray, out: np.ndarray) -> None:
        out[:] = self._tables.rows(self.name, keys if self.n_rows else ids_of(keys))

    def has(self, keys: np.ndarray) -> np.ndarray:
        return self._tables.admitted(self.name, ids_of(keys))

    def _memory(self) -> tuple[ShardMemory, Group]:
        whole = whole_of(self._tables)
        assert whole.memory is not None
        return whole.memory, whole.layout.groups[whole.layout.place_of_table[self.name][0]]


class CheckpointRows:
    """Of a checkpoint. tables: of the built module, which say how rows start; None: not known. Also a `RowReader`."""

    def __init__(self, checkpoint: OpenCheckpoint, name: str, tables: EmbeddingTables | None) -> None:
        about, self._checkpoint = checkpoint.tables[name], checkpoint
        self.name, self.dim = name, about.dim
        self.n_rows = 0 if about.is_hashed else about.n_rows
        self.capacity = about.n_rows - about.shared_rows if about.is_hashed else 0
        self.initial = None if tables is None else initial_of(tables, name)
        self.shared_hashes, self.shared_in = about.shared_hashes, checkpoint.n_shards if about.is_hashed else 1

    def numbered(self, start: int, stop: int) -> np.ndarray:
        return self._checkpoint.rows(self.name, np.arange(start, stop))

    def keys(self) -> np.ndarray:
        return np.sort(keys_of_ids(self._checkpoint.ids(self.name)))

    def of_keys(self, keys: np.ndarray) -> np.ndarray:
        return self._checkpoint.rows(self.name, ids_of(keys))

    def shared(self) -> np.ndarray:
        return self._checkpoint.shared_rows(self.name)

    def gather(self, keys: np.ndarray, out: np.ndarray) -> None:
        out[:] = self._checkpoint.rows(self.name, keys if self.n_rows else ids_of(keys))

    def has(self, keys: np.ndarray) -> np.ndarray:
        return np.isin(keys, self.keys())


def live_rows(tables: Sequence[EmbeddingTables]) -> dict[str, LiveRows]:
    """By table. Raises BadInput where this process has not all rows."""
    for one in tables:
        whole = whole_of(one)
        memory = cast(Any, whole.memory)
        if memory is None:
            raise BadInput(
                "the tables have no rows yet: save the model inside the training function, after the first batch or "
                "state.sync(); when it has returned, the memory is gone"
            )
        whole.await_steps()
        if len(memory.ready()) < whole.layout.n_shards:
            raise BadInput(
                f"this host has {len(memory.ready())} of the {whole.layout.n_shards} shards of the tables, the others "
                "are on other hosts: save a checkpoint, and export the model from it (`gba-hvd model export`)"
            )
    return {name: LiveRows(one, name) for one in tables for name in one.tables}


def has_all_rows(tables: Sequence[EmbeddingTables]) -> bool:
    """Whether this host has all shards."""
    return all(
        whole.memory is not None and len(whole.memory.ready()) == whole.layout.n_shards
        for whole in map(whole_of, tables)
    )


def step_of_rows(tables: Sequence[EmbeddingTables]) -> int:
    """The newest step that is in the rows, as their memory has it (`live_rows`)."""
    memories = [cast(Any, whole_of(one).memory) for one in tables]
    return int(max(memory.steps_of(shard)[0] for memory in memories for shard in memory.ready()))


def step_span_of(tables: Sequence[EmbeddingTables]) -> tuple[int, int]:
    """`ShardMemory.step_span` of their memory (`live_rows`)."""
    spans = [cast(Any, whole_of(one).memory).step_span() for one in tables]
    return min(first for first, _ in spans), max(last for _, last in spans)


def marks_of(tables: Sequence[EmbeddingTables]) -> list[Marks]:
    """`ShardMemory.marks` of their memory (`live_rows`)."""
    return [cast(Any, whole_of(one).memory).marks() for one in tables]


def stood_still_since(tables: Sequence[EmbeddingTables], before: Sequence[Marks]) -> bool:
    """`ShardMemory.stood_still_since` of their memory. before: `marks_of`"""
    return all(
        cast(Any, whole_of(one).memory).stood_still_since(marks) for one, marks in zip(tables, before, strict=True)
    )


def trained_input(opened: OpenCheckpoint) -> tuple[Trained, trained_scaling.Scaling]:
    """The vocabularies and the scaling in the training state of a job; one of an earlier version has none."""
    state = state_codec.decode(opened.state() or state_codec.encode({}))
    position = state.get("snapshot", state).get("position", {})
    return of_state(position.get("vocabularies", {})), trained_scaling.of_state(position.get("scaling", {}))


def whole_of(tables: EmbeddingTables) -> EmbeddingTables:
    """The tables that have the memory: several of one model share one."""
    return tables.part_of[0] if tables.part_of else tables


def initial_of(tables: EmbeddingTables, name: str) -> Initial | None:
    """Where rows start that no step has changed; None where that is no normal distribution."""
    about = tables.tables[name]
    std = None if about.keys else tables.initial_rows.std(name)
    return None if std is None else Initial(table_seed(tables.layout.seed, name), float(np.float32(std)))
