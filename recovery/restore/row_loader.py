"""Reads the sections of a chain and puts their rows where they belong.

Sections of a blob are read, checked and decoded in parallel, within a byte budget. The chain is gone through from its
newest save to its base, and each row is written once, as the newest save has it; so what comes back, and how old it is,
can be counted exactly.

Shards of a checkpoint (row r in shard r mod S) go into any number of shards S'. The rows of a section that go into one
shard of S' are S' / gcd(S, S') indices apart, and come to lie S / gcd(S, S') indices apart: slices, no index arrays.

Rows of a keyed table go back to their places where it has as many shards and rows as it had; else each key is inserted
where there is room for it. Row g of the shared ones, of all shards together, starts as the saved one g mod their
number: with a multiple of them, that is the very row that its keys shared. Where keys are sums of two, that holds for
each half of them; with other shards their second rows are others, which are zeros then, as they are where keys had one
row. Its filter, where it has one, comes back
where there are as many shards as there were; else it starts empty.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import product
from typing import cast

import numpy as np

from recovery.catalog.chains import Chain
from recovery.config import Config
from recovery.errors import BadInput
from recovery.format import row_codec
from recovery.format.manifest import Blob, Manifest, Section
from recovery.rows import NO_KEY, KeyedRowSource, RowIndices, RowSource, Table, write_rows
from recovery.storage.store import Store, read


@dataclass(frozen=True)
class Age:
    """Age of the restored rows, in steps. Negative: a row is younger than the step it is compared with."""

    least: int
    mean: float
    most: int


@dataclass(frozen=True)
class SectionRun:
    """Consecutive sections of a blob, read at once."""

    blob: str
    sections: tuple[Section, ...]

    @property
    def n_bytes(self) -> int:
        return sum(section.n_bytes for section in self.sections)

    @property
    def cost_bytes(self) -> int:
        """Memory it takes: what is read, and the largest section twice (decompressed, dequantised)."""
        return self.n_bytes + 2 * max(section.raw_bytes for section in self.sections)

    def pieces(self, data: memoryview) -> Iterator[tuple[Section, memoryview]]:
        """Each section with its bytes. data: of the whole run."""
        start = self.sections[0].start
        for section in self.sections:
            yield section, data[section.start - start : section.start - start + section.n_bytes]


def runs(blobs: Sequence[Blob], wanted: Callable[[Section], bool], most_bytes: int) -> Iterator[SectionRun]:
    """The wanted sections, neighbours together as long as they are not more than `most_bytes`."""
    for blob in blobs:
        run: list[Section] = []
        for section in blob.sections:
            if run and (not wanted(section) or sum(s.n_bytes for s in run) + section.n_bytes > most_bytes):
                yield SectionRun(blob.name, tuple(run))
                run = []
            if wanted(section):
                run.append(section)
        if run:
            yield SectionRun(blob.name, tuple(run))


class Filling:
    """One attempt at one chain."""

    def __init__(self, store: Store, source: RowSource, asked: tuple[int, ...], chain: Chain, config: Config) -> None:
        self._store, self._source, self._asked = store, source, frozenset(asked)
        self._chain, self._config = chain, config
        schema = source.schema
        self._written: dict[tuple[int, int], np.ndarray] | None = None
        if len(chain.manifests) > 1:
            self._written = {
                (number, shard): np.zeros(table.rows_in(shard, schema.n_shards), np.bool_)
                for number, table in enumerate(schema.tables)
                for shard in asked
            }
        saved = chain.newest.schema
        self._regrouped = {  # keyed tables whose rows do not go back to their places
            number
            for number, (was, now) in enumerate(zip(saved.tables, schema.tables, strict=True))
            if now.is_keyed and (saved.n_shards, was) != (schema.n_shards, now)
        }
        if self._regrouped and any(manifest.schema != saved for manifest in chain.manifests):
            raise BadInput(f"{chain.newest.name}: its chain has keyed tables of several sizes; none of it can be used")
        self._seen = {  # by the shard they were saved in
            (number, shard): np.zeros(saved.tables[number].rows_in(shard, saved.n_shards), np.bool_)
            for number in self._regrouped
            for shard in range(saved.n_shards)
        }
        self._filters = {  # of those: words by place, in as many shards
            (number, shard): np.zeros(saved.tables[number].rows_in(shard, saved.n_shards), np.float32)
            for number in self._regrouped
            for shard in asked
            if schema.tables[number].has_filter and not self._loses_filter(number)
        }
        self.n_regrouped = 0
        self._without_room: dict[int, int] = {}
        self._lock = threading.Lock()
        self._restored: dict[tuple[int, int], int] = {}  # rows by (number of the save in the chain, step they are of)
        self.n_bytes = 0

    def _loses_filter(self, number: int) -> bool:
        """Whether the filter of a table starts empty, though it has one."""
        saved, schema = self._chain.newest.schema, self._source.schema
        had = saved.tables[number].has_filter and saved.n_shards == schema.n_shards
        return schema.tables[number].has_filter and not had

    @property
    def without_filter(self) -> tuple[str, ...]:
        """The tables whose filter starts empty: the checkpoint has none that fits."""
        tables = self._source.schema.tables
        return tuple(table.name for number, table in enumerate(tables) if self._loses_filter(number))

    @property
    def without_room(self) -> dict[str, tuple[int, int]]:
        """By table, where there are any: keys that have no row any more, and rows for keys in the shards asked for."""
        schema = self._source.schema
        return {
            table.name: (n, len(self._asked) * (table.n_rows // schema.n_shards - table.shared_rows))
            for number, n in sorted(self._without_room.items())
            if n and (table := schema.tables[number])
        }

    @property
    def n_rows(self) -> int:
        return sum(self._restored.values())

    @property
    def saved_samples(self) -> float:
        """Mean over the rows: how many samples had been applied when each was itself saved last.

        A save of all that changed ("delta") covers the rows that it leaves out as well, also where later saves leave
        rows out. Rows that were read some steps after their save began count as saved then, at the mean number of
        samples per step so far.
        """
        total = 0.0
        for (number, step), n in self._restored.items():
            saves = self._chain.manifests
            from_save = max((i for i in range(number + 1, len(saves)) if saves[i].kind == "delta"), default=number)
            save = saves[from_save]
            later = step - save.step if from_save == number else 0
            total += n * (save.samples + later * save.samples / max(1, save.step))
        return total / max(1, self.n_rows)

    @property
    def of_other_steps(self) -> dict[int, int]:
        """Rows by the step that they are of, where it is not the state's: later ones, and of the newest save also
        earlier ones. Rows of older saves were not saved again since, which is no matter of this.
        """
        newest, found = len(self._chain.manifests) - 1, dict[int, int]()
        for (number, step), n in sorted(self._restored.items()):
            if step > self._chain.newest.step or (number == newest and step != self._chain.newest.step):
                found[step] = found.get(step, 0) + n
        return found

    def age(self, now: int) -> Age:
        steps: dict[int, int] = {}
        for (_, step), n in self._restored.items():
            steps[step] = steps.get(step, 0) + n
        if not steps:
            return Age(0, 0.0, 0)
        mean = sum((now - step) * n for step, n in steps.items()) / self.n_rows
        return Age(now - max(steps), mean, now - min(steps))

    @property
    def n_asked(self) -> int:
        """The rows of the shards asked for, as far as they can be known before."""
        schema = self._source.schema
        tables = [table for number, table in enumerate(schema.tables) if number not in self._regrouped]
        return self.n_regrouped + sum(t.rows_in(shard, schema.n_shards) for t in tables for shard in self._asked)

    def run(self) -> None:
        keyed = cast(KeyedRowSource, self._source)
        for number, shard in product(self._regrouped, self._asked):
            keyed.clear(number, shard)
        # Where keys find room depends on the order in which they come.
        readers = 1 if self._regrouped else self._config.readers
        with ThreadPoolExecutor(readers, "recovery-read") as pool:
            for number in reversed(range(len(self._chain.manifests))):
                self._go_through(number, pool)  # one after the other: the newer one wins
        for (number, shard), words in self._filters.items():
            was = self._chain.newest.schema.tables[number]
            keyed.insert_filter(number, shard, words[: len(words) - was.shared_rows])
        for number, table in enumerate(self._source.schema.tables):
            for shard in self._asked if table.is_keyed else ():
                keyed.settle(number, shard)

    def _go_through(self, number: int, pool: ThreadPoolExecutor) -> None:
        manifest = self._chain.manifests[number]
        n_shards = manifest.schema.n_shards
        mine = self._source.schema.n_shards
        reach = [any(into in self._asked for into, _, _ in spread(s, n_shards, mine)) for s in range(n_shards)]

        def is_wanted(section: Section) -> bool:
            return reach[section.shard] or section.table in self._regrouped

        in_flight: dict[Future[None], int] = {}
        try:
            for run in runs(manifest.blobs, is_wanted, self._config.section_bytes):
                while in_flight and sum(in_flight.values()) + run.cost_bytes > self._config.budget_bytes:
                    self._wait(in_flight)
                while len(in_flight) > 2 * self._config.readers:
                    self._wait(in_flight)
                in_flight[pool.submit(self._read, number, manifest, run)] = run.cost_bytes
            while in_flight:
                self._wait(in_flight)
        finally:
            for future in in_flight:
                future.cancel()

    @staticmethod
    def _wait(in_flight: dict[Future[None], int]) -> None:
        done, _ = wait(in_flight, return_when=FIRST_COMPLETED)
        for future in done:
            del in_flight[future]
            future.result()

    def _read(self, number: int, manifest: Manifest, run: SectionRun) -> None:
        data = read(self._store, run.blob, run.sections[0].start, run.n_bytes)
        rows_of_step: dict[int, int] = {}
        for section, piece in run.pieces(data):
            table = manifest.schema.tables[section.table]
            indices, records = row_codec.decode_rows(
                piece, section, table, manifest.schema.n_shards, f"{manifest.name}: {run.blob}"
            )
            if section.table in self._regrouped:
                n = self._regroup(section, manifest.schema.n_shards, indices, records)
            else:
                n = self._scatter(section, manifest.schema.n_shards, indices, records)
            rows_of_step[section.step] = rows_of_step.get(section.step, 0) + n
        with self._lock:
            self.n_bytes += run.n_bytes
            for step, n in rows_of_step.items():
                if n:
                    self._restored[number, step] = self._restored.get((number, step), 0) + n

    def _scatter(self, section: Section, saved_in: int, indices: np.ndarray, records: np.ndarray) -> int:
        """Write the rows that nothing newer has written into the shards asked for; returns how many."""
        n_shards, n = self._source.schema.n_shards, 0
        for into, start, stride in spread(section.shard, saved_in, n_shards):
            if into not in self._asked:
                continue
            cycle = n_shards // math.gcd(saved_in, n_shards)
            target: RowIndices
            if section.first is not None:
                skip = (start - section.first) % cycle  # the first of these rows whose place is start modulo cycle
                mine = records[skip::cycle]
                row = section.shard + saved_in * (section.first + skip)
                target = slice(row // n_shards, row // n_shards + stride * len(mine), stride)
            else:
                chosen = slice(None) if cycle == 1 else indices % cycle == start
                mine = records[chosen]
                target = (section.shard + saved_in * indices[chosen]) // n_shards
            if len(mine):
                n += self._write(section.table, into, target, mine)
        return n

    def _regroup(self, section: Section, saved_in: int, indices: np.ndarray, records: np.ndarray) -> int:
        """As `_scatter`, of a keyed table whose rows find other places. One thread."""
        seen, was = self._seen[section.table, section.shard], self._chain.newest.schema.tables[section.table]
        new = ~seen[indices]
        seen[indices] = True
        indices, records = indices[new], records[new]
        keys, n_shards, n = was.keys(records), self._source.schema.n_shards, 0
        if (words := self._filters.get((section.table, section.shard))) is not None:
            words[indices] = was.filter_of(records)
        records = self._source.schema.tables[section.table].records_of(was, records)
        for shard in self._asked:
            mine = (keys != NO_KEY) & (keys % n_shards == shard)
            if mine.any():
                written, without = cast(KeyedRowSource, self._source).insert(section.table, shard, records[mine])
                n += written
                self._without_room[section.table] = self._without_room.get(section.table, 0) + without
        entries = was.n_rows // saved_in - was.shared_rows
        for index, record in zip(indices[indices >= entries], records[indices >= entries], strict=True):
            n += self._share(section.table, int(index - entries) * saved_in + section.shard, was, saved_in, record)
        self.n_regrouped += n
        return n

    def _share(self, table: int, row: int, was: Table, saved_in: int, record: np.ndarray) -> int:
        """Write a shared row, by its number among all, to those that continue it; returns how many."""
        schema, n = self._source.schema, 0
        now = schema.tables[table]
        entries = now.n_rows // schema.n_shards - now.shared_rows
        empty = record.copy()
        empty[: sum(column.width for column in now.columns if not column.exact)] = 0
        for target, is_it in _continued(row, was, saved_in, now, schema.n_shards):
            if target % schema.n_shards in self._asked:
                at, slab = entries + target // schema.n_shards, self._source.slab(table, target % schema.n_shards)
                write_rows(slab, slice(at, at + 1), (record if is_it else empty)[None])
                n += 1
        return n

    def _write(self, table: int, shard: int, indices: RowIndices, records: np.ndarray) -> int:
        slab = self._source.slab(table, shard)
        if self._written is not None:
            written = self._written[table, shard]
            new = ~written[indices]
            if not new.all():
                if isinstance(indices, slice):
                    indices = np.arange(indices.start, indices.stop, indices.step)
                indices, records = indices[new], records[new]
            written[indices] = True
        write_rows(slab, indices, records)
        return len(records)


def spread(shard: int, saved_in: int, n_shards: int) -> list[tuple[int, int, int]]:
    """Where the rows of one of `saved_in` shards belong among `n_shards`: (shard, start, stride) of each that has some.

    The indices start, start + n_shards / gcd, start + 2 n_shards / gcd ... go there, `stride` indices apart.
    """
    divisor = math.gcd(saved_in, n_shards)
    return [((shard + saved_in * start) % n_shards, start, saved_in // divisor) for start in range(n_shards // divisor)]


def _continued(row: int, was: Table, saved_in: int, now: Table, n_shards: int) -> Iterator[tuple[int, bool]]:
    """(shared row, whether it is the saved one; else it is zeros) of those here that continue a saved shared row.

    row: by its number in all shards, as those returned. saved_in: shards
    """
    n_was, n_now = was.shared_rows * saved_in // was.shared_hashes, now.shared_rows * n_shards // now.shared_hashes
    half, first = divmod(row, n_was)
    same_second = was.shared_hashes == now.shared_hashes and saved_in == n_shards
    for target in range(first, n_now, n_was):
        if half == 0 or same_second:
            yield half * n_now + target, True
        if half == 0 and now.shared_hashes == 2 and not same_second:
            yield n_now + target, False
