"""All checkpoints of a location, deleted: of a job that is over.

In this order:

    1. claim     refused while a job that lives holds the location; servers of a dead one are fenced
    2. delete    manifests, newest first: what is left at any time can be restored; then their objects
    3. delete    the claims, this one last

If it ends early, the same call deletes the rest. What people put beside the checkpoints stays.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recovery.catalog import claims
from recovery.catalog.claims import Claim
from recovery.errors import StoreError
from recovery.storage.store import Store, is_blob_name, manifest_names

_AT_ONCE = 100  # the claim is renewed between: some stores take a request for each


@dataclass(frozen=True)
class Deletion:
    """What goes, in this order, and how much it is. manifests: newest first; n_bytes: of both"""

    manifests: tuple[str, ...]
    objects: tuple[str, ...]
    n_bytes: int


def plan_deletion(store: Store) -> Deletion:
    """All that saves have written. Nothing is written or deleted."""
    names = store.names("")
    manifests = tuple(reversed([name for name in manifest_names(store) if name in names]))
    objects = tuple(sorted(name for name in names if is_blob_name(name)))
    return Deletion(manifests, objects, sum(names[name] for name in (*manifests, *objects)))


def delete_all(store: Store, *, sleep: Callable[[float], None] = time.sleep) -> Deletion:
    """Delete it; returns what was deleted. May wait for a lease, as `claims.claim` does.

    Raises BadInput while a job holds the location, and Fenced when one has claimed it meanwhile: the rest is left.
    """
    claim = claims.claim(store, f"delete.{secrets.token_hex(4)}", sleep=sleep)
    try:
        found = plan_deletion(store)
        for names in (found.manifests, found.objects):
            for first in range(0, len(names), _AT_ONCE):
                claims.check(store, claim)
                claim = claims.renew(store, claim)
                store.delete(names[first : first + _AT_ONCE])
    finally:
        with contextlib.suppress(StoreError):  # else the next launch waits for the lease
            claims.release(store, claim)
    store.delete(_claims_until(store, claim))
    return found


def _claims_until(store: Store, claim: Claim) -> Sequence[str]:
    """Names of the claims that are not newer, this one's last, and of it that it was released."""
    names = [
        name for name in store.names("claims/") if any(one.epoch <= claim.epoch for one in claims.claims_of([name]))
    ]
    return sorted(names, key=lambda name: (name.startswith(f"{claim.name}/"), name.endswith("/closed"), name))
