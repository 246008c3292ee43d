"""Rows of some servers that only exist in a simulation: how often each is updated, what is saved, what a failure loses.

The row source is a model (popularity by Zipf's law, independent updates); what is kept of it, compared and chosen is
done by the code that real jobs run: `update_tracker`, `importance`, `sampled_accesses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recovery.errors import BadInput
from recovery.policies import POLICIES
from recovery.rows import Column, RowIndices, RowView, Schema, Table
from recovery.selection import importance
from recovery.selection.sampled_accesses import SampledAccesses
from recovery.selection.update_tracker import Tracker


@dataclass(frozen=True)
class RowModel:
    """A sample of a job's servers. Servers are alike, so what these lose on average, all do.

    n_servers, rows_per_server: of the sample; row i is at server i mod n_servers
    updates_per_row_h: mean updates of a row in an hour. 0.1 is about a day's log of 40 million samples, seen once in
        56 hours, on tables of some million rows
    zipf: the i-th most popular row gets updates in proportion to 1 / i^zipf
    """

    n_servers: int = 8
    rows_per_server: int = 1000
    updates_per_row_h: float = 0.1
    zipf: float = 1.05

    def __post_init__(self) -> None:
        if min(self.n_servers, self.rows_per_server) < 1 or not self.updates_per_row_h > 0 or self.zipf < 0:
            raise BadInput(f"a model of rows needs servers, rows and updates, got {self}")


class SimulatedRows:
    """A `RowSource` whose shards are the sampled servers. Time passes by `pass_time`; values exist for "scar" only."""

    def __init__(self, model: RowModel, rng: np.random.Generator, policy: str, r: float) -> None:
        if policy not in POLICIES:
            raise BadInput(f"policy {policy!r} is registered; simulated are {', '.join(POLICIES)}")
        n = model.n_servers * model.rows_per_server
        self.schema = Schema((Table("rows", n, (Column("weight", 1),)),), model.n_servers)
        self.updates_per_s = n * model.updates_per_row_h / 3600
        popularity = np.arange(1, n + 1) ** -model.zipf
        rates = self.updates_per_s * popularity / popularity.sum()
        self._rates = np.ascontiguousarray(rates.reshape(-1, model.n_servers).T)  # [server, row]
        self._counts = np.zeros(self._rates.shape, np.uint32)
        self._values = np.zeros((*self._rates.shape, 1), np.float32)
        self._kept = self._values.copy()
        self._rng, self._policy, self._r = rng, policy, r
        self._streams = [
            SampledAccesses.private(model.rows_per_server, importance.n_taken("ssu", model.rows_per_server, r))
            for _ in range(model.n_servers if policy == "ssu" else 0)
        ]
        self._tracker = Tracker(self)
        self._now_s, self._saved_s = 0.0, np.zeros(self._rates.shape)

    def shards(self) -> Sequence[int]:
        return range(self.schema.n_shards)

    def slab(self, table: int, shard: int) -> RowView:
        return RowView((self._values[shard],), self._counts[shard])

    def step_marks(self, shard: int) -> tuple[int, int]:
        return 0, 0  # nothing happens beside a save here

    def pass_time(self, seconds: float) -> None:
        """Rows are updated for so long."""
        if seconds <= 0:
            return
        self._now_s += seconds
        updates = self._rng.poisson(self._rates * seconds)
        self._counts += updates.astype(np.uint32)
        if self._policy == "scar":  # a random walk: every update moves a row by as much, in a direction of its own
            moved = self._rng.standard_normal(updates.shape) * np.sqrt(updates)
            self._values[..., 0] += moved.astype(np.float32)
        for shard, stream in enumerate(self._streams):
            stream.add(self._rng.permutation(np.repeat(np.arange(updates.shape[1]), updates[shard])), self._rng)

    def save(self, kind: str) -> float:
        """Save what `kind` takes; its share of all rows."""
        chosen = self._chosen(kind)
        self._tracker.begin(full=kind == "full")
        n_rows = 0
        for shard, indices in enumerate(chosen):
            counts = self._counts[shard][indices]
            self._tracker.record(0, shard, indices, counts)
            self._kept[shard][indices] = self._values[shard][indices]
            self._saved_s[shard][indices if kind != "delta" else slice(None)] = self._now_s
            n_rows += len(counts)
        self._tracker.commit("simulated")
        return n_rows / self.schema.n_rows

    def lose(self, shard: int) -> tuple[float, float]:
        """A server fails and gets back what was saved. How many updates are gone; seconds since each of its rows was
        itself saved last, or was left out by a delta, mean."""
        since_s = self._now_s - float(self._saved_s[shard].mean())
        lost = float(self._tracker.updates_since_save(0, shard).sum(dtype=np.int64))
        self._values[shard] = self._kept[shard]
        self._tracker.restored("simulated", [shard])
        return lost, since_s

    def _chosen(self, kind: str) -> list[RowIndices]:
        if kind == "full":
            for stream in self._streams:
                stream.take()
            return [slice(None) for _ in self.shards()]
        if kind == "ssu":
            return [stream.take() for stream in self._streams]
        if kind == "delta":
            return [np.flatnonzero(self._tracker.updates_since_save(0, shard)) for shard in self.shards()]
        important = [
            importance.l2_change(self._values[s], self._kept[s])
            if kind == "scar"
            else self._tracker.updates_since_save(0, s)
            for s in self.shards()
        ]
        limit = importance.threshold(
            [importance.histogram(of_shard) for of_shard in important],
            importance.n_taken(kind, self.schema.n_rows, self._r),
        )
        return [
            importance.at_least(of_shard, limit.key, quota)
            for of_shard, quota in zip(important, limit.quotas, strict=True)
        ]
