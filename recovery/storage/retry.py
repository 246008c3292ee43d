"""How long a store is waited for, and how often a call is tried again.

Each attempt runs in a thread of its own and may take a base time, and more for what it moves at a least rate. Then it
is cancelled: an upload through fsspec ends, a local write stops before its object gets a name. What can do neither (a
system call that hangs) leaves its thread; when MOST_HUNG calls of a store hang, others are refused until one returns.
Only errors that may pass are tried again, after a pause that doubles and has some chance in it, so that many jobs do
not come back all at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from recovery.errors import BadInput, StoreError
from recovery.storage.store import ATTEMPT, LEAST_BYTES_S, Attempt, Store, Transient, read

T = TypeVar("T")
MOST_HUNG = 8
_FIRST_BYTES, _PIECE_BYTES = 1 << 20, 16 << 20  # of an object whose size is not known


@dataclass(frozen=True)
class RetryPolicy:
    """timeout_s: of one attempt, and a second more for each `least_bytes_s` that it moves; tries: attempts in all;
    first_pause_s, longest_pause_s: between them."""

    timeout_s: float = 60.0
    tries: int = 5
    first_pause_s: float = 0.2
    longest_pause_s: float = 20.0
    least_bytes_s: float = LEAST_BYTES_S
    sleep: Callable[[float], None] = field(default=time.sleep, compare=False)
    rng: random.Random = field(default_factory=random.Random, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= threading.TIMEOUT_MAX or self.tries < 1:
            raise BadInput(f"timeout_s must be positive and tries at least 1, got {self.timeout_s} and {self.tries}")
        if not self.least_bytes_s > 0:
            raise BadInput(f"least_bytes_s is a rate in bytes per second, above 0, got {self.least_bytes_s}")
        if not 0 <= self.first_pause_s <= self.longest_pause_s:
            raise BadInput(f"pauses must not be negative, got {self.first_pause_s} to {self.longest_pause_s} s")

    def limit_s(self, n_bytes: int) -> float:
        """Time limit of one attempt that moves so many bytes."""
        return min(self.timeout_s + n_bytes / self.least_bytes_s, threading.TIMEOUT_MAX)

    def pause_s(self, failed: int) -> float:
        """After so many attempts that failed: half of it sure, half by chance."""
        longest = min(self.longest_pause_s, self.first_pause_s * 2.0 ** (failed - 1))
        return longest * (0.5 + 0.5 * self.rng.random())


class RetryingStore:
    """A store whose calls end in time, and are tried again.

    trouble: what the newest attempt met, while it is to be tried again; empty: it succeeded, or was the last one
    """

    def __init__(self, store: Store, patience: RetryPolicy | None = None) -> None:
        self.store, self.url = store, store.url
        self.patience = patience or RetryPolicy()
        self._lock, self._hung = threading.Lock(), set[threading.Thread]()
        self.trouble = ""

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        # An attempt that timed out may continue later, when the caller's buffers hold something else. What it
        # then writes must be these bytes, if the name may have been written, and be referred to, by a later attempt.
        kept = pieces if self.patience.tries == 1 else [b"".join(pieces)]
        self._call(f"put {name}", lambda: self.store.put(name, kept), sum(map(len, kept)))

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        if n_bytes is not None:
            return self._call(f"get {name}", lambda: self.store.get(name, start, n_bytes), n_bytes)
        pieces, asked = [self.get(name, start, _FIRST_BYTES)], _FIRST_BYTES
        while len(pieces[-1]) == asked:
            asked = _PIECE_BYTES
            pieces.append(self.get(name, start + sum(map(len, pieces)), asked))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read(self, name: str, start: int, n_bytes: int) -> memoryview:
        return self._call(f"get {name}", lambda: read(self.store, name, start, n_bytes), n_bytes)

    def names(self, prefix: str) -> dict[str, int]:
        return self._call(f"list {prefix}", lambda: self.store.names(prefix))

    def delete(self, names: Sequence[str]) -> None:
        self._call(f"delete {len(names)} objects", lambda: self.store.delete(names))

    def _call(self, what: str, call: Callable[[], T], n_bytes: int = 0) -> T:
        patience = self.patience
        for attempt in range(1, patience.tries + 1):
            try:
                result = self._within(patience.limit_s(n_bytes), call, f"{self.url}: {what}")
                self.trouble = ""
                return result
            except Transient as error:
                self.trouble = (
                    f"{error} (tried {attempt} of {patience.tries} times)" if attempt < patience.tries else ""
                )
                if attempt < patience.tries:
                    patience.sleep(patience.pause_s(attempt))
                    continue
                if patience.tries == 1:
                    raise
                raise StoreError(f"{error} (tried {patience.tries} times)") from error
        raise AssertionError("tries is at least 1")

    def _within(self, limit_s: float, call: Callable[[], T], what: str) -> T:
        """What `call` returns or raises; Transient when it takes longer. Its thread then ends when the call does."""
        with self._lock:
            self._hung = {thread for thread in self._hung if thread.is_alive()}
            if len(self._hung) >= MOST_HUNG:
                hung = sorted(thread.name for thread in self._hung)[0]
                raise Transient(f"{what}: not tried, {len(self._hung)} earlier calls still hang ({hung} ...)")
        done: list[T] = []
        died: list[BaseException] = []
        attempt = Attempt()

        def run() -> None:
            ATTEMPT.set(attempt)  # of this thread alone
            try:
                done.append(call())
            except BaseException as error:  # handed to who waits
                died.append(error)

        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            attempt.cancel()
            with self._lock:
                self._hung.add(thread)
            raise Transient(f"{what}: no answer within {limit_s:.4g} s")
        if died:
            raise died[0]
        return done[0]
