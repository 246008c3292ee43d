"""Who holds and who serves which shard. Pure functions of the membership.

Every worker computes these from the same gathered facts, so all agree without talking further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class WorkerTopology:
    """The workers of a world, by host.

    hosts: for each rank a number that is equal for the ranks that share one memory
    """

    hosts: tuple[int, ...]

    @property
    def order(self) -> list[int]:
        """The distinct hosts, by their lowest rank."""
        return list(dict.fromkeys(self.hosts))

    def ranks_of(self, host: int) -> list[int]:
        return [rank for rank, h in enumerate(self.hosts) if h == host]

    def leader_of(self, host: int) -> int:
        """The rank that acts for a host."""
        return self.ranks_of(host)[0]


@dataclass(frozen=True)
class HostShards:
    """What one host's memory holds of each shard: present or not, and the last step begun and finished. int64 [S].

    placed: counts up whenever a shard is given to a host. A host that was cut off may come back with the shards it had;
    what others took over meanwhile counts more, regardless of the steps.
    """

    ready: np.ndarray
    begun: np.ndarray
    finished: np.ndarray
    placed: np.ndarray


@dataclass(frozen=True)
class Placement:
    """Where the shards live and who serves them.

    host:   shard -> host (index into `WorkerTopology.order`)
    server: int32 [S], shard -> rank
    new:    shards that no host holds; their host gives them initial rows
    moves:  (shard, from host, to host): copied before training resumes
    drops:  (shard, host): copies that are not the shard's home
    """

    host: tuple[int, ...]
    rank: np.ndarray
    new: tuple[int, ...]
    moves: tuple[tuple[int, int, int], ...]
    drops: tuple[tuple[int, int], ...]


def place_shards(members: WorkerTopology, holdings: Sequence[HostShards]) -> Placement:
    """Keep every shard where it was placed last; give the missing ones to the emptiest hosts; then even out.

    `holdings[h]` belongs to `members.order[h]`. Evening out moves as few shards as it takes until no move would
    make the busiest host less busy, in shards per worker (hosts with as many workers: within one shard).
    """
    n_shards, n_hosts = len(holdings[0].ready), len(holdings)
    workers = [len(members.ranks_of(host)) for host in members.order]
    home: list[int] = []
    for shard in range(n_shards):
        copies = [h for h in range(n_hosts) if holdings[h].ready[shard]]
        newest = max(copies, key=lambda h: (holdings[h].placed[shard], holdings[h].finished[shard], -h), default=-1)
        home.append(newest)
    new = tuple(shard for shard in range(n_shards) if home[shard] < 0)
    count = [home.count(h) for h in range(n_hosts)]

    def load(h: int) -> tuple[float, int]:
        return (count[h] + 1) / workers[h], h

    for shard in new:
        home[shard] = min(range(n_hosts), key=load)
        count[home[shard]] += 1
    held = list(home)
    while True:
        source = max(range(n_hosts), key=lambda h: (count[h] / workers[h], -h))
        target = min(range(n_hosts), key=load)
        if load(target)[0] >= count[source] / workers[source]:
            break
        movable = [s for s in range(n_shards) if home[s] == source]
        shard = next((s for s in reversed(movable) if s in new), movable[-1])
        home[shard] = target
        count[source] -= 1
        count[target] += 1
    moves = [(s, held[s], home[s]) for s in range(n_shards) if held[s] != home[s] and s not in new]
    drops = [(s, h) for h in range(n_hosts) for s in range(n_shards) if holdings[h].ready[s] and h != home[s]]
    server = np.empty(n_shards, dtype=np.int32)
    for h, host in enumerate(members.order):
        ranks = members.ranks_of(host)
        for i, shard in enumerate(s for s in range(n_shards) if home[s] == h):
            server[shard] = ranks[i % len(ranks)]
    return Placement(tuple(home), server, new, tuple(moves), tuple(drops))
