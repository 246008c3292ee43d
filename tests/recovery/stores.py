"""A store that fails on purpose, at the calls that a test names, and says afterwards whether it did.

    store = FaultyStore(inner).fails("put", 2).truncates("get", 1, keep_bytes=10).dies_before("put", 4)
    ...
    assert store.fired == store.planned

Calls are counted from 1, each operation for itself: "put", "get", "names", "delete".
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recovery.storage.store import Store, Transient


class Crash(BaseException):
    """The process died here. Not an Exception: nobody who goes on after errors may go on after this."""


@dataclass(frozen=True)
class Fault:
    """One planned fault: what goes wrong at the n-th call of an operation."""

    operation: str
    at: int
    what: str


class FaultyStore:
    """Passes calls on to a store, except for the planned ones. Use it as a context manager when calls hang.

    calls: (operation, name or prefix) of every call so far, also of those that failed
    """

    def __init__(self, store: Store) -> None:
        self.store, self.url = store, store.url
        self.planned: set[Fault] = set()
        self.fired: set[Fault] = set()
        self.calls: list[tuple[str, str]] = []
        self._plan: dict[tuple[str, int], tuple[Fault, Callable[..., Any]]] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._dead = False
        self._listings: dict[str, dict[str, int]] = {}

    # --- what goes wrong -------------------------------------------------------------------------------------------

    def fails(self, operation: str, at: int, error: Exception | None = None) -> FaultyStore:
        """Raises, without doing anything; by default what may pass."""
        return self._add(operation, at, "fails", lambda *_: self._raise(error or Transient(f"planned fault {at}")))

    def answer_is_lost(self, operation: str, at: int) -> FaultyStore:
        """Does it, and raises."""
        return self._add(operation, at, "answer is lost", self._do_and_raise)

    def hangs(self, operation: str, at: int) -> FaultyStore:
        """Does not return until `release()`; then does what it was called for."""
        return self._add(operation, at, "hangs", self._hang)

    def slows(self, operation: str, at: int, wait: Callable[[], object]) -> FaultyStore:
        """Calls `wait` first: it may move a virtual clock, or wait for an event of the test."""
        return self._add(operation, at, "slows", lambda do, *args: (wait(), do(*args))[1])

    def loses(self, at: int) -> FaultyStore:
        """The at-th put says that all is well, and the object is not there."""
        return self._add("put", at, "loses", lambda *_: None)

    def lists_what_was(self, at: int) -> FaultyStore:
        """The at-th listing is that of the previous call with this prefix; empty if there was none."""
        return self._add("names", at, "lists what was", lambda do, prefix: dict(self._listings.get(prefix, {})))

    def truncates(self, operation: str, at: int, keep_bytes: int) -> FaultyStore:
        """A get returns, or a put writes, only the first `keep_bytes`, and nobody says so."""
        return self._add(operation, at, "truncates", lambda do, *args: self._cut(do, keep_bytes, *args))

    def flips(self, at: int, bit: int) -> FaultyStore:
        """One bit of what the at-th get returns is another one."""
        return self._add("get", at, "flips", lambda do, *args: _flipped(do(*args), bit))

    def dies_before(self, operation: str, at: int) -> FaultyStore:
        return self._add(operation, at, "dies before", lambda *_: self._die())

    def dies_within(self, at: int, keep_bytes: int) -> FaultyStore:
        """The at-th put leaves the first bytes of the object, as a local file system would."""
        return self._add("put", at, "dies within", lambda do, *args: (self._cut(do, keep_bytes, *args), self._die()))

    def dies_after(self, operation: str, at: int) -> FaultyStore:
        return self._add(operation, at, "dies after", lambda do, *args: (do(*args), self._die()))

    # --- the store -------------------------------------------------------------------------------------------------

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        self._call("put", self.store.put, name, pieces)

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        found: bytes = self._call("get", self.store.get, name, start, n_bytes)
        return found

    def names(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = self._call("names", self.store.names, prefix)
        self._listings[prefix] = found
        return found

    def delete(self, names: Sequence[str]) -> None:
        self._call("delete", self.store.delete, names)

    def release(self) -> None:
        """Calls that hang go on."""
        self._released.set()

    def __enter__(self) -> FaultyStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # -----------------------------------------------------------------------------------------------------------------

    def _add(self, operation: str, at: int, what: str, act: Callable[..., Any]) -> FaultyStore:
        fault = Fault(operation, at, what)
        assert (operation, at) not in self._plan, f"two faults at {operation} {at}"
        self._plan[operation, at] = fault, act
        self.planned.add(fault)
        return self

    def _call(self, operation: str, do: Callable[..., Any], *args: Any) -> Any:
        with self._lock:
            if self._dead:
                raise Crash(f"{operation} of a process that is dead")
            self._counts[operation] += 1
            about = args[0] if isinstance(args[0], str) else " ".join(args[0])
            self.calls.append((operation, about))
            fault, act = self._plan.get((operation, self._counts[operation]), (None, None))
            if fault is not None:
                self.fired.add(fault)
        return act(do, *args) if act is not None else do(*args)

    def _raise(self, error: BaseException) -> None:
        raise error

    def _do_and_raise(self, do: Callable[..., Any], *args: Any) -> None:
        do(*args)
        raise Transient("planned fault: the answer is lost")

    def _hang(self, do: Callable[..., Any], *args: Any) -> Any:
        self._released.wait()
        return do(*args)

    def _cut(self, do: Callable[..., Any], keep_bytes: int, name: str, *args: Any) -> Any:
        if len(args) == 1:  # put
            return do(name, [b"".join(args[0])[:keep_bytes]])
        return do(name, *args)[:keep_bytes]

    def _die(self) -> None:
        with self._lock:
            self._dead = True
        raise Crash("planned")


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)
