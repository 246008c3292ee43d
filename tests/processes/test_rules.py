"""Update rules through the real server: equal where theory says so, and through switches and kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gba_hvd.faults import FaultSchedule

from .alone import Outcome, train_alone
from .cluster import assert_same_parameters, cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
LR, MOMENTUM = 0.05, 0.9  # of the workload's optimizer "momentum"
WHOLE_STEPS: dict[str, Any] = {"samples": 960, "dense_optimizer": "momentum", "row_optimizer": "SGD"}


def dense_of(outcome: Outcome) -> dict[str, np.ndarray]:
    return {name: values for name, values in outcome.arrays.items() if name.startswith("dense.")}


@pytest.mark.variant
def test_dana_zero_and_dana_slim_train_the_same_model(tmp_path: Path) -> None:
    """In lock-step. What DANA-Zero shows is what DANA-Slim has, so rows and dense values come out the same."""
    zero = train_alone(tmp_path / "zero", WHOLE_STEPS, mode="gba", lookahead=0, rule="dana_zero")
    slim = train_alone(tmp_path / "slim", WHOLE_STEPS, mode="gba", lookahead=0, rule="dana_slim")
    assert (zero.step, slim.step, zero.modes) == (20, 20, {"gba"})
    rows = {name for name in zero.arrays if not name.startswith("dense.")}
    assert_same_parameters({n: slim.arrays[n] for n in rows}, {n: zero.arrays[n] for n in rows})
    buffers = [zero.optimizer_arrays[f"{number}.momentum_buffer"] for number in range(len(dense_of(zero)))]
    for (name, values), buffer in zip(dense_of(zero).items(), buffers, strict=True):
        np.testing.assert_allclose(slim.arrays[name], values - LR * MOMENTUM * buffer, rtol=1e-3, atol=2e-5)
    assert max(np.abs(buffer).max() for buffer in buffers) > 0.01, "without momentum there is nothing to compare"


def test_dana_slim_with_one_worker_in_lock_step_is_nesterovs_momentum(tmp_path: Path) -> None:
    nesterov = train_alone(tmp_path / "allreduce", WHOLE_STEPS | {"dense_optimizer": "nesterov"})
    slim = train_alone(tmp_path / "slim", WHOLE_STEPS, mode="gba", lookahead=0, rule="dana_slim")
    assert_same_parameters(slim.arrays, nesterov.arrays)


@pytest.mark.parametrize("rule", ["dana_zero", pytest.param("delayed_nesterov", marks=pytest.mark.variant)])
def test_a_job_switches_to_a_rule_and_back_while_its_server_is_killed(tmp_path: Path, rule: str) -> None:
    faults = [fault.entry() for fault in FaultSchedule().kill_server(host=0, at_step=9).faults]
    gba = {"mode": "allreduce", "rule": rule, "switch_at": {4: "async", 60: "allreduce"}}
    with cluster(tmp_path, gba=gba, dense_optimizer="momentum", fault_schedule=faults, epochs=3) as job:
        job.run(lambda: job.start_static(2), timeout_s=300)
        assert job.schedule_fired() == ["kill_server"]
        job.assert_every_sample_once(epochs=3)
        switches = [(line["from"], line["to"]) for line in job.notes("event") if line["event"] == "switch"]
        assert set(switches) == {("allreduce", "async"), ("async", "allreduce")}
        assert job.result()["mode"] == "allreduce"
        assert all(np.isfinite(values).all() for values in job.optimizer_arrays().values())
