"""Reads the sections of a chain and puts their rows where they belong.

Sections of a blob are read, checked and decoded in parallel, within a byte budget. The chain is gone through from its
newest save to its base, and each row is written once, as the newest save has it; so what comes back, and how old it is,
can be counted exactly.

Shards of a checkpoint (row r in shard r mod S) go into any number of shards S'. The rows of a section that go into one
shard of S' are S' / gcd(S, S') places apart, and come to lie S / gcd(S, S') places apart: slices, no index arrays.
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
    """Of the rows that came back, in steps. Negative: a row is younger than the step it is compared with."""

    least: int
    mean: float
    most: int


@dataclass(frozen=True)
class Run:
    """Consecutive sections of a blob, read at once."""

    blob: str
    sections: tuple[Section, ...]

    @property
    def n_bytes(self) -> int:
        return sum(section.n_bytes for section in self.sections)

    @property
    def cost_bytes(self) -> int:
        """Of memory: what is read, and the largest section twice (decompressed, dequantised)."""
        return self.n_bytes + 2 * max(section.raw_bytes for section in self.sections)


def runs(blobs: Sequence[Blob], wanted: Callable[[Section], bool], most_bytes: int) -> Iterator[Run]:
    """The wanted sections, neighbours together as long as they are not more than `most_bytes`."""
    for blob in blobs:
        run: list[Section] = []
        for section in blob.sections:
            if run and (not wanted(section) or sum(s.n_bytes for s in run) + section.n_bytes > most_bytes):
                yield Run(blob.name, tuple(run))
                run = []
            if wanted(section):
                run.append(section)
        if run:
            yield Run(blob.name, tuple(run))


class Filling:
    """One attempt at one chain."""

    def __init__(self, store: Store, holder: RowSource, asked: tuple[int, ...], chain: Chain, config: Config) -> None:
        self._store, self._holder, self._asked = store, holder, frozenset(asked)
        self._chain, self._config = chain, config
        schema = holder.schema
        self._written: dict[tuple[int, int], np.ndarray] | None = None
        if len(chain.manifests) > 1:
            self._written = {
                (number, shard): np.zeros(table.rows_in(shard, schema.n_shards), np.bool_)
                for number, table in enumerate(schema.tables)
                for shard in asked
            }
        self._lock = threading.Lock()
        self._rows_of_step: dict[int, int] = {}
        self.n_bytes = 0

    @property
    def n_rows(self) -> int:
        return sum(self._rows_of_step.values())

    def age(self, now: int) -> Age:
        steps = self._rows_of_step
        if not steps:
            return Age(0, 0.0, 0)
        mean = sum((now - step) * n for step, n in steps.items()) / self.n_rows
        return Age(now - max(steps), mean, now - min(steps))

    def run(self) -> None:
        with ThreadPoolExecutor(self._config.readers, "recovery-read") as pool:
            for manifest in reversed(self._chain.manifests):
                self._go_through(manifest, pool)  # one after the other: the newer one wins

    def _go_through(self, manifest: Manifest, pool: ThreadPoolExecutor) -> None:
        n_shards = manifest.schema.n_shards
        reach = {
            shard: not self._asked.isdisjoint(
                into for into, _, _ in spread(shard, n_shards, self._holder.schema.n_shards)
            )
            for shard in range(n_shards)
        }
        under_way: dict[Future[None], int] = {}
        try:
            for run in runs(manifest.blobs, lambda section: reach[section.shard], self._config.section_bytes):
                while under_way and sum(under_way.values()) + run.cost_bytes > self._config.budget_bytes:
                    self._wait(under_way)
                while len(under_way) > 2 * self._config.readers:
                    self._wait(under_way)
                under_way[pool.submit(self._read, manifest, run)] = run.cost_bytes
            while under_way:
                self._wait(under_way)
        finally:
            for future in under_way:
                future.cancel()

    @staticmethod
    def _wait(under_way: dict[Future[None], int]) -> None:
        done, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in done:
            del under_way[future]
            future.result()

    def _read(self, manifest: Manifest, run: Run) -> None:
        start = run.sections[0].start
        data = read(self._store, run.blob, start, run.n_bytes)
        rows_of_step: dict[int, int] = {}
        for section in run.sections:
            piece = data[section.start - start : section.start - start + section.n_bytes]
            table = self._holder.schema.tables[section.table]
            places, records = row_codec.decode_rows(
                piece, section, table, manifest.schema.n_shards, f"{manifest.name}: {run.blob}"
            )
            n = self._scatter(section, manifest.schema.n_shards, places, records)
            rows_of_step[section.step] = rows_of_step.get(section.step, 0) + n
        with self._lock:
            self.n_bytes += run.n_bytes
            for step, n in rows_of_step.items():
                if n:
                    self._rows_of_step[step] = self._rows_of_step.get(step, 0) + n

    def _scatter(self, section: Section, saved_in: int, places: np.ndarray, records: np.ndarray) -> int:
        """Write the rows that nothing newer has written into the shards asked for; returns how many."""
        n_shards, n = self._holder.schema.n_shards, 0
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
                chosen = slice(None) if cycle == 1 else places % cycle == start
                mine = records[chosen]
                target = (section.shard + saved_in * places[chosen]) // n_shards
            if len(mine):
                n += self._write(section.table, into, target, mine)
        return n

    def _write(self, table: int, shard: int, places: RowIndices, records: np.ndarray) -> int:
        slab = self._holder.slab(table, shard)
        if self._written is not None:
            written = self._written[table, shard]
            new = ~written[places]
            if not new.all():
                places = (np.arange(places.start, places.stop, places.step) if isinstance(places, slice) else places)[
                    new
                ]
                records = records[new]
            written[places] = True
        write_rows(slab, places, records)
        return len(records)


def spread(shard: int, saved_in: int, n_shards: int) -> list[tuple[int, int, int]]:
    """Where the rows of one of `saved_in` shards belong among `n_shards`: (shard, start, stride) of each that has some.

    The places start, start + n_shards / gcd, start + 2 n_shards / gcd ... go there, `stride` places apart.
    """
    divisor = math.gcd(saved_in, n_shards)
    return [((shard + saved_in * start) % n_shards, start, saved_in // divisor) for start in range(n_shards // divisor)]
