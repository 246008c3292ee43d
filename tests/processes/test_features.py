"""Features of shared tables, tables with optimizers of their own, and initial rows of all kinds, in real jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .alone import Outcome, train_alone
from .cluster import assert_same_parameters, cluster
from .workload import item_rows

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
LOCK_STEP = {"mode": "gba", "lookahead": 0}
PLAN: dict[str, Any] = {"features": True, "lr_decay": 0.95, "row_optimizer": "RowAdagrad", "samples": 500, "epochs": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One worker, allreduce."""
    return train_alone(tmp_path_factory.mktemp("features") / "job", PLAN)


def test_one_worker_trains_all_rows_but_padding(alone: Outcome) -> None:
    arrays = alone.arrays
    assert not arrays["item.weights"][0].any(), "padding has zeros, and no gradient"
    assert not arrays["item.exp_avg"][0].any() and arrays["item.exp_avg"][1:].any(axis=1).all()
    assert arrays["user.sum"].any()
    moved = np.abs(arrays["item.weights"][1:] - item_rows(np.arange(1, 40)))
    assert (moved.max(axis=1) > 0).all()


@pytest.mark.parametrize("gba", [{}, LOCK_STEP], ids=["allreduce", "gba"])
def test_two_workers_train_the_same_model(alone: Outcome, tmp_path: Path, gba: dict[str, Any]) -> None:
    with cluster(tmp_path, **PLAN, **({"gba": gba} if gba else {})) as job:
        arrays = job.run(lambda: job.start_static(2)).arrays()
        assert_same_parameters(arrays, alone.arrays)
        job.assert_every_sample_once(epochs=2, samples=500)
        if gba:
            assert len(job.pushes()) >= 64


@pytest.mark.parametrize("row_compression", [{}, {"name": "dct_mp", "keep": 1.0}], ids=["whole", "dct_mp"])
def test_rows_of_features_on_another_host(alone: Outcome, tmp_path: Path, row_compression: dict[str, Any]) -> None:
    with cluster(tmp_path, own_memory_per_name=True, row_compression=row_compression, **PLAN) as job:
        job.start_elastic(("localhost", "127.0.0.1"))
        assert job.wait() == 0, job.log()
        arrays = job.arrays()
        assert job.notes("event")[0]["message"].startswith("2 workers on 2 hosts")
        assert_same_parameters(arrays, {name: value for name, value in alone.arrays.items() if name in arrays})
