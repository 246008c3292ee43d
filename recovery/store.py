"""Where checkpoints go: a flat space of immutable objects with names like `blobs/000017-00000003/0004`.

An object is written once, whole, under a fresh name, and never changed: what is half written is never referred to.

Four kinds of names, the first three with the epoch of the claim they were written under: `manifests/EPOCH-NUMBER.json`,
`blobs/EPOCH-NUMBER/...`, `claims/EPOCH-...`, and `probes/...` of `check`. `open_store` decides which back end serves a
URL; what a back end can do is in its own file.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from recovery.errors import BadInput, NotFound, StoreError

_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(?P<folder>manifests|blobs|claims|probes)(?:/{_PART}){{1,6}}")
_PREFIX = re.compile(rf"(?:{_PART}/){{0,6}}(?:{_PART})?")
_EPOCH = re.compile(r"(?:manifests|blobs|claims)/(\d{6})-.*")
_LONGEST = 200


class Transient(StoreError):
    """An error that may pass: the same call may work when it is tried again."""


class Store(Protocol):
    """Raises NotFound or StoreError. Thread-safe."""

    url: str

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a new object from consecutive pieces. When this returns, it is durable.

        The same bytes may be written again under their name: the answer to the first attempt may have been lost.
        """

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        """The bytes from `start` on, at most n_bytes; fewer, or none, when the object ends before."""

    def names(self, prefix: str) -> dict[str, int]:
        """Name -> size in bytes of the objects that begin so; as of now, whatever was listed before."""

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


def open_store(url: str | Path, *, timeout_s: float = 60.0, tries: int = 5, **storage_options: Any) -> Store:
    """The store at a URL: a path or file://, memory://, or what fsspec knows: s3://, gs://, abfs://, sftp:// ...

    timeout_s: of one attempt at one call; tries: how often a call is attempted when it fails for what may pass.
    storage_options: go to the back end (`key`, `endpoint_url`, `token` ...; its environment variables work as well).

    Nothing is read or written yet: see `check`. Raises BadInput for a URL that no back end serves.
    """
    from recovery.fsspec_store import FsspecStore
    from recovery.local_store import LocalStore
    from recovery.patience import Patience, PatientStore

    protocol, colon, path = str(url).partition("://")
    if not colon or protocol in ("file", "local"):
        if storage_options:
            raise BadInput(f"{url}: a local folder takes no storage options, got {', '.join(storage_options)}")
        # What a disk refuses it refuses again. And pieces need no copy for a second attempt.
        return PatientStore(LocalStore(path if colon else str(url)), Patience(timeout_s, tries=1))
    return PatientStore(FsspecStore(str(url), storage_options), Patience(timeout_s, tries))


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
    """What the names of all blobs of one save begin with. A save that is tried again takes another number."""
    return f"blobs/{epoch:06d}-{number:08d}/"


def epoch_of(name: str) -> int | None:
    """The epoch an object was written under; None when the name does not say."""
    found = _EPOCH.fullmatch(name)
    return int(found[1]) if found else None
