"""The checkpoint that `keep_best` keeps has the model that was measured, through launches and copies."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from recovery.catalog.best import BestCheckpoint, best_chain
from recovery.catalog.chains import Chain, chains
from recovery.restore.open_checkpoint import open_checkpoint
from recovery.storage.open import open_store

from .cluster import NAMES, Cluster, cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
STEPS = 11  # of an epoch


def plan_of(url: Path, scores: list[float], mode: str = "allreduce") -> dict[str, Any]:
    """Epochs that take less time than a companion server takes to start, and an interval that is never over."""
    checkpoint = {"url": str(url), "every_s": 600.0, "keep_best": "auc", "lease_s": 1.0}
    return {"gba": {"mode": mode}, "checkpoint": checkpoint, "scores": scores, "epochs": len(scores)}


def best_of(url: Path) -> BestCheckpoint:
    found = best_chain(list(chains(open_store(url))))
    assert found is not None
    return found


def dense_at(job: Cluster, epoch: int) -> set[str]:
    """Fingerprints of the dense parameters that workers had at the end of an epoch."""
    return {str(line["values"]) for line in job.notes("values") if line["of_epoch"] == epoch}


def fingerprint(url: Path) -> str:
    dense = open_checkpoint(url, "best").dense()
    return hashlib.sha256(b"".join(dense[name].numpy().tobytes() for name in dense)).hexdigest()


def test_the_best_model_of_a_short_first_epoch_is_saved_as_it_was_measured(tmp_path: Path) -> None:
    url = tmp_path / "checkpoints"
    with cluster(tmp_path / "job", **plan_of(url, [0.9, 0.7, 0.6])) as job:
        job.run(lambda: job.start_elastic(NAMES[:2]))
        best = best_of(url)
        assert (best.value, best.step, best.manifest.step, best.unsaved) == (0.9, STEPS, STEPS, None)
        assert not best.n_ahead, "no row is of a later step"
        assert dense_at(job, 0) == {fingerprint(url)} != dense_at(job, 2)
        assert not [line for line in job.notes("event") if line["event"] == "best_not_saved"]
    newest = next(iter(chains(open_store(url))))
    assert isinstance(newest, Chain) and newest.newest.step == 3 * STEPS


@pytest.mark.parametrize("is_copy", [True, False], ids=["a copy", "the same folder"])
def test_another_job_that_resumes_leaves_the_mark_of_the_best_model_where_it_was(tmp_path: Path, is_copy: bool) -> None:
    url = tmp_path / "checkpoints"
    with cluster(tmp_path / "job", **plan_of(url, [0.9, 0.7])) as job:
        job.run(lambda: job.start_elastic(NAMES[:2]))
    before = best_of(url)
    if is_copy:
        url = Path(shutil.copytree(url, tmp_path / "copied"))
    for scores, marked in (([0.9, 0.7, 0.6], STEPS), ([0.9, 0.7, 0.6, 0.95], 4 * STEPS)):
        name = f"another-{len(scores)}"
        with cluster(tmp_path / name, {"GBA_HVD_JOB_ID": name}, **plan_of(url, scores)) as job:
            job.run(lambda job=job: job.start_elastic(NAMES[:2]))  # type: ignore[misc]
        best = best_of(url)
        assert (best.step, best.manifest.step, best.value) == (marked, marked, max(scores))
        assert (best.manifest == before.manifest) == (marked == STEPS)
        newest = next(iter(chains(open_store(url))))
        assert isinstance(newest, Chain) and newest.newest.step == STEPS * len(scores)
        assert newest.newest.about["job"] == name != before.manifest.about["job"]
