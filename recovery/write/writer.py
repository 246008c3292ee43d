"""From rows in memory to blobs in a store, in bounded memory, while training continues.

Which rows are saved is the caller's choice, and so is when; how they become blobs is in `section_pipeline`, how blobs
become a checkpoint in `multipart`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from recovery.config import Config
from recovery.format.row_codec import Encoding
from recovery.rows import Choice, RowIndices, RowSource, n_indices, slice_indices
from recovery.storage.store import Store
from recovery.write import consistent_read
from recovery.write.section_pipeline import Buffers, PartResult, SectionPipeline

Note = Callable[[int, int, RowIndices, np.ndarray, np.ndarray], None]
"""Called with everything that was read: table, shard, indices, records float32 [n, W], counts uint32 [n].

The arrays are the writer's and will be overwritten."""


def save_rows(
    source: RowSource,
    choice: Choice,
    store: Store,
    prefix: str,
    config: Config,
    *,
    exact: bool = False,
    note: Note | None = None,
    read_all: Callable[[], None] = lambda: None,
    cancel: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
    buffers: Buffers | None = None,
) -> PartResult:
    """Write rows of all shards that are here to blobs named `prefix` + number. They mean nothing before `commit_parts`.

    exact: never quantised, under any settings. read_all: called when the last row has been read. buffers: of the
    saves before, which are over; None: new ones, for this save.

    Raises what the store raises, Busy, or Cancelled within one section after `cancel` was set.
    """
    encoding = Encoding(config.level, bits=None if exact else config.bits)
    buffers = buffers or Buffers(source.schema, config)
    with SectionPipeline(
        source.schema, store, prefix, config, encoding, cancel or threading.Event(), clock, buffers
    ) as line:
        for shard in source.shards():
            for number, table in enumerate(source.schema.tables):
                indices, start = choice(number, shard), 0
                while start < n_indices(indices):
                    records, counts = line.buffers(table)
                    part = slice_indices(indices, start, min(n_indices(indices), start + len(records)))
                    records, counts = records[: n_indices(part)], counts[: n_indices(part)]
                    got = consistent_read.read(
                        source, number, shard, part, records, counts,
                        timeout_s=config.busy_timeout_s, clock=clock, pause=line.pause,
                    )  # fmt: skip
                    part = slice_indices(part, 0, got.n_rows)
                    records, counts = records[: got.n_rows], counts[: got.n_rows]
                    if note is not None:
                        note(number, shard, part, records, counts)
                    line.encode(number, shard, part, got, records)
                    start += got.n_rows
        read_all()
        return line.finish()
