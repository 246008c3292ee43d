"""Saving from a process of its own: what is shared, what a kill of either process leaves, and rows that go on changing.

What both kinds of checkpointers promise is in `test_checkpointer`. Here the process is real.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from recovery.catalog.claims import Claim
from recovery.child import process
from recovery.child.handle import ChildDied
from recovery.child.process import Begin, Ready
from recovery.config import Config
from recovery.errors import BadInput, Fenced
from recovery.events import Event
from recovery.process_checkpointer import ProcessCheckpointer
from recovery.restore import restore
from recovery.storage.open import open_store
from recovery.storage.store import Store
from recovery.testing import RamStore, train, two_tables, values
from recovery.torch_rows.row_memory import SHARED, share_
from recovery.torch_rows.tensor_rows import TensorRows
from tests.recovery.holders import assert_same
from tests.recovery.saving import ThroughAPipe

CONFIG = Config(job="mine", section_bytes=8 << 10, blob_bytes=32 << 10, level=0, keep_last=100)
SPAWN = multiprocessing.get_context("spawn")


@dataclass
class GatedStore:
    """A folder whose first manifest of some name is written when a file `go` is there; a file `waits` says it waits."""

    folder: Path
    gated: str

    def __post_init__(self) -> None:
        self.store = open_store(self.folder / "store")
        self.url = self.store.url
        self.get, self.names, self.delete = self.store.get, self.store.names, self.store.delete

    def __reduce__(self) -> tuple[type[GatedStore], tuple[Path, str]]:
        return GatedStore, (self.folder, self.gated)

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        if name.startswith(self.gated):
            (self.folder / "waits").touch()
            until((self.folder / "go").exists)
        self.store.put(name, pieces)


def until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def shared(n_rows: int = 5000) -> TensorRows:
    return two_tables(2, n_rows=n_rows, shared=True)


def restored(store: Store) -> tuple[int, dict[str, np.ndarray]]:
    rows = two_tables(2, seed=None)
    report = restore(store, rows)
    assert report is not None
    return report.step, values(rows)


# --- one child, for what needs no death ------------------------------------------------------------------------------


@dataclass
class Saving:
    rows: TensorRows
    checkpoints: ProcessCheckpointer
    store: Store
    events: list[Event]


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saving]:
    """A strict one, as in strict mode a save can be compared with the rows as they were."""
    folder, rows, events = tmp_path_factory.mktemp("saving"), shared(), list[Event]()
    config = replace(CONFIG, strict=True)
    with ProcessCheckpointer(folder, rows, config, on_event=events.append, nice=7) as checkpoints:
        yield Saving(rows, checkpoints, open_store(folder), events)
        pid = checkpoints.pid
    assert pid is not None and not psutil.pid_exists(pid)


@pytest.mark.processes
def test_the_process_is_another_one_and_stands_back(saving: Saving) -> None:
    process = psutil.Process(saving.checkpoints.pid)
    assert process.ppid() == os.getpid()
    assert process.nice() == os.nice(0) + 7
    assert os.getsid(process.pid) == process.pid  # so Ctrl-C goes past it


@pytest.mark.processes
def test_strict_saves_of_another_process_are_of_one_step(saving: Saving) -> None:
    rows = saving.rows
    for _ in range(3):
        train(rows, 1, seed=1)
        before, step = values(rows), rows.last_step
        handle = saving.checkpoints.save(step, 10 * step, {"lr": torch.tensor(0.5)})
        train(rows, 1, seed=1)  # the save need not be over
        saved = handle.result(60)
        assert {s.step for blob in saved.manifest.blobs for s in blob.sections} <= {step}
        assert 0 < saved.stall_s <= saved.seconds
        found = restored(saving.store)
        assert found[0] == step
        assert_same(found[1], before)
    assert saving.checkpoints.newest == saved.manifest
    assert saving.events[-1].saved == saved


@pytest.mark.processes
def test_what_another_process_restores_is_in_the_model(saving: Saving) -> None:
    rows = saving.rows
    saving.checkpoints.save(rows.last_step, 0, b"dense").result(60)
    expected = values(rows)
    train(rows, 3, seed=2)
    report = saving.checkpoints.restore()
    assert report is not None
    assert report.state == b"dense"
    assert_same(values(rows), expected)
    rows.continue_from(report.step)


# --- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_child_that_is_killed_costs_its_save_and_the_next_one_starts_another(tmp_path: Path) -> None:
    rows, events, store = shared(), list[Event](), GatedStore(tmp_path, "manifests/000001-00000002")
    with ProcessCheckpointer(store, rows, CONFIG, on_event=events.append) as checkpoints:
        checkpoints.save(0, 0).result(60)
        before = restored(store)
        train(rows, 2, seed=1)
        lost = checkpoints.save(2, 20)
        until((tmp_path / "waits").exists)
        first = checkpoints.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ChildDied, match="SIGKILL"):
            lost.result(60)
        assert_same(restored(store)[1], before[1])
        assert "step 2 could not be saved; the last checkpoint is manifests/000001-00000001.json" in events[-1].text
        train(rows, 2, seed=1)
        saved = checkpoints.save(4, 40).result(60)
        assert checkpoints.pid != first
        assert (saved.manifest.kind, saved.manifest.epoch) == ("full", 2)
        assert_same(restored(store)[1], values(rows))


def train_and_save(folder: Path) -> None:
    """Be in the middle of a second save, and say who saves."""
    rows = shared()
    with ProcessCheckpointer(GatedStore(folder, "manifests/000001-00000002"), rows, CONFIG) as checkpoints:
        (folder / "child").write_text(str(checkpoints.pid))
        checkpoints.save(0, 0).result(60)
        train(rows, 2, seed=1)
        checkpoints.save(2, 20, b"dense").result(600)


@pytest.mark.processes
def test_a_parent_that_is_killed_leaves_its_save_and_no_process(tmp_path: Path) -> None:
    process = SPAWN.Process(target=train_and_save, args=(tmp_path,))
    process.start()
    until((tmp_path / "waits").exists)
    child = psutil.Process(int((tmp_path / "child").read_text()))
    assert process.pid is not None
    pids = process.pid, child.pid
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    process.close()
    assert child.is_running()  # it has a save in flight
    (tmp_path / "go").touch()
    assert psutil.wait_procs([child], 60)[1] == []
    step, found = restored(open_store(tmp_path / "store"))
    expected = shared()
    train(expected, 2, seed=1)
    assert step == 2
    assert_same(found, values(expected))
    assert not [name for name in os.listdir(SHARED) if name.startswith(tuple(f"torch_{pid}_" for pid in pids))]


@pytest.mark.processes
def test_rows_and_slots_are_of_one_step_while_training_goes_on(tmp_path: Path) -> None:
    rows = two_tables(2, n_rows=20_000, shared=True)
    user = rows.tables["user"]
    over, seen = threading.Event(), []

    def training() -> None:
        while not over.is_set():
            rows.touched("user", np.arange(20_000))
            with rows.step() as step:
                for tensor in (user.weight, *user.slots.values()):
                    tensor.fill_(step)
            time.sleep(0.002)

    with ProcessCheckpointer(tmp_path, rows, replace(CONFIG, policy="full")) as checkpoints:
        thread = threading.Thread(target=training)
        thread.start()
        try:
            until(lambda: rows.last_step > 2)
            for _ in range(3):
                checkpoints.save(rows.last_step, 0).result(60)
                back = two_tables(2, n_rows=20_000, seed=None)
                assert restore(open_store(tmp_path), back) is not None
                found = values(back)["user"]
                assert (found == found[:, :1]).all()
                seen.append(found[:, 0])
        finally:
            over.set()
            thread.join()
    assert len(np.unique(np.concatenate(seen))) > 1  # it did go on


# --- without a real process ------------------------------------------------------------------------------------------


def test_a_child_takes_the_place_of_a_dead_one_only_if_nobody_else_has(ram: RamStore) -> None:
    rows = shared()
    with ThroughAPipe(ram, rows, CONFIG) as checkpoints:
        checkpoints._child.end()  # as if it had died: the next save starts another
        until(lambda: checkpoints.pid is None and checkpoints._child is None)
        with ThroughAPipe(ram, rows, CONFIG) as same_job:  # started again elsewhere
            same_job.save(1, 10).result(60)
            with pytest.raises(Fenced, match="has taken over"):
                checkpoints.save(2, 20).result(60)
            with pytest.raises(Fenced):
                checkpoints.save(3, 30)
            same_job.save(4, 40).result(60)


class Stopped:
    """A process that was ready, and then stopped."""

    pid, exitcode, was_killed = 1, -signal.SIGKILL, False

    def __init__(self) -> None:
        self.ours, self.theirs = multiprocessing.Pipe()
        self.theirs.send(Ready(Claim(1, "mine", "0"), None))

    def start(self, begin: Begin) -> tuple[Connection, Stopped]:
        return self.ours, self

    def kill(self) -> None:
        self.was_killed = True

    def join(self, timeout: float | None = None) -> None:
        pass

    def close(self) -> None:
        self.theirs.close()


@pytest.mark.slow
@pytest.mark.parametrize("ask", [lambda it: it.save(1, 10).result(60), ProcessCheckpointer.restore])
def test_a_child_without_a_sign_of_life_is_killed_and_nobody_waits_for_it(tmp_path: Path, ask: object) -> None:
    stopped = Stopped()
    with ProcessCheckpointer(
        tmp_path, shared(), replace(CONFIG, strict=True), silence_s=0.3, start=stopped.start
    ) as checkpoints:
        with pytest.raises(ChildDied, match=r"no heartbeat for 0\.3 s"):
            ask(checkpoints)  # type: ignore[operator]
        assert stopped.was_killed


def test_rows_that_nobody_else_can_map_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="shared=True"):
        ProcessCheckpointer(tmp_path, two_tables())


@pytest.mark.slow
def test_ssu_saves_what_was_used_most_out_of_lists_that_both_processes_map(tmp_path: Path) -> None:
    """Rows 0 to 49 are in every step, of the other 4950 one is in each."""
    rows = shared()
    with ProcessCheckpointer(tmp_path, rows, replace(CONFIG, policy="ssu", row_fraction=0.02)) as checkpoints:
        checkpoints.save(0, 0).result(60)
        for step in range(1, 31):
            rows.touched("user", np.append(np.arange(50), 50 + step))
            with rows.step():
                rows.tables["user"].weight[:50] += 1
        saved = checkpoints.save(30, 300).result(60)
    assert saved.manifest.kind == "ssu"
    assert sum(s.n_rows for blob in saved.manifest.blobs for s in blob.sections if s.table == 0) <= 100
    assert np.array_equal(restored(open_store(tmp_path))[1]["user"][:50], values(rows)["user"][:50])


def test_too_little_shared_memory_is_reported_with_what_is_missing() -> None:
    tensors = [torch.zeros(1 << 20), torch.zeros(1 << 19)]
    with pytest.raises(BadInput, match=r"need 6.0 MiB of shared memory, /dev/shm has 5.0 MiB free: enlarge it"):
        share_(tensors, free_bytes=lambda folder: 5 << 20)
    assert not any(tensor.is_shared() for tensor in tensors)


def test_tensors_stay_the_same_objects_in_shared_memory() -> None:
    weight = torch.nn.Parameter(torch.randn(100, 4))
    part, before = weight.data[10:12], weight.detach().clone()
    share_([weight], free_bytes=lambda folder: 1 << 20)
    assert weight.is_shared()
    assert torch.equal(weight.detach(), before)
    assert part.data_ptr() == weight.data_ptr() + 160


def test_the_process_ends_well_where_the_job_has_no_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    log = logging.getLogger("recovery")
    for name, value in (("handlers", []), ("propagate", True)):
        monkeypatch.setattr(log, name, value)  # and afterwards as before
    monkeypatch.setattr(process, "serve", lambda *_: None)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=1))
    for name in ("setsid", "nice", "_exit"):
        monkeypatch.setattr(os, name, lambda *status: ended.extend(status))
    monkeypatch.setattr(sys, "stderr", None)
    process._main(None, SimpleNamespace(nice=0))  # type: ignore[arg-type]
    assert ended == [0, 0]
