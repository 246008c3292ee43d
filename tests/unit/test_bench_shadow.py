"""What the benchmark of replicas launches and concludes. No launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools.bench import emulated, measure, quality, shadow

from gba_hvd import GBACallback


def row(workers: int, mode: str, samples_per_s: float, **more: Any) -> measure.Row:
    return {"workers": workers, "mode": mode, "samples_per_s": samples_per_s, **more}


ROWS = [
    row(1, "no_sync", 100.0), row(1, "shadow_ma", 99.0), row(1, "ma_5", 80.0),
    row(4, "no_sync", 400.0), row(4, "no_sync", 420.0), row(4, "no_sync", 410.0), row(4, "shadow_ma", 369.0),
    row(8, "shadow_ma", 700.0),
]  # fmt: skip


def test_speed_is_against_replicas_that_never_meet_with_as_many_workers():
    ratios = shadow.throughput_vs_nosync(ROWS)
    assert ratios == {"shadow_ma": {"1": pytest.approx(0.99), "4": pytest.approx(0.9)}, "ma_5": {"1": 0.8}}


def test_only_the_background_has_a_target():
    assert shadow.below_target(shadow.throughput_vs_nosync(ROWS)) == {"shadow_ma, 4 workers": pytest.approx(0.9)}


def test_contestants_with_replicas_run_with_threads_as_well():
    found = [(v.name, v.command[-2:]) for v in shadow.variants_of(["allreduce", "shadow_ma"], 1, [2, 4])]
    assert [name for name, _ in found] == ["allreduce", "shadow_ma", "shadow_ma, 2 threads", "shadow_ma, 4 threads"]
    assert found[-1][1] == ("--threads", "4")


def test_columns_that_a_contestant_does_not_have_are_left_out():
    found = shadow.by_workers([row(1, "no_sync", 5.0, auc=0.7), row(1, "shadow_ma", 4.0, seconds_per_round=0.01)])
    assert found == {
        "1": {
            "no_sync": {"samples_per_s": 5.0, "auc": 0.7},
            "shadow_ma": {"samples_per_s": 4.0, "seconds_per_round": 0.01},
        }
    }


def test_every_contestant_is_a_setting_that_the_callback_takes():
    for name, (mode, settings) in shadow.CONTESTANTS.items():
        callback = GBACallback(mode=mode, **settings)
        if name.startswith("shadow_"):
            assert callback.averaging(mode).algorithm == name.removeprefix("shadow_")
            assert callback.averaging(mode).every is None
        elif "every" in settings:
            assert name == f"{mode}_{callback.averaging(mode).every}"


def test_the_quality_benchmark_has_a_protocol_for_every_contestant_that_synchronises():
    for name, (mode, settings) in shadow.CONTESTANTS.items():
        if name not in (shadow.NO_SYNC, "allreduce"):
            protocol = quality.PROTOCOLS[name]
            assert (protocol.mode, dict(protocol.settings)) == (mode, settings)
    words = quality.PROTOCOLS["ma_30"].overrides(100)
    assert words == ["switching.mode=ma", "switching.switch_at={}", "switching.every=30"]
    assert set(quality.USUAL).isdisjoint(shadow.CONTESTANTS)


def test_auc_is_taken_over_from_the_quality_benchmark(tmp_path: Path):
    facts = {"dataset": "frappe", "epochs": 2, "micro_batch": 512, "dropped_share": 0.0, "staleness_mean": None}
    rows = [
        {**facts, "protocol": name, "seed": seed, "auc": auc, "auc_last": auc, "staleness_max": None}
        for name, seed, auc in (("sync", 1, 0.98), ("shadow_ma", 1, 0.979), ("gba", 1, 0.97))
    ]
    path = tmp_path / "quality.json"
    path.write_text(json.dumps({"rows": rows}))
    found = shadow.auc_by_protocol(path)
    assert set(found) == {"sync", "shadow_ma"}
    (columns,) = found["shadow_ma"].values()
    assert columns["auc"] == 0.979 and columns["vs_sync"] == pytest.approx(-0.001)
    assert shadow.auc_by_protocol(None) == {}


def test_what_would_be_of_no_use_is_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(measure.RunFailed, match="no such file"):
        shadow.auc_by_protocol(tmp_path / "nothing.json")
    with pytest.raises(measure.RunFailed, match="needs no_sync"):
        shadow.check([1, 2], ["shadow_ma"])
    with pytest.raises(measure.RunFailed, match="from 2 on"):
        shadow.check([1], list(shadow.CONTESTANTS), [1, 2])
    with pytest.raises(measure.RunFailed, match="from 1 to 8"):
        shadow.check([1, 16], list(shadow.CONTESTANTS))


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_equal_workers_do_as_much_as_they_can_between_them(workers: int):
    scenario = emulated.even(0.1, 5.0, workers)
    assert scenario.ideal_rate(0.0, scenario.end_s) == pytest.approx(workers / 0.1)
