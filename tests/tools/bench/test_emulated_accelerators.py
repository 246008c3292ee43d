"""Emulated accelerators and what the benchmarks of the asynchronous modes compute. No launch of a real peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gba_hvd_tools.bench.harness import auto_by_minute, small_ctr, two_hosts
from gba_hvd_tools.bench.harness import emulated_accelerators as emulated
from gba_hvd_tools.bench.ps import command as ps
from gba_hvd_tools.bench.stragglers import command as gba
from gba_hvd_tools.bench.switch import command as switch
from gba_hvd_tools.simulated import mode_choice as simulated
from gba_hvd_tools.virtual_hosts import VirtualHosts

from tests.tools.bench.test_interrupted import options


class Clock:
    """Time that passes in sleep only."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def accelerator(scenario: emulated.Scenario, worker: int, clock: Clock) -> emulated.Accelerator:
    return emulated.Accelerator(scenario, worker, clock=clock, sleep=clock.sleep)


def done_by(scenario: emulated.Scenario, worker: int) -> int:
    """Micro-batches a worker that never waits for others does while the emulation lasts."""
    clock, n = Clock(), 0
    device = accelerator(scenario, worker, clock)
    while device.at_s < scenario.end_s:
        device.begin()
        device.wait()
        n += 1
    return n


@pytest.mark.parametrize("name", [*gba.SCENARIOS, *gba.TWO_HOST_SCENARIOS])
def test_workers_that_never_wait_do_what_the_ideal_says(name: str):
    scenario = emulated.scenarios(0.05, 5.0)[name]
    done = sum(done_by(scenario, worker) for worker in range(scenario.n_workers))
    assert done / scenario.end_s == pytest.approx(scenario.ideal_rate(0.0, scenario.end_s), rel=0.01)
    assert scenario.n_micro() > done
    assert scenario.n_micro() % emulated.N_MICRO == 0


def test_with_one_worker_five_times_slower_the_ideal_is_three_and_a_fifth_workers():
    scenario = emulated.scenarios(0.05, 5.0)["straggler_5x"]
    assert scenario.ideal_rate(scenario.warmup_s, scenario.end_s) == pytest.approx(3.2 / 0.05)


def test_nobody_sleeps_when_the_emulation_is_over():
    clock = Clock()
    device = accelerator(emulated.Scenario("none", 0.05, 0.0, 1.0), 0, clock)
    device.begin()
    clock.now += 2.0
    device.begin()
    device.wait()
    assert device.at_s == 2.0


def test_real_compute_counts_towards_the_service_time():
    clock = Clock()
    device = accelerator(emulated.Scenario("none", 0.05, 0.0, 1.0), 0, clock)
    device.begin()
    clock.now += 0.02
    device.wait()
    assert device.at_s == pytest.approx(0.05)


def test_speed_is_of_applied_samples_within_the_measured_time():
    clock = Clock()
    device = accelerator(emulated.Scenario("none", 0.1, 1.0, 3.0), 0, clock)
    progress = emulated.EmulatedProgress(device)
    device.begin()
    for at, applied, dropped in [(0.5, 7, 0), (1.0, 100, 10), (2.0, 300, 60), (2.5, 400, 110), (3.5, 9000, 999)]:
        clock.now = 100.0 + at
        progress.note(applied, dropped)
    result = progress.result(micro_batch=10)
    assert result["samples_per_s"] == 200.0
    assert result["ideal_share"] == pytest.approx(200.0 / (10 * 4 / 0.1))
    assert result["dropped"] == 100
    assert result["dropped_share"] == 0.25


def test_minutes_are_whole_ones_of_the_measured_time():
    clock = Clock()
    device = accelerator(emulated.Scenario("none", 0.1, 10.0, 150.0), 0, clock)
    progress = emulated.EmulatedProgress(device)
    device.begin()
    for at, applied in [(10, 0), (70, 600), (100, 600), (130, 1800), (150, 9999)]:
        clock.now = 100.0 + at
        progress.note(applied)
    assert progress.result(micro_batch=10)["by_minute"] == [10.0, 20.0]


def test_workers_of_the_slow_host_are_as_slow_as_in_the_simulation_from_the_middle_on():
    scenario = emulated.scenarios(0.05, 300.0)["slow_host_of_two"]
    middle_s = scenario.warmup_s + 150.0
    assert [scenario.mean_service_s(worker, middle_s - 1) for worker in range(4)] == [0.05] * 4
    assert [scenario.mean_service_s(worker, middle_s) for worker in range(4)] == [0.05, 0.05, 0.1, 0.1]
    cluster = simulated.scenarios(400.0)["slow_host_of_two"]
    assert cluster.slow[:, -1].tolist() == [1, 1, 2, 2]


class Lab:
    """Instead of virtual hosts: notes the limits of their links."""

    def __init__(self) -> None:
        self.limits: list[str | None] = []

    def limit(self, rate: str | None, burst_bytes: int, queue_ms: float) -> None:
        self.limits.append(rate)


def test_the_link_is_limited_once_and_the_limit_lifted_once(tmp_path: Path):
    link = emulated.SlowLink("32mbit", from_s=10.0, to_s=20.0)
    lab = Lab()
    limits = two_hosts.LinkLimits(cast("VirtualHosts", lab), link, tmp_path / "started")
    for at_s in (0.0, 9.9, 10.04, 15.0, 20.0, 30.0):
        limits.at(at_s, link)
    assert lab.limits == ["32mbit", None]
    assert limits.changes_s == [10.0, 20.0]


def test_the_chief_makes_a_file_when_its_first_micro_batch_begins(tmp_path: Path):
    device = emulated.Accelerator(emulated.Scenario("none", 0.05, 0.0, 1.0), 0, started=tmp_path / "started")
    assert not (tmp_path / "started").exists()
    device.begin()
    assert (tmp_path / "started").exists()


def by_minute(mode: str, *rates: float) -> dict[str, Any]:
    return {
        "scenario": "slow_link", "mode": mode, "run": 0, "samples_per_s": sum(rates) / len(rates), "by_minute": rates,
    }  # fmt: skip


def test_auto_is_held_against_the_mode_that_was_better_in_the_minute():
    rows = [
        by_minute("allreduce", 90, 90, 90, 80, 90),
        by_minute("gba", 100, 100, 100, 30, 100),
        by_minute("auto", 50, 100, 99, 72, 100),
    ]
    assert auto_by_minute.compared(rows) == {
        "slow_link": [{"run": 0, "share": pytest.approx(421 / 440), "better": "allreduce",
                       "worst_minute": 0.9, "minute": 4, "better_in_it": "allreduce"}],
    }  # fmt: skip


def test_a_minute_in_which_no_fixed_mode_made_a_step_is_not_compared():
    rows = [by_minute(mode, 90, 90, 0, 80, 90) for mode in ("allreduce", "gba", "auto")]
    (found,) = auto_by_minute.compared(rows)["slow_link"]
    assert (found["worst_minute"], found["minute"]) == (1.0, 4)
    assert auto_by_minute.compared([by_minute(mode, 90, 90, 0, 0) for mode in ("allreduce", "gba", "auto")]) == {}


def test_both_shares_of_auto_are_printed_with_their_goals(capsys: pytest.CaptureFixture[str]):
    rows = [by_minute("allreduce", *[90] * 5), by_minute("gba", *[100] * 5), by_minute("auto", 50, 90, 100, 97, 100)]
    gba.show({}, {"auto_by_minute": auto_by_minute.compared(rows)})
    assert capsys.readouterr().out == (
        "slow_link run 1: auto has 0.874 of gba over the whole run (goal 0.98); "
        "worst minute: 4, 0.970 of gba (goal 0.95)\n"
    )


def test_runs_that_are_short_or_without_both_fixed_modes_are_not_compared_by_minute():
    short = [by_minute(mode, 1, 1, 1) for mode in ("allreduce", "gba", "auto")]
    assert auto_by_minute.compared(short) == {}
    assert auto_by_minute.compared([by_minute(mode, 1, 1, 1, 1) for mode in ("gba", "auto")]) == {}


def test_scenarios_on_two_hosts_say_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(two_hosts, "missing", lambda: "these packages are not installed: iproute2")
    args = options("gba", "--out", str(tmp_path / "found.json"), "--scenarios", "none", "slow_link")
    assert args.run(args) == 1
    assert not (tmp_path / "found.json").exists()
    said = capsys.readouterr().err
    assert "slow_link: runs on two virtual hosts" in said and "not installed: iproute2" in said


def test_what_needs_virtual_hosts_is_run_on_request_only(tmp_path: Path):
    chosen = options("gba", "--out", str(tmp_path / "found.json"))
    assert chosen.scenarios == list(gba.SCENARIOS)
    assert not {*gba.SCENARIOS} & {*gba.TWO_HOST_SCENARIOS}


def test_a_contestant_runs_on_both_hosts_and_one_that_knows_no_other_host_does_not():
    (ours,) = gba.launched(["auto", "torch_rpc"], n_hosts=2)
    assert "h1:2,h2:2" in ours.command and "eth0" in ours.command


def test_staleness_is_weighted_by_pushes_and_keys_may_have_been_through_json():
    assert emulated.staleness(json.loads(json.dumps({0: 3, 4: 1}))) == {
        "staleness_mean": 1.0,
        "staleness_max": 4,
    }
    assert emulated.staleness({})["staleness_max"] == 0


def test_auto_is_held_against_the_better_of_both_modes():
    speeds = {
        "none": {"allreduce": 100, "gba": 98, "auto": 99},
        "straggler_5x": {"allreduce": 10, "gba": 40, "auto": 30},
    }
    found = {
        name: {m: {"samples_per_s": v, "ideal_share": v / 50} for m, v in of.items()} for name, of in speeds.items()
    }
    headline = emulated.headline(found)
    assert headline["gba_vs_allreduce"] == 4.0
    assert headline["gba_ideal_share"] == 0.8
    assert headline["auto_vs_allreduce_without_straggler"] == 0.99
    assert headline["auto_vs_better_mode"] == {"none": 0.99, "straggler_5x": 0.75}
    assert "gba_vs_horovod" not in headline


def test_the_scenario_in_the_result_is_plain_json():
    for scenario in emulated.scenarios(0.05, 5.0).values():
        assert "Infinity" not in json.dumps(gba.described(scenario))


def test_a_switch_is_timed_from_its_decision_to_the_first_step_of_the_new_mode():
    times = [(k, "allreduce" if k <= 5 or k > 12 else "gba", 0.1 * k + (0.05 if k > 5 else 0.0)) for k in range(1, 16)]
    found = switch.switches([switch.SwitchStep(*t) for t in times], every=5)
    assert [(row["from"], row["to"], row["step"], row["steps_until"]) for row in found] == [
        ("allreduce", "gba", 5, 1),
        ("gba", "allreduce", 10, 3),
    ]
    assert found[0]["seconds"] == pytest.approx(0.15)
    assert found[0]["steps"] == pytest.approx(1.5)
    assert found[1]["steps"] == pytest.approx(3.0)


def test_the_ratio_of_a_parameter_server_is_that_of_its_worst_number_of_servers():
    speeds = {("ours", 1): 10.0, ("ours", 2): 12.0, ("rpc", 1): 4.0, ("rpc", 2): 6.0}
    speeds |= {("ours_plain", 1): 16.0, ("ours_plain", 2): 30.0, ("plain_echo", 2): 40.0, ("ours_tls", 1): 12.0}
    rows = [
        {"contestant": name, "servers": servers, "rows": 8, "what": "pull", "rows_per_s": speed}
        for (name, servers), speed in speeds.items()
    ]
    headline = ps.headline(rows, 8)
    assert headline["pull_vs_rpc"] == 2.0
    assert headline["pull_vs_rpc_by_servers"] == {"1": 2.5, "2": 2.0}
    assert headline["pull_plain_vs_rpc_by_servers"] == {"1": 4.0, "2": 5.0}
    assert headline["pull_tls_vs_rpc_by_servers"] == {"1": 3.0}
    assert headline["pull_plain_vs_plain_echo_by_servers"] == {"2": 0.75}
    assert "push_vs_rpc" not in headline


def test_all_workers_see_the_same_samples_and_others_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(small_ctr, "N_HELD_OUT", 500)
    small_ctr.write(tmp_path, 1000)
    samples, held_out = small_ctr.Samples.train(tmp_path, 1000), small_ctr.Samples.held_out(tmp_path)
    ids, dense, label = samples.micro(1, 256)
    assert ids.shape == (8, 256)
    assert ids.dtype == torch.int64
    assert dense.shape == (256, 4)
    assert set(label.tolist()) == {0.0, 1.0}
    assert (len(held_out), held_out.first) == (500, 1000)
    assert not torch.equal(held_out.micro(0, 256)[0], samples.micro(0, 256)[0])


def test_auc_counts_ties_half(tmp_path: Path):
    samples = small_ctr.Samples(
        np.zeros((4, 8), np.int32), np.zeros((4, 4), np.float32), np.array([0, 1, 0, 1.0]), 0, 4
    )
    logits = torch.tensor([0.0, 0.0, -1.0, 2.0])
    assert small_ctr.auc(lambda ids, dense: logits, samples) == 0.875


def test_the_dense_part_takes_all_embeddings():
    assert small_ctr.Tower()(torch.randn(3, 4), torch.randn(3, 8, 8)).shape == (3,)
