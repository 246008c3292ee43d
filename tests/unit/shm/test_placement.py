"""Every shard has one home, the newest copy wins, and shards move only as far as the load asks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.shm.placement import HostShards, Placement, WorkerTopology, place_shards


@st.composite
def worlds(draw: st.DrawFn, equal_hosts: bool = False) -> tuple[WorkerTopology, list[HostShards]]:
    n_hosts, n_shards = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    if equal_hosts:
        hosts = list(range(n_hosts)) * draw(st.integers(1, 3))
    else:
        hosts = list(range(n_hosts)) + draw(st.lists(st.integers(0, n_hosts - 1), max_size=6))
    hosts = draw(st.permutations(hosts))
    bits = st.lists(st.integers(0, 1), min_size=n_shards, max_size=n_shards)
    steps = st.lists(st.integers(0, 3), min_size=n_shards, max_size=n_shards)
    holdings = []
    for _ in range(n_hosts):
        finished, placed = np.array(draw(steps), dtype=np.int64), np.array(draw(steps), dtype=np.int64)
        holdings.append(HostShards(np.array(draw(bits), dtype=np.int64), finished + 1, finished, placed))
    return WorkerTopology(tuple(100 + 7 * h for h in hosts)), holdings


@pytest.mark.slow
@given(worlds())
def test_every_shard_has_one_home_and_a_server_that_lives_there(world: tuple[WorkerTopology, list[HostShards]]) -> None:
    members, holdings = world
    placed = place_shards(members, holdings)
    assert len(placed.host) == len(placed.rank) == len(holdings[0].ready)
    for shard, home in enumerate(placed.host):
        assert members.hosts[placed.rank[shard]] == members.order[home]


@pytest.mark.slow
@given(worlds())
def test_a_shard_comes_from_a_newest_copy(world: tuple[WorkerTopology, list[HostShards]]) -> None:
    members, holdings = world
    placed = place_shards(members, holdings)
    moved = {shard: (source, target) for shard, source, target in placed.moves}
    for shard, home in enumerate(placed.host):
        copies = [h for h, holding in enumerate(holdings) if holding.ready[shard]]
        assert (shard in placed.new) == (not copies)
        if copies:
            source, target = moved.get(shard, (home, home))
            assert target == home
            assert source in copies
            newest = max((holdings[h].placed[shard], holdings[h].finished[shard]) for h in copies)
            assert (holdings[source].placed[shard], holdings[source].finished[shard]) == newest


@pytest.mark.slow
@given(worlds())
def test_after_moving_and_dropping_one_copy_is_left(world: tuple[WorkerTopology, list[HostShards]]) -> None:
    members, holdings = world
    placed = place_shards(members, holdings)
    have = {(s, h) for h, holding in enumerate(holdings) for s in np.flatnonzero(holding.ready)}
    have |= {(s, placed.host[s]) for s in placed.new}
    have = (have | {(s, to) for s, _, to in placed.moves}) - {(s, source) for s, source, _ in placed.moves}
    have -= set(placed.drops)
    assert have == set(enumerate(placed.host))


@pytest.mark.slow
@given(worlds())
def test_no_move_would_make_the_busiest_host_less_busy(world: tuple[WorkerTopology, list[HostShards]]) -> None:
    members, holdings = world
    placed = place_shards(members, holdings)
    workers = [len(members.ranks_of(host)) for host in members.order]
    count = [placed.host.count(h) for h in range(len(holdings))]
    busiest = max(c / w for c, w in zip(count, workers, strict=True))
    assert all((c + 1) / w >= busiest for c, w in zip(count, workers, strict=True))


@pytest.mark.slow
@given(worlds(equal_hosts=True))
def test_equal_hosts_hold_as_many_shards_within_one(world: tuple[WorkerTopology, list[HostShards]]) -> None:
    members, holdings = world
    placed = place_shards(members, holdings)
    count = [placed.host.count(h) for h in range(len(holdings))]
    assert max(count) - min(count) <= 1


@pytest.mark.slow
@given(worlds(equal_hosts=True))
def test_as_few_shards_move_as_can_be(world: tuple[WorkerTopology, list[HostShards]]) -> None:
    members, holdings = world
    n_shards, n_hosts = len(holdings[0].ready), len(holdings)
    placed = place_shards(members, holdings)
    held = [0] * n_hosts  # before evening out
    moved = {shard: source for shard, source, _ in placed.moves}
    for shard, home in enumerate(placed.host):
        if shard not in placed.new:
            held[moved.get(shard, home)] += 1
    each, more = divmod(n_shards, n_hosts)
    fewest = sum(max(0, h - each) for h in held) - min(more, sum(h > each for h in held))
    assert len(placed.moves) == fewest


@pytest.mark.slow
@given(worlds())
def test_the_workers_of_a_host_share_its_shards(world: tuple[WorkerTopology, list[HostShards]]) -> None:
    members, holdings = world
    placed = place_shards(members, holdings)
    for host in members.order:
        served = [int(np.sum(placed.rank == rank)) for rank in members.ranks_of(host)]
        assert max(served) - min(served) <= 1


def holding(n_shards: int, ready: list[int], finished: int = 0, placed: int = 1) -> HostShards:
    here = np.isin(np.arange(n_shards), ready).astype(np.int64)
    return HostShards(here, here * finished, here * finished, here * placed)


def test_a_new_job_gives_all_shards_initial_rows() -> None:
    placed = place_shards(WorkerTopology((5, 5)), [holding(4, [])])
    assert placed == Placement((0, 0, 0, 0), placed.rank, (0, 1, 2, 3), (), ())
    assert placed.rank.tolist() == [0, 1, 0, 1]


def test_a_host_that_joins_takes_half() -> None:
    placed = place_shards(WorkerTopology((5, 9)), [holding(4, [0, 1, 2, 3], 7), holding(4, [])])
    assert placed.new == ()
    assert placed.moves == ((2, 0, 1), (3, 0, 1))


def test_a_host_that_is_gone_leaves_its_shards_to_start_over() -> None:
    placed = place_shards(WorkerTopology((5,)), [holding(4, [0, 2], 7)])
    assert placed.new == (1, 3)
    assert placed.moves == ()


def test_a_stale_copy_is_dropped() -> None:
    placed = place_shards(WorkerTopology((5, 9)), [holding(2, [0, 1], 3), holding(2, [1], 7)])
    assert placed.host == (0, 1)
    assert placed.drops == ((1, 0),)


def test_a_host_that_comes_back_is_not_believed_however_many_steps_it_has() -> None:
    """Others took its shards over while it was cut off."""
    placed = place_shards(
        WorkerTopology((5, 9)), [holding(4, [0, 1, 2, 3], 7, placed=2), holding(4, [2, 3], 9, placed=1)]
    )
    assert placed.moves == ((2, 0, 1), (3, 0, 1))
    back_first = place_shards(WorkerTopology((9, 5)), [holding(2, [1], 9, placed=1), holding(2, [0, 1], 7, placed=2)])
    assert back_first.moves == ((1, 1, 0),)


@pytest.mark.parametrize(("hosts", "leads"), [((4, 4, 8), [0, 2]), ((8, 4, 8, 4), [0, 1])])
def test_the_lowest_rank_of_a_host_leads_it(hosts: tuple[int, ...], leads: list[int]) -> None:
    members = WorkerTopology(hosts)
    assert [members.leader_of(host) for host in members.order] == leads
