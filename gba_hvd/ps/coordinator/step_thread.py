"""The thread of server 0 that applies this server's part of a step, while the main thread answers.

It owns nothing: one function at a time runs here (`Partition.execute`), and the main thread keeps away from what that
function uses. Which requests are answered meanwhile stands in `server.Server`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class StepThread(Generic[T]):
    """Belongs to the main thread. `close()` waits for the function that runs.

    fileno(): readable from the moment that a function is over until its result is taken
    """

    def __init__(self) -> None:
        self._is_over = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._future: Future[T] | None = None

    def fileno(self) -> int:
        return self._is_over

    @property
    def is_busy(self) -> bool:
        """Whether a function runs, or its result was not taken."""
        return self._future is not None

    def begin(self, function: Callable[[], T]) -> None:
        """Not while the thread is busy."""
        assert self._future is None

        def run() -> T:
            try:
                return function()
            finally:
                os.eventfd_write(self._is_over, 1)

        self._future = self._pool.submit(run)

    def result(self) -> T:
        """Of the function that was begun: waits for it, and raises what it raised."""
        assert self._future is not None
        future, self._future = self._future, None
        try:
            return future.result()
        finally:
            os.eventfd_read(self._is_over)

    def close(self) -> None:
        self._pool.shutdown()
