"""How long a store is waited for, and how often a call is tried again.

Each attempt runs in a thread of its own, so that one that hangs is given up on. Only errors that may pass are tried
again, after a pause that doubles and has some chance in it, so that many jobs do not come back all at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from recovery.errors import BadInput, StoreError
from recovery.store import Store, Transient, read

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """timeout_s: of one attempt; tries: attempts in all; first_pause_s, longest_pause_s: between them."""

    timeout_s: float = 60.0
    tries: int = 5
    first_pause_s: float = 0.2
    longest_pause_s: float = 20.0
    sleep: Callable[[float], None] = field(default=time.sleep, compare=False)
    rng: random.Random = field(default_factory=random.Random, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= threading.TIMEOUT_MAX or self.tries < 1:
            raise BadInput(f"timeout_s must be positive and tries at least 1, got {self.timeout_s} and {self.tries}")
        if not 0 <= self.first_pause_s <= self.longest_pause_s:
            raise BadInput(f"pauses must not be negative, got {self.first_pause_s} to {self.longest_pause_s} s")

    def pause_s(self, failed: int) -> float:
        """After so many attempts that failed: half of it sure, half by chance."""
        longest = min(self.longest_pause_s, self.first_pause_s * 2.0 ** (failed - 1))
        return longest * (0.5 + 0.5 * self.rng.random())


class PatientStore:
    """A store whose calls end in time, and are tried again."""

    def __init__(self, store: Store, patience: Patience | None = None) -> None:
        self.store, self.url = store, store.url
        self.patience = patience or Patience()

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        # An attempt that was given up on may go on later, when the caller's buffers hold something else. What it then
        # writes must be these bytes, if the name may have been written, and be referred to, by a later attempt.
        kept = pieces if self.patience.tries == 1 else [b"".join(pieces)]
        self._call(f"put {name}", lambda: self.store.put(name, kept))

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        return self._call(f"get {name}", lambda: self.store.get(name, start, n_bytes))

    def read(self, name: str, start: int, n_bytes: int) -> memoryview:
        return self._call(f"get {name}", lambda: read(self.store, name, start, n_bytes))

    def names(self, prefix: str) -> dict[str, int]:
        return self._call(f"list {prefix}", lambda: self.store.names(prefix))

    def delete(self, names: Sequence[str]) -> None:
        self._call(f"delete {len(names)} objects", lambda: self.store.delete(names))

    def _call(self, what: str, call: Callable[[], T]) -> T:
        patience = self.patience
        for attempt in range(1, patience.tries + 1):
            try:
                return _within(patience.timeout_s, call, f"{self.url}: {what}")
            except Transient as error:
                if attempt < patience.tries:
                    patience.sleep(patience.pause_s(attempt))
                    continue
                if patience.tries == 1:
                    raise
                raise StoreError(f"{error} (tried {patience.tries} times)") from error
        raise AssertionError("tries is at least 1")


def _within(timeout_s: float, call: Callable[[], T], what: str) -> T:
    """What `call` returns or raises; Transient when it takes longer. Its thread then dies with the process."""
    done: list[T] = []
    died: list[BaseException] = []

    def attempt() -> None:
        try:
            done.append(call())
        except BaseException as error:  # handed to who waits
            died.append(error)

    thread = threading.Thread(target=attempt, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise Transient(f"{what}: no answer within {timeout_s:g} s")
    if died:
        raise died[0]
    return done[0]
