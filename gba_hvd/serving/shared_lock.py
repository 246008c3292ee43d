"""A lock that many requests hold together, and an update alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from gba_hvd.errors import BadInput


class SharedLock:
    """Held by any number of threads together (`shared`), or by one alone (`exclusive`).

    Who waits for it alone goes before threads that come after it, so requests without a pause do not keep updates out;
    a thread that holds it gets it again at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_holders, self._n_waiting, self._is_taken = 0, 0, False
        self._mine = threading.local()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        depth = getattr(self._mine, "depth", 0)
        if not depth:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_taken and not self._n_waiting)
                self._n_holders += 1
        self._mine.depth = depth + 1
        try:
            yield
        finally:
            self._mine.depth = depth
            if not depth:
                with self._changed:
                    self._n_holders -= 1
                    self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Raises BadInput in a thread that holds it: it would wait for itself."""
        if getattr(self._mine, "depth", 0):
            raise BadInput("this thread holds the state of the model, so it cannot update it: poll() outside reading()")
        with self._changed:
            self._n_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._is_taken and not self._n_holders)
                self._is_taken = True
            finally:
                self._n_waiting -= 1
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()
