"""Which checkpoints are no longer needed, and which objects no manifest refers to. Decided here, deleted at the end.

Only what this run wrote is ever expired, never what another one left. A job that is launched again is the same run: it
resumes from the newest checkpoint, takes over the name, and counts what earlier launches saved (`first_epoch_of`). Were
each launch to count its own only, a job of one launch a night would keep every night. Of another run are checkpoints
under another name, and those before `resume=False` or before another job saved there.

Ages are not looked at, only the steps or times at which checkpoints were saved, compared with each other: a clock that
was set back may make one more or one less be kept for good, never the newest ones go.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from recovery.catalog.best_step import Saved, kept_of
from recovery.catalog.claims import claims_of
from recovery.catalog.epoch_position import position_of
from recovery.errors import BadInput, Damaged
from recovery.format.manifest import Manifest, from_json
from recovery.storage.store import Store, age_of, epoch_of, is_blob_name

FIRST_EPOCH = "first_epoch"  # in what a manifest has about its job: of the run
BEST_STEP = "best_step"  # there, too: at which the model was best when it was saved


@dataclass(frozen=True)
class Keep:
    """last: so many of the newest. every_steps, every_s: also the first in every so many steps, or seconds.
    epochs: also the last one of each of so many epochs of the training, the newest.
    """

    last: int = 3
    every_steps: int | None = None
    every_s: float | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise BadInput(f"at least the last checkpoint must be kept, got last={self.last}")
        for name, every in (("every_steps", self.every_steps), ("every_s", self.every_s)):
            if every is not None and not 0 < every < math.inf:
                raise BadInput(f"{name} must be positive, got {every}")
        is_whole = isinstance(self.epochs, int) and not isinstance(self.epochs, bool)
        if self.epochs is not None and not (is_whole and self.epochs > 0):
            raise BadInput(f"keep_epochs is a whole number of epochs, at least 1, got {self.epochs!r}")


@dataclass(frozen=True)
class Expired:
    """What to delete, in this order, and why."""

    manifests: tuple[str, ...]
    blobs: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class OrphanedObjects:
    """Objects that no manifest refers to (name -> bytes), and why."""

    objects: Mapping[str, int]
    reason: str

    @property
    def n_bytes(self) -> int:
        return sum(self.objects.values())


def expired(manifests: Sequence[Manifest], mine: Collection[str], keep: Keep) -> Expired:
    """What is no longer needed of what this run wrote.

    manifests: all that are in the store and can be read; mine: names of those that this run wrote
    """
    by_name = {manifest.name: manifest for manifest in manifests}
    own = sorted((by_name[name] for name in mine if name in by_name), key=_age)
    wanted = {manifest.name for manifest in own[-keep.last :]}
    if keep.every_steps:
        wanted |= _first_of_each({m.name: m.step // keep.every_steps for m in own})
    if keep.every_s:
        wanted |= _first_of_each({m.name: int(m.saved_unix_s // keep.every_s) for m in own})
    if keep.epochs:
        wanted |= _last_of_each_epoch(own, keep.epochs)
    if (best := best_kept(own)) is not None:
        wanted.add(best[0].name)
    needed = _with_parents(by_name, [*wanted, *(name for name in by_name if name not in mine)])
    gone = [manifest for manifest in reversed(own) if manifest.name not in needed]
    still = {name for manifest in manifests if manifest.name in needed for name in objects_of(manifest)}
    blobs = [name for manifest in gone for name in objects_of(manifest) if name not in still]
    reason = f"{len(gone)} of {len(own)} checkpoints of this run expire: the last {keep.last} are kept"
    if keep.every_steps:
        reason += f", one every {keep.every_steps} steps"
    if keep.every_s:
        reason += f", one every {keep.every_s:g} s"
    if keep.epochs:
        reason += f", the last one of each of the newest {keep.epochs} epochs"
    if best is not None:
        reason += ", the one of the best model"
    based_on = len([m for m in own if m.name in needed - wanted])
    return Expired(tuple(m.name for m in gone), tuple(blobs), reason + f", and {based_on} that these are based on")


def best_kept(own: Sequence[Manifest]) -> tuple[Manifest, Manifest] | None:
    """By `best_step.kept_of`: the checkpoint of the best model, and the one that names its step. own: of one run,
    oldest first."""
    return kept_of([
        Saved(
            one, one.step, one.about.get(BEST_STEP), is_final=bool(one.about.get("last_gasp")),
            until=one.about.get("best_until"), metric=str(one.about.get("best_metric", "")),
        )
        for one in own
    ])  # fmt: skip


def first_epoch_of(newest: Manifest, job: str) -> int:
    """The first epoch of the run that a launch of `job` continues when it resumes from this checkpoint; 0: of none."""
    first = newest.about.get(FIRST_EPOCH, newest.epoch)
    is_known = newest.about.get("job") == job and isinstance(first, int) and 0 < first <= newest.epoch
    return first if is_known else 0


def delete(store: Store, expired: Expired) -> None:
    """Manifests first, newest first: a crash leaves no manifest whose blobs or parent are gone."""
    for name in expired.manifests:
        store.delete([name])
    if expired.blobs:
        store.delete(expired.blobs)


def objects_of(manifest: Manifest) -> list[str]:
    """Names of all objects a manifest refers to."""
    return [blob.name for blob in manifest.blobs] + ([manifest.state.name] if manifest.state else [])


def orphaned_objects(
    names: Mapping[str, int], manifests: Iterable[Manifest], unreadable: Collection[str]
) -> OrphanedObjects:
    """Objects of dead epochs that no manifest refers to: of saves that died, of checkpoints half deleted, old claims.

    names: all objects and their bytes; unreadable: names of manifests that are damaged

    The newest epoch's are left alone: a save may be in flight.
    """
    claims = claims_of(names)
    if not claims:
        return OrphanedObjects({}, "nothing: there is no claim, so it is not known who may be writing")
    newest = max(one.epoch for one in claims)
    referred = {name for manifest in manifests for name in objects_of(manifest)}
    doubtful = tuple("blobs/" + name.removeprefix("manifests/").removesuffix(".json") + "/" for name in unreadable)
    found = {}
    for name, n_bytes in names.items():
        epoch = epoch_of(name)
        if epoch is None or epoch >= newest or not (is_blob_name(name) or claims_of([name])):
            continue  # a checkpoint, of a save in flight, or another writer's
        if name not in referred and not (doubtful and name.startswith(doubtful)):
            found[name] = n_bytes
    reason = f"written under claims before {newest}, the newest one, and in no checkpoint"
    return OrphanedObjects(found, reason + f"; those of {len(doubtful)} damaged ones stay" * bool(doubtful))


def gc(store: Store, *, really: bool = False) -> OrphanedObjects:
    """Find orphaned objects, and delete them if asked to.

    Raises BadInput when a checkpoint is of a newer format version: what it refers to is not known.
    """
    names = store.names("")
    manifests, unreadable = [], []
    for name in names:
        if age_of(name) is not None:
            try:
                manifests.append(from_json(store.get(name), name))
            except Damaged:
                unreadable.append(name)
    found = orphaned_objects(names, manifests, unreadable)
    if really and found.objects:
        store.delete(sorted(found.objects))
    return found


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.epoch, manifest.number


def _first_of_each(periods: Mapping[str, int]) -> set[str]:
    """The first name of every period. periods: by name, oldest first."""
    first: dict[int, str] = {}
    for name, period in periods.items():
        first.setdefault(period, name)
    return set(first.values())


def _last_of_each_epoch(own: Sequence[Manifest], n: int) -> set[str]:
    """Names of the last checkpoints of the newest n epochs. own: oldest first; those without a position are of none."""
    last: dict[int, str] = {}
    for one in reversed(own):
        position = position_of(one)
        if position is not None and len(last) < n:
            last.setdefault(position.epoch, one.name)
    return set(last.values())


def _with_parents(by_name: Mapping[str, Manifest], names: Iterable[str]) -> set[str]:
    needed: set[str] = set()
    for name in names:
        at: str | None = name
        while at is not None and at not in needed:
            needed.add(at)
            at = by_name[at].parent if at in by_name else None
    return needed
