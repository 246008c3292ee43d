"""Update rules through the real server: equal where theory says so, and through switches and kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd.faults import FaultSchedule
from gba_hvd.ps.worker.worker import PsWorker

from .alone import Outcome, Watch, train_alone
from .cluster import assert_same_parameters, cluster

pytestmark = [pytest.mark.processes]
LR, MOMENTUM = 0.05, 0.9  # of the workload's optimizer "momentum"
WHOLE_STEPS: dict[str, Any] = {"samples": 960, "dense_optimizer": "momentum", "row_optimizer": "SGD"}


def more(*rules: str) -> list[Any]:
    return [pytest.param(rule, marks=pytest.mark.variant) for rule in rules]


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


def test_gap_aware_damps_the_rows_of_a_push_alike_on_every_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four dense tensors at five servers: one of these has none. They log what they apply."""
    monkeypatch.setenv("GBA_HVD_TRACE", str(tmp_path / "trace"))
    plan = {"samples": 480, "max_norm": 1.0}
    result = train_alone(tmp_path / "job", plan, mode="async", rule="gap_aware", servers_per_host=5)
    assert (result.modes, result.samples["applied"]) == ({"async"}, 2 * 480)
    by_step: dict[int, list[list[float]]] = {}
    for path in (tmp_path / "trace").glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["is"] == "apply":
                by_step.setdefault(line["step"], []).append(line["row_damping"])
    assert sorted(by_step) == list(range(1, 61))
    assert all(len(reported) == 5 and all(one == reported[0] for one in reported) for reported in by_step.values())
    assert any(reported[0][0] < 1.0 for reported in by_step.values()), "some pushes were computed with older values"


@pytest.mark.parametrize(("rule", "in_gba"), [(None, "look_ahead"), ("none", "none")])
def test_gba_looks_ahead_by_default_and_a_switch_takes_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str | None, in_gba: str
) -> None:
    taken: list[tuple[np.ndarray, np.ndarray]] = []
    changes: list[dict[str, Any]] = []
    export, on_event = PsWorker.export, Watch.on_event

    def exporting(worker: PsWorker, leaving: bool, ended: bool = True) -> Any:
        shown = worker._values.as_served()
        found = export(worker, leaving, ended)
        if leaving:
            taken.append((shown, np.concatenate([found[t].values for t in sorted(found)])))
        return found

    def watching(watch: Watch, event: gba_hvd.Event) -> None:
        on_event(watch, event)
        if event.kind == "switch":
            changes.append(event.data)

    monkeypatch.setattr(PsWorker, "export", exporting)
    monkeypatch.setattr(Watch, "on_event", watching)
    plan = {"dense_optimizer": "Adam", "samples": 960}
    result = train_alone(tmp_path / "job", plan, mode="allreduce", switch_at={4: "gba", 12: "allreduce"}, rule=rule)
    assert (result.modes, result.samples["applied"]) == ({"allreduce", "gba"}, 2 * 960)
    ((shown, model),) = taken
    assert (shown != model).any() == (in_gba == "look_ahead")
    there, back = changes
    assert (there["to"], there["rule"], back["to"], "rule" in back) == ("gba", in_gba, "allreduce", False)
    assert ("the default of mode gba" in there["rule_reason"]) == (rule is None)


@pytest.mark.parametrize("rule", ["dana_zero", "dana_dc", *more("delayed_nesterov", "dc", "look_ahead")])
def test_a_job_switches_to_a_rule_and_back_while_its_server_is_killed(tmp_path: Path, rule: str) -> None:
    faults = [fault.entry() for fault in FaultSchedule().kill_server(host=0, at_step=9).faults]
    settings = {"lambda": 0.5, "adaptive": False} if rule == "dana_dc" else {}
    gba = {
        "mode": "allreduce", "rule": rule, "rule_settings": settings, "switch_at": {4: "async", 60: "allreduce"},
    }  # fmt: skip
    with cluster(tmp_path, gba=gba, dense_optimizer="momentum", fault_schedule=faults, epochs=3) as job:
        job.run(lambda: job.start_static(2), timeout_s=300)
        assert job.schedule_fired() == ["kill_server"]
        job.assert_every_sample_once(epochs=3)
        switches = [(line["from"], line["to"]) for line in job.notes("event") if line["event"] == "switch"]
        assert set(switches) == {("allreduce", "async"), ("async", "allreduce")}
        assert job.result()["mode"] == "allreduce"
        reported = [line["gaps"] for line in job.notes("event") if line["event"] == "finished"]
        assert reported and all(set(gaps) == {"0", "1"} for gaps in reported)
        assert all(n > 0 and gap > 0 for n, gap, *_ in reported[0].values())
        ended = [line["arrivals"] for line in job.notes("event") if line["event"] == "finished"]
        (arrivals,) = (one for one in ended if one)  # rank 0 received them
        assert all(share == 1.0 and age >= 0 for step in arrivals for age, share in step)
        assert all(np.isfinite(values).all() for values in job.optimizer_arrays().values())
