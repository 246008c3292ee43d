"""Reads the sections of a chain and puts their rows where they belong.

Sections of a blob are read, checked and decoded in parallel, within a byte budget. The chain is gone through from its
newest save to its base, and each row is written once, as the newest save has it; so what comes back, and how old it is,
can be counted exactly.

Shards of a checkpoint (row r in shard r mod S) go into any number of shards S'. The rows of a section that go into one
shard of S' are S' / gcd(S, S') indices apart, and come to lie S / gcd(S, S') indices apart: slices, no index arrays.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from recovery.catalog.chains import Chain
from recovery.config import Config
from recovery.format import row_codec
from recovery.format.manifest import Blob, Manifest, Section
from recovery.rows import RowIndices, RowSource, write_rows
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
        self._lock = threading.Lock()
        self._restored: dict[tuple[int, int], int] = {}  # rows by (number of the save in the chain, step they are of)
        self.n_bytes = 0

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

    def age(self, now: int) -> Age:
        steps: dict[int, int] = {}
        for (_, step), n in self._restored.items():
            steps[step] = steps.get(step, 0) + n
        if not steps:
            return Age(0, 0.0, 0)
        mean = sum((now - step) * n for step, n in steps.items()) / self.n_rows
        return Age(now - max(steps), mean, now - min(steps))

    def run(self) -> None:
        with ThreadPoolExecutor(self._config.readers, "recovery-read") as pool:
            for number in reversed(range(len(self._chain.manifests))):
                self._go_through(number, pool)  # one after the other: the newer one wins

    def _go_through(self, number: int, pool: ThreadPoolExecutor) -> None:
        manifest = self._chain.manifests[number]
        n_shards = manifest.schema.n_shards
        mine = self._source.schema.n_shards
        reach = [any(into in self._asked for into, _, _ in spread(s, n_shards, mine)) for s in range(n_shards)]
        in_flight: dict[Future[None], int] = {}
        try:
            for run in runs(manifest.blobs, lambda section: reach[section.shard], self._config.section_bytes):
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
            table = self._source.schema.tables[section.table]
            indices, records = row_codec.decode_rows(
                piece, section, table, manifest.schema.n_shards, f"{manifest.name}: {run.blob}"
            )
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
