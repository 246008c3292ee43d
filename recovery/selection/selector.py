"""Which rows the next save takes, by the configured policy; and what the policy has to remember for that.

Puts together what is decided elsewhere: `importance` (and thresholds), `subsampled_updates` (the list of SSU),
`update_tracker` (what changed). A save is `begin`, then `note` of everything that was read, then `commit` or `abandon`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np

from recovery.config import Config
from recovery.errors import BadInput
from recovery.policies import POLICIES, SAVE_POLICIES, SavePolicy
from recovery.rows import Choice, ObservableRowSource, RowIndices, RowSource, everything
from recovery.selection import importance
from recovery.selection.scar import Scar
from recovery.selection.subsampled_updates import SubSampled
from recovery.selection.update_tracker import Tracker

_PIECE = 1 << 20  # rows looked at at once, so that looking takes little memory however large a shard is
_Importance = Callable[[int, int, slice], np.ndarray]
"""(table, shard, consecutive places) -> [n]; 0: not worth saving."""


class Selection:
    """Of the shards that a row source has. The writer's thread owns it; only `updated` may be called by another."""

    def __init__(
        self,
        holder: RowSource,
        config: Config,
        *,
        tracker_path: Path | None = None,
        counters: str = "",
        rng: np.random.Generator | None = None,
    ) -> None:
        """tracker_path, counters: see `Tracker`. rng: of SSU."""
        self._holder, self._config = holder, config
        self._small = importance.small_tables(holder.schema)
        self._tracker = Tracker(holder, tracker_path, counters) if config.policy in ("delta", "mfu") else None
        self._valid_for: str | None = None
        self._policy: SavePolicy | None = None  # where neither the tracker nor the stream of updates decides
        if config.policy == "scar":
            self._policy = Scar(holder)
        elif config.policy not in POLICIES:
            self._policy = SAVE_POLICIES.get(config.policy)(holder)
        self._lists: dict[tuple[int, int], SubSampled] = {}
        self._taken: dict[tuple[int, int], np.ndarray] = {}
        self._lock = threading.Lock()
        self._rng = rng or np.random.default_rng()
        if config.policy == "ssu":
            if not hasattr(holder, "listen"):
                raise BadInput(f"{type(holder).__name__} does not tell its updates (listen), which ssu needs; use mfu")
            cast(ObservableRowSource, holder).listen(self.updated)

    @property
    def n_bytes(self) -> int:
        """Memory that the policy takes for the shards that are here."""
        schema, config = self._holder.schema, self._config
        return sum(
            importance.extra_bytes(
                config.policy, table.rows_in(shard, schema.n_shards), table.record_bytes, config.row_fraction
            )
            for shard in self._holder.shards()
            for table in schema.tables
        )

    def is_valid_for(self, manifest: str | None) -> bool:
        """Whether a partial save on top of this manifest would be right."""
        if self._tracker is not None:
            return self._tracker.is_valid_for(manifest)
        return manifest is not None and manifest == self._valid_for

    def expected_bytes(self, kind: str) -> int:
        """About how much a save would write, before compression."""
        total, schema = 0, self._holder.schema
        for shard in self._holder.shards():
            for number, table in enumerate(schema.tables):
                n = table.rows_in(shard, schema.n_shards)
                if kind == "delta":
                    n = sum(int(np.count_nonzero(self._since(number, shard, piece))) for piece in _pieces(n))
                elif kind != "full" and number not in self._small:
                    n = importance.n_taken(kind, n, self._config.row_fraction)
                total += n * table.record_bytes
        return total

    # --- one save ----------------------------------------------------------------------------------------------------

    def begin(self, kind: str) -> Choice:
        """Which rows a save of this kind takes."""
        if kind not in ("full", self._config.policy):
            raise BadInput(f"a save can be full or {self._config.policy} (the policy), not {kind}")
        if self._tracker is not None:
            self._tracker.begin(full=kind == "full")
        whole = everything(self._holder)
        if kind == "full":
            self._take_all()
            return whole
        if kind == "delta":
            return self._changed
        importance_of = self._since if self._policy is None else self._policy.importance
        chosen = self._sampled if kind == "ssu" else self._above(importance_of)
        return lambda table, shard: whole(table, shard) if table in self._small else chosen(table, shard)

    def note(self, table: int, shard: int, places: RowIndices, records: np.ndarray, counts: np.ndarray) -> None:
        if self._tracker is not None:
            self._tracker.record(table, shard, places, counts)
        if self._policy is not None:
            self._policy.saved(table, shard, places, records, counts)

    def commit(self, manifest: str) -> None:
        self._taken.clear()
        self._valid_for = manifest
        if self._tracker is not None:
            self._tracker.commit(manifest)

    def abandon(self) -> None:
        """Nothing of this save counts. SSU's rows go back to their lists; what a policy has noted is of no use."""
        if self._tracker is not None:
            self._tracker.rollback()
        for (table, shard), places in self._taken.items():
            self.updated(table, shard, np.repeat(places, self._config.ssu_period))  # one of so many is looked at
        self._taken.clear()
        if self._policy is not None:
            self._valid_for = None

    def restored(self, manifest: str, shards: tuple[int, ...] | None = None) -> None:
        """The rows of these shards (None: of all that are here) have just come out of this manifest's chain."""
        if self._tracker is not None:
            self._tracker.restored(manifest, shards)
        if self._policy is not None:
            for shard in self._holder.shards() if shards is None else shards:
                for table in range(len(self._holder.schema.tables)):
                    self._policy.restored(table, shard)
        if shards is None:
            self._valid_for = manifest
        elif manifest != self._valid_for:
            self._valid_for = None

    def updated(self, table: int, shard: int, places: np.ndarray) -> None:
        """SSU: these rows were updated."""
        if table not in self._small and len(places):
            with self._lock:
                self._list(table, shard).add(places)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()

    # --- policies ----------------------------------------------------------------------------------------------------

    def _since(self, table: int, shard: int, places: slice) -> np.ndarray:
        assert self._tracker is not None
        return self._tracker.updates_since_save(table, shard, places)

    def _changed(self, table: int, shard: int) -> RowIndices:
        n = len(self._holder.slab(table, shard))
        found = [importance.changed(self._since(table, shard, piece)) + piece.start for piece in _pieces(n)]
        places = np.concatenate(found) if found else np.empty(0, np.int64)
        return slice(0, n) if len(places) == n else places  # all rows need no places

    def _above(self, score: _Importance) -> Choice:
        """The share r of each table that is most important, over all shards that are here."""
        shards, schema = self._holder.shards(), self._holder.schema
        limits: dict[tuple[int, int], list[tuple[slice, int, int]]] = {}
        for number, table in enumerate(schema.tables):
            if number in self._small:
                continue
            n_rows = [table.rows_in(shard, schema.n_shards) for shard in shards]
            parts = [(shard, piece) for shard, n in zip(shards, n_rows, strict=True) for piece in _pieces(n)]
            found = [importance.histogram(score(number, shard, piece)) for shard, piece in parts]
            limit = importance.threshold(
                found, importance.n_taken(self._config.policy, sum(n_rows), self._config.row_fraction)
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
        with self._lock:
            taken = self._list(table, shard).take()
        self._taken[table, shard] = taken
        return taken

    def _take_all(self) -> None:
        with self._lock:
            self._taken = {part: rows.take() for part, rows in self._lists.items()}

    def _list(self, table: int, shard: int) -> SubSampled:
        if (table, shard) not in self._lists:
            schema = self._holder.schema
            n = schema.tables[table].rows_in(shard, schema.n_shards)
            capacity = importance.n_taken("ssu", n, self._config.row_fraction)
            self._lists[table, shard] = SubSampled(n, capacity, rng=self._rng, period=self._config.ssu_period)
        return self._lists[table, shard]


def _pieces(n_rows: int) -> list[slice]:
    return [slice(start, min(start + _PIECE, n_rows)) for start in range(0, n_rows, _PIECE)]
