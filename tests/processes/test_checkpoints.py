"""Jobs that save checkpoints: all of it is lost and comes back, or a host is lost and its rows come back."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gba_hvd_tools import cli
from gba_hvd_tools.chaos.data import ChaosClicks

from recovery.catalog import claims
from recovery.catalog.chains import Chain, chains
from recovery.format.row_codec import checksum
from recovery.restore.open_checkpoint import open_checkpoint
from recovery.storage.open import open_store

from .cluster import NAMES, PATIENT, Cluster, assert_identical, cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]
TWO = NAMES[:2]
LOCK_STEP = {"mode": "gba", "lookahead": 0}
PATIENCE_S = 300.0  # on a busy machine processes take long to start
# Where the job waits: until its servers are there, and until a checkpoint is there. So there will be a second one.
HOLDS = {"1": "servers", "4": "saved once"}


def saving(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    """lease_s: for so long a restarted job waits for lease renewals of one that was killed."""
    return {"checkpoint": {"url": str(tmp_path / "checkpoints"), "every_steps": 2, "lease_s": 1.0, **settings}}


def events(job: Cluster, kind: str) -> list[dict[str, Any]]:
    return [line for line in job.notes("event") if line["event"] == kind]


def draws(n_steps: int) -> dict[int, list[float]]:
    """What a worker that nothing happened to draws at each step."""
    torch_numbers = torch.rand(n_steps, generator=torch.Generator().manual_seed(5)).tolist()
    numpy_numbers, python_numbers = np.random.RandomState(5).rand(n_steps), random.Random(5)
    return {
        step: [torch_numbers[step - 1], float(numpy_numbers[step - 1]), python_numbers.random()]
        for step in range(1, n_steps + 1)
    }


def let_go(job: Cluster, n_servers: int = 1, hold: str = "servers") -> None:
    """Of a job that waits for its servers."""
    addresses = lambda: list(job.shard_dir.glob("**/ps-0.address"))  # noqa: E731
    wait_for(lambda: job.ended or len(addresses()) == n_servers, "the servers", PATIENCE_S)
    (job.out / hold).touch()


def wait_for_two_checkpoints(job: Cluster) -> None:
    """Of a job with HOLDS."""
    for n, hold in ((1, "saved once"), (2, "saved twice")):
        wait_for(lambda n=n: job.ended or len(events(job, "checkpoint")) >= n, f"{n} checkpoints", PATIENCE_S)
        assert not job.ended, job.log()
        (job.out / hold).touch()


@pytest.mark.parametrize("mode", ["allreduce", pytest.param("gba", marks=pytest.mark.variant)])
def test_a_job_that_was_killed_goes_on_as_if_nothing_had_happened(
    reference: dict[str, np.ndarray], tmp_path: Path, mode: str
) -> None:
    plan = saving(tmp_path) | ({"gba": LOCK_STEP} if mode == "gba" else {})
    plan |= {"cwd": str(tmp_path), "checkpoint": plan["checkpoint"] | {"url": "checkpoints"}}  # servers have another
    holds = {**HOLDS, "20": "never"}  # it does not end before it is killed
    with cluster(tmp_path / "first", **plan, sleep_s=0.05, holds=holds, horovod=False) as job:
        job.start_alone()
        let_go(job)
        wait_for_two_checkpoints(job)
        job.kill_all()
    with cluster(tmp_path / "second", **plan, horovod=False) as job:
        job.run(job.start_alone, PATIENCE_S)
        (resumed,) = events(job, "resumed")
        assert resumed["step"] >= 4
        result = job.result()
        assert result["total"] == result["applied"] == 2000
        assert_identical(job.arrays(), reference)
        if mode == "allreduce":
            later = {line["attempt"]: line["drawn"] for line in job.notes("attempt")}
            assert list(later) == list(range(resumed["step"] + 1, 23))
            assert later == {step: drawn for step, drawn in draws(22).items() if step in later}
        saved = events(job, "checkpoint")[-1]
        assert saved["saved_step"] == result["step"] == 22
        assert saved["checksum"] == checksum([(tmp_path / "checkpoints" / saved["manifest"]).read_bytes()])
        assert saved["stall_s"] > 0


def killed_after_two_checkpoints(tmp_path: Path) -> dict[str, Any]:
    """A job of one worker, in `first`. Returns its plan."""
    plan = saving(tmp_path)
    holds = {**HOLDS, "20": "never"}  # it does not end before it is killed
    with cluster(tmp_path / "first", **plan, sleep_s=0.05, holds=holds, horovod=False) as job:
        job.start_alone()
        let_go(job)
        wait_for_two_checkpoints(job)
        job.kill_all()
    return plan


def test_a_restart_that_passes_over_a_damaged_checkpoint_warns_of_the_steps_that_are_lost(tmp_path: Path) -> None:
    plan = killed_after_two_checkpoints(tmp_path)
    newest, before, *_ = (one.newest for one in chains(open_store(tmp_path / "checkpoints")) if isinstance(one, Chain))
    (tmp_path / "checkpoints" / newest.blobs[0].name).unlink()
    with cluster(tmp_path / "second", **plan, horovod=False) as job:
        job.run(job.start_alone, PATIENCE_S)
        (resumed,), (damaged,) = events(job, "resumed"), events(job, "checkpoint_damaged")
        assert (resumed["step"], resumed["manifest"]) == (before.step, before.name)
        assert damaged["steps_lost"] == newest.step - before.step > 0
        assert damaged["message"].count(newest.name) == 1 and "is gone" in damaged["message"]
        assert f"WARNING [checkpoint damaged] step {before.step}: newer checkpoints cannot be used" in job.said()


def test_a_job_does_not_go_on_with_other_data_or_another_optimizer(tmp_path: Path) -> None:
    plan = killed_after_two_checkpoints(tmp_path)
    with cluster(tmp_path / "second", **plan, samples=1200, seed=2, horovod=False) as job:
        job.start_alone()
        assert job.wait(PATIENCE_S) != 0
        assert "samples 1000, here 1200, seed 1, here 2" in job.said(), job.log()
        assert not job.notes("committed")
    with cluster(tmp_path / "third", **plan, dense_optimizer="momentum") as job:
        job.start_static(2)
        assert job.wait(PATIENCE_S) != 0
        assert f"the checkpoint at {tmp_path / 'checkpoints'} (" in job.said(), job.log()
        assert "is of a job with the dense optimizer Adam, this one has SGD" in job.said()
        assert "KeyError" not in job.said() and not job.notes("committed")


def test_old_checkpoints_expire_although_the_server_that_made_them_was_killed(tmp_path: Path) -> None:
    plan = saving(tmp_path, policy="full", keep_last=2, every_steps=5)
    # It is killed where no save is in flight: the second one begins at step 11 or 12, a third would not before 16.
    holds = {"1": "servers", "8": "saved once", "14": "killed"}
    with cluster(tmp_path, **plan, holds=holds, sleep_s=0.02, epochs=1000, horovod=False) as job:
        job.start_alone()
        let_go(job)
        wait_for_two_checkpoints(job)
        (address,) = job.shard_dir.glob("gba-hvd-*/ps-0.address")
        killed = json.loads(address.read_text())["pid"]
        os.kill(killed, signal.SIGKILL)
        at = job.last_step()
        (job.out / "killed").touch()
        wait_for(lambda: job.ended or events(job, "checkpoint")[-1]["saved_step"] > at + 4, "another one", PATIENCE_S)
        assert not job.ended, job.log()
        assert json.loads(address.read_text())["pid"] != killed
        assert len(list((tmp_path / "checkpoints" / "manifests").iterdir())) <= 3  # the third is being replaced


def test_a_save_whose_server_dies_has_failed_and_another_one_is_made(tmp_path: Path) -> None:
    plan = saving(tmp_path, policy="full", rate_bytes_s=2000.0, section_bytes=500, blob_bytes=500)
    with cluster(tmp_path, **plan, holds={"1": "servers"}, sleep_s=0.02, epochs=1000, horovod=False) as job:
        job.start_alone()
        let_go(job)
        blobs = lambda: list((tmp_path / "checkpoints").glob("blobs/*/*"))  # noqa: E731
        wait_for(lambda: job.ended or blobs(), "a save in flight", PATIENCE_S)
        (address,) = job.shard_dir.glob("gba-hvd-*/ps-0.address")
        server = json.loads(address.read_text())["pid"]
        assert Path(f"/proc/{server}/comm").read_text() == "gba-hvd-server\n"
        os.kill(server, signal.SIGKILL)
        # Without word of it, the next one would be asked for after 300 s.
        wait_for(lambda: job.ended or events(job, "checkpoint"), "a checkpoint", PATIENCE_S / 2)
        assert "the server that was saving its rows has died" in events(job, "checkpoint_failed")[0]["why"]
        (restart,) = events(job, "server_restarted")
        assert restart["before"] == server and restart["now"] == json.loads(address.read_text())["pid"]


def test_all_rows_of_a_strict_checkpoint_are_of_the_step_of_its_state(tmp_path: Path) -> None:
    """Workers would do many steps while one is saved, which takes a second."""
    plan = saving(tmp_path, policy="full", every_steps=4, strict=True, keep_last=100)
    plan["checkpoint"] |= {"rate_bytes_s": 20_000.0, "section_bytes": 500, "blob_bytes": 500}
    with cluster(tmp_path, **plan, holds={"1": "servers"}, epochs=1000) as job:
        job.start_static(2)
        let_go(job)
        wait_for(lambda: job.ended or len(events(job, "checkpoint")) >= 4, "four checkpoints", PATIENCE_S)
        assert not job.ended, job.log()
        assert not events(job, "checkpoint_failed")
    found = [one.newest for one in chains(open_store(tmp_path / "checkpoints")) if isinstance(one, Chain)]
    assert len(found) >= 4
    for manifest in found:
        assert {section.step for blob in manifest.blobs for section in blob.sections} == {manifest.step}


def test_the_interval_is_planned_from_what_was_measured_if_nobody_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan: dict[str, Any] = {"checkpoint": {"url": str(tmp_path / "checkpoints"), "lease_s": 1.0, "mtbf_h": 20.0}}
    for epochs, name in ((1, "first"), (2, "second")):
        with cluster(tmp_path / name, **plan, epochs=epochs, horovod=False) as job:
            job.run(job.start_alone, PATIENCE_S)
            planned, saved = events(job, "checkpoint_plan")[0], events(job, "checkpoint")[0]
            # The first job knows after its last save, the one that resumes from it from the beginning.
            assert (planned["time"] < saved["time"]) == (name == "second")
            assert 0 < planned["interval_s"] <= 3600
            assert "one host" in planned["message"] and "20.0 h between failures" in planned["message"]
    assert cli.main(["plan", "--url", plan["checkpoint"]["url"], "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert 0 < reported["costs"]["save_s"] < PATIENCE_S
    assert 0 < reported["costs"]["load_s"] < PATIENCE_S
    assert reported["measured"]["observed_s"] > 0 and not reported["measured"]["failures_s"]


def test_two_hosts_are_killed_in_gba_mode_and_go_on_with_every_sample_once(tmp_path: Path) -> None:
    plan = saving(tmp_path) | {"gba": {"mode": "gba"}, "own_memory_per_name": True}
    with cluster(tmp_path / "first", **plan, epochs=100, sleep_s=0.1, holds={"4": "saved once"}) as job:
        job.start_elastic(TWO)
        wait_for_two_checkpoints(job)
        job.kill_all()
        before = job.notes("push")
    epochs = newest_step(tmp_path) // 11 + 2  # the rest of the one it was killed in, and one more
    with cluster(tmp_path / "second", **plan, epochs=epochs) as job:
        job.run(lambda: job.start_elastic(TWO), PATIENCE_S)
        resumed = events(job, "resumed")[0]
        result = job.result()
        assert result["total"] == result["applied"] + result["dropped"] + result["lost"] == 1000 * epochs
        epoch = job.notes("push")[0]["epoch"]
        assert resumed["step"] >= 4
        # After the restart comes exactly what the restored model had not seen of that epoch.
        rows = job.samples_of_epoch(epoch)
        assert len(rows) == len(set(rows)) == 1000 - 96 * (resumed["step"] - 11 * epoch)
        seen = {row for line in before if line["epoch"] == epoch for row in line["rows"]}
        assert set(range(1000)) - set(rows) <= seen


def test_a_job_with_replicas_is_killed_and_goes_on_with_what_they_had_learned(tmp_path: Path) -> None:
    plan = saving(tmp_path, every_steps=12) | {"gba": {"mode": "shadow", "sync": "ma"}}
    with cluster(tmp_path / "first", PATIENT, **plan, epochs=100, sleep_s=0.1) as job:
        job.start_static(2)
        wait_for(
            lambda: job.ended or any(s["saved_step"] > 126 for s in events(job, "checkpoint")), "epochs", PATIENCE_S
        )
        assert not job.ended, job.log()
        job.kill_all()
    epochs = newest_step(tmp_path) // 63 + 2
    with cluster(tmp_path / "second", PATIENT, **plan, epochs=epochs) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        resumed, result = events(job, "resumed")[0], job.result()
        assert resumed["step"] > 126 and result["mode"] == "shadow"
        assert result["total"] == result["applied"] == 1000 * epochs
        assert min(result["aucs"]) > 0.95  # of the epochs after the restart: a model that started over has less
        last = {line["values"] for line in job.notes("values") if line["of_epoch"] == epochs - 1}
        assert len(last) == 1


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        ("allreduce", "ssu"),
        ("gba", "mfu"),
        pytest.param("allreduce", "mfu", marks=pytest.mark.variant),
        pytest.param("gba", "ssu", marks=pytest.mark.variant),
    ],
)
def test_every_lookup_of_a_row_is_counted_where_what_is_used_most_is_saved(
    tmp_path: Path, mode: str, policy: str
) -> None:
    plan = saving(tmp_path, policy=policy) | ({"gba": LOCK_STEP} if mode == "gba" else {})
    with cluster(tmp_path, **plan, holds=HOLDS) as job:
        job.start_static(2)
        let_go(job)
        wait_for(lambda: job.ended or events(job, "checkpoint"), "a checkpoint", PATIENCE_S)
        (job.out / "saved once").touch()
        assert job.wait(PATIENCE_S) == 0, job.log()
        assert job.result()["applied"] == 2000
        found, clicks = job.accesses(), ChaosClicks(1000)
        assert np.array_equal(found["user"], 2 * np.bincount(clicks.user, minlength=300))
        assert np.array_equal(found["item"], 2 * np.bincount(clicks.item, minlength=40))
        kinds = [saved["kind"] for saved in events(job, "checkpoint")]
        assert kinds[:2] == ["full", policy]
        assert kinds[-1] in ("full", "delta"), "the last one leaves out no change"


PLANNED = {"every_steps": None, "longest_s": 0.02}  # neither how often nor by which policy


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (PLANNED, "mfu"),
        ({"policy": "mfu"}, "mfu"),
        ({"policy": "ssu"}, "ssu"),
        ({"policy": "scar"}, "scar"),
        pytest.param({"policy": "delta"}, "delta", marks=pytest.mark.variant),
    ],
    ids=["planned", "mfu", "ssu", "scar", "delta"],
)
def test_a_lost_host_gets_its_rows_back_and_no_sample_is_lost(
    tmp_path: Path, settings: dict[str, Any], kind: str
) -> None:
    plan = saving(tmp_path, total_samples=4000, recovery="partial", **({"every_steps": 4} | settings))
    # At step 11 the second checkpoint, of step 8, is steps old, and the third one is not due yet. A planned interval is
    # no shorter than a save takes: the second checkpoint has a second until it is due.
    held_at, sleep_s = ("30", 0.05) if settings == PLANNED else ("11", 0.0)
    plan |= {"holds": {"1": "servers", "6": "saved once", held_at: "killed"}, "wait_at_step": 36}
    with cluster(tmp_path, **plan, own_memory_per_name=True, epochs=4, sleep_s=sleep_s) as job:
        # Who was started again on that host before the others had noticed would find all rows in its memory.
        job.start_elastic(TWO, cooldown_s=600)
        let_go(job, n_servers=2)
        wait_for_two_checkpoints(job)
        wait_for(
            lambda: len(list(job.out.glob("held-by-killed-*"))) == 2, f"both workers at step {held_at}", PATIENCE_S
        )
        killed = job.processes_of_name(TWO[1])
        job.kill(killed)
        shutil.rmtree(job.shard_dir / TWO[1])
        (job.out / "killed").touch()
        back = wait_for(lambda: events(job, "rows_restored"), "the rows' return", PATIENCE_S)[0]
        (job.out / "go").touch()
        assert job.wait(PATIENCE_S) == 0, job.log()
        job.assert_nothing_left()
        assert len(killed) >= 3, "a worker, its server and the keeper were to be killed"
        assert back["rows_restored"] in (170, 340) and back["rows_lost"] == 0
        before_the_loss = [saved["kind"] for saved in events(job, "checkpoint") if saved["time"] < back["time"]]
        assert before_the_loss[:2] == ["full", kind] and set(before_the_loss) == {"full", kind}
        assert 0 <= back["pls"] < 1 and back["pls"] == back["pls_total"] and back["total_samples"] == 4000
        # A save that took long, on a busy machine, lets the next one be of the step of the loss; so may a planned one.
        assert (back["pls"] > 0) == (back["age"] > 0)
        job.assert_every_sample_once(epochs=4)


def test_a_worker_that_misses_the_word_that_all_are_to_save_holds_up_nobody(tmp_path: Path) -> None:
    faults = [{"point": "after commit", "step": s, "rank": 1, "do": "lose the result"} for s in (10, 13, 16, 19)]
    plan = saving(tmp_path, every_steps=1)
    with cluster(tmp_path, **plan, faults=faults, sleep_s=0.1, holds=HOLDS) as job:
        job.start_elastic(TWO)
        let_go(job)  # from here on nearly every commit says it
        wait_for(lambda: job.ended or events(job, "checkpoint"), "a checkpoint", PATIENCE_S)
        (job.out / "saved once").touch()  # another one is of the last step
        assert job.wait(PATIENCE_S) == 0, job.log()
        assert job.fired() == len(faults)
        assert len(events(job, "checkpoint")) >= 2
        job.assert_every_sample_once(epochs=2)


def newest_step(tmp_path: Path) -> int:
    return next(one.newest.step for one in chains(open_store(tmp_path / "checkpoints")) if isinstance(one, Chain))


@pytest.mark.parametrize("mode", ["allreduce", "gba"])
def test_workers_that_are_preempted_have_a_checkpoint_made_first(tmp_path: Path, mode: str) -> None:
    plan = saving(tmp_path, every_steps=1000, preemption_s=60.0) | ({"gba": LOCK_STEP} if mode == "gba" else {})
    with cluster(tmp_path, **plan, sleep_s=0.1, epochs=100) as job:
        job.start_static(2)
        wait_for(lambda: any(job.shard_dir.glob("*/ps-0.address")) and job.last_step() >= 3, "3 steps", PATIENCE_S)
        assert job.launcher is not None and not job.ended, job.log()
        at = job.last_step()
        job.launcher.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE_S) != 0
        # The launcher's patience with workers ends after some seconds; the server's save goes on.
        wait_for(lambda: any((tmp_path / "checkpoints").glob("manifests/*.json")), "the checkpoint", PATIENCE_S)
        assert newest_step(tmp_path) >= at
        job.assert_nothing_left()


def test_a_worker_that_is_preempted_does_so_in_time_also_without_a_checkpoint(tmp_path: Path) -> None:
    """The save would take some minutes."""
    plan = saving(tmp_path, every_steps=1000, preemption_s=2.0, rate_bytes_s=100.0)
    with cluster(tmp_path, **plan, sleep_s=0.1, epochs=100, horovod=False) as job:
        job.start_alone()
        wait_for(lambda: any(job.shard_dir.glob("*/ps-0.address")) and job.last_step() >= 3, "3 steps", PATIENCE_S)
        assert job.launcher is not None and not job.ended, job.log()
        job.launcher.send_signal(signal.SIGTERM)
        assert job.wait(60.0) != 0
        assert events(job, "preempted")
        assert not any((tmp_path / "checkpoints").glob("manifests/*.json"))


def test_a_host_whose_worker_is_preempted_costs_nothing(tmp_path: Path) -> None:
    plan = saving(tmp_path, every_steps=1000, preemption_s=60.0)
    with cluster(tmp_path, **plan, own_memory_per_name=True, epochs=4, sleep_s=0.1, wait_at_step=1) as job:
        job.start_elastic(TWO, cooldown_s=600)  # nobody is started again on the host that goes
        let_go(job, n_servers=2, hold="go")
        (worker,) = set(job.processes_of_name(TWO[1])) & set(job.processes(only_workers=True))
        os.kill(worker, signal.SIGTERM)
        reported = wait_for(lambda: events(job, "preempted"), "word of it", PATIENCE_S)[0]
        wait_for(
            lambda: [n for n in job.notes("end") if n["pid"].endswith(f"-{worker}")], "the worker's end", PATIENCE_S
        )
        job.kill(job.processes_of_name(TWO[1]))  # now the host goes
        back = wait_for(lambda: events(job, "rows_restored"), "the rows' return", PATIENCE_S)[0]
        assert job.wait(PATIENCE_S) == 0, job.log()
        assert (back["age"], back["pls"], back["rows_lost"]) == (0, 0, 0)
        assert newest_step(tmp_path) > reported["step"]
        job.assert_every_sample_once(epochs=4)


def test_a_second_job_may_not_write_to_the_place_of_a_living_one(tmp_path: Path) -> None:
    with cluster(tmp_path / "first", **saving(tmp_path, lease_s=9.0), sleep_s=0.2, epochs=1000, horovod=False) as first:
        first.start_alone()
        wait_for(lambda: events(first, "checkpoint"), "the first job's checkpoint", PATIENCE_S)
        with cluster(tmp_path / "second", **saving(tmp_path, lease_s=60.0), horovod=False) as second:
            second.start_alone()
            assert second.wait(PATIENCE_S) != 0
            assert "that process lives on this host" in second.said() and "takeover=True" in second.said(), second.log()
            assert "waiting for up to" not in second.log()
        n = len(first.notes("committed"))
        wait_for(lambda: len(first.notes("committed")) > n, "the first job to go on")


def test_the_same_command_started_twice_is_refused_before_it_claims_although_the_first_ones_server_does_not_answer(
    tmp_path: Path,
) -> None:
    url, name = tmp_path / "checkpoints", {"GBA_HVD_JOB_ID": "mine"}
    plan = saving(tmp_path, lease_s=1.5)
    with cluster(tmp_path / "first", name, **plan, sleep_s=0.2, epochs=1000, horovod=False) as first:
        first.start_alone()
        wait_for(lambda: events(first, "checkpoint"), "the first job's checkpoint", PATIENCE_S)
        (address,) = first.shard_dir.glob("**/ps-0.address")
        server = json.loads(address.read_text())["pid"]
        os.kill(server, signal.SIGSTOP)
        # The worker renews the claim meanwhile.
        renewals = lambda: {path.name for path in url.glob("claims/*/*")}  # noqa: E731
        before = renewals()
        wait_for(lambda: len(renewals() - before) > 0, "a renewal of the claim")
        with cluster(tmp_path / "second", name, **plan, shard_dir=str(first.shard_dir), horovod=False) as second:
            second.start_alone()
            assert second.wait(PATIENCE_S) != 0
            (worker,) = first.processes(only_workers=True)
            assert f"ShardMemoryError: a running job (process {worker}) uses {address.parent}" in second.said()
            assert "waiting for up to" not in second.log()
        assert len(list(url.glob("claims/*"))) == 1
        n = len(events(first, "checkpoint"))
        os.kill(server, signal.SIGCONT)
        wait_for(lambda: len(events(first, "checkpoint")) > n, "another checkpoint of the first job", PATIENCE_S)
        assert not events(first, "place_shared")


def is_taken_over_and_left(job: Cluster, store: Any) -> None:
    """Another job takes the location of this one over, and leaves it without a checkpoint; this one claims it again."""
    wait_for(lambda: job.ended or events(job, "checkpoint"), "a checkpoint", PATIENCE_S)
    other = claims.claim(store, "other", takeover=True)
    wait_for(lambda: job.ended or events(job, "checkpoint_failed"), "a save that fails", PATIENCE_S)
    failed = [event["message"] for event in events(job, "checkpoint_failed")]
    assert "Fenced" in failed[0] and "'other'" in failed[0]
    n = len(events(job, "checkpoint"))
    claims.release(store, other)
    wait_for(lambda: job.ended or len(events(job, "checkpoint")) > n, "a checkpoint under the new claim", PATIENCE_S)
    (shared,) = events(job, "place_shared")
    assert (shared["before"], shared["now"]) == (1, 3)
    assert max(store.names("manifests/")).startswith("manifests/000003-")


@pytest.mark.parametrize("mode", ["allreduce", "gba"])
def test_a_job_whose_place_was_taken_over_claims_it_again_when_the_other_has_left_without_a_checkpoint(
    tmp_path: Path, mode: str
) -> None:
    plan = saving(tmp_path) | ({"gba": LOCK_STEP} if mode == "gba" else {})
    with cluster(tmp_path / "job", **plan, sleep_s=0.2, epochs=1000, horovod=False) as job:
        job.start_alone()
        is_taken_over_and_left(job, store := open_store(str(tmp_path / "checkpoints")))
        newest = next(one.newest for one in chains(store) if isinstance(one, Chain))
        assert newest.about["mode"] == mode


def test_the_next_chief_saves_under_the_claim_that_the_one_before_made_again_in_an_asynchronous_mode(
    tmp_path: Path,
) -> None:
    plan = saving(tmp_path) | {"gba": {"mode": "gba"}}
    with cluster(tmp_path / "job", **plan, sleep_s=0.2, epochs=1000) as job:
        job.start_elastic(NAMES[:1], slots=2)
        is_taken_over_and_left(job, open_store(str(tmp_path / "checkpoints")))
        chief, n_failed = events(job, "checkpoint")[-1]["pid"], len(events(job, "checkpoint_failed"))
        saved = lambda: [event["pid"] for event in events(job, "checkpoint") if event["pid"] != chief]  # noqa: E731
        n = len(events(job, "checkpoint"))
        wait_for(lambda: len(events(job, "checkpoint")) > n, "the claim to be known to all", PATIENCE_S)
        os.kill(int(chief.rpartition("-")[2]), signal.SIGKILL)
        wait_for(lambda: job.ended or len(saved()) > 1, "checkpoints of the next chief", PATIENCE_S)
        assert not job.ended, job.log()
        why = [event["why"] for event in events(job, "checkpoint_failed")[n_failed:]]
        assert not any("Fenced" in one for one in why), why
        assert len(list((tmp_path / "checkpoints" / "claims").iterdir())) == 3, "nobody has claimed since"


@pytest.mark.parametrize(
    ("url", "words"),
    [("s4://bucket/job", "s4"), ("/proc/nowhere", "cannot hold checkpoints")],
)
def test_a_place_that_cannot_be_used_is_reported_before_training_begins(tmp_path: Path, url: str, words: str) -> None:
    with cluster(tmp_path, checkpoint={"url": url}, horovod=False) as job:
        job.start_alone()
        assert job.wait(PATIENCE_S) != 0
        assert words in job.said(), job.log()
        assert not job.notes("committed")


@pytest.mark.parametrize("mode", ["allreduce", "gba"])
def test_a_checkpoint_is_read_while_the_job_lives_and_after_it(tmp_path: Path, mode: str) -> None:
    plan = saving(tmp_path) | ({"gba": LOCK_STEP} if mode == "gba" else {})
    url = tmp_path / "checkpoints"
    with cluster(tmp_path / "job", **plan, sleep_s=0.05, holds=HOLDS, horovod=False) as job:
        job.start_alone()
        let_go(job)
        wait_for(lambda: job.ended or events(job, "checkpoint"), "a checkpoint", PATIENCE_S)
        claims = set(url.glob("claims/*"))
        opened = open_checkpoint(url)  # the job is held at step 4
        assert set(url.glob("claims/*")) == claims
        assert 2 <= opened.step <= 6
        assert opened.rows("user").shape == (opened.tables["user"].n_rows, opened.tables["user"].dim)
        (job.out / "saved once").touch()
        assert job.wait(PATIENCE_S) == 0, job.log()
        arrays = job.arrays()
    opened = open_checkpoint(url)
    assert opened.step == 22
    rows = {name: opened.rows(name) for name in opened.tables}
    for name, values in rows.items():
        assert np.array_equal(values, arrays[f"{name}.weights"]), name
    dense = {name: tensor.numpy() for name, tensor in opened.dense().items()}
    assert dense
    for name, values in dense.items():
        assert np.array_equal(values, arrays[f"dense.{name}"]), name
