"""Going back to an earlier checkpoint: it becomes the newest one, and those after it go.

What was saved is never changed, and the newest checkpoint is the one of the largest (epoch, number). So going back
writes the manifest of the earlier one again, under the epoch of a claim of its own; the rows and the state that it
refers to stay where they are. In this order:

    1. claim    refused while a job that lives holds the location; servers of a dead one are fenced
    2. write    the manifest: from here on every reader takes it for the newest
    3. delete   manifests of what came after, newest first, and the earlier manifest itself; then objects that are left
    4. release

| it ends | what is left |
|---|---|
| before 2 | the checkpoints as they were |
| after 2 | the earlier one is the newest; what came after it is older now, and expires as any other checkpoint does |
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from recovery.catalog import claims, retention
from recovery.catalog.chains import Chain, open_chain
from recovery.catalog.retention import Expired
from recovery.errors import BadInput, Damaged, NotFound, StoreError
from recovery.format.manifest import Manifest, from_json, to_json
from recovery.storage.store import Store, age_of, manifest_names

ROLLED_BACK = "rolled_back_from"  # in what a manifest has about its job: the newest one before


@dataclass(frozen=True)
class Rollback:
    """To which checkpoint, and what goes: manifests after it, newest first, with those that cannot be read.

    newest: the name of the newest one before
    """

    to: Chain
    newest: str
    later: tuple[str, ...]
    manifests: tuple[Manifest, ...]  # all that can be read


def plan_rollback(store: Store, name: str) -> Rollback:
    """What going back to this checkpoint would do. Nothing is written.

    Raises Damaged when the checkpoint is not whole, BadInput when it is the newest already.
    """
    to = open_chain(store, name)
    names = manifest_names(store)
    later = tuple(one for one in reversed(names) if (age_of(one) or (0, 0)) > (to.newest.epoch, to.newest.number))
    if not later:
        raise BadInput(f"{name} is the newest checkpoint of {store.url}: there is nothing to go back from")
    readable = []
    for one in names:
        with contextlib.suppress(Damaged, NotFound):
            readable.append(from_json(store.get(one), one))
    return Rollback(to, names[-1], later, tuple(readable))


def roll_back(store: Store, plan: Rollback, *, sleep: Callable[[float], None] = time.sleep) -> Manifest:
    """Carry it out; returns the new newest checkpoint. May wait for a lease, as `claims.claim` does.

    Raises BadInput while a job holds the location, or when it has another newest checkpoint than the plan; Fenced when
    a job has claimed the location meanwhile: before the manifest was written nothing has changed, after that something
    is left to be deleted.
    """
    claim = claims.claim(store, f"rollback.{secrets.token_hex(4)}", sleep=sleep)
    try:
        newest = manifest_names(store)[-1:]
        if newest != [plan.newest]:
            raise BadInput(
                f"{store.url}: {newest[0] if newest else 'nothing'} is the newest now: look again, and decide"
            )
        before = plan.to.newest
        copy = replace(before, epoch=claim.epoch, about={**before.about, ROLLED_BACK: plan.newest})
        document = to_json(copy)
        claims.check(store, claim)
        store.put(copy.name, [document])
        claims.check(store, claim)  # a job that came meanwhile may read what is to be deleted
        retention.delete(store, _no_longer_needed(plan, copy))
    finally:
        with contextlib.suppress(StoreError):  # else the next launch waits for the lease
            claims.release(store, claim)
    return copy


def _no_longer_needed(plan: Rollback, copy: Manifest) -> Expired:
    before = plan.to.newest.name
    kept = [one for one in plan.manifests if one.name not in plan.later and one.name != before]
    needed = {name for one in [*kept, copy] for name in retention.objects_of(one)}
    gone = _readable(plan, [*plan.later, before])
    blobs = dict.fromkeys(name for one in gone for name in retention.objects_of(one) if name not in needed)
    return Expired((*plan.later, before), tuple(blobs), f"after {copy.name}, which is the newest now")


def _readable(plan: Rollback, names: Sequence[str]) -> list[Manifest]:
    by_name = {one.name: one for one in plan.manifests}
    return [by_name[name] for name in names if name in by_name]
