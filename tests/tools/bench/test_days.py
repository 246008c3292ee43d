"""What the benchmark of days plans, keeps and concludes. No training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools.bench.days import chains, command, plot
from gba_hvd_tools.bench.days.chains import AFTER, BASE, Chain
from gba_hvd_tools.bench.harness import measure, resumable


def row(base: str, then: str, seed: int, day: int, auc: float, phase: str = AFTER, **more: Any) -> measure.Row:
    norms = {"steps": 4, "mean": 1.0, "histogram": {"0": 3, "8": 1}}
    found = {"phase": phase, "base": base, "then": then, "seed": seed, "day": day, "auc": auc, "auc_bayes": 0.8}
    found |= chains.USUAL
    return {**found, "grad_norms": norms, "dropped_share": 0.0, "staleness_mean": None, "staleness_max": None, **more}


def summary(days: range, mode: str, **more: Any) -> dict[str, Any]:
    """Of a job that has trained up to `days`."""
    entries = [
        {"epoch": day, "test_auc": 0.7 + day / 100, "test_logloss": 0.5, "test_auc_bayes": 0.8}
        for day in range(days.stop)
    ]
    norms = [{"epoch": day, "mode": mode, "steps": 5, "mean": 1.0, "histogram": {"0": 5}} for day in days]
    account = {"samples_total": 1000 * days.stop, "samples_dropped": 0, "steps": 10 * days.stop}
    return {
        "by_epoch": entries, "grad_norms": norms, **account, "staleness": {"histogram": {}, "mean": None, "max": None},
        **more,
    }  # fmt: skip


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["quality-days", *words])


def test_a_seed_comes_after_the_other_and_sync_first_once_for_both_directions():
    found = chains.planned(["gba", "sync", "async"], ["from_sync", "to_sync"], [1, 2])
    assert [(chain.base, chain.then) for chain in found if chain.seed == 1] == [
        ("sync", "sync"), ("sync", "gba"), ("sync", "async"), ("gba", "sync"), ("async", "sync"),
    ]  # fmt: skip
    assert [chain.seed for chain in found] == [1] * 5 + [2] * 5


def test_a_chain_with_rows_is_not_run_again_and_a_base_is_no_chain():
    rows = [row("sync", "sync", 1, 3, 0.7), row("gba", "", 1, 0, 0.7, phase=BASE)]
    waiting = chains.missing([Chain("sync", "sync", 1), Chain("sync", "sync", 2), Chain("gba", "sync", 1)], rows)
    assert waiting == [Chain("sync", "sync", 2), Chain("gba", "sync", 1)]


def test_rows_of_other_settings_are_others_and_synchronous_days_have_no_rule():
    found = chains.planned(["sync", "gba"], ["from_sync", "to_sync"], [1], "contributors", "look_ahead")
    assert [(chain.base, chain.then, chain.row_average, chain.rule) for chain in found] == [
        ("sync", "sync", "contributors", "none"), ("sync", "gba", "contributors", "look_ahead"),
        ("gba", "sync", "contributors", "look_ahead"),
    ]  # fmt: skip
    assert [chain.base_name for chain in found] == [
        "sync-1-contributors", "sync-1-contributors", "gba-1-contributors-look_ahead"
    ]  # fmt: skip
    assert str(found[1]) == "sync -> gba, contributors, look_ahead, seed 1"
    rows = [row("sync", "gba", 1, 3, 0.7), row("sync", "sync", 1, 3, 0.7, row_average="contributors")]
    assert chains.missing(found, rows) == found[1:]
    (one,) = chains.rows_of_job(BASE, found[2], range(1), summary(range(1), "gba"), None)
    assert (one["then"], one["row_average"], one["rule"]) == ("", "contributors", "look_ahead")
    (one,) = chains.rows_of_job(BASE, found[1], range(1), summary(range(1), "allreduce"), None)
    assert (one["row_average"], one["rule"]) == ("contributors", "none")
    (after,) = chains.rows_of_job(AFTER, found[1], range(1, 2), summary(range(2), "gba"), None)
    assert chains.of_setting([*rows, one, after], "contributors", "look_ahead") == [rows[1], one, after]
    assert chains.of_setting([*rows, one, after], "global", "none") == rows[:1]


@pytest.mark.parametrize(
    ("words", "rule", "average"), [([], "none", "global"), (["--rule", "look_ahead"], "look_ahead", "contributors")]
)
def test_jobs_are_started_with_the_rule_and_the_divisor_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], rule: str, average: str
):
    started: list[list[str]] = []
    monkeypatch.setattr(measure, "launch", lambda variant, words, **more: started.append(words))
    (tmp_path / "summary.json").write_text('{"status": "FINISHED"}')
    args = options("--out", str(tmp_path / "days.json"), "--row-average", average, *words)
    chain = Chain("sync", "gba", 1, args.row_average, args.rule)
    for mode in ("gba", "sync"):
        command.train(mode, chain, range(1), args, tmp_path)
    assert [word for word in started[0] if "rule" in word or "average" in word] == [
        f"switching.rule={rule}", f"train.row_average={average}"
    ]  # fmt: skip
    assert "switching.rule=none" in started[1] and f"train.row_average={average}" in started[1]


def test_what_a_job_inherits_is_not_counted_as_its_own():
    before = summary(range(2), "allreduce", staleness={"histogram": {"0": 5, "2": 1}, "mean": 0.3, "max": 2})
    after = summary(
        range(2, 4),
        "gba",
        samples_dropped=100,
        staleness={"histogram": {"0": 8, "2": 1, "4": 1}, "mean": 0.6, "max": 4},
    )
    rows = chains.rows_of_job(AFTER, Chain("sync", "gba", 1), range(2, 4), after, before)
    assert [(one["day"], one["auc"], one["mode"]) for one in rows] == [
        (2, pytest.approx(0.72), "gba"), (3, pytest.approx(0.73), "gba"),
    ]  # fmt: skip
    assert rows[0]["dropped_share"] == pytest.approx(100 / 2000)
    assert (rows[0]["staleness_mean"], rows[0]["staleness_max"]) == (1.0, 4)
    assert rows[0]["steps_of_job"] == 20


def test_a_job_that_trained_in_another_mode_gives_no_rows():
    norms = [
        {"epoch": 0, "mode": mode, "steps": 5, "mean": 1.0, "histogram": {"0": 5}} for mode in ("allreduce", "gba")
    ]
    with pytest.raises(ValueError, match=r"day 0 was to be trained in gba, steps by mode: .'allreduce': 5, 'gba': 5"):
        chains.rows_of_job(BASE, Chain("gba", "sync", 1), range(1), summary(range(1), "gba", grad_norms=norms), None)
    with pytest.raises(ValueError, match="day 1 was not tested"):
        chains.rows_of_job(BASE, Chain("gba", "sync", 1), range(2), summary(range(1), "gba"), None)


def all_rows() -> list[measure.Row]:
    """Two seeds with sync and gba, one with async, both directions for gba."""
    rows = [row("sync", "sync", seed, day, 0.75) for seed in (1, 2) for day in (3, 4)]
    rows += [row("sync", "gba", 1, day, auc) for day, auc in ((4, 0.748), (3, 0.749))]
    rows += [row("sync", "gba", 2, day, 0.752) for day in (3, 4)]
    rows += [row("sync", "async", 2, day, 0.74, staleness_mean=5.0) for day in (3, 4)]
    rows += [row("gba", "sync", 1, day, 0.7502) for day in (3, 4)]
    rows += [row("gba", "", 1, 0, 0.7, phase=BASE, dropped_share=0.25)]
    return rows


def test_days_are_compared_with_sync_of_the_same_seed():
    found = chains.headline(all_rows())
    assert list(found["from_sync"]) == ["sync", "gba", "async"]
    gba = found["from_sync"]["gba"]
    assert (gba["seeds"], gba["first"], gba["last"]) == (2, pytest.approx(0.7505), pytest.approx(0.75))
    assert gba["mean"] == pytest.approx((0.7485 + 0.752) / 2)
    assert gba["vs_sync_mean"] == pytest.approx((-0.0015 + 0.002) / 2)
    assert (gba["vs_sync_worst"], gba["vs_sync_best"]) == (pytest.approx(-0.0015), pytest.approx(0.002))
    assert found["from_sync"]["async"]["vs_sync_mean"] == pytest.approx(-0.01), "seed 2 alone"
    assert found["from_sync"]["async"]["staleness_mean"] == 5.0
    assert found["to_sync"]["gba"]["dropped_share"] == 0.25, "of the days in gba, which are the base"


def test_the_goal_is_a_distance_in_either_direction():
    told = chains.goal(chains.headline(all_rows()))
    assert told["from_sync"] == {"difference": pytest.approx(0.00025), "is_met": True}
    assert told["to_sync"] == {"difference": pytest.approx(0.0002), "is_met": True}
    better = [one | {"auc": 0.76} if one["then"] == "gba" else one for one in all_rows()]
    assert not chains.goal(chains.headline(better))["from_sync"]["is_met"]


def test_norms_are_those_of_the_days_after_synchronous_ones():
    found = chains.norms_by_mode(all_rows())
    assert list(found) == ["sync", "gba", "async"]
    assert found["gba"] == {0: 12, 8: 4}
    assert chains.quantile(found["gba"], 0.5) == pytest.approx(2 ** (0.5 / 8))
    assert chains.quantile(found["gba"], 0.95) == pytest.approx(2 ** (8.5 / 8))


def test_rows_are_found_again_and_those_of_other_settings_are_refused(tmp_path: Path):
    path = tmp_path / "days.json"
    settings = command.settings_of(options("--out", str(path)))
    path.write_text(json.dumps({"machine": {"cores": 2}, "settings": settings, "rows": all_rows()}))
    words = ["--seeds", "1", "2", "--modes", "sync", "--limit-minutes", "0"]
    assert command.run(options("--out", str(path), *words)) == 0
    found = resumable.earlier(path, command.KEY)
    assert (found["rows"], found["machine"]) == (all_rows(), {"cores": 2})
    before = path.read_bytes()
    assert command.run(options("--out", str(path), *words, "--days", "9")) == 1
    assert path.read_bytes() == before


def test_a_base_stays_until_no_chain_waits_for_it(tmp_path: Path):
    models = tmp_path / "models"
    for name in ("sync-1", "gba-1", ".training-x"):
        (models / name).mkdir(parents=True)
    command.forget_models(models, [Chain("sync", "bsp", 1)])
    assert sorted(folder.name for folder in models.iterdir()) == [".training-x", "sync-1"]
    (models / ".training-x").rmdir()
    command.forget_models(models, [])
    assert not models.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--days", "0"], "--days must be at least 1, got 0"),
        (["--plot", "norms.txt"], "must end in .svg or .png"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(tmp_path: Path, words: list[str], message: str):
    with pytest.raises(measure.RunFailed, match=message):
        command.check(options("--out", str(tmp_path / "out.json"), *words))


@pytest.mark.slow
def test_the_picture_is_small_and_the_same_each_time(tmp_path: Path):
    first, second = tmp_path / "one.svg", tmp_path / "two.svg"
    for file in (first, second):
        plot.draw(all_rows(), file)
    assert first.read_bytes() == second.read_bytes()
    assert 5000 < len(first.read_bytes()) < 200_000


def test_the_tables_say_how_far_the_goal_is(capsys: pytest.CaptureFixture[str]):
    command.show(all_rows())
    said = capsys.readouterr().out
    assert "from_sync: gba is +0.00025 from sync in the mean; goal, within 0.0005: met" in said
