"""Jobs with compressed gradients: nothing is lost through steps, switches, killed workers and restarts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .balance import assert_balanced
from .cluster import NAMES, Cluster, assert_same_parameters, cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]
TWO = NAMES[:2]
SPARSE = {"compression": {"name": "topk", "keep": 0.1, "values": "int8"}}
PATIENCE_S = 300.0


def events(job: Cluster, kind: str) -> list[dict[str, Any]]:
    return [line for line in job.notes("event") if line["event"] == kind]


@pytest.mark.parametrize(
    "values", ["int8", *(pytest.param(v, marks=pytest.mark.variant) for v in ("none", "fp16", "bf16"))]
)
def test_all_gradients_are_applied_or_wait(tmp_path: Path, values: str) -> None:
    plan = {"compression": {"name": "dct", "keep": 0.1, "values": values, "refresh_every": 5}}
    with cluster(tmp_path, **plan) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        assert_balanced(job)
        (reported, *_) = events(job, "traffic")
        assert reported["bytes"]["sent_allreduce_dense"] > 0
        assert 0 < reported["density"]["mlp.0.weight"] < 0.3


@pytest.mark.variant
def test_half_precision_is_summed_by_horovod(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    with cluster(tmp_path, compression={"name": "fp16"}) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        assert_balanced(job, tolerance=1e-2, least_waiting=0.0)
        for name, value in job.arrays().items():
            np.testing.assert_allclose(value, reference[name], rtol=0.02, atol=0.02, err_msg=name)


def test_keeping_everything_trains_the_same_model(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    with cluster(tmp_path, compression={"name": "dct", "keep": 1.0}, own_memory_per_name=True) as job:
        job.run(lambda: job.start_elastic(TWO), PATIENCE_S)
        dense = {name: value for name, value in reference.items() if name.startswith("dense.")}
        assert_same_parameters({name: job.arrays()[name] for name in dense}, dense)


@pytest.mark.parametrize("point", ["before commit", pytest.param("before exchange", marks=pytest.mark.variant)])
def test_a_killed_worker_takes_its_residual_along_and_nothing_else(tmp_path: Path, point: str) -> None:
    fault = {"point": point, "do": "kill", "step": 8, "rank": 1}
    with cluster(tmp_path, **SPARSE, faults=[fault]) as job:
        job.run(lambda: job.start_elastic(TWO), PATIENCE_S)
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=2)
        if point == "before commit":  # its last note says what it had: the step was not decided
            assert_balanced(job, residual_lost=True)
        (reported, *_) = events(job, "residual_lost")
        assert reported["workers"] == 1 and reported["residual"] > 0


def test_a_survivor_that_misses_the_result_settles_what_it_sent(tmp_path: Path) -> None:
    fault = {"point": "after commit", "do": "lose the result", "step": 8, "rank": 1}
    with cluster(tmp_path, {"GBA_HVD_TIMEOUT_S": "10"}, **SPARSE, faults=[fault]) as job:
        job.run(lambda: job.start_elastic(TWO), PATIENCE_S)
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=2)
        assert_balanced(job)


def saving(folder: Path, every_steps: int = 2) -> dict[str, Any]:
    return {"checkpoint": {"url": str(folder / "checkpoints"), "every_steps": every_steps, "lease_s": 1.0}}


@pytest.mark.variant
def test_a_job_that_was_killed_goes_on_with_its_residual_and_refuses_another_compressor(tmp_path: Path) -> None:
    holds = {"1": "server", "12": "never"}
    with cluster(tmp_path / "first", **SPARSE, **saving(tmp_path), sleep_s=0.05, holds=holds) as job:
        job.start_static(2)
        wait_for(lambda: job.ended or any(job.shard_dir.glob("*/ps-0.address")), "the server", PATIENCE_S)
        (job.out / "server").touch()
        wait_for(lambda: job.ended or events(job, "checkpoint"), "a checkpoint", PATIENCE_S)
        assert not job.ended, job.log()
        job.kill_all()
        saves = job.notes("saves")
    with cluster(tmp_path / "other", compression={"name": "fp16"}, **saving(tmp_path), horovod=False) as job:
        job.start_alone()
        assert job.wait(PATIENCE_S) != 0
        words = "is of a job with compression=topk(keep=0.1).then(int8), this one has fp16"
        assert words in job.said(), job.log()
    with cluster(tmp_path / "second", **SPARSE, **saving(tmp_path)) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        step, rests = at_start(job)
        saved = sum(line["saves"] for line in saves if line["step"] == step)
        assert abs(saved) > 1e-4
        np.testing.assert_allclose(sum(rests), saved, rtol=1e-4)
        assert sorted(map(bool, rests)) == [False, True]  # one worker has all of it


@pytest.mark.variant
@pytest.mark.parametrize("mode", ["allreduce", "gba"])
def test_a_job_that_left_its_memory_behind_goes_on_from_the_checkpoint_with_its_residual(
    tmp_path: Path, mode: str
) -> None:
    """What was not sent died with the workers, so the rows in memory are of no use: that of the checkpoint counts."""
    plan = {**SPARSE, **saving(tmp_path), "own_memory_per_name": True, "holds": {1: "go", 9: "never"}}
    plan |= {"gba": {"mode": "gba"}} if mode == "gba" else {}
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "120"}, **plan) as job:
        job.start_elastic(TWO)
        servers = lambda: list(job.shard_dir.glob("*/*/ps-0.address"))  # noqa: E731
        wait_for(lambda: job.ended or len(servers()) == 2, "two servers", PATIENCE_S)
        (job.out / "go").touch()
        saved = lambda: list((tmp_path / "checkpoints").glob("manifests/*.json"))  # noqa: E731
        wait_for(lambda: job.ended or saved(), "a checkpoint", PATIENCE_S)
        assert job.launcher is not None and not job.ended, job.log()
        job.launcher.kill()
        wait_for(lambda: not job.kill(job.processes(only_workers=True)), "the workers' end", PATIENCE_S)
        job.launcher.wait(60)
        saves, pushes = job.notes("saves"), pushes_with_residuals(job)
        job.out = tmp_path / "second"  # the same job, but its notes are kept apart
        job.out.mkdir()
        plan = {name: value for name, value in job.plan.items() if name not in ("gba", "holds")}
        job.plan_file.write_text(json.dumps(plan | {"out": str(job.out)}))
        job.start_elastic(TWO)
        assert job.wait(PATIENCE_S) == 0, job.log()
        (left,) = events(job, "memory_left")
        assert "not kept there: gradients are compressed" in left["message"]
        (resumed, *_) = events(job, "resumed")
        assert resumed["rows_restored"] > 0 and not resumed.get("from_memory")
        step, rests = at_start(job)
        saved = sum(line["saves"] for line in saves if line["step"] == step)
        if mode == "gba":
            again = set(job.samples_of_epoch(0))
            saved = sum(push["left"] for push in pushes if again.isdisjoint(push["rows"]))
        assert abs(saved) > 1e-4
        np.testing.assert_allclose(sum(rests), saved, rtol=1e-3, atol=1e-4)
        assert sorted(map(bool, rests)) == [False, True]
        assert_balanced(job, began=sum(rests))
        result = job.result()
        assert result["total"] == result["applied"] + result["dropped"] + result["lost"] == 2000
        job.assert_nothing_left()


def at_start(job: Cluster) -> tuple[int, list[float]]:
    """The step that a job resumed from, and what each worker had not sent there."""
    (resumed, *_) = events(job, "resumed")
    step = int(resumed["step"])
    return step, [line["rest"] for line in job.notes("brings") if line["step"] == step + 1]


# --- asynchronous modes: each host of a job has a server -------------------------------------------------------------

TWO_HOSTS: dict[str, Any] = {"own_memory_per_name": True, "samples": 2000}
QUALITY = {"gba": {"mode": "gba"}, "epochs": 4, **TWO_HOSTS}


SPARSE_ROWS = {"name": "ternary_ef", "keep": 0.5, "values": "int8"}


@pytest.mark.parametrize("values", ["int8", pytest.param("none", marks=pytest.mark.variant)])
def test_what_goes_to_servers_of_other_hosts_and_comes_back_is_compressed(tmp_path: Path, values: str) -> None:
    """Every sample is applied or accounted for, and the model learns as without."""
    dense = {"name": "dct", "keep": 0.2, "values": values, "refresh_every": 20}
    sparse = {"compression": dense, "row_compression": SPARSE_ROWS if values == "int8" else {}}
    aucs, n_bytes = {}, {}
    for name, plan in (("plain", {}), ("sparse", sparse)):
        with cluster(tmp_path / name, **QUALITY, **plan) as job:
            job.run(lambda job=job: job.start_elastic(TWO), PATIENCE_S)  # type: ignore[misc]
            job.assert_every_sample_once(epochs=4, samples=2000)
            aucs[name] = job.result()["aucs"][-1]
            reported = [line["bytes"] for line in events(job, "traffic")]
        for kind in ("dense", "rows"):
            n_bytes[name, kind] = sum(n for one in reported for key, n in one.items() if key.endswith(f"_gba_{kind}"))
    assert aucs["sparse"] > aucs["plain"] - 0.05
    assert 0 < n_bytes["sparse", "dense"] < n_bytes["plain", "dense"]
    # Half of the pushes stay on the host, and evaluations pull whole rows.
    assert (n_bytes["sparse", "rows"] < 0.85 * n_bytes["plain", "rows"]) is (values == "int8")


@pytest.mark.parametrize("keep", [0.5, pytest.param(1.0, marks=pytest.mark.variant)])
def test_activations_travel_in_both_modes_and_through_switches(tmp_path: Path, keep: float) -> None:
    """DCT-MP. Every sample is applied or accounted for, and the model learns."""
    rule = {"row_compression": {"name": "dct_mp", "keep": keep, "refresh_every": 20, "values": "int8"}}
    switches = {"mode": "allreduce", "switch_at": {20: "gba", 60: "allreduce"}}
    plan = {"gba": switches, "epochs": 4, **TWO_HOSTS, **rule}
    with cluster(tmp_path, **plan) as job:
        job.run(lambda: job.start_elastic(TWO), PATIENCE_S)
        assert {line["to"] for line in events(job, "switch")} == {"gba", "allreduce"}
        job.assert_every_sample_once(epochs=4, samples=2000)
        aucs = job.result()["aucs"]
        assert aucs[-1] > max(0.6, aucs[0])
        reported = events(job, "traffic")
    n_bytes = {mode: sum(one["bytes"].get(f"sent_{mode}_rows", 0) for one in reported) for mode in ("allreduce", "gba")}
    assert all(n_bytes.values()), n_bytes
    of_all = {mode: reported[-1]["all_workers"][f"sent_{mode}_rows"] for mode in n_bytes}
    assert of_all == pytest.approx(n_bytes, rel=0.1), "what both workers counted, but for what came after the last push"
    assert sum(of_all.values()) <= sum(n_bytes.values())
    assert all(0 < share <= 1 for share in reported[-1]["row_density"])


@pytest.mark.variant
def test_rows_in_half_precision_train_nearly_the_same_model(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    with cluster(tmp_path, row_compression={"name": "fp16"}, own_memory_per_name=True) as job:
        job.run(lambda: job.start_elastic(TWO), PATIENCE_S)
        arrays = job.arrays()
        assert not any(name.startswith("user") for name in arrays), "the rows are to live on two hosts"
        for name, value in arrays.items():
            np.testing.assert_allclose(value, reference[name], rtol=0.02, atol=0.02, err_msg=name)


def test_there_and_back_nothing_is_lost(tmp_path: Path) -> None:
    """Of the residual, too: in allreduce mode before and after, by the projections."""
    switches = {"mode": "allreduce", "switch_at": {6: "gba", 20: "allreduce"}}
    plan = {"gba": switches, "epochs": 3, **TWO_HOSTS, **SPARSE}
    with cluster(tmp_path, **plan) as job:
        job.run(lambda: job.start_elastic(TWO), PATIENCE_S)
        assert {line["to"] for line in events(job, "switch")} == {"gba", "allreduce"}
        job.assert_every_sample_once(epochs=3, samples=2000)
        assert job.notes("pushed")
        assert_balanced(job)


def test_a_job_killed_in_an_asynchronous_mode_goes_on_with_what_was_not_sent(tmp_path: Path) -> None:
    """Of the pushes that the checkpoint has, and of no others: those are computed again."""
    plan = {**TWO_HOSTS, **SPARSE, **saving(tmp_path, every_steps=6)}
    # The checkpoint is made between steps 6 and 8, a next one would be at 12: what is pushed after 8 is in none. Only
    # the worker on the other host than the dense values leaves something behind, so both push before and after.
    holds = {"8": "saved", "11": "never"}
    first_push = [waits(rank, f"fault-{1 - rank}", "before push", 0) for rank in (0, 1)]
    step_3 = [waits(rank, "both pushed", "before push of step", 3) for rank in (0, 1)]
    faults = {"faults": [*first_push, *step_3]}
    with cluster(tmp_path / "first", **plan, gba={"mode": "gba"}, holds=holds, **faults) as job:
        job.start_elastic(TWO)
        wait_for(lambda: job.ended or len(pushes_of_workers(job)) == 2, "a push of each worker", PATIENCE_S)
        (job.out / "both pushed").touch()
        held = lambda: len(list(job.out.glob("held-by-saved-*"))) == 2  # noqa: E731
        wait_for(lambda: job.ended or (held() and events(job, "checkpoint")), "a checkpoint", PATIENCE_S)
        before = pushes_of_workers(job)
        (job.out / "saved").touch()
        more = lambda: all(n > before[pid] for pid, n in pushes_of_workers(job).items())  # noqa: E731
        wait_for(lambda: job.ended or more(), "one more push of each worker", PATIENCE_S)
        assert not job.ended, job.log()
        job.kill_all()
        pushes = pushes_with_residuals(job)
    with cluster(tmp_path / "second", **plan) as job:
        job.run(lambda: job.start_elastic(TWO), PATIENCE_S)
        step, rests = at_start(job)
        assert 4 <= step < 20 and len(rests) == 2, "the checkpoint is of the first epoch"
        assert not events(job, "residual_lost")
        again = set(job.samples_of_epoch(0))
        left = [push["left"] for push in pushes if again.isdisjoint(push["rows"])]
        assert 0 < len(left) < len(pushes), "some pushes are in the checkpoint, and some are not"
        close = {"rtol": 1e-3, "atol": 1e-4}
        for wrong in (0.0, sum(push["left"] for push in pushes)):
            assert not np.isclose(sum(left), wrong, **close), "what is compared below would show nothing"
        np.testing.assert_allclose(sum(rests), sum(left), **close)
        assert sorted(map(bool, rests)) == [False, True]
        assert_balanced(job, began=sum(rests))


def waits(rank: int, file: str, point: str, step: int) -> dict[str, Any]:
    return {"point": point, "step": step, "rank": rank, "do": "wait for", "file": file}


def pushes_of_workers(job: Cluster) -> Counter[int]:
    return Counter(line["pid"] for line in job.notes("pushed"))


def pushes_with_residuals(job: Cluster) -> list[dict[str, Any]]:
    """Every push of an asynchronous mode: its samples, and what it left behind of its own gradient."""
    found = []
    for pid in {line["pid"] for line in job.notes("push")}:
        leases = [line for line in job.notes("push") if line["pid"] == pid]
        sums = [line for line in job.notes("pushed") if line["pid"] == pid]
        pairs = zip(leases, sums, strict=False)  # the last one may not have come so far
        found += [
            {"rows": lease["rows"], "left": reported["pushed"] - reported["arrives"]} for lease, reported in pairs
        ]
    return found


@pytest.mark.variant
def test_workers_decide_about_pushes_and_pulls_and_lose_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path, **TWO_HOSTS, **SPARSE, bypass=True, gba={"mode": "gba"}, epochs=2) as job:
        job.run(lambda: job.start_elastic(TWO), PATIENCE_S)
        job.assert_every_sample_once(epochs=2, samples=2000)
        assert_balanced(job, least_waiting=-1.0)  # where pushes go as they are, nothing is left
        reported = [line["message"] for line in events(job, "compression")]
        assert any("dense gradients for server" in message for message in reported)
        assert any("dense values from server" in message for message in reported)
