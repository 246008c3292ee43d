"""Where a plain model's rows, their counts and the marks of its steps lie; and how another process comes to map them.

Here is decided what the memory looks like, not who writes it: that is `tensor_rows`. Shared memory has no name that
could be left behind: it goes with the last process that maps it, however that ends.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recovery.errors import BadInput
from recovery.rows import RowView, Schema
from recovery.selection.sampled_accesses import SampledAccesses, n_words

SHARED = Path("/dev/shm")


class SampledLists:
    """The lists of sampled accesses of all tables and shards in one tensor of words, int32 [n].

    capacities: of each table, the most rows of a shard in a list; 0: no list
    """

    def __init__(self, schema: Schema, capacities: tuple[int, ...], period: int, words: Tensor) -> None:
        self._about = schema, capacities, period, words
        self.capacities, self.period = capacities, period
        self.lists: dict[tuple[int, int], SampledAccesses] = {}
        flat, at = words.numpy().view(np.uint32), 0
        for table, shard, n_rows in _listed(schema, capacities):
            end = at + n_words(n_rows, capacities[table])
            self.lists[table, shard] = SampledAccesses(flat[at:end], n_rows, capacities[table], period)
            at = end

    @classmethod
    def make(cls, schema: Schema, capacities: tuple[int, ...], period: int, shared: bool) -> SampledLists:
        size = sum(n_words(n_rows, capacities[table]) for table, _, n_rows in _listed(schema, capacities))
        words = torch.zeros(size, dtype=torch.int32)
        if shared:
            share_([words])
        return cls(schema, capacities, period, words)

    def __reduce__(self) -> tuple[type[SampledLists], tuple[Any, ...]]:
        return SampledLists, self._about


def _listed(schema: Schema, capacities: Sequence[int]) -> list[tuple[int, int, int]]:
    """(table, shard, rows of the shard) of each list."""
    return [
        (number, shard, table.rows_in(shard, schema.n_shards))
        for number, table in enumerate(schema.tables)
        for shard in range(schema.n_shards)
        if capacities[number] and table.rows_in(shard, schema.n_shards)
    ]


class RowMemory:
    """A `RowSource` of tensors. One of shared tensors may be sent to a process that is started: it maps the same
    memory.

    columns: of each table, its columns, float32 [n, w] or [n]. counts: of each table, int32 [n], the bits of a uint32.
    marks:   int64 [2], the last step finished and the last one begun.
    sampled: the lists of sampled accesses, once they were asked for.
    """

    def __init__(
        self,
        schema: Schema,
        columns: Sequence[Sequence[Tensor]],
        counts: Sequence[Tensor],
        step_marks: Tensor,
        sampled: SampledLists | None = None,
    ) -> None:
        self.schema, self.sampled = schema, sampled
        self._tensors = [[tensor.detach() for tensor in of_table] for of_table in columns], list(counts), step_marks
        self._columns = [tuple(_array(tensor) for tensor in of_table) for of_table in columns]
        self.counts = [tensor.numpy().view(np.uint32) for tensor in counts]
        self._marks = step_marks.numpy()

    def __reduce__(self) -> tuple[type[RowMemory], tuple[Any, ...]]:
        return RowMemory, (self.schema, *self._tensors, self.sampled)

    @property
    def is_shared(self) -> bool:
        columns, counts, step_marks = self._tensors
        return all(tensor.is_shared() for tensor in (*itertools.chain(*columns), *counts, step_marks))

    @property
    def finished(self) -> int:
        return int(self._marks[0])

    @finished.setter
    def finished(self, step: int) -> None:
        self._marks[0] = step

    @property
    def begun(self) -> int:
        return int(self._marks[1])

    @begun.setter
    def begun(self, step: int) -> None:
        self._marks[1] = step

    def shards(self) -> Sequence[int]:
        """The shards that are here: all of them, in ascending order."""
        return range(self.schema.n_shards)

    def slab(self, table: int, shard: int) -> RowView:
        """Rows of a table in a shard, as views of the tensors."""
        mine = slice(shard, None, self.schema.n_shards)
        return RowView(tuple(column[mine] for column in self._columns[table]), self.counts[table][mine])

    def map_pages(self) -> None:
        """Touch every page once, so that the first save does not pay for mapping it."""
        for array in (*itertools.chain(*self._columns), *self.counts):
            array.reshape(-1)[:: mmap.PAGESIZE // array.itemsize].max(initial=0)

    def sampled_accesses(
        self, capacities: Sequence[int], period: int, rng: np.random.Generator | None = None
    ) -> Mapping[tuple[int, int], SampledAccesses]:
        """See `SampledRowSource`. Made when they are first asked for, in shared memory where the rows are in it."""
        if self.sampled is None:
            self.sampled = SampledLists.make(self.schema, tuple(capacities), period, self.is_shared)
        if (self.sampled.capacities, self.sampled.period) != (tuple(capacities), period):
            raise BadInput(
                f"these rows list every {self.sampled.period}. access for saves of {self.sampled.capacities} rows of "
                f"a shard of each table, got {period} and {tuple(capacities)}: build the rows again"
            )
        return self.sampled.lists

    def step_marks(self, shard: int) -> tuple[int, int]:
        """(finished, begun): the last steps finished and begun on a shard; readers use them as a seqlock."""
        finished = self.finished
        return finished, self.begun


def share_(tensors: Iterable[Tensor], free_bytes: Callable[[Path], int] | None = None) -> None:
    """Move tensors to shared memory. They stay the same objects; arrays that were made of them before are cut off.

    Raises BadInput when there is not enough: a page that is missing later would kill its writer.
    """
    private = {t.untyped_storage().data_ptr(): t for t in tensors if not t.is_shared()}.values()
    need, free = sum(t.untyped_storage().nbytes() for t in private), (free_bytes or _free_bytes)(SHARED)
    if need > free:
        raise BadInput(
            f"rows, slots and counts need {need / 2**20:,.1f} MiB of shared memory, {SHARED} has "
            f"{free / 2**20:,.1f} MiB free: enlarge it (mount -o remount,size=..., docker run --shm-size=...), or save "
            "from this process (Checkpointer), which needs no shared memory (shared=False)"
        )
    for tensor in private:
        tensor.share_memory_()


def _free_bytes(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _array(tensor: Tensor) -> np.ndarray:
    """float32 [n, w], a view."""
    array: np.ndarray = tensor.detach().numpy()
    return array.reshape(len(array), -1)
