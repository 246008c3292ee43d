"""What a run knows of the checkpoints at its location: the chain in force, what comes next, which ones expire.

Not thread-safe: one thread at a time restores or saves.
"""

from __future__ import annotations

import contextlib

from recovery.catalog import retention
from recovery.catalog.chains import Chain, chains
from recovery.catalog.retention import Expired, Keep
from recovery.errors import BadInput, Damaged
from recovery.format.manifest import Manifest, from_json
from recovery.schedule import planner
from recovery.selection.selector import Selection
from recovery.storage.store import Store, epoch_of, manifest_names


class ActiveChain:
    """chain: what is on the store and what the next partial save can be on top of; None: nothing is."""

    def __init__(self, store: Store, selection: Selection) -> None:
        self._store, self._selection = store, selection
        self.chain: Chain | None = None
        self._manifests: dict[str, Manifest] = {}

    def find(self) -> None:
        """Resume from the newest checkpoint there is; the tracker says whether it is of this memory."""
        newest = next(chains(self._store), None)
        if isinstance(newest, Chain):
            self.chain = newest

    def next_kind(self, wanted: str) -> tuple[str, str]:
        """("full" or the wanted kind, why)."""
        chain = self.chain
        if chain is None:
            return planner.next_kind(planner.ChainSize(), wanted)
        trusted = self._selection.is_valid_for(chain.newest.name)
        expected = self._selection.expected_bytes(wanted) if trusted and wanted != "full" else 0
        partial = sum(_rows_bytes(manifest) for manifest in chain.manifests[1:])
        return planner.next_kind(planner.ChainSize(_rows_bytes(chain.base), partial, expected, trusted), wanted)

    def add(self, manifest: Manifest) -> None:
        """It is in the store."""
        before = () if manifest.parent is None or self.chain is None else self.chain.manifests
        self.chain = Chain((*before, manifest))
        self._manifests[manifest.name] = manifest

    def expire(self, epochs: range, keep: Keep, job: str | None = None) -> Expired:
        """Delete what is no longer needed of what was written under these epochs. Raises StoreError.

        job: and names this job; None: whichever
        """
        for name in manifest_names(self._store):
            if name not in self._manifests:
                with contextlib.suppress(Damaged, BadInput):  # of another version: what it needs is not ours
                    self._manifests[name] = from_json(self._store.get(name), name)
        # By the epoch, not from memory: one whose last write had no answer may be there all the same.
        under = [one for name, one in self._manifests.items() if epoch_of(name) in epochs]
        mine = [one.name for one in under if job is None or one.about.get("job", "") == job]
        gone = retention.expired(list(self._manifests.values()), mine, keep)
        if gone.manifests:
            retention.delete(self._store, gone)
        for name in gone.manifests:
            del self._manifests[name]
        return gone


def _rows_bytes(manifest: Manifest) -> int:
    return sum(blob.n_bytes for blob in manifest.blobs)
