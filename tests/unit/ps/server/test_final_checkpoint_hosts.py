"""The last checkpoint of several hosts: all servers agree on it in the store, or nothing counts and it is said why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd.ps.messages import DelegateClaim, Save, SaveAbout, SaveSettings, SaveStatus
from gba_hvd.ps.partition.saver import Saver
from gba_hvd.ps.server import final_checkpoint_hosts
from gba_hvd.shm.checkpoint_rows import ShardRows
from gba_hvd.shm.retained_state import RetainedState
from gba_hvd.shm.shard_memory import ShardMemory
from recovery import state_codec
from recovery.catalog import claims, retention
from recovery.catalog.chains import Chain, chains
from recovery.catalog.epoch_position import EpochPosition, position_of
from recovery.config import Config
from recovery.restore import restore
from recovery.storage.open import open_store

TABLES = {"user": (20, 4), "item": (7, 4)}
STEP, TIMEOUT_S = 8, 80.0


class Hosts:
    """Two hosts with a memory and a server each, without workers: the first has shards 0 and 2, and the state."""

    def __init__(self, url: Path, memories: list[ShardMemory], final_checkpoint_s: float) -> None:
        self.memories, self.store = memories, open_store(url)
        for memory, mine in zip(memories, ([0, 2], [1]), strict=True):
            for shard in range(3):
                if shard in mine:
                    memory.set_ready(shard, STEP)
                else:
                    memory.drop(shard)
        self.claim = claims.claim(self.store, "job.1", lease_s=0.1)
        settings = SaveSettings(str(url), {}, Config(policy="delta"), final_checkpoint_s)
        self.servers = [Saver(memory, memory.folder / "saved") for memory in memories]
        for part, server in enumerate(self.servers):
            server.hold(DelegateClaim(self.claim, settings, SaveAbout(job="1"), self.claim.epoch, part, 2))

    def gone(self, part: int, kept: RetainedState | None = None) -> None:
        """The server of this host finds that all workers are gone."""
        final_checkpoint_hosts.begin(self.servers[part], self.memories[part], kept)

    def report(self, part: int) -> SaveStatus:
        thread = self.servers[part]._thread
        assert thread is not None
        thread.join(TIMEOUT_S)
        assert self.servers[part].report().state != "running"
        return self.servers[part].report()

    def checkpoints(self) -> list[Chain]:
        return [one for one in chains(self.store) if isinstance(one, Chain)]


@pytest.fixture
def hosts(make_tables: Callable[..., gba_hvd.EmbeddingTables], tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(final_checkpoint_s: float = TIMEOUT_S) -> Hosts:
        memories = [make_tables(TABLES).memory for _ in range(2)]
        made.append(Hosts(tmp_path / "place", memories, final_checkpoint_s))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for server in (server for one in made for server in one.servers):
        server.close()


def state_of(step: int = STEP) -> RetainedState:
    account = {"applied": 96 * step, "shard_steps_missed": 5}
    position = {"account": account, "cursor": {"epoch": 2, "segment": 0, "steps_done": 3, "n_steps": 8}, "order": None}
    return RetainedState(step, 0, 77, state_codec.encode({"position": position, "model": np.arange(3.0)}))


def missed_in(chain: Chain, place: Hosts, into: ShardMemory) -> int:
    """What the account of the restored state says; all rows are restored into this memory."""
    report = restore(place.store, ShardRows(into, lambda: [0, 1, 2], filling=True))
    assert report is not None and report.state is not None and report.manifest == chain.newest
    missed: int = state_codec.decode(report.state)["position"]["account"]["shard_steps_missed"]
    return missed


@pytest.mark.slow
def test_all_hosts_together_save_what_they_have(hosts: Callable[..., Hosts]) -> None:
    job = hosts()
    for host, memory in enumerate(job.memories):
        for shard in memory.ready():
            ShardRows(memory).slab(0, shard).columns[0][:] = 10.0 * host + shard
    job.gone(1)
    job.gone(0, state_of())
    assert (job.report(0).state, job.report(1).state) == ("done", "part")
    (chain,) = job.checkpoints()
    assert (chain.newest.step, chain.newest.samples, chain.newest.about["last_gasp"]) == (STEP, 96 * STEP, True)
    assert position_of(chain.newest) == EpochPosition(2, 3, 8, n_segments=0), (
        "not that at which the workers' world had formed"
    )
    assert missed_in(chain, job, job.memories[0]) == 5
    rows = ShardRows(job.memories[0], lambda: [0, 1, 2], filling=True)
    assert [rows.slab(0, shard).columns[0][0, 0] for shard in range(3)] == [0.0, 11.0, 2.0]
    assert not job.store.names(f"blobs/{job.claim.epoch:06d}-last/")


@pytest.mark.slow
def test_steps_that_shards_missed_are_counted(hosts: Callable[..., Hosts]) -> None:
    """Killed between the commit and the end of applying: one shard is behind, one is in the middle, one is ahead."""
    job = hosts()
    job.memories[1].set_ready(1, STEP - 1)
    job.memories[0].set_ready(0, STEP - 1)
    job.memories[0].begin(np.array([0]), STEP)
    job.memories[0].begin(np.array([2]), STEP + 1)
    job.gone(0, state_of())
    job.gone(1)
    assert (job.report(0).state, job.report(1).state) == ("done", "part")
    assert job.memories[0].steps_of(0) == (STEP - 1, STEP), "the memory is as it was: somebody may still go on from it"
    assert missed_in(job.checkpoints()[0], job, job.memories[1]) == 5 + 2


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_rows_that_do_not_belong_to_the_state_are_refused(hosts: Callable[..., Hosts], host: int) -> None:
    job = hosts()
    shard = job.memories[host].ready()[0]
    job.memories[host].set_ready(shard, STEP - 2)
    job.gone(0, state_of())
    job.gone(1)
    for part in (0, 1) if host == 0 else (0,):
        assert job.report(part).state == "failed"
        assert "the training state is of step 8, the rows of" in job.report(part).facts.why
    assert not job.checkpoints()


@pytest.mark.slow
def test_hosts_that_do_not_have_each_shard_once_save_nothing(hosts: Callable[..., Hosts]) -> None:
    job = hosts()
    job.memories[0].set_absent(0)
    job.memories[0].set_ready(1, STEP)
    job.gone(0, state_of())
    job.gone(1)
    assert "lack shards [0], and have shards [1] more than once" in job.report(0).facts.why
    assert not job.checkpoints()


@pytest.mark.parametrize("kept", [None, replace(state_of(), generation=3)], ids=["none", "of an asynchronous mode"])
def test_without_a_training_state_nothing_is_saved_and_all_learn_why(hosts: Callable[..., Hosts], kept: Any) -> None:
    job = hosts()
    job.gone(0, kept)
    assert "the training state was not kept" in job.report(0).facts.why
    job.gone(1)
    assert "the training state was not kept" in job.report(1).facts.why
    assert not job.checkpoints()


@pytest.mark.slow
def test_a_host_whose_workers_live_is_not_waited_for_longer_than_half_of_the_time(hosts: Callable[..., Hosts]) -> None:
    job = hosts(final_checkpoint_s=0.5)
    job.gone(0, state_of())
    assert "servers of hosts [1] of 2 have not reported that their workers are gone" in job.report(0).facts.why
    job.gone(1)  # too late
    assert "have not reported" in job.report(1).facts.why
    assert not job.checkpoints()


@pytest.mark.slow
def test_a_first_server_that_is_gone_is_not_waited_for_for_ever(hosts: Callable[..., Hosts]) -> None:
    job = hosts(final_checkpoint_s=0.5)
    job.gone(1)
    assert "the server of the first host has sent no order to save" in job.report(1).facts.why
    assert not job.store.names(f"blobs/{job.claim.epoch:06d}-last/")


def test_what_a_server_leaves_that_died_after_its_word_is_no_checkpoint(hosts: Callable[..., Hosts]) -> None:
    job = hosts()
    final_checkpoint_hosts.publish(
        job.store, job.claim.epoch, final_checkpoint_hosts.SaveOrder(STEP, step=STEP)
    )  # and was killed
    job.gone(1)
    assert job.report(1).state == "part"
    assert not job.checkpoints()
    claims.claim(job.store, "job.1", lease_s=0.1)  # the job goes on
    left = retention.gc(job.store, really=True)
    assert any(name.endswith("/word") for name in left.objects) and any("/part-0001" in name for name in left.objects)
    assert not job.store.names("blobs/")


@pytest.mark.parametrize("part", [0, 1])
def test_workers_that_go_on_elsewhere_make_it_stop(hosts: Callable[..., Hosts], part: int) -> None:
    job = hosts()
    claims.claim(job.store, "job.1", lease_s=0.1)  # their world
    job.gone(part, state_of())
    assert "has taken over" in job.report(part).facts.why
    assert not job.checkpoints()


@pytest.mark.slow
def test_a_save_that_nobody_was_left_to_ask_the_other_host_for_fails_and_the_last_one_is_made(
    hosts: Callable[..., Hosts],
) -> None:
    """The chief's worker had asked its server, and the other one was killed before."""
    job = hosts()
    held = job.servers[0].held
    assert held is not None
    request = Save(
        epoch=job.claim.epoch, number=STEP, part=0, n_parts=2, kind="full", parent=None, step=STEP, samples=1,
        settings=held.settings, claim=held.claim, about=SaveAbout(), first_epoch=held.first_epoch,
    )  # fmt: skip
    job.servers[0].begin(request, [0, 2], lambda parts: b"state")
    job.servers[0].workers_are_gone()
    job.gone(1)
    assert "was not asked for its rows" in job.report(0).facts.why
    job.gone(0, state_of())
    assert (job.report(0).state, job.report(1).state) == ("done", "part")
    (chain,) = job.checkpoints()
    assert (chain.newest.number, chain.newest.step) == (STEP + 1, STEP)


@pytest.mark.slow
def test_what_was_saved_already_is_not_saved_again(hosts: Callable[..., Hosts]) -> None:
    job = hosts()
    for _ in range(2):
        job.gone(0, state_of())
        job.gone(1)
        reports = job.report(0), job.report(1)
    assert [one.state for one in reports] == ["failed", "failed"]
    assert "nothing is newer than the last checkpoint" in reports[0].facts.why
    assert len(job.checkpoints()) == 1


def test_a_server_that_was_given_another_place_renews_no_claim(hosts: Callable[..., Hosts]) -> None:
    job = hosts()
    assert job.servers[0]._keepalive._thread is not None and job.servers[1]._keepalive._thread is None
    held = job.servers[0].held
    assert held is not None
    job.servers[1].hold(DelegateClaim(held.claim, held.settings, part=0, n_parts=1))  # it is the chief's now
    assert job.servers[1]._keepalive._thread is not None and job.servers[1].n_hosts == 1
