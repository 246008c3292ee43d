"""What the benchmark of replicas launches and concludes. No launch."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools.bench import model_averaging, quality
from gba_hvd_tools.bench.harness import emulated_accelerators as emulated
from gba_hvd_tools.bench.harness import measure
from gba_hvd_tools.bench.stragglers import command as gba

from gba_hvd import GBACallback


def row(workers: int, mode: str, samples_per_s: float, **more: Any) -> measure.Row:
    return {"workers": workers, "mode": mode, "samples_per_s": samples_per_s, **more}


ROWS = [
    row(1, "no_sync", 100.0), row(1, "shadow_ma", 99.0), row(1, "ma_5", 80.0),
    row(4, "no_sync", 400.0), row(4, "no_sync", 420.0), row(4, "no_sync", 410.0), row(4, "shadow_ma", 369.0),
    row(8, "shadow_ma", 700.0),
]  # fmt: skip


def test_speed_is_against_replicas_that_never_meet_with_as_many_workers():
    ratios = model_averaging.throughput_vs_nosync(ROWS)
    assert ratios == {"shadow_ma": {"1": pytest.approx(0.99), "4": pytest.approx(0.9)}, "ma_5": {"1": 0.8}}


def test_only_the_background_has_a_target():
    assert model_averaging.below_target(model_averaging.throughput_vs_nosync(ROWS)) == {
        "shadow_ma, 4 workers": pytest.approx(0.9)
    }


def test_contestants_with_replicas_run_with_threads_as_well():
    found = [(v.name, v.command[-2:]) for v in model_averaging.variants_of(["allreduce", "shadow_ma"], 1, [2, 4])]
    assert [name for name, _ in found] == ["allreduce", "shadow_ma", "shadow_ma, 2 threads", "shadow_ma, 4 threads"]
    assert found[-1][1] == ("--threads", "4")


def test_columns_that_a_contestant_does_not_have_are_left_out():
    found = model_averaging.by_workers(
        [row(1, "no_sync", 5.0, auc=0.7), row(1, "shadow_ma", 4.0, seconds_per_round=0.01)]
    )
    assert found == {
        "1": {
            "no_sync": {"samples_per_s": 5.0, "auc": 0.7},
            "shadow_ma": {"samples_per_s": 4.0, "seconds_per_round": 0.01},
        }
    }


def test_every_contestant_is_a_setting_that_the_callback_takes():
    for name, (mode, settings) in model_averaging.CONTESTANTS.items():
        callback = GBACallback(mode=mode, **settings)
        if name.startswith("shadow_"):
            assert callback.averaging(mode).algorithm == name.removeprefix("shadow_")
            assert callback.averaging(mode).every is None
        elif "every" in settings:
            assert name == f"{mode}_{callback.averaging(mode).every}"


def test_the_quality_benchmark_has_a_protocol_for_every_contestant_that_synchronises():
    for name, (mode, settings) in model_averaging.CONTESTANTS.items():
        if name not in (model_averaging.NO_SYNC, "allreduce"):
            protocol = quality.PROTOCOLS[name]
            assert (protocol.mode, dict(protocol.settings)) == (mode, settings)
    words = quality.PROTOCOLS["ma_30"].overrides(100, 512)
    assert words == ["switching.mode=ma", "switching.switch_at={}", "switching.wait_s=60", "switching.every=30"]
    assert set(quality.USUAL).isdisjoint(model_averaging.CONTESTANTS)


def quality_file(path: Path) -> Path:
    facts = {"metric": "auc", "dropped_share": 0.0, "staleness_mean": None, "staleness_max": None}
    rows = [
        {**vars(quality.Run("frappe", 2, 512, name, seed)), **facts, "auc": auc, "auc_last": auc}
        for name, seed, auc in (("sync", 1, 0.98), ("sync_each", 1, 0.982), ("shadow_ma", 1, 0.979), ("gba", 1, 0.97))
    ]
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_auc_is_taken_over_from_the_quality_benchmark(tmp_path: Path):
    found = model_averaging.auc_by_protocol(quality_file(tmp_path / "quality.json"))
    assert set(found) == {"sync", "sync_each", "shadow_ma"}
    (columns,) = found["shadow_ma"].values()
    assert columns["auc"] == 0.979 and columns["vs_sync"] == pytest.approx(-0.001)


def test_what_would_be_of_no_use_is_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(measure.RunFailed, match="no such file"):
        model_averaging.auc_by_protocol(tmp_path / "nothing.json")
    with pytest.raises(measure.RunFailed, match="needs no_sync"):
        model_averaging.check([1, 2], ["shadow_ma"])
    with pytest.raises(measure.RunFailed, match="from 2 on"):
        model_averaging.check([1], list(model_averaging.CONTESTANTS), [1, 2])
    with pytest.raises(measure.RunFailed, match="from 1 to 8"):
        model_averaging.check([1, 16], list(model_averaging.CONTESTANTS))


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_equal_workers_do_as_much_as_they_can_between_them(workers: int):
    scenario = emulated.even(0.1, 5.0, workers)
    assert scenario.ideal_rate(0.0, scenario.end_s) == pytest.approx(workers / 0.1)


# --- AUC against the foreground --------------------------------------------------------------------------------------


def test_auc_of_the_background_is_held_against_the_best_in_the_foreground(capsys: pytest.CaptureFixture[str]):
    aucs = {
        "sync": {"frappe": 0.99, "synthetic": 0.79}, "no_sync": {"frappe": 0.99},
        "shadow_easgd": {"frappe": 0.985}, "shadow_ma": {"frappe": 0.98, "synthetic": 0.7},
        "shadow_bmuf": {"other": 0.5}, "easgd_5": {"frappe": 0.981}, "ma_100": {"frappe": 0.983},
        "bmuf_30": {"frappe": None},
    }  # fmt: skip
    auc = {
        name: {dataset: {"auc": value, "seeds": 3} for dataset, value in found.items()} for name, found in aucs.items()
    }
    result = model_averaging.headline([], auc)
    assert result["auc_vs_best_foreground"] == {
        "shadow_easgd": {"frappe": pytest.approx(0.002)},
        "shadow_ma": {"frappe": pytest.approx(-0.003)},
    }
    assert result["auc"] == auc
    model_averaging.show([], result)
    said = capsys.readouterr().out
    assert "shadow_easgd, AUC minus that of the best in the foreground: +0.00200 (frappe, 3 seeds)" in said


# --- in pieces -------------------------------------------------------------------------------------------------------


def options(out: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    model_averaging.add_parser(parser.add_subparsers())
    return parser.parse_args(["shadow", "--out", str(out), "--contestants", "no_sync", "shadow_ma", *words])


@dataclass
class Launched:
    """(workers, contestant, number): the launches there would have been, and those that fail."""

    done: list[tuple[int, str, int]] = field(default_factory=list)
    broken: set[tuple[int, str, int]] = field(default_factory=set)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    found = Launched()

    class Launches:
        bayes_auc = 0.8

        def __init__(self, *_: object) -> None:
            pass

        def run(self, scenario: emulated.Scenario, rows: list[Any], contestant: measure.Variant, n: int) -> measure.Row:
            launch = (scenario.n_workers, contestant.name, n)
            if launch in found.broken:
                raise measure.RunFailed("no luck")
            found.done.append(launch)
            return {"scenario": scenario.name, "mode": contestant.name, "run": n, "samples_per_s": 100.0, "auc": 0.7}

    monkeypatch.setattr(gba, "Launches", Launches)
    monkeypatch.setattr(measure, "console_script", lambda script: f"/bin/{script}")
    return found


def test_rows_of_an_earlier_piece_are_kept_and_not_run_again(tmp_path: Path, launched: Launched):
    out = tmp_path / "shadow.json"
    assert model_averaging.run(options(out, "--workers", "2")) == 0
    assert launched.done == [(2, "no_sync", 0), (2, "shadow_ma", 0)]
    assert model_averaging.run(options(out, "--workers", "2", "4", "--runs", "2")) == 0
    assert launched.done[2:] == [
        (2, "no_sync", 1), (2, "shadow_ma", 1),
        (4, "no_sync", 0), (4, "shadow_ma", 0), (4, "no_sync", 1), (4, "shadow_ma", 1),
    ]  # fmt: skip
    assert model_averaging.run(options(out, "--workers", "4")) == 0
    assert model_averaging.run(options(out, "--workers", "8", "--seconds", "20")) == 1, "rows of other settings"
    assert len(launched.done) == 8
    found = json.loads(out.read_text())
    assert len(found["rows"]) == 8
    assert found["throughput_vs_nosync"] == {"shadow_ma": {"2": 1.0, "4": 1.0}}
    assert set(found["commands"]) == {f"{name}, {n} workers" for name in ("no_sync", "shadow_ma") for n in (2, 4)}
    assert [p.name for p in tmp_path.iterdir()] == ["shadow.json"]


def test_a_piece_without_the_quality_file_keeps_the_auc_of_the_one_before(tmp_path: Path, launched: Launched):
    out, file = tmp_path / "shadow.json", quality_file(tmp_path / "quality.json")
    assert model_averaging.run(options(out, "--workers", "2", "--quality", str(file))) == 0
    assert model_averaging.run(options(out, "--workers", "4")) == 0
    assert json.loads(out.read_text())["auc"] == model_averaging.auc_by_protocol(file)


def test_a_run_that_fails_is_done_by_the_next_piece(tmp_path: Path, launched: Launched):
    out = tmp_path / "shadow.json"
    launched.broken = {(2, "no_sync", 0)}
    assert model_averaging.run(options(out, "--workers", "2")) == 1
    assert json.loads(out.read_text())["failures"] == {"no_sync, 2 workers, run 0": "no luck"}
    launched.broken = set()
    assert model_averaging.run(options(out, "--workers", "2")) == 0
    assert launched.done == [(2, "shadow_ma", 0), (2, "no_sync", 0)]
