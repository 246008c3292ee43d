"""A host is lost and all go back to a checkpoint: the end is that of a job that nothing happened to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gba_hvd.shm.checkpoint_rows import ShardRows
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.shard_memory import ShardMemory
from recovery import state_codec
from recovery.catalog.chains import Chain, chains
from recovery.format.manifest import Manifest
from recovery.restore import Report, restore
from recovery.storage.open import open_store

from .cluster import NAMES, PATIENT, Cluster, assert_same_parameters, cluster, wait_for
from .test_checkpoints import PATIENCE_S, events, let_go
from .workload import digest_of_dense, digests_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]
EPOCHS, SAMPLES, STEPS_OF_EPOCH, GLOBAL_BATCH, N_ROWS = 2, 1000, 11, 96, 340
LOST_AT = 12  # in the second epoch; the checkpoint is of the first


def samples_after(step: int) -> int:
    return step // STEPS_OF_EPOCH * SAMPLES + step % STEPS_OF_EPOCH * GLOBAL_BATCH


@contextmanager
def a_host_is_lost(
    tmp_path: Path, names: tuple[str, ...], checkpoint: dict[str, Any], lost: str | None = None, **plan: Any
) -> Iterator[tuple[Cluster, Report, dict[int, str]]]:
    """The job, held at LOST_AT without its last host; its newest complete checkpoint and the digests of its rows."""
    place = {"url": str(tmp_path / "checkpoints"), "every_steps": 8, "lease_s": 1.0, "keep_last": 9, **checkpoint}
    holds = {1: "servers", 9: "saved once", LOST_AT: "go"}
    settings = {"checkpoint": place, "holds": holds, "own_memory_per_name": True, "epochs": EPOCHS, **plan}
    with cluster(tmp_path / "job", PATIENT, **settings) as job:
        job.start_elastic(names, cooldown_s=600)  # no worker starts again on a host that was lost
        let_go(job, n_servers=len(names))
        wait_for(lambda: job.ended or events(job, "checkpoint"), "a checkpoint", PATIENCE_S)
        (job.out / "saved once").touch()
        held = lambda: len(list(job.out.glob("held-by-go-*")))  # noqa: E731
        wait_for(lambda: job.ended or held() == len(names), f"step {LOST_AT}", PATIENCE_S)
        assert not job.ended, job.log()
        report, rows = restored(tmp_path, job)
        lost = lost or names[-1]
        job.kill(job.processes_of_name(lost))
        shutil.rmtree(job.shard_dir / lost)
        yield job, report, rows


def restored(tmp_path: Path, job: Cluster) -> tuple[Report, dict[int, str]]:
    """The newest checkpoint, and digests of its shards."""
    folder = next(job.shard_dir.glob("*/gba-hvd-*"))
    layout = Layout.of_description(
        {name: value for name, value in state_of(folder).items() if name not in ("format", "host")}
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o700)
    with open(scratch / "shards", "wb") as file:
        file.truncate(layout.n_bytes)
    rows = ShardRows(ShardMemory.attach(scratch, layout), lambda: range(layout.n_shards), filling=True)
    report = restore(open_store(tmp_path / "checkpoints"), rows)
    assert report is not None
    return report, digests_of(rows, range(layout.n_shards))


def state_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "memory.json").read_text())
    return found


def dense_of(report: Report) -> str:
    """As workers note it of what they have."""
    assert report.state is not None
    state = state_codec.decode(report.state)
    names = [name for name in state["model"] if name.startswith("mlp")]
    return digest_of_dense((state["model"][name], state["optimizer"]["state"][i]) for i, name in enumerate(names))


def assert_all_went_back(job: Cluster, report: Report, rows: dict[int, str]) -> list[dict[str, Any]]:
    """Right after the recovery the one worker that is left has the checkpoint's dense state and all its rows.

    Its events; there are two where a second host was lost when this worker had reported the recovery of the first.
    """
    wait_for(lambda: job.ended or events(job, "resumed"), "the recovery", PATIENCE_S)
    assert events(job, "resumed"), job.log()
    last = events(job, "resumed")[-1]
    told = [event for event in events(job, "resumed") if event["pid"] == last["pid"]]
    after = [line for line in job.notes("job") if line["pid"] == last["pid"] and line["time"] <= last["time"]][-1]
    assert after["dense"] == dense_of(report)
    assert {int(shard): digest for shard, digest in after["shards"].items()} == rows
    assert {(event["step"], event["manifest"]) for event in told} == {(report.step, report.manifest.name)}
    assert (last["rows_restored"], last["rows_lost"], last["pls"], last["age"]) == (N_ROWS, 0, 0.0, 0.0)
    assert told[0]["from_step"] == LOST_AT and {event["strategy"] for event in told} == {"full"}
    assert sum(event["samples_redone"] for event in told) == samples_after(LOST_AT) - samples_after(report.step)
    return told


def assert_ends_as_if_nothing_had_happened(job: Cluster, report: Report, reference: dict[str, np.ndarray]) -> None:
    assert job.wait(PATIENCE_S) == 0, job.log()
    job.assert_nothing_left()
    job.assert_every_sample_once(EPOCHS)
    assert job.result()["redone"] == samples_after(LOST_AT) - samples_after(report.step)
    assert_same_parameters(job.arrays(), reference)
    newest = next(chains(open_store(job.plan["checkpoint"]["url"])))
    assert isinstance(newest, Chain) and newest.newest.step == 22


def test_all_go_back_to_the_checkpoint_and_no_sample_counts_twice(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    with a_host_is_lost(tmp_path, NAMES[:2], {"recovery": "full", "strict": True}) as (job, report, rows):
        (job.out / "go").touch()
        (told,) = assert_all_went_back(job, report, rows)
        assert told["strategy_reason"].startswith("full: it was asked for")
        assert 0 < told["overhead_partial"] < told["overhead_full"]
        assert_ends_as_if_nothing_had_happened(job, report, reference)


def spoil(folder: Path, manifest: Manifest) -> None:
    """Other bytes, as many as before: seen only when the rows are read."""
    for blob in manifest.blobs:
        (folder / blob.name).write_bytes(bytes(blob.n_bytes))


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.variant)])
def test_a_checkpoint_that_is_damaged_is_seen_when_rows_are_gone_already(
    reference: dict[str, np.ndarray], tmp_path: Path, all_of_them: bool
) -> None:
    """All take the one before; without one the job ends and says so."""
    place = tmp_path / "checkpoints"
    with a_host_is_lost(tmp_path, NAMES[:2], {"recovery": "full", "strict": True, "every_steps": 5}) as (job, _, _):
        store = open_store(place)
        wait_for(lambda: job.ended or len(store.names("manifests/")) == 2, "two checkpoints", PATIENCE_S)
        newest, before = (chain.newest for chain in chains(store) if isinstance(chain, Chain))
        for manifest in (newest, before) if all_of_them else (newest,):
            spoil(place, manifest)
        (job.out / "go").touch()
        if all_of_them:
            assert job.wait(PATIENCE_S) != 0, job.log()
            assert "full recovery was begun and no checkpoint could be read to its end" in job.said(), job.log()
            assert [line["end"] for line in job.notes("end")] == ["FAILED"]
            return
        wait_for(lambda: job.ended or events(job, "checkpoint_damaged"), "the recovery", PATIENCE_S)
        (told,) = events(job, "resumed")
        assert (told["step"], told["manifest"]) == (before.step, before.name) and newest.name in told["skipped"][0]
        (damaged,) = events(job, "checkpoint_damaged")
        assert damaged["message"].count(newest.name) == 1
        assert job.wait(PATIENCE_S) == 0, job.log()
        job.assert_every_sample_once(EPOCHS)
        assert job.result()["redone"] == samples_after(LOST_AT) - samples_after(before.step)
        assert_same_parameters(job.arrays(), reference)


@pytest.mark.variant
def test_residuals_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """What compression had not sent when the host was lost is of steps that do not count: none of it is reported lost.

    Rows' residuals are in no checkpoint.
    """
    sparse = {"name": "dct", "keep": 0.3}
    plan = {"compression": sparse, "row_compression": {"name": "ternary_ef", "keep": 0.3}}
    with a_host_is_lost(tmp_path, NAMES[:2], {"recovery": "full", "strict": True}, **plan) as (job, report, rows):
        (job.out / "go").touch()
        assert_all_went_back(job, report, rows)
        assert job.wait(PATIENCE_S) == 0, job.log()
        job.assert_nothing_left()
        job.assert_every_sample_once(EPOCHS)
        assert not events(job, "residual_lost") and events(job, "row_residual_lost")


CRASHES = [
    ("noted", 0), ("noted", 1), ("decided", 1), ("before filling", 0), ("filled", 1),
    ("before sending", 0), ("before sending", 1), ("sent", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        pytest.param(*one, marks=[] if one == ("before sending", 0) else pytest.mark.variant, id=f"{one[0]}-{one[1]}")
        for one in CRASHES
    ],
)
def test_a_second_host_is_lost_in_the_midst_of_it(
    reference: dict[str, np.ndarray], tmp_path: Path, point: str, rank: int
) -> None:
    """Rank 0 has the decision and the training state first; whoever is left has all of it in the end."""
    faults = [{"point": point, "step": 0, "rank": rank, "do": "kill"}]
    checkpoint = {"recovery": "full", "strict": True}
    with a_host_is_lost(tmp_path, NAMES, checkpoint, faults=faults) as (job, report, rows):
        (job.out / "go").touch()
        wait_for(lambda: job.ended or job.fired(), "the second loss", PATIENCE_S)
        assert_ends_as_if_nothing_had_happened(job, report, reference)
        assert job.fired() == 1
        assert_all_went_back(job, report, rows)


@pytest.mark.parametrize(
    ("target_pls", "strategy", "why"),
    [
        (1e-9, "full", "the expected PLS of partial recovery is"),
        # Half an interval, 4 steps of 12, is a third of all the time, and noticing the loss is a part of that time.
        (0.1, "partial", ", target 0.1"),
    ],
)
def test_the_estimate_decides(tmp_path: Path, target_pls: float, strategy: str, why: str) -> None:
    with a_host_is_lost(tmp_path, NAMES[:2], {"target_pls": target_pls, "total_samples": 2000}) as (job, report, _):
        (job.out / "go").touch()
        kind = "resumed" if strategy == "full" else "rows_restored"
        wait_for(lambda: job.ended or events(job, kind), "the recovery", PATIENCE_S)
        assert events(job, kind), job.log()
        told = events(job, kind)[0]
        assert (told["strategy"], told["strategy_asked"]) == (strategy, "auto")
        assert why in told["strategy_reason"] and 0 < told["overhead_partial"] < told["overhead_full"]
        assert (told["pls"] == 0) == (strategy == "full")
        assert job.wait(PATIENCE_S) == 0, job.log()
        job.assert_nothing_left()
        job.assert_every_sample_once(EPOCHS)
        redone = samples_after(LOST_AT) - samples_after(report.step)
        assert job.result()["redone"] == (redone if strategy == "full" else 0)


def test_where_no_checkpoint_is_complete_recovery_is_partial_and_says_why(tmp_path: Path) -> None:
    """The store is gone when the host is lost: full recovery was asked for, and rows are all that is lost."""
    with a_host_is_lost(tmp_path, NAMES[:2], {"recovery": "full"}) as (job, _, _):
        (tmp_path / "checkpoints").rename(tmp_path / "moved")  # at once: a server may be writing there
        (tmp_path / "checkpoints").write_text("no folder any more")
        (job.out / "go").touch()
        wait_for(lambda: job.ended or events(job, "rows_lost"), "the recovery", PATIENCE_S)
        told = events(job, "rows_lost")[0]
        assert told["strategy"] == "partial" and told["rows_restored"] == 0
        assert "full recovery was asked for, but full recovery is not possible" in told["strategy_reason"]
        assert job.wait(PATIENCE_S) == 1, "the last checkpoint cannot be saved"
        job.assert_every_sample_once(EPOCHS)
        assert job.result()["redone"] == 0
