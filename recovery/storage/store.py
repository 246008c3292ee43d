"""Where checkpoints go: a flat space of immutable objects with names like `blobs/000017-00000003/0004`.

An object is written once, completely, under a fresh name, and never changed: what is half written is never referred to.

Kinds of names, the first three with the epoch of the claim they were written under: `manifests/EPOCH-NUMBER.json`,
`blobs/EPOCH-NUMBER/...`, `claims/EPOCH-...`; `probes/...` of `check`; and those of models that were saved for
predictions: `versions/`, `rows/`, `files/` (`gba_hvd.serving`). `open_store` decides which back end serves a
URL; what a back end can do is in its own file.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from threading import Lock
from typing import Protocol

from recovery.errors import BadInput, NotFound, StoreError

_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(?P<folder>manifests|blobs|claims|probes|versions|rows|files)(?:/{_PART}){{1,6}}")
_PREFIX = re.compile(rf"(?:{_PART}/){{0,6}}(?:{_PART})?")
_EPOCH = re.compile(r"(?:manifests|blobs|claims)/(\d{6,9})-.*")
_MANIFEST = re.compile(r"manifests/(\d{6,9})-(\d{8,15})\.json")
_BLOB = re.compile(r"blobs/\d{6,9}-(?:\d{8,15}/(?:\d{4,}(?:-\d{4,})?|state|part-\d{4,})|last/(?:word|gone-\d{4,}))")
MOST_EPOCH, MOST_NUMBER = 10**9 - 1, 10**15 - 1  # of names
_LONGEST = 200
LEAST_BYTES_S = float(1 << 20)


class Transient(StoreError):
    """An error that may pass: the same call may work when it is tried again."""


class Attempt:
    """One call of a store, as who waits for it sees it: `cancel` when the wait is over. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._do = Lock(), list[Callable[[], object]]()
        self.is_cancelled = False

    def on_cancel(self, do: Callable[[], object]) -> None:
        """Have this called, in another thread, when the attempt is cancelled; at once if it was already."""
        with self._lock:
            if not self.is_cancelled:
                self._do.append(do)
                return
        do()

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
        for do in self._do:
            do()


ATTEMPT: ContextVar[Attempt | None] = ContextVar("the attempt this thread is at", default=None)


def stop_if_cancelled(what: str) -> None:
    """Raises Transient when no caller waits any more: what is written then may be other bytes by now."""
    attempt = ATTEMPT.get()
    if attempt is not None and attempt.is_cancelled:
        raise Transient(f"{what}: cancelled, it took too long")


class Store(Protocol):
    """Raises NotFound, Transient where the same call may work later, or StoreError. Thread-safe.

    A class that a distribution registers in `recovery.stores`, under the protocol of its URLs, is constructed with the
    URL and a dict of storage options, and touches nothing yet; it raises BadInput for a URL or option it cannot use.
    Time limits and further attempts are around it (`recovery.storage.retry`). It passes names through `checked` before
    it makes paths of them, and prefixes through `checked_prefix`.

    url: for messages, without secrets (`recovery.redaction.redacted`)
    """

    url: str

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a new object from consecutive pieces. When this returns, it is durable.

        The same bytes may be written again under their name: the answer to the first attempt may have been lost.
        """

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        """The bytes from `start` on, at most n_bytes; fewer, or none, when the object ends before."""

    def names(self, prefix: str) -> dict[str, int]:
        """Name -> size in bytes of the objects that begin so; as of now, not as of an earlier listing."""

    def delete(self, names: Sequence[str]) -> None:
        """Those that are there; the others are no error."""


def read(store: Store, name: str, start: int, n_bytes: int) -> memoryview:
    """As `get`, in the way that is fastest for much: a store may have a `read` of its own for that."""
    own = getattr(store, "read", None)
    found: memoryview = memoryview(store.get(name, start, n_bytes)) if own is None else own(name, start, n_bytes)
    return found


def is_there(store: Store, name: str, n_bytes: int) -> bool:
    """Whether an object has so many bytes, by reading its end: a listing may be older than the object."""
    try:
        return len(store.get(name, max(0, n_bytes - 1), 2)) == min(1, n_bytes)
    except NotFound:
        return False


def check(store: Store) -> None:
    """Write a small object, read, list and delete it. Raises BadInput saying what keeps this store from being used."""
    name, data = f"probes/{uuid.uuid4().hex}", b"checkpoints go here"
    doing = "written to"
    try:
        store.put(name, [data])
        doing = "read from"
        found = store.get(name)
        if found != data:
            raise StoreError(f"{len(data)} bytes were written, other {len(found)} came back")
        doing = "listed"
        if store.names("probes/").get(name) != len(data):
            raise StoreError("what was just written is not in the listing, or with another size")
        doing = "cleaned up (objects deleted)"
        store.delete([name])
    except StoreError as error:
        raise BadInput(f"{store.url} cannot hold checkpoints, it cannot be {doing}: {error}") from error


def is_name(name: str, folder: str | None = None) -> bool:
    """Whether an object may be called so: nothing that could lead out of the store, on any file system."""
    found = _NAME.fullmatch(name) if len(name) <= _LONGEST else None
    return found is not None and folder in (None, found["folder"])


def checked(name: str) -> str:
    """`name`, if an object may be called so. Every back end asks before it makes a path of it."""
    if not is_name(name):
        raise BadInput(f"{name!r} cannot be the name of an object; names are like blobs/000017-00000003/0004")
    return name


def checked_prefix(prefix: str) -> str:
    if not _PREFIX.fullmatch(prefix):
        raise BadInput(f"{prefix!r} cannot be the beginning of a name; names are like blobs/000017-00000003/0004")
    return prefix


def blob_prefix(epoch: int, number: int) -> str:
    """What the names of all blobs of one save begin with. A save that is tried again takes another number.

    Raises BadInput for numbers that no restore would read.
    """
    if not (0 <= epoch <= MOST_EPOCH and 0 <= number <= MOST_NUMBER):
        raise BadInput(
            f"checkpoint {number} of epoch {epoch} cannot be named: numbers go to {MOST_NUMBER:,} and epochs to "
            f"{MOST_EPOCH:,}; continue in another folder"
        )
    return f"blobs/{epoch:06d}-{number:08d}/"


def is_blob_name(name: str) -> bool:
    """Whether a save of ours would call an object so: what people put beside it is theirs."""
    return _BLOB.fullmatch(name) is not None


def age_of(name: str) -> tuple[int, int] | None:
    """(epoch, number) of a manifest, by which checkpoints are ordered; None when it is no manifest's name."""
    found = _MANIFEST.fullmatch(name)
    return (int(found[1]), int(found[2])) if found and is_name(name) else None


def manifest_sizes(store: Store) -> dict[str, int]:
    """Name -> size in bytes of all manifests, oldest first. Other objects there are passed over."""
    listed = store.names("manifests/")
    found = [(age, name) for name in listed if (age := age_of(name)) is not None]
    return {name: listed[name] for _, name in sorted(found)}


def manifest_names(store: Store) -> list[str]:
    """Names of all manifests, oldest first."""
    return list(manifest_sizes(store))


def epoch_of(name: str) -> int | None:
    """The epoch an object was written under; None when the name does not say."""
    found = _EPOCH.fullmatch(name)
    return int(found[1]) if found else None
