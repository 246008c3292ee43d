"""`ReadAhead`: threads that read the batches that come next while others are trained on.

The training announces which batches it expects to read, in order. It may then ask for others: a batch that was
announced and does not come is thrown away, also while it is read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

Share = tuple[int, int]
"""The first micro-batch of a batch, and how many neighbours it has."""


class _PendingRead:
    """A batch to be read. Fields are written under the lock of its owner."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.batch: Any = None
        self.error: BaseException | None = None
        self.done = self.dropped = False


class ReadAhead:
    """Reads up to `depth` batches ahead, one thread for each of `readers`.

        with ReadAhead([read], depth=2) as ahead:
            ahead.expect((index, 1) for index in range(first, end))
            batch = ahead.read((first, 1))

    readers: functions from a share to its batch, each used by one thread. `expect` and `read` may be called from any
    thread, one at a time. Leaving waits for reads that have begun; `close()` may be called twice.
    """

    def __init__(self, readers: Sequence[Callable[[Share], Any]], depth: int) -> None:
        self._readers, self._depth = readers, depth
        self._changed = threading.Condition()
        self._coming: Iterator[Share] = iter(())
        self._ahead: deque[_PendingRead] = deque()  # in the order in which they are expected
        self._waiting: deque[_PendingRead] = deque()  # for a thread
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> ReadAhead:
        for number, read in enumerate(self._readers):
            name = f"gba-hvd reader {number}"
            self._threads.append(threading.Thread(target=self._run, args=(read,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, coming: Iterable[Share]) -> None:
        """From now on these come, in this order; evaluated as far as is read ahead. What else was read is dropped."""
        with self._changed:
            left, kept = iter(coming), deque[_PendingRead]()
            while self._ahead:
                share = next(left, None)
                if share != self._ahead[0].share:
                    left = left if share is None else chain([share], left)
                    break
                kept.append(self._ahead.popleft())
            self._drop()
            self._ahead, self._coming = kept, left
            self._fill()

    def read(self, share: Share) -> Any:
        """The batch; waits for it. Raises what reading it raised. One that is not expected next drops all others."""
        with self._changed:
            if self._ahead and self._ahead[0].share == share:
                job = self._ahead.popleft()
            else:
                self._drop()
                job, self._coming = _PendingRead(share), iter(())
                self._waiting.appendleft(job)
            self._fill()
            self._changed.wait_for(lambda: job.done or self._closed)
            if job.error is not None:
                raise job.error
            assert job.done, "read() after close()"
            return job.batch

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._drop()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _fill(self) -> None:
        while len(self._ahead) < self._depth and (share := next(self._coming, None)) is not None:
            job = _PendingRead(share)
            self._ahead.append(job)
            self._waiting.append(job)
        self._changed.notify_all()

    def _drop(self) -> None:
        for job in self._ahead:
            job.dropped, job.batch = True, None
        self._ahead.clear()
        self._waiting = deque(job for job in self._waiting if not job.dropped)

    def _run(self, read: Callable[[Share], Any]) -> None:
        while (job := self._next()) is not None:
            batch, error = None, None
            try:
                batch = read(job.share)
            except BaseException as raised:  # of any kind: `read` of this batch raises it
                error = raised
            with self._changed:
                if not job.dropped:
                    job.batch, job.error, job.done = batch, error, True
                    self._changed.notify_all()

    def _next(self) -> _PendingRead | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return None if self._closed else self._waiting.popleft()
