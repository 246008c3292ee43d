"""Two hosts in allreduce mode that lost all their workers: one last checkpoint of both, or none and it is said why."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gba_hvd.ps import launch
from recovery.catalog.chains import Chain, chains
from recovery.format.manifest import Manifest
from recovery.storage.open import open_store

from .cluster import NAMES, Cluster, assert_same_parameters, cluster, wait_for
from .test_checkpoints import PATIENCE_S, events
from .test_memory_left import end_all_workers

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]
TWO = NAMES[:2]
SAVED_BY = 7  # a step, or a later one: there both workers wait for the checkpoint, so none is begun after it
KILLED_AT = 10  # both workers stand there, and have not begun the next step


def plan_of(tmp_path: Path, final_checkpoint_s: float) -> dict[str, Any]:
    checkpoint = {
        "url": str(tmp_path / "checkpoints"),
        "every_steps": 6,
        "lease_s": 1.0,
        "final_checkpoint_s": final_checkpoint_s,
    }
    return {"checkpoint": checkpoint, "own_memory_per_name": True}


def newest_in(tmp_path: Path) -> Manifest:
    newest = next(iter(chains(open_store(tmp_path / "checkpoints"))))
    assert isinstance(newest, Chain)
    return newest.newest


def folder_of(job: Cluster, is_chief: bool) -> Path:
    """The memory of the host that the chief is on, or of the other one."""
    (found,) = (folder for folder in job.shard_dir.glob("*/gba-hvd-*") if (folder / "kept").exists() == is_chief)
    return found


def server_of(folder: Path) -> int:
    pid = launch.pid_of(folder, 0)
    assert pid is not None
    return pid


@contextmanager
def two_hosts_without_workers(tmp_path: Path, final_checkpoint_s: float, grace_s: int = 6) -> Iterator[Cluster]:
    """Their servers and keepers live on. One checkpoint is there."""
    plan = plan_of(tmp_path, final_checkpoint_s) | {"holds": {1: "go", SAVED_BY: "saved", KILLED_AT: "never"}}
    with cluster(tmp_path / "first", {"GBA_HVD_GRACE_S": str(grace_s)}, **plan) as job:
        job.start_elastic(TWO)
        servers = lambda: list(job.shard_dir.glob("*/*/ps-0.address"))  # noqa: E731
        wait_for(lambda: job.ended or len(servers()) == 2, "two servers", PATIENCE_S)
        (job.out / "go").touch()
        saved = lambda: any((tmp_path / "checkpoints").glob("manifests/*.json"))  # noqa: E731
        wait_for(lambda: job.ended or saved(), "a checkpoint", PATIENCE_S)
        (job.out / "saved").touch()
        held = lambda: list(job.out.glob("held-by-never-*"))  # noqa: E731
        wait_for(lambda: job.ended or len(held()) == 2, f"both workers at step {KILLED_AT}", PATIENCE_S)
        end_all_workers(job)
        yield job
        wait_for(lambda: not job.processes(), "the end of servers and keepers", PATIENCE_S)
        job.assert_nothing_left()


def go_on(tmp_path: Path, step: int) -> dict[str, np.ndarray]:
    """Two hosts resume from the newest checkpoint, which is of this step, and train every sample. The parameters."""
    with cluster(tmp_path / "second", **plan_of(tmp_path, 60.0)) as job:
        job.run(lambda: job.start_elastic(TWO), PATIENCE_S)
        (resumed,) = events(job, "resumed")
        assert resumed["step"] == step
        result = job.result()
        assert result["total"] == result["applied"] == 2000 and result["step"] == 22
        assert result["shard_steps_missed"] == 0
        return job.arrays()


def test_two_hosts_save_what_they_have_before_their_memories_go(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    with two_hosts_without_workers(tmp_path, final_checkpoint_s=60.0):
        pass
    newest = newest_in(tmp_path)
    assert (newest.step, newest.about["last_gasp"]) == (KILLED_AT, True)
    assert not list((tmp_path / "checkpoints").glob("blobs/*-last/*"))
    found = go_on(tmp_path, KILLED_AT)
    dense = {name: value for name, value in reference.items() if name.startswith("dense.")}
    assert_same_parameters({name: found[name] for name in dense}, dense)


@pytest.mark.variant
def test_hosts_that_cannot_agree_leave_the_checkpoint_before_in_force(tmp_path: Path) -> None:
    """The other host's server is killed before it can say that its workers are gone."""
    with two_hosts_without_workers(tmp_path, final_checkpoint_s=12.0, grace_s=16) as job:
        os.kill(server_of(folder_of(job, False)), signal.SIGKILL)
        before = newest_in(tmp_path)
        with open(folder_of(job, True) / "ps-0.log") as log:  # it can be read when the folder is gone
            wait_for(lambda: not job.processes(), "the end of servers and keepers", PATIENCE_S)
            assert "the servers of hosts [1] of 2 have not reported that their workers are gone" in log.read()
    newest = newest_in(tmp_path)
    assert newest.number >= before.number, "one that was in flight may have come"
    assert newest.step < KILLED_AT and "last_gasp" not in newest.about
    go_on(tmp_path, newest.step)  # training went on during that save, so some rows may be of a later step


@pytest.mark.variant
@pytest.mark.parametrize("killed_is_first", [False, True])
def test_a_server_that_dies_within_the_agreement_leaves_the_checkpoint_before_in_force(
    tmp_path: Path, killed_is_first: bool
) -> None:
    """Either one, after the word was given and before the other host has saved its rows."""
    place = tmp_path / "checkpoints"
    with two_hosts_without_workers(tmp_path, final_checkpoint_s=20.0, grace_s=32) as job:
        gone_s = time.monotonic()
        first, other = server_of(folder_of(job, True)), server_of(folder_of(job, False))
        # The first one is to know that its workers are gone, and not to act before the other one does, after 16 s.
        wait_for(lambda: time.monotonic() - gone_s > 8.0, "half of the time that servers wait")
        os.kill(first, signal.SIGSTOP)
        wait_for(lambda: list(place.glob("blobs/*-last/gone-0001")), "the other server's workers are gone")
        os.kill(other, signal.SIGSTOP)
        before = newest_in(tmp_path)
        with open(folder_of(job, not killed_is_first) / "ps-0.log") as log:
            os.kill(first, signal.SIGCONT)
            wait_for(lambda: list(place.glob("blobs/*-last/word")), "the word of the first server")
            os.kill(first if killed_is_first else other, signal.SIGKILL)
            if killed_is_first:
                os.kill(other, signal.SIGCONT)
            wait_for(lambda: not job.processes(), "the end of servers and keepers", PATIENCE_S)
            said = log.read()
    assert ("the last checkpoint: part" if killed_is_first else "the writer of part 1 has not saved its rows") in said
    newest = newest_in(tmp_path)
    assert newest.name == before.name and newest.step < KILLED_AT and "last_gasp" not in newest.about
    go_on(tmp_path, newest.step)  # training went on during that save, so some rows may be of a later step
