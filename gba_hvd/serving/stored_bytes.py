"""Objects that are named by the SHA-256 of their bytes: written once, verified when they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from gba_hvd.serving.manifest import Shard, StoredObject
from recovery.errors import Damaged, NotFound
from recovery.storage.local_store import LocalStore
from recovery.storage.store import Store, read


def sha256_of(pieces: Sequence[bytes | memoryview]) -> str:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def put_file(store: Store, pieces: Sequence[bytes], ending: str) -> StoredObject:
    """Write `files/SHA256.ending`, unless it is there."""
    sha256, n_bytes = sha256_of(pieces), sum(map(len, pieces))
    name = f"files/{sha256}.{ending}"
    put_missing(store, name, sha256, pieces, store.names(name).get(name))
    return StoredObject(name, n_bytes, sha256)


def put_missing(store: Store, name: str, sha256: str, pieces: Sequence[bytes | memoryview], there: int | None) -> bool:
    """Write an object, unless the store has it; whether it was written. there: the bytes that the store has of it.

    What a local folder has is read and written again where it is damaged; of other stores only the size is compared.
    """
    n_bytes = sum(map(len, pieces))
    if there == n_bytes and (not is_local(store) or sha256_of([read(store, name, 0, n_bytes)]) == sha256):
        return False
    if there is not None:  # cut off, or altered, since it was written
        store.delete([name])
    store.put(name, pieces)
    return True


def is_local(store: Store) -> bool:
    return isinstance(getattr(store, "store", store), LocalStore)


def get_verified(store: Store, one: StoredObject | Shard) -> memoryview:
    """All bytes of an object. Raises Damaged when it is gone, or not what was saved."""
    name, n_bytes = one.name, one.n_bytes
    try:
        data = read(store, name, 0, n_bytes + 1)
    except NotFound as error:
        raise Damaged(f"{store.url}: {name} is gone") from error
    if len(data) != n_bytes:
        raise Damaged(
            f"{store.url}: {name} is truncated or overwritten: it has "
            f"{'more' if len(data) > n_bytes else f'{len(data):,} bytes'}, {n_bytes:,} were saved"
        )
    if (found := sha256_of([data])) != one.sha256:
        raise Damaged(f"{store.url}: {name} is not what was saved: its SHA-256 is {found}")
    return data
