"""Evaluations and losses over real workers: the same figures in every mode, on any number of workers and hosts."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gba_hvd_tools.cli import main

from gba_hvd.metrics.grouped_auc import grouped_auc
from gba_hvd.metrics.scores import exact_auc

from .cluster import NAMES, Cluster, cluster, wait_for
from .workload import Clicks

sys.path.insert(0, str(Path(__file__).parent))  # as it is for a worker's script
from shown import N_ITEMS, K, bought, outputs_of, relevant, seen, stars, vectors_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
SHORT = {"samples": 200, "epochs": 1, "evaluates_more": True}


def expected(n: int = 200) -> dict[str, Any]:
    """By numpy and loops, from all samples at once."""
    data = Clicks(n)
    batch = data.take(np.arange(n))
    ctr, cvr, rating = outputs_of(torch.from_numpy(data.user), torch.from_numpy(data.item)).numpy().T
    clicked, groups = data.label == 1, grouped_auc(ctr, data.label, data.item)
    errors = (rating - stars(batch).numpy()).astype(float)

    def logloss(logits: np.ndarray, labels: np.ndarray) -> float:
        return float(np.logaddexp(0, np.where(labels == 1, -logits, logits).astype(float)).mean())

    after = bought(batch).numpy()
    tasks = {
        "ctr": {"auc": exact_auc(ctr, data.label), "logloss": logloss(ctr, data.label), "gauc": groups.gauc},
        "cvr": {"auc": exact_auc(cvr[clicked], after[clicked]), "logloss": logloss(cvr[clicked], after[clicked])},
        "stars": {"mse": float((errors**2).mean()), "mae": float(np.abs(errors).mean())},
    }
    bag, exclude = relevant(batch), seen(batch)
    users, items = vectors_of(torch.from_numpy(data.user)), vectors_of(torch.arange(N_ITEMS))
    ends = [*bag.offsets.tolist()[1:], len(bag.values)]
    sums, n_queries, n_unknown = dict.fromkeys([f"{m}_at_{k}" for m in ("recall", "ndcg") for k in K], 0.0), 0, 0
    for query, (start, end) in enumerate(zip(bag.offsets.tolist(), ends, strict=True)):
        wanted = set(bag.values[start:end].tolist())
        if not wanted:
            continue
        n_queries, n_unknown = n_queries + 1, n_unknown + sum(item >= N_ITEMS for item in wanted)
        scores = (items @ users[query]).tolist()
        order = sorted(set(range(N_ITEMS)) - {int(exclude[query])}, key=lambda item: (-scores[item], item))
        for k in K:
            hits = [item in wanted for item in order[:k]]
            sums[f"recall_at_{k}"] += sum(hits) / len(wanted)
            ideal = sum(1 / math.log2(rank + 2) for rank in range(min(k, len(wanted))))
            sums[f"ndcg_at_{k}"] += sum(hit / math.log2(rank + 2) for rank, hit in enumerate(hits)) / ideal
    return {
        "tasks": tasks, "n": [n, int(clicked.sum()), n], "groups": [groups.n_groups, groups.n_groups_left_out],
        "retrieval": {name: value / n_queries for name, value in sums.items()},
        "counts": [n_queries, n - n_queries, N_ITEMS, n_unknown],
    }  # fmt: skip


def check(job: Cluster, workers: int, mode: str) -> None:
    found, right = job.notes("evaluation"), expected()
    assert sorted(line["rank"] for line in found) == list(range(workers)) and {line["mode"] for line in found} == {mode}
    assert all(line["evaluation"] == found[0]["evaluation"] for line in found), "one result on every rank"
    first = found[0]["evaluation"]
    assert {name: first[name] for name in ("n", "groups", "counts")} == {
        name: right[name] for name in ("n", "groups", "counts")
    }
    for name, task in right["tasks"].items():
        assert first["tasks"][name] == pytest.approx(task, rel=1e-9), name
    assert first["retrieval"] == pytest.approx(right["retrieval"], rel=1e-9)
    assert first["tasks"]["ctr"]["auc"] == right["tasks"]["ctr"]["auc"]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_evaluations_in_allreduce_mode_are_those_of_all_samples_at_once(tmp_path: Path, workers: int) -> None:
    with cluster(tmp_path, **SHORT) as job:
        job.run(lambda: job.start_static(workers))
        check(job, workers, "allreduce")


@pytest.mark.parametrize(("mode", "workers"), [("gba", 1), ("gba", 2), ("gba", 3), ("shadow", 2)])
def test_evaluations_in_asynchronous_modes_are_those_of_all_samples_at_once(
    tmp_path: Path, mode: str, workers: int
) -> None:
    with cluster(tmp_path, gba={"mode": mode}, **SHORT) as job:
        job.run(lambda: job.start_static(workers))
        check(job, workers, mode)


@pytest.mark.parametrize(
    ("mode", "workers", "reading"),
    [("allreduce", 2, {"num_workers": 1}), ("gba", 3, {"num_workers": 1, "prefetch": 1}), ("gba", 2, {"prefetch": 3})],
)
def test_evaluations_that_read_ahead_find_the_same(
    tmp_path: Path, mode: str, workers: int, reading: dict[str, int]
) -> None:
    more = {} if mode == "allreduce" else {"gba": {"mode": mode}}
    with cluster(tmp_path, evaluation_reading=reading, **more, **SHORT) as job:
        job.run(lambda: job.start_static(workers))
        check(job, workers, mode)


@pytest.mark.parametrize("mode", ["gba", "hop_bs"])
def test_a_worker_that_hangs_within_an_evaluation_does_not_hold_it_up(tmp_path: Path, mode: str) -> None:
    """The other one gets its batch, and the result; the next epoch is trained and evaluated without the first."""
    plan = {"gba": {"mode": mode}, "epochs": 2, "hangs_in_evaluation": 0}
    with cluster(tmp_path, {"GBA_HVD_LEASE_S": "3"}, **plan) as job:
        job.start_static(2)
        wait_for(lambda: [one for one in job.notes("of_epoch") if one["of_epoch"] == 1], "the end of the next epoch")
        assert (job.out / "hangs").exists()
        (job.out / "go on").touch()
        assert job.wait() == 0, job.log()
        job.assert_every_sample_once(epochs=2)
        hung = [line["message"] for line in job.notes("event") if line["event"] == "worker_hangs"]
        assert any(re.match(r"rank 1 \(process \d+\) lives, and has done nothing for \d+ s: it", text) for text in hung)
        aucs = [line["auc"] for line in job.notes("auc")]
        assert len(aucs) == 4 and len(set(aucs)) == 2, "one result of each evaluation, for both"


def test_the_model_stands_still_while_others_wait(tmp_path: Path) -> None:
    """For code of one worker that takes longer than others wait by themselves."""
    plan = {"gba": {"mode": "gba"}, "epochs": 2, "others_wait_s": 5.0}
    with cluster(tmp_path, {"GBA_HVD_LEASE_S": "1", "GBA_HVD_ALIVE_S": "120"}, **plan) as job:
        job.start_static(2)
        assert job.wait() == 0, job.log()
        job.assert_every_sample_once(epochs=2)
        seen = [line["between_epochs"] for line in job.notes("between_epochs")]
        assert len(seen) == 2 and all(before == after for before, after in seen)
        assert "others_trained" not in [line["event"] for line in job.notes("event")]


def test_a_switch_that_waits_for_a_worker_that_hangs_names_it_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The request stands: when the worker is back, the job is in allreduce."""
    plan = {"gba": {"mode": "gba"}, "epochs": 2, "hangs_in_evaluation": 0, "sleep_s": 0.1}
    with cluster(tmp_path, {"GBA_HVD_LEASE_S": "3"}, **plan) as job:
        job.start_static(2)
        wait_for(lambda: "worker_hangs" in [one["event"] for one in job.notes("event")], "the warning")
        assert main(["switch", "allreduce", "--dir", str(job.shard_dir), "--wait", "2"]) == 1
        shown = capsys.readouterr()
        named = r"rank 1 on localhost \(process \d+\) has not been active for \d+ s, and the switch waits"
        asked, waits = shown.out.splitlines()
        assert asked.endswith("asked for allreduce; it is in gba now") and re.match(named, waits)
        still, names_it = shown.err.splitlines()
        assert still.startswith("still not in allreduce after 2 s") and re.match(named, names_it)
        (job.out / "go on").touch()
        assert job.wait() == 0, job.log()
        job.assert_every_sample_once(epochs=2)
        switches = [one["message"] for one in job.notes("event") if one["event"] == "switch"]
        assert any(text.startswith("gba -> allreduce") for text in switches)


def test_who_waits_in_an_evaluation_for_a_worker_that_hangs_says_so(tmp_path: Path) -> None:
    """In allreduce mode all wait: the log says for whom, and in what."""
    with cluster(tmp_path, epochs=1, hangs_in_evaluation=0, long_waits_s=[1, 3]) as job:
        job.start_static(3)
        waits = r"rank {} has waited for \d+ s in an evaluation \(gba_hvd.evaluate\): rank 1 has not come to it\."
        wait_for(lambda: all(re.search(waits.format(rank), job.said()) for rank in (0, 2)), "a line of each that waits")
        assert (job.out / "hangs").exists()
        (job.out / "go on").touch()
        assert job.wait() == 0, job.log()
        job.assert_every_sample_once(epochs=1)


def test_a_worker_whose_server_others_still_need_says_what_it_waits_for(tmp_path: Path) -> None:
    plan = {"gba": {"mode": "gba"}, "epochs": 1, "hangs_in_evaluation": 0, "own_memory_per_name": True}
    with cluster(tmp_path, {"GBA_HVD_LEASE_S": "3"}, **plan) as job:
        job.start_elastic(NAMES[:2])
        wait_for(
            lambda: re.search(r"training is over .* waited \d+ s for rank 1: the server", job.said()), "the reason"
        )
        assert not re.search(r"WARNING.*training is over", job.said()), "it is the usual end"
        (job.out / "go on").touch()
        assert job.wait() == 0, job.log()
        job.assert_every_sample_once(epochs=1)


@pytest.mark.parametrize("mode", ["allreduce", "gba"])
def test_evaluations_use_rows_of_other_hosts(tmp_path: Path, mode: str) -> None:
    plan = {**SHORT, "own_memory_per_name": True, **({} if mode == "allreduce" else {"gba": {"mode": mode}})}
    with cluster(tmp_path, **plan) as job:
        job.run(lambda: job.start_elastic(NAMES[:2]))
        check(job, 2, mode)


# --- negatives of all workers ----------------------------------------------------------------------------------------

NEGATIVES = {
    "global_negatives": True, "dense_optimizer": "SGD", "row_optimizer": "SGD", "samples": 960, "epochs": 1,
}  # fmt: skip


@pytest.mark.parametrize("workers", [2, 3])
def test_global_negatives_train_what_one_process_with_the_global_batch_trains(tmp_path: Path, workers: int) -> None:
    with cluster(tmp_path / "alone", horovod=False, sync_micro_batch=96, **NEGATIVES) as job:
        alone = job.run(job.start_alone).arrays()
    with cluster(tmp_path / "job", sync_micro_batch=96 // workers, **NEGATIVES) as job:
        found = job.run(lambda: job.start_static(workers)).arrays()
        job.assert_every_sample_once(epochs=1, samples=960)
    assert set(found) == set(alone)
    for name, values in alone.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_worker_killed_between_the_collectives_of_the_loss_costs_no_sample(tmp_path: Path) -> None:
    """The other worker computes the step again, alone at first, with the negatives of the batch and a warning."""
    kill = {"point": "in the loss", "do": "kill", "step": 4, "rank": 1}
    with cluster(tmp_path, sync_micro_batch=48, faults=[kill], **NEGATIVES) as job:
        job.run(lambda: job.start_elastic(NAMES[:2]))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=1, samples=960)
        warned = [line["message"] for line in job.notes("event") if line["event"] == "negatives_local"]
        assert all("a step has 2 batches for" in message for message in warned)


def test_negatives_in_an_asynchronous_mode_are_those_of_the_micro_batch_and_the_log_says_so(tmp_path: Path) -> None:
    with cluster(tmp_path, gba={"mode": "gba"}, **NEGATIVES) as job:
        job.run(lambda: job.start_static(2))
        job.assert_every_sample_once(epochs=1, samples=960)
        assert job.said().count("in an asynchronous mode workers do not wait for each other") == 1
