"""Going back to an earlier version of a saved model: it becomes the newest one, those after it are withdrawn.

The newest version is the one with the largest number. So withdrawing is deleting manifests, in this order:

    1. mark     refused while a save completes a version, or another process deletes; a save meanwhile is refused
    2. numbers  a name for each version that goes: no later save gets its number, and readers learn why it is gone
    3. delete   manifests of what came after, the newest last
    4. unmark

| it ends | what is left |
|---|---|
| before the last deletion of 3 | the newest is as before, some between may be gone |
| after it | the earlier version is the newest |
| killed before the end of 4 | the mark as well, by which saves, withdrawing and deleting are refused |

The same command completes it; killed, with --force, which removes the mark first.
Objects stay, for readers that have a withdrawn version open, until `old_versions.delete_unneeded`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from gba_hvd.errors import BadInput
from gba_hvd.serving.manifest import (
    ModelManifest,
    no_new_version,
    read_manifest,
    version_name,
    versions,
    withdrawn_name,
)
from recovery.errors import Damaged
from recovery.storage.store import Store


@dataclass(frozen=True)
class Withdrawal:
    """later: versions after `to`, ascending. manifests: of those of them that can be read"""

    to: ModelManifest
    later: tuple[int, ...]
    manifests: tuple[ModelManifest, ...]


def plan_withdrawal(store: Store, version: int) -> Withdrawal:
    """What going back to this version would do. Nothing is written.

    Raises BadInput where it is not there, or is the newest already; Damaged where its manifest is not whole.
    """
    to = read_manifest(store, version)
    later = tuple(one for one in versions(store) if one > version)
    if not later:
        raise BadInput(f"version {version} is the newest of {store.url}: there is nothing to go back from")
    manifests = []
    for one in later:
        with contextlib.suppress(Damaged, BadInput):  # cut off, of a later program, or deleted meanwhile
            manifests.append(read_manifest(store, one))
    return Withdrawal(to, later, tuple(manifests))


def withdraw(store: Store, plan: Withdrawal) -> None:
    """Carry it out.

    Raises BadInput where there are other versions than in the plan, StoreError while a save completes a version or
    another process deletes some: nothing has changed then. StoreError also where the store fails, see above.
    """
    with no_new_version(store):
        there = versions(store)
        if plan.to.version not in there or tuple(one for one in there if one > plan.to.version) != plan.later:
            raise BadInput(f"{store.url}: its versions are {', '.join(map(str, there))} now: look again, and decide")
        for one in plan.later:
            store.put(withdrawn_name(one), [b"withdrawn"])
        for one in plan.later:
            store.delete([version_name(one)])
