"""Rank 0 is killed at the end of an epoch of gba mode: another worker is rank 0 before the epoch is over."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from recovery.catalog.best import best_chain
from recovery.catalog.chains import Chain, chains
from recovery.storage.open import open_store

from .cluster import NAMES, PATIENCE_S, Cluster, cluster, wait_for
from .test_checkpoints import HOLDS, let_go, wait_for_two_checkpoints

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]
# Leases stay with whoever has them, however long it gets no core, or the test.
NEVER_SILENT = {"GBA_HVD_ALIVE_S": "120", "GBA_HVD_LEASE_S": "600"}
N_MICRO, LAST = 63, 1  # micro-batches of an epoch; the last epoch


def plan_of(tmp_path: Path, *faults: dict[str, Any]) -> dict[str, Any]:
    checkpoint = {"url": str(tmp_path / "checkpoints"), "every_steps": 1000, "lease_s": 1.0}
    return {"gba": {"mode": "gba"}, "checkpoint": checkpoint, "faults": list(faults)}


def assert_one_end_for_all(job: Cluster, tmp_path: Path) -> None:
    """Every sample is accounted for, each epoch was evaluated once, and rank 0 saved its last step."""
    assert job.wait(PATIENCE_S) == 0, job.log()
    job.assert_nothing_left()
    job.assert_every_sample_once(epochs=LAST + 1)
    result = job.result()
    assert len(result["aucs"]) == LAST + 1
    assert result["mode"] == "gba"
    newest = next(iter(chains(open_store(tmp_path / "checkpoints"))))
    assert isinstance(newest, Chain)
    assert newest.newest.step == result["step"] == 22


def chief_of(job: Cluster) -> str:
    return str(next((line["pid"] for line in job.notes("rank") if line["rank"] == 0), ""))


def waits_for_the_end(job: Cluster) -> bool:
    """Rank 0 has pushed all that it was given of the last epoch, and the rest of it is in the other's hands."""
    chief, given = chief_of(job), [line for line in job.notes("given") if line["of"] == LAST]
    pushed = {line["push"] for line in job.pushes(LAST) if line["pid"] == chief}
    everything = {line["given"] for line in given} - {None}
    return len(everything) == N_MICRO and {line["given"] for line in given if line["pid"] == chief} - {None} <= pushed


def test_the_last_epoch_is_over_when_the_survivor_is_rank_0(tmp_path: Path) -> None:
    """Rank 0 waits for the end, which only the other's last pushes are missing from, and is killed there."""
    waits = {"point": "before push", "step": LAST, "rank": 1, "do": "wait for", "file": "the chief is dead"}
    first = {"point": "before push", "step": LAST, "rank": 0, "do": "wait for", "file": "fault-0"}  # it has some of it
    with cluster(tmp_path / "job", NEVER_SILENT, **plan_of(tmp_path, waits, first)) as job:
        job.start_elastic(NAMES[:2])
        wait_for(lambda: job.ended or waits_for_the_end(job), "rank 0 at the end of the epoch", PATIENCE_S)
        assert not job.ended, job.log()
        chief = chief_of(job)
        os.kill(int(chief.rpartition("-")[2]), signal.SIGKILL)
        (log,) = job.shard_dir.glob("*/ps-0.log")
        wait_for(lambda: "worker of rank 0 is dead" in log.read_text(), "the server to notice", PATIENCE_S)
        (job.out / "the chief is dead").touch()
        assert_one_end_for_all(job, tmp_path)
        assert job.fired() == 2
        reported = [line for line in job.notes("given") if line["instead"] == "finished" and line["of"] == LAST]
        assert reported and chief not in {line["pid"] for line in reported}, "it was killed before the end"
        survivor = next(line["pid"] for line in job.pushes(LAST) if line["pid"] != chief)
        assert [line["as_rank"] for line in reported if line["pid"] == survivor][:1] == [0]


@pytest.mark.variant
def test_a_rank_0_that_learned_of_the_end_first_costs_nothing(tmp_path: Path) -> None:
    """It is killed when it learns that the first epoch is over, before it has taken the model from the servers."""
    reported = {"point": "learned of the end", "step": 0, "rank": 0, "do": "kill"}
    with cluster(tmp_path / "job", **plan_of(tmp_path, reported)) as job:
        job.start_elastic(NAMES[:2])
        assert_one_end_for_all(job, tmp_path)
        assert job.fired() == 1


@pytest.mark.parametrize("mode", ["allreduce", "gba"])
@pytest.mark.parametrize("epoch", [0, LAST])
def test_a_rank_0_that_is_killed_in_an_evaluation_loses_no_sample_no_score_and_no_best_checkpoint(
    tmp_path: Path, mode: str, epoch: int
) -> None:
    of = {"point": "in an evaluation", "step": epoch}
    # The other one waits for that, so that rank 0 has a part of the evaluation in every mode.
    plan = plan_of(tmp_path, {**of, "rank": 0, "do": "kill"}, {**of, "rank": 1, "do": "wait for", "file": "fault-0"})
    plan["gba"], plan["checkpoint"] = {"mode": mode}, plan["checkpoint"] | {"keep_best": "auc"}
    with cluster(tmp_path / "job", NEVER_SILENT, **plan) as job:
        job.start_elastic(NAMES[:2])
        assert job.wait(PATIENCE_S) == 0, job.log()
        assert (job.out / "fault-0").exists()
        job.assert_nothing_left()
        seconds = [line for line in job.notes("rank") if line["rank"] == 1]  # a late joiner may be that, too
        survivor = min(seconds, key=lambda line: line["time"])["pid"]
        (end,) = (line for line in job.notes("event") if line["event"] == "finished" and line["pid"] == survivor)
        total, applied, dropped, lost = (end[f"samples_{what}"] for what in ("total", "applied", "dropped", "lost"))
        assert (end["step"], total, applied + dropped, lost) == (22, 2000, 2000, 0)
        assert not dropped or mode == "gba"  # where one that is slow may be too late
        aucs = [line["auc"] for line in job.notes("auc") if line["pid"] == survivor]
        assert len(aucs) == LAST + 1 and {line["auc"] for line in job.notes("auc")} == set(aucs)
        best = best_chain(list(chains(open_store(tmp_path / "checkpoints"))))
        assert best is not None
        assert (best.metric, best.value) == ("auc", max(aucs))
        assert best.step == 11 * (1 + aucs.index(max(aucs))) <= best.manifest.step


def test_a_chief_that_dies_after_a_partial_save_leaves_the_last_one_to_another(tmp_path: Path) -> None:
    """By mfu, saves during training leave out rows; the last one may not. The chief dies when both are at the end.

    It begins to train when the other is steps ahead: what is due counts from the start of the job, so it is due.
    """
    last = {"point": "before the last save", "step": 0}
    late = {"point": "kept", "step": 0, "rank": 0, "do": "wait for", "file": "the other is ahead"}
    faults = {**last, "rank": 0, "do": "kill", "once": "fault-1"}, {**last, "rank": 1, "do": "mark"}, late
    plan = plan_of(tmp_path, *faults)
    plan["checkpoint"] |= {"every_steps": 2, "policy": "mfu", "keep_last": 30}
    plan["holds"] = HOLDS | {"12": "saved twice"}
    with cluster(tmp_path / "job", NEVER_SILENT, **plan) as job:
        job.start_elastic(NAMES[:1], slots=2)
        let_go(job)
        wait_for(lambda: list(job.out.glob("held-by-saved once-*")), "the other to be held")
        (job.out / "the other is ahead").touch()
        wait_for_two_checkpoints(job)
        assert_one_end_for_all(job, tmp_path)
        assert job.fired() == 3
        found = [one for one in chains(open_store(tmp_path / "checkpoints")) if isinstance(one, Chain)]
        assert "mfu" in {chain.newest.kind for chain in found}
        assert found[0].newest.kind in ("full", "delta"), "it leaves out no change"
        (end,) = (line for line in job.notes("end"))
        saved = [line for line in job.notes("event") if line["event"] == "checkpoint" and line["pid"] == end["pid"]]
        assert end["end"] == "FINISHED" and saved and saved[-1]["manifest"] == found[0].newest.name
