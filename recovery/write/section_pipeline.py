"""How rows become blobs: the buffers and threads of one save.

    read into a section buffer -> encode (threads) -> copy into a blob buffer -> put (threads)

There is a fixed number of buffers of each kind, made once and used again and again: they are the byte budget. Who needs
one waits until it is free, so a slow store slows down the reading, not the training. Only the calling thread assembles
blobs, in the order in which rows were read; if possible while a step keeps it from reading more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from recovery.config import Config
from recovery.errors import BadInput, RecoveryError
from recovery.format import row_codec
from recovery.format.manifest import LEAST_SECTION_BYTES, LIMIT_BYTES, Blob, Section
from recovery.format.row_codec import Encoded, Encoding
from recovery.rows import RowIndices, Schema, Table
from recovery.storage.direct_io import aligned
from recovery.storage.store import Store
from recovery.write import consistent_read


class Cancelled(RecoveryError):
    """The save was asked to stop."""


@dataclass(frozen=True)
class PartResult:
    """What one writer put into the store. Its fields are also what a writer lists for the one that commits.

    n_torn: pieces that had to be read again because a step began. worst_error: of a weight, through quantisation.
    seconds: until it was durable. extra: what this writer adds for the checkpoint's state.
    """

    blobs: tuple[Blob, ...]
    extra: bytes = b""
    n_torn: int = 0
    worst_error: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of_all(cls, parts: Sequence[PartResult]) -> PartResult:
        """Several parts as one, without their extras."""
        return cls(
            tuple(blob for part in parts for blob in part.blobs),
            n_torn=sum(part.n_torn for part in parts),
            worst_error=max(part.worst_error for part in parts),
            seconds=max(part.seconds for part in parts),
        )

    @property
    def sections(self) -> list[Section]:
        return [section for blob in self.blobs for section in blob.sections]

    @property
    def n_rows(self) -> int:
        return sum(section.n_rows for section in self.sections)

    @property
    def n_bytes(self) -> int:
        """In the store."""
        return sum(blob.n_bytes for blob in self.blobs)

    @property
    def raw_bytes(self) -> int:
        """Before encoding."""
        return sum(section.raw_bytes for section in self.sections)


@dataclass(frozen=True)
class _Rows:
    """records: float32, for sections of any table. counts: uint32, one per row of the narrowest."""

    records: np.ndarray
    counts: np.ndarray


class Buffers:
    """The memory of a save, and of the next one. Memory that is new to a process is slow at its first use, most of all
    on a virtual machine, so every page is written once, here."""

    def __init__(self, schema: Schema, config: Config) -> None:
        """Raises BadInput when a row is too large for a section, or the sections are too many for a manifest."""
        self.section_bytes, self.blob_bytes = config.section_buffer_bytes, config.blob_buffer_bytes
        for table in schema.tables:
            if _row_bytes(table) > self.section_bytes:
                raise BadInput(
                    f"a row of {table.name!r} needs {_row_bytes(table)} bytes, a section may have "
                    f"{self.section_bytes}: raise budget_bytes ({config.budget_bytes}) or section_bytes"
                )
        least = sum(t.n_rows * _row_bytes(t) for t in schema.tables) // self.section_bytes * LEAST_SECTION_BYTES
        if least > LIMIT_BYTES:
            raise BadInput(
                f"a full checkpoint in sections of {self.section_bytes:,} bytes has a manifest of more than {least:,} "
                f"bytes, a restore reads at most {LIMIT_BYTES:,}: raise budget_bytes ({config.budget_bytes:,}) or "
                f"section_bytes ({config.section_bytes:,})"
            )
        most_rows = max(self.section_bytes // _row_bytes(table) for table in schema.tables)
        self.sections = [
            _Rows(np.full(self.section_bytes // 4, 0, np.float32), np.full(most_rows, 0, np.uint32))
            for _ in range(config.threads + 1)
        ]
        room = self.blob_bytes + 64  # the indices of a section may be padded
        self.blobs = [aligned(room) for _ in range(config.concurrent_puts + 1)]
        for blob in self.blobs:
            blob.fill(0)

    @property
    def n_bytes(self) -> int:
        return sum(blob.nbytes for blob in self.blobs) + sum(r.records.nbytes + r.counts.nbytes for r in self.sections)


@dataclass
class _SectionInFlight:
    """place: the fields of `Section` that are known before it is encoded: table, shard, n_rows, first, step."""

    place: tuple[int, int, int, int | None, int]
    buffers: _Rows
    encoded: Future[Encoded]


class SectionPipeline:
    """The threads of one save, and what is in flight. Used by one thread, as a context manager."""

    def __init__(
        self,
        schema: Schema,
        store: Store,
        prefix: str,
        config: Config,
        encoding: Encoding,
        cancel: threading.Event,
        clock: Callable[[], float],
        buffers: Buffers,
    ) -> None:
        """buffers: for this pipeline alone until it is left."""
        self._schema, self._store, self._prefix, self._encoding_as = schema, store, prefix, encoding
        self._cancel, self._clock, self._rate = cancel, clock, config.rate_bytes_s
        self._section_bytes, self._blob_bytes = buffers.section_bytes, buffers.blob_bytes
        self._free, self._free_blobs = deque(buffers.sections), deque(buffers.blobs)
        self._encoders = ThreadPoolExecutor(config.threads, "recovery-encode")
        self._putters = ThreadPoolExecutor(config.concurrent_puts, "recovery-put")
        self._in_flight: deque[_SectionInFlight] = deque()
        self._puts: deque[tuple[Future[None], np.ndarray]] = deque()
        self._blob: np.ndarray | None = None
        self._at = 0
        self._sections: list[Section] = []
        self._blobs: list[Blob] = []
        self._n_torn, self._worst_error, self._started = 0, 0.0, clock()

    def __enter__(self) -> SectionPipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        for pool in (self._encoders, self._putters):
            pool.shutdown(wait=True, cancel_futures=kind is not None)

    def buffers(self, table: Table) -> tuple[np.ndarray, np.ndarray]:
        """records float32 [n, width] and counts uint32 [n] for the next section, n as large as sections may be."""
        self._look()
        if not self._free:
            self._assemble()
        n = self._section_bytes // _row_bytes(table)
        free = self._free[0]
        return free.records[: n * table.width].reshape(n, table.width), free.counts[:n]

    def encode(
        self, table: int, shard: int, indices: RowIndices, got: consistent_read.ReadResult, records: np.ndarray
    ) -> None:
        """What was read into the `buffers` given last is sent on."""
        first = indices.start if isinstance(indices, slice) else None
        encoded = self._encoders.submit(
            row_codec.encode_rows,
            self._schema.tables[table],
            records,
            None if isinstance(indices, slice) else indices,
            self._encoding_as,
        )
        self._n_torn += got.n_torn
        place = (table, shard, len(records), first, got.step)
        self._in_flight.append(_SectionInFlight(place, self._free.popleft(), encoded))

    def pause(self, seconds: float) -> bool:
        """While no row can be read: do what there is to do, or sleep. Returns whether there was anything."""
        if self._in_flight and self._in_flight[0].encoded.done():
            self._assemble()
            return True
        time.sleep(seconds)
        return False

    def finish(self) -> PartResult:
        while self._in_flight:
            self._assemble()
        self._put()
        while self._puts:
            self._wait_put()
            self._look()
        return PartResult(
            tuple(self._blobs),
            n_torn=self._n_torn,
            worst_error=self._worst_error,
            seconds=self._clock() - self._started,
        )

    def _look(self) -> None:
        """Notice that the save was cancelled, or that a put failed, before more is done for nothing."""
        if self._cancel.is_set():
            raise Cancelled("the save was cancelled")
        while self._puts and self._puts[0][0].done():
            self._wait_put()

    def _assemble(self) -> None:
        """Append the oldest section in flight to the blob."""
        one = self._in_flight.popleft()
        encoded = one.encoded.result()
        if self._at + encoded.n_bytes > self._blob_bytes and self._sections:
            self._put()
        if self._blob is None:
            while not self._free_blobs:
                self._wait_put()
            self._blob = self._free_blobs.popleft()
        start = self._at
        for piece in encoded.pieces:
            self._blob[self._at : self._at + len(piece)] = np.frombuffer(piece, np.uint8)
            self._at += len(piece)
        self._free.append(one.buffers)
        self._worst_error = max(self._worst_error, encoded.worst_error)
        sizes = (start, encoded.n_bytes, encoded.raw_bytes)
        self._sections.append(Section(*one.place, *sizes, encoded.encoding, encoded.checksum))
        self._keep_rate()

    def _put(self) -> None:
        if self._blob is None:
            return
        blob = Blob(f"{self._prefix}{len(self._blobs):04d}", self._at, tuple(self._sections))
        self._puts.append((self._putters.submit(self._store.put, blob.name, [self._blob[: self._at].data]), self._blob))
        self._blobs.append(blob)
        self._blob, self._at, self._sections = None, 0, []

    def _wait_put(self) -> None:
        done, buffer = self._puts.popleft()
        done.result()
        self._free_blobs.append(buffer)

    def _keep_rate(self) -> None:
        if self._rate is None:
            return
        n_bytes = sum(blob.n_bytes for blob in self._blobs) + self._at
        ahead_s = n_bytes / self._rate - (self._clock() - self._started)
        if ahead_s > 0 and self._cancel.wait(ahead_s):
            self._look()


def _row_bytes(table: Table) -> int:
    """With its place."""
    return table.record_bytes + 8
