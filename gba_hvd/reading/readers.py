"""What reads the batches of a dataset: this process, or reader processes; and ahead of those who need them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gba_hvd.reading.datasets import Dataset, MapDataset, TakeRows
from gba_hvd.reading.read_ahead import ReadAhead, Share
from gba_hvd.reading.reader_processes import ReaderProcesses
from gba_hvd.reading.settings import ReadSettings
from gba_hvd.reading.slow_reads import logging_slow_reads

ReadShare = Callable[[Share], Any]


class Readers:
    """`take` are functions from a share to its batch, one for each reader; `processes` are these readers, if any.

    rows_of: the samples of a share, int64 [n]. seed_of: of what is drawn at random for it, in a reader process. All
    that is started ends with `stack`.
    """

    def __init__(
        self,
        dataset: Dataset | MapDataset,
        read: TakeRows,
        settings: ReadSettings,
        rows_of: Callable[[Share], np.ndarray],
        seed_of: Callable[[Share], int],
        stack: contextlib.ExitStack,
    ) -> None:
        self._settings, self._stack = settings, stack
        stack.enter_context(logging_slow_reads())
        self.processes: ReaderProcesses | None = None
        self.take: list[ReadShare] = [lambda share: read(rows_of(share))]
        if settings.num_workers:
            processes = ReaderProcesses(dataset, settings.collate_fn, settings.num_workers, settings.worker_init_fn)
            self.processes = stack.enter_context(processes)

            def take(number: int, share: Share) -> Any:
                return processes.take(number, rows_of(share), seed_of(share))

            self.take = [partial(take, number) for number in range(settings.num_workers)]

    def ahead(self, take: Sequence[ReadShare], reader_of: Callable[[Share], int] | None = None) -> ReadAhead | None:
        """What reads ahead by `take`, one function for each reader; None where nothing is to be read ahead."""
        if not self._settings.depth:
            return None
        found = self._stack.enter_context(ReadAhead(take, self._settings.depth, reader_of))
        if self.processes is not None:
            self._stack.callback(self.processes.close)  # first, so that no thread waits for a process that hangs
        return found
