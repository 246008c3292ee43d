"""When the next lease is asked for: as late as it can be without being waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_LOOK_S = 0.2


class LeasePrefetcher(Generic[_Item]):
    """Fetches the next item while this one is computed, and no earlier than needed.

    A lease that waits in a worker's hands grows stale, most of all in a slow worker's. So the next one is asked for
    when the current one should soon be done, going by how long the last ones took.

    meanwhile: called by who waits for an item, every 0.2 s; may raise
    """

    def __init__(
        self, fetch: Callable[[], _Item], meanwhile: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._fetch, self._meanwhile, self._clock = fetch, meanwhile, clock
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._item: _Item | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._computing_s = self._fetching_s = 0.0
        self._handed_s: float | None = None
        self._thread: threading.Thread | None = None

    def next(self) -> _Item:
        """The next item; waits for it. Raises what fetching it raised, and what is raised meanwhile."""
        now = self._clock()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gba-hvd leases", daemon=True)
            self._thread.start()
        with self._changed:
            if self._handed_s is not None:
                took = now - self._handed_s
                self._computing_s = took if not self._computing_s else 0.7 * self._computing_s + 0.3 * took
            self._due_s = now
            self._changed.notify_all()
        while not self._has_come():
            self._meanwhile()
        with self._changed:
            if self._error is not None:
                raise self._error
            item, self._item = self._item, None
            assert item is not None
            self._handed_s = self._clock()
            margin = 2 * self._fetching_s + 0.1 * self._computing_s
            self._due_s = self._handed_s + max(0.0, self._computing_s - margin) if self._computing_s else None
            self._changed.notify_all()
            return item

    def _has_come(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._item is not None or self._error is not None, _LOOK_S)

    def fail(self, error: BaseException) -> None:
        """From another thread: nothing more is fetched, and `next` raises this, also if it waits already."""
        with self._changed:
            self._error, self._closed = self._error or error, True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait_until_due():
                started = self._clock()
                item = self._fetch()
                with self._changed:
                    took = self._clock() - started
                    self._fetching_s = took if not self._fetching_s else 0.7 * self._fetching_s + 0.3 * took
                    self._item, self._due_s = item, None
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _wait_until_due(self) -> bool:
        with self._changed:
            while not self._closed:
                if self._item is None and self._due_s is not None:
                    left = self._due_s - self._clock()
                    if left <= 0:
                        return True
                    self._changed.wait(left)
                else:
                    self._changed.wait()
            return False
