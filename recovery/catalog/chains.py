"""Which checkpoints of a store can be restored: complete chains, newest first; and why the others cannot.

Only names, sizes and manifests are looked at here. Whether the bytes of a blob are right is seen when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from recovery.errors import Damaged, NotFound
from recovery.format.manifest import Blob, Manifest, StateBlob, from_json
from recovery.policies import is_lossless
from recovery.storage.store import Store, age_of, is_there, manifest_names


@dataclass(frozen=True)
class Chain:
    """The base, and every save on top of it up to the newest."""

    manifests: tuple[Manifest, ...]

    @property
    def newest(self) -> Manifest:
        return self.manifests[-1]

    @property
    def base(self) -> Manifest:
        return self.manifests[0]

    @property
    def is_complete(self) -> bool:
        """Whether no save of it left out a change: then every row is as of the newest."""
        return all(is_lossless(manifest.kind) for manifest in self.manifests)


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that is not restored from, and why. step: None where its manifest cannot be read."""

    name: str
    why: str
    step: int | None = None

    @property
    def words(self) -> str:
        """Its name, once, and why."""
        return self.why if self.why.startswith(self.name) else f"{self.name}: {self.why}"


def chains(
    store: Store,
    is_wanted: Callable[[int, int], bool] = lambda epoch, number: True,
    opened: Collection[Manifest] = (),
) -> Iterator[Chain | Skipped]:
    """Every checkpoint of the store, newest first by (epoch, number): its chain, or what is wrong with it.

    is_wanted: by the epoch it was written under and its number; others are passed over, and not read.
    opened: manifests that the caller has of an earlier call; they are not read again, nor their objects looked for.

    Raises BadInput when a newer version of this program wrote one: to fall back silently behind it would lose work.
    """
    names = [name for name in manifest_names(store) if (age := age_of(name)) is not None and is_wanted(*age)]
    there = store.names("blobs/")  # later: of what is saved meanwhile the manifest comes last
    known: dict[str, Manifest | Damaged] = {manifest.name: manifest for manifest in opened}
    for name in reversed(names):
        try:
            yield _chain(store, name, known, there)
        except Damaged as error:
            yield Skipped(name, str(error), _step_of(store, name))


def _step_of(store: Store, name: str) -> int | None:
    try:
        return from_json(store.get(name), name).step
    except (Damaged, NotFound):
        return None


def open_chain(store: Store, name: str) -> Chain:
    """The chain of one checkpoint, as a restore opens it. Raises Damaged saying what keeps it from being restored."""
    return _chain(store, name, {}, store.names("blobs/"))


def _chain(store: Store, name: str, known: dict[str, Manifest | Damaged], there: dict[str, int]) -> Chain:
    found: list[Manifest] = []
    at: str | None = name
    while at is not None:  # ends: a parent's name is smaller, or the manifest is Damaged
        try:
            manifest = _manifest(store, at, known, there)
        except Damaged as error:
            raise error if at == name else Damaged(f"{name} is on top of {at}, and {error}") from error
        found.append(manifest)
        at = manifest.parent
    if (state := found[0].state) is not None:  # of the others, only the rows are needed
        _require(store, name, state, there)
    return Chain(tuple(reversed(found)))


def _manifest(store: Store, name: str, known: dict[str, Manifest | Damaged], there: dict[str, int]) -> Manifest:
    if name not in known:
        try:
            known[name] = _checked(store, from_json(store.get(name), name), there)
        except NotFound:
            known[name] = Damaged(f"{name} is gone")
        except Damaged as error:
            known[name] = error
    found = known[name]
    if isinstance(found, Damaged):
        raise found
    return found


def _checked(store: Store, manifest: Manifest, there: dict[str, int]) -> Manifest:
    for blob in manifest.blobs:
        _require(store, manifest.name, blob, there)
    return manifest


def _require(store: Store, manifest: str, blob: Blob | StateBlob, there: dict[str, int]) -> None:
    if blob.name not in there:
        if not is_there(store, blob.name, blob.n_bytes):
            raise Damaged(f"{manifest}: {blob.name} is gone")
    elif there[blob.name] != blob.n_bytes:
        raise Damaged(f"{manifest}: {blob.name} has {there[blob.name]} bytes, {blob.n_bytes} were saved")
