"""What is logged of reads of training data that take long: what is read, and that it is over.

A read that hangs is silent, and a job of one worker has no other one that reports that it waits. So each read is noted
while it lasts, in the process that reads, and a thread looks at what is noted. It lives as long as something is read or
a block of `logging_slow_reads` lasts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from gba_hvd.comm.wait_notices import Patience

FIRST_S, LOOK_S = 30.0, 1.0
log = logging.getLogger("gba_hvd")


class _Read:
    """One that lasts. what: words for it, asked for when they are needed."""

    def __init__(self, what: Callable[[], str]) -> None:
        self._what, self._began_s, self._is_reported = what, time.monotonic(), False
        self._patience = Patience(first_s=FIRST_S)
        self._patience.word(True, self._began_s)

    def look(self) -> None:
        """Log how long it has taken so far, if that is due."""
        if (waited_s := self._patience.word(True, time.monotonic())) is not None:
            self._is_reported = True
            log.warning(
                "reading %s has taken %.0f s and is not over: its storage hangs or is slow. Training waits when what "
                "was read ahead is used up",
                self._words(), waited_s,
            )  # fmt: skip

    def end(self) -> None:
        if self._is_reported:
            log.warning("reading %s is over, after %.0f s", self._words(), time.monotonic() - self._began_s)

    def _words(self) -> str:
        try:
            return self._what()
        except Exception as error:  # of any kind: a dataset of the user names its files, and the read is good
            return f"a part of the dataset (naming it raised {type(error).__name__}: {error})"


class _ReadsInFlight:
    """The reads of this process, and the thread that looks at them. Safe in several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_users = 0
        self._thread: threading.Thread | None = None
        self.reads: set[_Read] = set()

    def enter(self) -> None:
        with self._changed:
            self._n_users += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gba-hvd reads", daemon=True)
                self._thread.start()

    def leave(self) -> None:
        with self._changed:
            self._n_users -= 1
            if self._n_users:
                return
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        assert thread is not None
        thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._thread is not threading.current_thread(), LOOK_S)
                if self._thread is not threading.current_thread():
                    return
            for read in list(self.reads):
                read.look()


_READS = _ReadsInFlight()


@contextlib.contextmanager
def logging_slow_reads() -> Iterator[None]:
    """Keep the thread from one read to the next."""
    _READS.enter()
    try:
        yield
    finally:
        _READS.leave()


@contextlib.contextmanager
def reading(what: Callable[[], str]) -> Iterator[None]:
    """Log a read that takes longer than `FIRST_S`, then ever less often, and its end. what: words for what is read."""
    read = _Read(what)
    with logging_slow_reads():
        _READS.reads.add(read)
        try:
            yield
        finally:
            _READS.reads.remove(read)
            read.end()
