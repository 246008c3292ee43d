"""What a saved model no longer needs: old versions, and objects that no version names. Found here, deleted at the end.

A save writes its objects before its manifest, and uses those that are there. So a save that comes to its manifest while
objects are deleted is to be repeated, and one that comes to it later sees which of its objects are gone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gba_hvd.errors import BadInput
from gba_hvd.serving.manifest import no_new_version, read_manifest, remove_marks, version_name, versions
from recovery.storage.store import Store

_OURS = re.compile(
    r"rows/[0-9a-f]{2}/[0-9a-f]{64}|files/[0-9a-f]{64}\.[a-z0-9]+"
)  # what people put beside it is theirs


@dataclass(frozen=True)
class Unneeded:
    """versions: to be deleted, ascending; objects: in no version that is kept, name -> bytes"""

    versions: tuple[int, ...]
    kept: tuple[int, ...]
    objects: Mapping[str, int]

    @property
    def n_bytes(self) -> int:
        return sum(self.objects.values())


def unneeded(store: Store, keep_last: int | None = None) -> Unneeded:
    """keep_last: so many of the newest versions are kept; None: all.

    Raises BadInput where there is no model; Damaged for a version that is kept and cannot be read: what it needs is not
    known.
    """
    there = versions(store)
    if keep_last is not None and keep_last < 1:
        raise BadInput(f"at least the newest version is kept, got {keep_last}")
    if not there:
        raise BadInput(f"{store.url} has no model")
    kept = there if keep_last is None else there[-keep_last:]
    named = {one.name for version in kept for one in read_manifest(store, version).objects()}
    objects = store.names("rows/") | store.names("files/")
    gone = {name: n for name, n in sorted(objects.items()) if name not in named and _OURS.fullmatch(name)}
    return Unneeded(tuple(there[: len(there) - len(kept)]), tuple(kept), gone)


def delete_unneeded(store: Store, keep_last: int | None = None, *, force: bool = False) -> Unneeded:
    """Delete it, manifests first; returns what was deleted. Raises also StoreError while a save is completed.

    force: no process saves there or deletes: what killed ones left, for which others wait, goes first.
    """
    if force:
        remove_marks(store)
    with no_new_version(store):
        found = unneeded(store, keep_last)
        store.delete([version_name(version) for version in found.versions])
        store.delete(list(found.objects))
    return found
