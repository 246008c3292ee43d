"""A host is switched off: the others go on.

Its rows are as in the newest checkpoint and all others as they were; with full recovery, all is as in the checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools.virtual_hosts import VirtualHosts

from recovery.catalog.chains import Chain, chains
from recovery.storage.open import open_store
from tests.processes.cluster import wait_for

from .job import IMPATIENT, HostsJob, hosts_job, quiet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
PATIENCE_S = 180.0
EPOCHS, SAMPLES, STEPS_OF_EPOCH, GLOBAL_BATCH, N_ROWS = 3, 1000, 11, 96, 340
HOLDS = {1: "servers are there", 7: "saved once", 12: "go"}


def saving(folder: Path, **settings: Any) -> dict[str, Any]:
    """Checkpoints of step 5 and 10, or one later; no other one is in flight at step 12, where the host is lost."""
    return {"checkpoint": {"url": str(folder), "every_steps": 5, "lease_s": 1.0, **settings}}


def samples_after(step: int) -> int:
    return step // STEPS_OF_EPOCH * SAMPLES + step % STEPS_OF_EPOCH * GLOBAL_BATCH


@pytest.mark.parametrize(
    ("mode", "victim", "policy"),
    [
        ("allreduce", "other", "mfu"),
        pytest.param("gba", "chief", "ssu", marks=pytest.mark.variant),
        pytest.param("allreduce", "chief", "scar", marks=pytest.mark.variant),
        pytest.param("allreduce", "other", "ssu", marks=pytest.mark.variant),
        pytest.param("gba", "other", "delta", marks=pytest.mark.variant),
    ],
)
def test_a_host_that_is_switched_off_takes_only_its_own_rows_along(
    lab: VirtualHosts, tmp_path: Path, mode: str, victim: str, policy: str
) -> None:
    """The chief's host is the coordinator's, too. The newest checkpoint is partial. The wire differs by policy."""
    store, wire = open_store(tmp_path / "checkpoints"), {"delta": "plain", "ssu": "tls"}.get(policy, "curve")
    settings = {"policy": policy, "total_samples": EPOCHS * SAMPLES, "recovery": "partial"}
    plan = {**saving(tmp_path / "checkpoints", **settings), "epochs": EPOCHS, "holds": HOLDS}
    plan["gba"] = {"mode": mode, "wire": wire}
    with hosts_job(tmp_path / "job", lab, IMPATIENT, **plan) as job:
        job.start()
        job.wait_for_servers(PATIENCE_S)
        wait_for(lambda: job.ended or job.events("checkpoint"), "a checkpoint", PATIENCE_S)
        assert not job.ended, job.log()
        (job.out / "saved once").touch()
        wait_for(lambda: job.ended or len(store.names("manifests/")) == 2, "another one", PATIENCE_S)
        assert not job.ended, job.log()
        chief = job.chief()
        (lost,) = [chief] if victim == "chief" else job.others(chief)
        (left,) = job.others(lost)
        held = job.shards_on(lost).keys()
        wait_for(lambda: job.ended or len(list(job.out.glob("held-by-go-*"))) == 2, "step 12", PATIENCE_S)
        assert not job.ended, job.log()
        lab.kill(lost)
        before = quiet(lambda: job.shards_on(left), "the survivor's rows")  # held, it finds out when it goes on
        saved, newest = job.shards_in(store, left, tmp_path / "saved"), next(chains(store))
        _, report = job.restored(store, left, tmp_path / "lost", sorted(held))
        (job.out / "go").touch()

        wait_for(lambda: job.ended or job.events("rows_restored"), "the rows' return", PATIENCE_S)
        back = job.events("rows_restored")[0]
        of_left = [line for line in job.notes("job") if line["host"] == left]
        after = min(of_left, key=lambda line: abs(line["time"] - back["time"]))  # reported together
        assert held and not held & before.keys()
        assert {int(s): d for s, d in after["shards"].items()} == {**saved, **before}

        assert job.wait(PATIENCE_S) == 0, job.log()
        job.assert_nothing_left()
        job.assert_samples(EPOCHS, SAMPLES)
        assert isinstance(newest, Chain) and back["rows_lost"] == 0
        assert newest.newest.kind == policy
        if mode == "allreduce":
            # Rows that were read some steps after their save began lost less, down to nothing.
            lost_samples = max(0.0, samples_after(back["step"]) - report.saved_samples)
            expected = lost_samples / (EPOCHS * SAMPLES) * back["rows_restored"] / N_ROWS
            assert back["pls"] == back["pls_total"] == pytest.approx(expected)
        else:  # some may have been dropped
            assert 0 <= back["pls"] < 1


@pytest.mark.parametrize(
    ("mode", "victim"),
    [
        ("allreduce", "chief"),
        pytest.param("gba", "other", marks=pytest.mark.variant),
        pytest.param("gba", "chief", marks=pytest.mark.variant),
        pytest.param("allreduce", "other", marks=pytest.mark.variant),
    ],
)
def test_with_full_recovery_all_is_as_in_the_checkpoint(
    lab: VirtualHosts, tmp_path: Path, mode: str, victim: str
) -> None:
    store = open_store(tmp_path / "checkpoints")
    settings = {"recovery": "full", "strict": True}
    plan = {**saving(tmp_path / "checkpoints", **settings), "epochs": EPOCHS, "gba": {"mode": mode}, "holds": HOLDS}
    with hosts_job(tmp_path / "job", lab, IMPATIENT, **plan) as job:
        job.start()
        held_at_the_loss(job)
        chief = job.chief()
        (lost,) = [chief] if victim == "chief" else job.others(chief)
        (left,) = job.others(lost)
        wait_for(lambda: job.ended or len(store.names("manifests/")) == 2, "another checkpoint", PATIENCE_S)
        lab.kill(lost)
        saved, newest = job.shards_in(store, left, tmp_path / "saved"), next(chains(store))
        assert isinstance(newest, Chain)
        (job.out / "go").touch()
        wait_for(lambda: job.ended or job.events("resumed"), "the recovery", PATIENCE_S)
        assert job.events("resumed"), job.log()
        told = job.events("resumed")[0]
        of_left = [line for line in job.notes("job") if line["host"] == left]
        after = min(of_left, key=lambda line: abs(line["time"] - told["time"]))  # told in one go
        assert {int(shard): digest for shard, digest in after["shards"].items()} == saved
        manifest = newest.newest
        assert (told["manifest"], told["step"], told["rows_restored"]) == (manifest.name, manifest.step, N_ROWS)
        assert (told["strategy"], told["pls"], told["rows_lost"]) == ("full", 0.0, 0)

        assert job.wait(PATIENCE_S) == 0, job.log()
        job.assert_nothing_left()
        result = job.result()
        assert result["total"] == result["applied"] + result["dropped"] + result["lost"] == EPOCHS * SAMPLES
        assert result["redone"] == told["samples_redone"] >= 0
        if mode == "allreduce":
            job.assert_samples(EPOCHS, SAMPLES)
            assert result["redone"] == samples_after(12) - samples_after(manifest.step)


def held_at_the_loss(job: HostsJob) -> None:
    """The job has saved, and its workers wait at step 12."""
    job.wait_for_servers(PATIENCE_S)
    wait_for(lambda: job.ended or job.events("checkpoint"), "a checkpoint", PATIENCE_S)
    assert not job.ended, job.log()
    (job.out / "saved once").touch()
    wait_for(lambda: job.ended or len(list(job.out.glob("held-by-go-*"))) == 2, "step 12", PATIENCE_S)
    assert not job.ended, job.log()


@pytest.mark.parametrize(
    ("settings", "strategy", "why"),
    [
        ({"target_pls": 1e-9}, "full", "the expected PLS of partial recovery is"),
        # Half an interval, 2.5 steps of 12, is a fifth of all the time, and noticing the loss is a part of that time.
        ({}, "partial", "expected PLS"),
    ],
)
@pytest.mark.variant
def test_the_estimate_decides(
    lab: VirtualHosts, tmp_path: Path, settings: dict[str, Any], strategy: str, why: str
) -> None:
    plan = saving(tmp_path / "checkpoints", **settings) | {"epochs": EPOCHS, "holds": HOLDS}
    with hosts_job(tmp_path / "job", lab, IMPATIENT, **plan) as job:
        job.start()
        held_at_the_loss(job)
        lab.kill(job.others(job.chief())[0])
        (job.out / "go").touch()
        kind = "resumed" if strategy == "full" else "rows_restored"
        wait_for(lambda: job.ended or job.events(kind), "the recovery", PATIENCE_S)
        assert job.events(kind), job.log()
        told = job.events(kind)[0]
        assert (told["strategy"], told["strategy_asked"]) == (strategy, "auto")
        assert why in told["strategy_reason"] and 0 < told["overhead_partial"] < told["overhead_full"]
        assert job.wait(PATIENCE_S) == 0, job.log()
        job.assert_nothing_left()
        job.assert_samples(EPOCHS, SAMPLES)
