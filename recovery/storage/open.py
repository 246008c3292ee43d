"""A store by its URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recovery.errors import BadInput, StoreError
from recovery.redaction import redacted
from recovery.registry import Registry
from recovery.storage.fsspec_store import PACKAGES, FsspecStore
from recovery.storage.local_store import LocalStore
from recovery.storage.retry import RetryingStore, RetryPolicy
from recovery.storage.store import LEAST_BYTES_S, Store, manifest_names

STORES: Registry[Store] = Registry(
    "recovery.stores",
    "store",
    Store,
    {"file": LocalStore, "local": LocalStore, "memory": FsspecStore, **dict.fromkeys(PACKAGES, FsspecStore)},
    arguments=("url", "options"),
)


def open_store(
    url: str | Path,
    *,
    timeout_s: float = 60.0,
    least_bytes_s: float = LEAST_BYTES_S,
    tries: int = 5,
    **storage_options: Any,
) -> Store:
    """The store at a URL: a path or file://, memory://, or what fsspec knows: s3://, gs://, abfs://, sftp:// ...

    A distribution may register a store under another protocol, as an entry point in `recovery.stores`.
    timeout_s, least_bytes_s: one attempt at one call may take timeout_s, and a second for each so many bytes it moves.
    tries: how often a call is attempted when it fails for what may pass.
    storage_options: go to the back end (`key`, `endpoint_url`, `token` ...; its environment variables work as well).

    Nothing is read or written yet: see `check`. Raises BadInput for a URL that no back end serves.
    """
    protocol, colon, path = str(url).partition("://")
    is_remote = bool(colon) and protocol not in ("file", "local")
    if not is_remote:
        if storage_options:
            raise BadInput(f"{url}: a local folder takes no storage options, got {', '.join(storage_options)}")
        # What a disk refuses it refuses again. And pieces need no copy for a second attempt.
        tries = 1
    patience = RetryPolicy(timeout_s, tries, least_bytes_s=least_bytes_s)
    if not is_remote:
        return RetryingStore(LocalStore(path if colon else str(url)), patience)
    kind = STORES.get(protocol) if protocol in STORES.names() else FsspecStore
    return RetryingStore(kind(str(url), storage_options), patience)


def refuse_inside(url: str | Path, **how: Any) -> None:
    """Raises BadInput for a URL that is within a location of checkpoints, such as `ck/manifests` within `ck`.

    how: as of `open_store`
    """
    parts = str(url).rstrip("/").split("/")
    for i, part in enumerate(parts):
        outer = "/".join(parts[:i])
        if part not in ("manifests", "blobs", "claims", "probes") or outer.endswith(":/") or not outer:
            continue
        try:
            is_location = bool(manifest_names(open_store(outer, **how)))
        except StoreError:  # one whose lists may not be read is not where this job's checkpoints go
            continue
        if is_location:
            raise BadInput(
                f"{redacted(str(url))} is within the location of the checkpoints at {redacted(outer)}: give "
                f"{redacted(outer)} to continue from those, or another location, outside of it"
            )
