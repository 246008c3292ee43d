"""`ReadAhead`: threads that read the batches that come next while others are trained on.

The training announces which batches it expects to read, in order. It may then ask for any of them, or for others: a
batch that is not expected any more is thrown away, also while it is read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

Share = tuple[int, int]
"""The first micro-batch of a batch, and how many neighbours it has."""


class _PendingRead:
    """A batch to be read. reader: by which one; None: any. Fields are written under the lock of its owner."""

    def __init__(self, share: Share, reader: int | None) -> None:
        self.share, self.reader = share, reader
        self.batch: Any = None
        self.error: BaseException | None = None
        self.done = self.dropped = False


class ReadAhead:
    """Reads up to `depth` batches ahead, one thread for each of `readers`.

        with ReadAhead([read], depth=2) as ahead:
            ahead.expect((index, 1) for index in range(first, end))
            batch = ahead.read((first, 1))

    readers: functions from a share to its batch, each used by one thread. reader_of: the number of the one that reads a
    share; None: any. `expect` and `read` may be called from any thread, one at a time. Leaving waits for reads that
    have begun; `close()` may be called twice.
    """

    def __init__(
        self, readers: Sequence[Callable[[Share], Any]], depth: int, reader_of: Callable[[Share], int] | None = None
    ) -> None:
        self._readers, self._depth, self._reader_of = readers, depth, reader_of
        self._changed = threading.Condition()
        self._coming: Iterator[Share] = iter(())
        self._ahead: deque[_PendingRead] = deque()  # in the order in which they are expected
        self._waiting: deque[_PendingRead] = deque()  # for a thread
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> ReadAhead:
        for number, read in enumerate(self._readers):
            name = f"gba-hvd reader {number}"
            self._threads.append(threading.Thread(target=self._run, args=(number, read), name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, coming: Iterable[Share]) -> None:
        """From now on these come, in this order; evaluated as far as is read ahead. What else was read is dropped."""
        with self._changed:
            self._coming = iter(coming)
            next_ones = list(islice(self._coming, self._depth))
            there = {job.share: job for job in self._ahead}
            self._drop(job for job in self._ahead if job.share not in next_ones)
            self._ahead = deque(there.get(share) or self._job(share) for share in next_ones)
            # A lease that was not expected is named first: it is read before what was there already.
            self._waiting = deque(job for job in self._ahead if job in self._waiting)
            self._wake()

    def read(self, share: Share) -> Any:
        """The batch; waits for it. Raises what reading it raised."""
        with self._changed:
            job = next((job for job in self._ahead if job.share == share), None)
            if job is not None:
                self._ahead.remove(job)
            else:
                job = self._job(share)
                self._waiting.rotate(1)  # it is needed first
            self._fill()
            self._changed.wait_for(lambda: job.done or self._closed)
            if job.error is not None:
                raise job.error
            assert job.done, "read() after close()"
            return job.batch

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._drop(self._ahead)
            self._ahead.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _job(self, share: Share) -> _PendingRead:
        job = _PendingRead(share, None if self._reader_of is None else self._reader_of(share))
        self._waiting.append(job)
        return job

    def _fill(self) -> None:
        while len(self._ahead) < self._depth and (share := next(self._coming, None)) is not None:
            self._ahead.append(self._job(share))
        self._wake()

    def _wake(self) -> None:
        """The threads, if there is something for them: each that wakes takes the interpreter from the training."""
        if self._waiting:
            self._changed.notify_all()

    def _drop(self, jobs: Iterable[_PendingRead]) -> None:
        for job in jobs:
            job.dropped, job.batch = True, None
        self._waiting = deque(job for job in self._waiting if not job.dropped)

    def _run(self, number: int, read: Callable[[Share], Any]) -> None:
        while (job := self._next(number)) is not None:
            batch, error = None, None
            try:
                batch = read(job.share)
            except BaseException as raised:  # of any kind: `read` of this batch raises it
                error = raised
            with self._changed:
                if not job.dropped:
                    job.batch, job.error, job.done = batch, error, True
                    self._changed.notify_all()

    def _next(self, number: int) -> _PendingRead | None:
        def mine() -> _PendingRead | None:
            return next((job for job in self._waiting if job.reader in (None, number)), None)

        with self._changed:
            self._changed.wait_for(lambda: self._closed or mine() is not None)
            if self._closed or (job := mine()) is None:
                return None
            self._waiting.remove(job)
            return job
