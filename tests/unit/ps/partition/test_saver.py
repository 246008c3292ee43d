"""What the servers of a job save together, what is left of it when one of them fails, and what expires."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import gba_hvd
from gba_hvd.ps.coordinator import pending_save
from gba_hvd.ps.coordinator.pending_save import PendingSave
from gba_hvd.ps.messages import JobPosition, Save, SaveAbout, SaveSettings, SaveStatus
from gba_hvd.ps.partition import saver as saver_module
from gba_hvd.ps.partition.saver import Saver
from gba_hvd.shm.checkpoint_rows import ShardRows, schema_of
from gba_hvd.shm.layout import Layout, SampledSpec
from gba_hvd.shm.shard_memory import ShardMemory
from recovery.catalog import claims
from recovery.catalog.chains import Chain, chains
from recovery.catalog.epoch_position import EpochPosition
from recovery.catalog.retention import first_epoch_of
from recovery.config import Config
from recovery.errors import StoreError
from recovery.restore import restore
from recovery.selection import sampled_accesses
from recovery.selection.importance import list_capacities
from recovery.storage.open import open_store
from recovery.storage.store import Store

N_ROWS = {"user": 20, "item": 7}
TIMEOUT_S = 60.0


class Hosts:
    """Two servers on one memory, each with some of its shards, and the place where they save."""

    def __init__(self, url: Path, memory: Any, **config: Any) -> None:
        self.url, self.memory = url, memory
        self.store = open_store(url)
        self.claim = claims.claim(self.store, "job.1", lease_s=0.1)
        self.first_epoch = self.claim.epoch
        self.settings = SaveSettings(str(url), {}, Config(**{"policy": "full", **config}))
        self.servers = [self.server(part) for part in (0, 1)]

    def server(self, part: int) -> Saver:
        return Saver(self.memory, self.memory.folder / f"saved-{part}")

    def save(self, number: int, n_parts: int = 2, parts: Sequence[int] | None = None, **more: Any) -> list[SaveStatus]:
        request = {
            "epoch": self.claim.epoch, "number": number, "n_parts": n_parts, "kind": "full", "parent": None,
            "step": number, "samples": number, "settings": self.settings, "claim": self.claim, "about": SaveAbout(),
            "first_epoch": self.first_epoch,
        }  # fmt: skip
        asked = range(n_parts) if parts is None else parts
        for part in asked:
            shards = [0, 1, 2] if n_parts == 1 else [[0, 2], [1]][part]
            self.servers[part].begin(Save(part=part, **{**request, **more}), shards, lambda extras: b"state")
        return [self.await_report(part, number) for part in asked]

    def await_report(self, part: int, number: int) -> SaveStatus:
        thread = self.servers[part]._thread
        assert thread is not None
        thread.join(TIMEOUT_S)
        report = self.servers[part].report()
        assert report.number == number and report.state != "running"
        return report

    def saved_numbers(self) -> list[int]:
        return [one.newest.number for one in chains(self.store) if isinstance(one, Chain)]


@pytest.fixture
def hosts(make_tables: Callable[..., gba_hvd.EmbeddingTables], tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(**config: Any) -> Hosts:
        memory = make_tables({name: (n, 4) for name, n in N_ROWS.items()}).memory
        made.append(Hosts(tmp_path / "place", memory, **config))
        return made[-1]

    yield make
    for one in made:
        for server in one.servers:
            server.close()


class Failing:
    """A store that refuses to write what `refuses` names."""

    def __init__(self, store: Store, refuses: Callable[[str], bool]) -> None:
        self._store, self._refuses, self.url, self.refused = store, refuses, store.url, 0

    def put(self, name: str, pieces: Any) -> None:
        if self._refuses(name):
            self.refused += 1
            raise StoreError(f"planned: {name} is refused")
        self._store.put(name, pieces)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], bool]], list[Failing]]:
    """Makes the servers' stores refuse some names."""

    def refuse(refuses: Callable[[str], bool]) -> list[Failing]:
        opened: list[Failing] = []

        def opens(url: str, **options: Any) -> Failing:
            opened.append(Failing(open_store(url, **options), refuses))
            return opened[-1]

        monkeypatch.setattr(saver_module, "open_store", opens)
        return opened

    return refuse


@pytest.mark.slow
def test_what_is_reported_of_a_checkpoint_is_of_all_its_parts(hosts: Callable[..., Hosts]) -> None:
    job = hosts()
    chief, peer = job.save(5)
    (chain,) = [one for one in chains(job.store) if isinstance(one, Chain)]
    sections = [section for blob in chain.newest.blobs for section in blob.sections]
    assert (chief.state, peer.state) == ("done", "part")
    assert chief.facts.rows == sum(N_ROWS.values()) > peer.facts.rows > 0
    assert chief.facts.raw_bytes == sum(section.raw_bytes for section in sections) > peer.facts.raw_bytes
    assert chief.facts.n_bytes == chain.newest.n_bytes


def test_a_strict_save_that_read_rows_of_a_later_step_has_failed(hosts: Callable[..., Hosts]) -> None:
    """Workers have gone on without waiting for it. In an asynchronous mode there is no such step."""
    job = hosts(strict=True)
    for shard in (0, 1, 2):
        job.memory.set_ready(shard, 5)
    assert [report.state for report in job.save(5, n_parts=1)] == ["done"]
    (report,) = job.save(6, n_parts=1, step=4)
    assert report.state == "failed" and "strict: a row was read at step 5" in report.facts.why
    assert job.saved_numbers() == [5]
    assert [report.state for report in job.save(7, n_parts=1, step=4, generation=1)] == ["done"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "refused", ["/0000-", "/0001-", "/part-0001", "/state"], ids=["own rows", "a peer's rows", "a list", "the state"]
)
def test_nothing_stays_of_a_save_that_failed_before_its_manifest(
    hosts: Callable[..., Hosts], refusing: Any, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    opened = refusing(lambda name: refused in name and "-00000005/" in name)
    job = hosts()
    assert [one.state for one in job.save(4)] == ["done", "part"]
    with monkeypatch.context() as now:
        if refused in ("/0001-", "/part-0001"):  # how long a list is waited for that does not come
            now.setattr(saver_module, "_PARTS_LEAST_S", 0.5)
        assert job.save(5)[0].state == "failed"
    assert sum(store.refused for store in opened) == 1
    assert [one.state for one in job.save(6)] == ["done", "part"]  # a part that was too late is deleted now
    assert not job.store.names("blobs/000001-00000005/")
    assert job.saved_numbers() == [6, 4]


@pytest.mark.slow
def test_blobs_stay_when_the_manifest_may_be_there(hosts: Callable[..., Hosts], refusing: Any) -> None:
    opened = refusing(lambda name: name == "manifests/000001-00000005.json")
    job = hosts()
    assert job.save(5)[0].state == "failed"
    assert sum(store.refused for store in opened) == 1
    assert any(name.startswith("blobs/000001-00000005/") for name in job.store.names(""))


@pytest.mark.slow
def test_a_part_that_was_saved_in_vain_is_deleted_with_the_next_save(
    hosts: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hosts()
    with monkeypatch.context() as now:
        now.setattr(saver_module, "_PARTS_LEAST_S", 0.5)
        assert job.save(5, parts=[0])[0].state == "failed"  # in vain: the other one comes too late
    assert job.save(5, parts=[1])[0].state == "part"
    assert job.store.names("blobs/000001-00000005/")
    assert [one.state for one in job.save(6)] == ["done", "part"]
    assert not job.store.names("blobs/000001-00000005/")
    assert job.saved_numbers() == [6]


@pytest.mark.slow
def test_checkpoints_of_this_job_expire_whoever_saved_them(hosts: Callable[..., Hosts]) -> None:
    job = hosts(keep_last=2)
    for number in (1, 2):
        job.save(number)
    job.servers[0].close()
    job.servers[0] = job.server(0)  # the one that had saved them was killed
    job.save(3)
    assert job.saved_numbers() == [3, 2]
    job.claim = claims.claim(job.store, "job.1", lease_s=0.1)  # the world was formed again: another epoch
    job.servers = [job.server(part) for part in (0, 1)]
    job.save(4)
    assert job.saved_numbers() == [4, 3]


@pytest.mark.slow
def test_rows_that_came_from_elsewhere_are_saved_whatever_their_counts_say(hosts: Callable[..., Hosts]) -> None:
    job = hosts(policy="delta")
    rows = ShardRows(job.memory)
    before = job.save(1, n_parts=1)[0].facts.manifest
    job.memory.init_shard(1, 2)  # a lost shard that came back: its counts start over, at what was saved
    job.claim = claims.claim(job.store, "job.1", lease_s=0.1)  # with a world that was formed again
    rows.slab(0, 1).columns[0][:] = 7.0
    assert job.save(3, n_parts=1, kind="delta", parent=before)[0].state == "done"
    job.memory.init_shard(1, 9)
    report = restore(job.store, rows)
    assert report is not None and report.manifest.number == 3
    assert (rows.slab(0, 1).columns[0] == 7.0).all()


@pytest.mark.slow
def test_what_the_job_went_on_from_never_expires(hosts: Callable[..., Hosts]) -> None:
    job = hosts(keep_last=1)
    job.save(1)
    job.claim = claims.claim(job.store, "job.2", takeover=True)
    job.first_epoch = job.claim.epoch
    for number in (2, 3):
        job.save(number)
    assert job.saved_numbers() == [3, 1]


@pytest.mark.slow
def test_keep_last_counts_what_earlier_launches_saved_and_no_other_jobs(hosts: Callable[..., Hosts]) -> None:
    job = hosts(keep_last=2)
    mine, other = SaveAbout(job="mine"), SaveAbout(job="other")
    for number, about in ((1, mine), (2, other), (3, mine), (4, mine)):
        job.claim = claims.claim(job.store, f"{about.job}.{number}", takeover=True, lease_s=0.1)
        if about is other:  # one that began meanwhile, and deletes what is its own
            job.first_epoch, before = job.claim.epoch, job.first_epoch
        job.save(number, about=about)
        if about is other:
            job.first_epoch = before
    assert job.saved_numbers() == [4, 3, 2]
    newest = next(one for one in chains(job.store) if isinstance(one, Chain)).newest
    assert first_epoch_of(newest, "mine") == before == 1
    assert first_epoch_of(newest, "other") == 0


@pytest.mark.slow
def test_a_save_of_a_world_that_is_no_more_is_cancelled_and_leaves_nothing(
    hosts: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hosts()
    waiting = threading.Event()
    await_part = saver_module.await_part

    def wait(*args: Any, **how: Any) -> Any:
        waiting.set()
        return await_part(*args, **how)

    monkeypatch.setattr(saver_module, "await_part", wait)
    request_epoch = job.claim.epoch
    save = Save(
        epoch=request_epoch, number=5, part=0, n_parts=2, kind="full", parent=None, step=5, samples=5,
        settings=job.settings, claim=job.claim, about=SaveAbout(), first_epoch=1,
    )  # fmt: skip
    job.servers[0].begin(save, [0, 2], lambda extras: b"state")
    assert waiting.wait(TIMEOUT_S)
    job.claim = claims.claim(job.store, "job.1", lease_s=0.1)
    assert [one.state for one in job.save(6, n_parts=1)] == ["done"]
    assert not job.store.names(f"blobs/{request_epoch:06d}-00000005/")
    assert job.saved_numbers() == [6]


@pytest.mark.slow
def test_what_the_store_meets_is_reported_while_a_save_runs(
    hosts: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, meanwhile = hosts(), list[SaveStatus]()
    await_part = saver_module.await_part

    def wait(*args: Any, **how: Any) -> Any:
        store: Any = job.servers[0]._store
        store.trouble = "no answer (tried 1 of 5 times)"
        meanwhile.append(job.servers[0].report())
        return await_part(*args, **how)

    monkeypatch.setattr(saver_module, "await_part", wait)
    assert [one.facts.why for one in job.save(5)] == ["", ""]
    assert [(one.state, one.facts.why) for one in meanwhile] == [("running", "no answer (tried 1 of 5 times)")]


def test_a_last_checkpoint_does_not_wait_for_a_step_whose_worker_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each list of sampled accesses would wait for its end, one after the other, and use the time for saving up."""
    layout = Layout.of({"user": (3000, 4)}, (), n_shards=3, seed=1, init_std=0.1)
    config = Config(policy="ssu")
    capacities = list_capacities(schema_of(layout), config.row_fraction)
    layout = replace(layout, sampled=SampledSpec(capacities, config.ssu_period))
    memory = ShardMemory.create_or_open(tmp_path / "shm", "job", layout, grace_s=0)
    for shard in range(3):
        memory.init_shard(shard, 4)
    memory.begin(np.arange(3), 5)

    def is_over(step_marks: Callable[[], tuple[int, int]]) -> None:
        finished, begun = step_marks()
        assert finished == begun, "waits for a step that nobody finishes"

    monkeypatch.setattr(sampled_accesses, "_await_step", is_over)
    job = Hosts(tmp_path / "place", memory, policy="ssu")
    (report,) = job.save(4, n_parts=1, about=SaveAbout(is_final=True))
    assert report.state == "done", report.facts.why
    for server in job.servers:
        server.close()
    memory.close()


def test_a_last_checkpoint_is_made_of_a_step_that_only_a_number_of_a_save_has_reached(
    hosts: Callable[..., Hosts],
) -> None:
    """The second save of step 4 had the number 5; then step 5 came, and all workers were gone."""
    job = hosts(policy="delta")
    job.settings = msgspec.structs.replace(job.settings, final_checkpoint_s=TIMEOUT_S)
    job.save(4, n_parts=1)
    job.save(5, n_parts=1, step=4)
    (saver, _) = job.servers
    assert saver.last_request(4, 4) is None
    request = saver.last_request(5, 5)
    assert request is not None and (request.number, request.step) == (6, 5)


@pytest.mark.parametrize(("asked", "step", "number"), [(12, 12, 41), (12, 50, 50), (45, 12, 45), (40, 12, 40)])
def test_a_chief_that_does_not_know_the_newest_number_gets_a_later_one(
    monkeypatch: pytest.MonkeyPatch, asked: int, step: int, number: int
) -> None:
    """Else its checkpoint would be older than that of number 40 to whoever looks for the newest."""
    begun: list[Save] = []
    saver: Any = SimpleNamespace(
        report=lambda: SaveStatus(1, 40, "done"), begin=lambda request, *more: begun.append(request)
    )
    part: Any = SimpleNamespace(shards=np.arange(3))
    monkeypatch.setattr(pending_save, "part_state", lambda part: b"")
    claim = claims.Claim(1, "job.1", "nonce")
    pending = PendingSave(part, [], saver)  # type: ignore[arg-type]
    request = Save(
        epoch=1, number=asked, part=0, n_parts=1, kind="delta", parent=None, step=12, samples=0,
        settings=SaveSettings("place", {}, Config()), claim=claim, about=SaveAbout(), first_epoch=1,
    )  # fmt: skip
    pending.ask(request, b"")
    pending.begin(JobPosition(step=step, account={"applied": 96 * step}), [0])
    assert [(one.number, one.step) for one in begun] == [(number, step)]


@pytest.mark.parametrize(
    ("asked", "saved"),
    [
        (EpochPosition(3, 1, 4, segment=1, n_segments=6), EpochPosition(3, 2, 5, segment=5, n_segments=6)),
        (EpochPosition(2, 4, 4), EpochPosition(3, 2, 5, segment=5, n_segments=0)),
        (None, EpochPosition(3, 2, 5, segment=5, n_segments=0)),
    ],
)
def test_a_checkpoint_of_an_asynchronous_mode_has_the_position_at_which_it_is_saved(
    monkeypatch: pytest.MonkeyPatch, asked: EpochPosition | None, saved: EpochPosition
) -> None:
    """Not that at which it was asked for, which has the number of segments."""
    begun: list[Save] = []
    saver: Any = SimpleNamespace(report=SaveStatus, begin=lambda request, *more: begun.append(request))
    part: Any = SimpleNamespace(shards=np.arange(3))
    monkeypatch.setattr(pending_save, "part_state", lambda part: b"")
    pending = PendingSave(part, [], saver)  # type: ignore[arg-type]
    request = Save(
        epoch=1, number=7, part=0, n_parts=1, kind="full", parent=None, step=7, samples=0, first_epoch=1,
        settings=SaveSettings("place", {}, Config()), claim=claims.Claim(1, "a", "b"), about=SaveAbout(position=asked),
    )  # fmt: skip
    pending.ask(request, b"")
    pending.begin(JobPosition(step=9, epoch=3, segment=5, steps_done=2, n_steps=5, account={"applied": 96}), [0])
    assert [one.about.position for one in begun] == [saved]
