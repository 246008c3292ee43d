"""A host is switched off: the others go on, its rows are as in the newest checkpoint, all others as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools.virtual_hosts import VirtualHosts

from recovery.catalog.chains import Chain, chains
from recovery.storage.open import open_store
from tests.processes.cluster import wait_for

from .job import IMPATIENT, hosts_job, quiet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
PATIENCE_S = 180.0
EPOCHS, SAMPLES, STEPS_OF_EPOCH, GLOBAL_BATCH, N_ROWS = 3, 1000, 11, 96, 340
HOLDS = {1: "servers are there", 12: "go"}


def saving(folder: Path, **settings: Any) -> dict[str, Any]:
    """A checkpoint is made at step 8 or 9, and no other one is in flight at step 12, where the host is lost."""
    return {"checkpoint": {"url": str(folder), "every_steps": 7, "lease_s": 1.0, **settings}}


def samples_after(step: int) -> int:
    return step // STEPS_OF_EPOCH * SAMPLES + step % STEPS_OF_EPOCH * GLOBAL_BATCH


@pytest.mark.parametrize(
    ("mode", "victim"),
    [
        ("allreduce", "other"),
        pytest.param("gba", "chief", marks=pytest.mark.variant),
        pytest.param("allreduce", "chief", marks=pytest.mark.variant),
        pytest.param("gba", "other", marks=pytest.mark.variant),
    ],
)
def test_a_host_that_is_switched_off_takes_only_its_own_rows_along(
    lab: VirtualHosts, tmp_path: Path, mode: str, victim: str
) -> None:
    """The chief's host is the coordinator's, too."""
    store = open_store(tmp_path / "checkpoints")
    plan = {**saving(tmp_path / "checkpoints"), "epochs": EPOCHS, "gba": {"mode": mode}, "holds": HOLDS}
    with hosts_job(tmp_path / "job", lab, IMPATIENT, **plan) as job:
        job.start()
        job.wait_for_servers(PATIENCE_S)
        wait_for(lambda: job.ended or store.names("manifests/"), "a checkpoint", PATIENCE_S)
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
        (job.out / "go").touch()

        wait_for(lambda: job.ended or job.events("rows_restored"), "the rows' return", PATIENCE_S)
        back = job.events("rows_restored")[0]
        of_left = [line for line in job.notes("job") if line["host"] == left]
        after = min(of_left, key=lambda line: abs(line["time"] - back["time"]))  # told in one go
        assert held and not held & before.keys()
        assert {int(s): d for s, d in after["shards"].items()} == {**saved, **before}

        assert job.wait(PATIENCE_S) == 0, job.log()
        job.assert_nothing_left()
        job.assert_samples(EPOCHS, SAMPLES)
        assert isinstance(newest, Chain) and back["rows_lost"] == 0
        so_far, since = samples_after(back["step"]), samples_after(back["step"]) - newest.newest.samples
        if mode == "allreduce":
            assert back["pls"] == pytest.approx(since / so_far * back["rows_restored"] / N_ROWS)
        else:  # some may have been dropped
            assert 0 <= back["pls"] < 1
