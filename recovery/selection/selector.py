"""Which rows the next save takes, by the configured policy; and what the policy has to remember for that.

Puts together what is decided elsewhere: `importance` (and thresholds), `sampled_accesses` (the lists of SSU),
`update_tracker` (what changed). A save is `begin`, then `note` of everything that was read, then `commit` or `abandon`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import numpy as np

from recovery.config import Config
from recovery.errors import BadInput
from recovery.policies import POLICIES, SAVE_POLICIES, SavePolicy, lossless_kind
from recovery.rows import Choice, RowIndices, RowSource, everything
from recovery.selection import importance
from recovery.selection.sampled_accesses import SampledAccesses, SampledRowSource
from recovery.selection.scar import Scar
from recovery.selection.update_tracker import BYTES_PER_ROW, Tracker

_PIECE = 1 << 20  # rows looked at at once, so that looking takes little memory however large a shard is
_Importance = Callable[[int, int, slice], np.ndarray]
"""(table, shard, consecutive indices) -> [n]; 0: not worth saving."""


def bytes_per_row(policy: str) -> int:
    """Of what a policy keeps of each row beside the rows, in the file of its tracker."""
    return BYTES_PER_ROW if policy in ("delta", "mfu") else 0


class Selection:
    """Selects rows of the shards that a row source has. The writer's thread owns it."""

    def __init__(
        self,
        source: RowSource,
        config: Config,
        *,
        tracker_path: Path | None = None,
        counters: str = "",
        rng: np.random.Generator | None = None,
    ) -> None:
        """tracker_path, counters: see `Tracker`. rng: of SSU."""
        self._source, self._config = source, config
        self._small = importance.small_tables(source.schema)
        self._row_fraction = config.row_fraction
        if config.save_bytes is not None:
            self._row_fraction = importance.share_within(source.schema, config.save_bytes)
        self._tracker = Tracker(source, tracker_path, counters) if bytes_per_row(config.policy) else None
        self._valid_for: str | None = None
        self._policy: SavePolicy | None = None  # where neither the tracker nor the stream of updates decides
        if config.policy == "scar":
            self._policy = Scar(source)
        elif config.policy not in POLICIES:
            self._policy = SAVE_POLICIES.get(config.policy)(source)
        self._taken: dict[tuple[int, int], np.ndarray] = {}  # by SSU, for the save in flight
        self._again: dict[tuple[int, int], np.ndarray] = {}  # those of a save that failed
        self._rng = rng or np.random.default_rng()
        if config.policy == "ssu":
            if not hasattr(source, "sampled_accesses"):
                raise BadInput(
                    f"{type(source).__name__} does not sample accesses (sampled_accesses), which ssu needs; use mfu"
                )
            self._lists(self._rng)  # refuses other ones than the configured, now

    def is_valid_for(self, manifest: str | None) -> bool:
        """Whether a partial save on top of this manifest would be right."""
        if self._tracker is not None:
            return self._tracker.is_valid_for(manifest)
        return manifest is not None and manifest == self._valid_for

    def expected_bytes(self, kind: str) -> int:
        """About how much a save would write, before compression."""
        total, schema = 0, self._source.schema
        for shard in self._source.shards():
            for number, table in enumerate(schema.tables):
                n = table.rows_in(shard, schema.n_shards)
                if kind == "delta":
                    n = sum(int(np.count_nonzero(self._since(number, shard, piece))) for piece in _pieces(n))
                elif kind != "full" and number not in self._small:
                    n = importance.n_taken(kind, n, self._row_fraction)
                total += n * table.record_bytes
        return total

    # --- one save ----------------------------------------------------------------------------------------------------

    def begin(self, kind: str) -> Choice:
        """Which rows a save of this kind takes."""
        if kind not in ("full", self._config.policy, lossless_kind(self._config.policy)):
            raise BadInput(f"a save can be full or {self._config.policy} (the policy), not {kind}")
        if self._tracker is not None:
            self._tracker.begin(full=kind == "full")
        whole = everything(self._source)
        if kind == "full":
            self._take_all()
            return whole
        if kind == "delta":
            return self._changed
        importance_of = self._since if self._policy is None else self._policy.importance
        chosen = self._sampled if kind == "ssu" else self._above(importance_of)
        return lambda table, shard: whole(table, shard) if table in self._small else chosen(table, shard)

    def note(self, table: int, shard: int, indices: RowIndices, records: np.ndarray, counts: np.ndarray) -> None:
        if self._tracker is not None:
            self._tracker.record(table, shard, indices, counts)
        if self._policy is not None:
            self._policy.saved(table, shard, indices, records, counts)

    def commit(self, manifest: str) -> None:
        self._taken.clear()
        self._valid_for = manifest
        if self._tracker is not None:
            self._tracker.commit(manifest)

    def abandon(self) -> None:
        """Nothing of this save counts. SSU takes its rows again; what a policy has noted is of no use."""
        if self._tracker is not None:
            self._tracker.rollback()
        for part, indices in self._taken.items():
            self._again[part] = np.union1d(self._again.get(part, indices), indices)
        self._taken.clear()
        if self._policy is not None:
            self._valid_for = None

    def restored(self, manifest: str, shards: tuple[int, ...] | None = None) -> None:
        """The rows of these shards (None: of all that are here) have just come out of this manifest's chain."""
        if self._tracker is not None:
            self._tracker.restored(manifest, shards)
        for shard in self._source.shards() if shards is None else shards:
            for table in range(len(self._source.schema.tables)):
                if self._policy is not None:
                    self._policy.restored(table, shard)
                if self._config.policy == "ssu":
                    self._sampled(table, shard)
                    self._taken.pop((table, shard))
        if shards is None:
            self._valid_for = manifest
        elif manifest != self._valid_for:
            self._valid_for = None

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()

    # --- policies ----------------------------------------------------------------------------------------------------

    def _since(self, table: int, shard: int, indices: slice) -> np.ndarray:
        assert self._tracker is not None
        return self._tracker.updates_since_save(table, shard, indices)

    def _changed(self, table: int, shard: int) -> RowIndices:
        n = len(self._source.slab(table, shard))
        found = [np.flatnonzero(self._since(table, shard, piece)) + piece.start for piece in _pieces(n)]
        indices = np.concatenate(found) if found else np.empty(0, np.int64)
        return slice(0, n) if len(indices) == n else indices  # all rows need no indices

    def _above(self, score: _Importance) -> Choice:
        """The share r of each table that is most important, over all shards that are here."""
        shards, schema = self._source.shards(), self._source.schema
        limits: dict[tuple[int, int], list[tuple[slice, int, int]]] = {}
        for number, table in enumerate(schema.tables):
            if number in self._small:
                continue
            n_rows = [table.rows_in(shard, schema.n_shards) for shard in shards]
            parts = [(shard, piece) for shard, n in zip(shards, n_rows, strict=True) for piece in _pieces(n)]
            found = [importance.histogram(score(number, shard, piece)) for shard, piece in parts]
            limit = importance.threshold(
                found, importance.n_taken(self._config.policy, sum(n_rows), self._row_fraction)
            )
            for (shard, piece), quota in zip(parts, limit.quotas, strict=True):
                limits.setdefault((number, shard), []).append((piece, limit.key, quota))

        def choose(table: int, shard: int) -> RowIndices:
            found = [
                importance.at_least(score(table, shard, piece), key, quota) + piece.start
                for piece, key, quota in limits.get((table, shard), [])
            ]
            return np.concatenate(found) if found else np.empty(0, np.int64)

        return choose

    def _sampled(self, table: int, shard: int) -> RowIndices:
        """What SSU has listed, and rows of a save that failed as far as the share r allows."""
        taken = np.empty(0, np.int64)
        if (listed := self._lists().get((table, shard))) is not None:
            taken = listed.take(lambda: self._source.step_marks(shard))
            again = np.setdiff1d(self._again.pop((table, shard), taken), taken)
            room = max(0, listed.capacity - len(taken))
            taken = np.union1d(taken, again if len(again) <= room else self._rng.choice(again, room, replace=False))
        self._taken[table, shard] = taken
        return taken

    def _take_all(self) -> None:
        if self._config.policy == "ssu":
            for part in self._lists():
                self._sampled(*part)

    def _lists(self, rng: np.random.Generator | None = None) -> Mapping[tuple[int, int], SampledAccesses]:
        capacities = importance.list_capacities(self._source.schema, self._row_fraction)
        return cast(SampledRowSource, self._source).sampled_accesses(capacities, self._config.ssu_period, rng)


def _pieces(n_rows: int) -> list[slice]:
    return [slice(start, min(start + _PIECE, n_rows)) for start in range(0, n_rows, _PIECE)]
