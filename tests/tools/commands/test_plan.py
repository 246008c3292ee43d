"""`gba-hvd plan` and `gba-hvd simulate recovery`: from figures, from files, and what they ask for."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
from gba_hvd_tools import cli, running_jobs
from gba_hvd_tools.commands.plan import pace_in_words

from gba_hvd.ps.messages import SaveAbout, SavePace
from recovery import CheckpointCallback, Checkpointer, Config
from recovery.schedule.adaptive import Goals, JobMeasurements
from recovery.testing import two_tables

FIGURES = ["--save-s", "360", "--load-s", "60", "--mtbf-hours", "28"]
FEW = ["simulate", "recovery", "--save-s", "60", "--servers", "4", "--repeats", "2", "--sampled-servers", "2"]


def test_the_table_has_both_strategies_and_the_reason_follows(capsys):
    assert cli.main(["plan", *FIGURES, "--rebase-at", "inf", "--price", "0.02"]) == 0
    said = capsys.readouterr().out
    assert "8.690%" in said
    assert "partial: partial recovery costs 0.46% of training time, full 8.69%" in said
    assert "save: mfu (12.5% of rows) every 5.6 h" in said
    assert "cost: 4.00 per month" in said


def test_one_server_is_recovered_in_full(capsys):
    assert cli.main(["plan", *FIGURES, "--json", "--servers", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["strategy"] == "full"
    assert "the loss of the only server is the loss of the job" in found["reason"]
    assert "asked for" not in found["reason"]


def test_all_that_is_missing_is_named_at_once(capsys):
    assert cli.main(["plan"]) == 1
    said = capsys.readouterr().err
    assert all(option in said for option in ("--save-s", "--costs", "--mtbf-hours", "--failures", "--job", "--url"))


def test_a_simulation_needs_the_time_of_a_save(capsys):
    assert cli.main(["simulate", "recovery"]) == 1
    assert "how long a save takes is not known: give --save-s, or --costs" in capsys.readouterr().err


def test_json_has_what_was_found_and_what_it_is_from(capsys):
    assert cli.main(["plan", *FIGURES, "--json", "--target-pls", "0.02", "--policy", "ssu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["strategy"], found["kind"]) == ("partial", "ssu")
    assert found["partial"]["pls"] == pytest.approx(0.02)
    assert found["costs"]["load_s"] == 60
    assert found["between_failures"]["n_failures"] == 0


def test_the_share_of_a_save_can_be_left_to_the_plan(capsys):
    assert cli.main(["plan", *FIGURES, "--json", "--r", "auto", "--rebase-at", "inf"]) == 0
    assert json.loads(capsys.readouterr().out)["r"] == 1 / 32
    with pytest.raises(SystemExit):
        cli.main(["plan", *FIGURES, "--r", "some"])
    assert "--r" in capsys.readouterr().err


@pytest.mark.parametrize("nested", [True, False])
def test_measured_costs_come_from_a_file_and_options_win(nested, tmp_path, capsys):
    costs = {"save_s": 10, "load_s": 5, "reschedule_s": 7, "stall_share": 0.1, "machine": "any"}
    (tmp_path / "costs.json").write_text(json.dumps({"costs": costs} if nested else costs))
    arguments = ["plan", "--costs", str(tmp_path / "costs.json"), "--load-s", "6", "--mtbf-hours", "5", "--json"]
    assert cli.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)["costs"]
    assert (found["save_s"], found["load_s"], found["stall_share"]) == (10, 6, 0.1)


def test_observed_failures_are_weighed_with_what_was_assumed(tmp_path, capsys):
    (tmp_path / "failures").write_text("# hour\n3\n10.5, server 2\n\n30\n")
    arguments = ["plan", "--save-s", "9", "--failures", str(tmp_path / "failures"), "--observed-hours", "40", "--json"]
    assert cli.main([*arguments, "--mtbf-hours", "100"]) == 0
    found = json.loads(capsys.readouterr().out)["between_failures"]
    assert (found["n_failures"], found["mean_s"]) == (3, 35 * 3600)
    assert cli.main(arguments) == 0  # with nothing assumed, by themselves
    assert json.loads(capsys.readouterr().out)["between_failures"]["mean_s"] == pytest.approx(40 / 3 * 3600)


@pytest.mark.slow
def test_the_plot_is_a_picture(tmp_path, capsys):
    assert cli.main(["plan", *FIGURES, "--plot", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "written to" in capsys.readouterr().out


def save_with(place, about):
    rows = two_tables()
    with Checkpointer(place, rows, Config(job="job")) as checkpoints:
        checkpoints.save(7, 700, b"state", about=about).result(20)
    return rows.schema.n_bytes


@pytest.mark.slow
def test_figures_come_from_what_a_checkpoint_says_was_measured(tmp_path, capsys):
    measured = JobMeasurements().saved("full", 20.0, 1000, 0).saved("delta", 3.0, 100, 1000).lost(7200.0)
    measured = replace(measured, load_s=9.0)
    given = Goals("delta", 0.25, mtbf_h=10.0, target_pls=0.05, longest_s=1800.0)
    pace = CheckpointCallback("/nowhere", every_s=1200.0, every_steps=500).pace
    about = SaveAbout(
        measured=measured, costs=measured.costs(), given=given, n_servers=3, pace=SavePace(**pace)
    )  # as a job with servers writes it
    n_bytes = save_with(tmp_path, msgspec.to_builtins(about))
    assert cli.main(["plan", "--url", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["costs"] | {"save_s": 20.0} == asdict(measured.costs())
    assert 0 < found["costs"]["save_s"] < 20  # what this one took
    assert found["between_failures"]["mean_s"] == pytest.approx((10 + 2) / 2 * 3600)
    assert found["partial"]["round_s"] == 1800.0
    assert found["partial"]["pls"] == pytest.approx(0.5 * 1800 / (6 * 3600 * 3))
    assert found["stored_bytes"] in (2 * n_bytes, 4 * n_bytes)
    assert found["checkpoint"] == "manifests/000001-00000001.json"
    assert found["pace"] == {"every_s": 1200.0, "every_steps": 500, "is_planned": False}
    assert cli.main(["plan", "--url", str(tmp_path), "--save-s", "40", "--servers", "9", "--mtbf-hours", "99"]) == 0
    said = capsys.readouterr().out
    assert "from manifests/000001-00000001.json: 9 servers" in said
    assert "save 40 s" in said
    assert "that job saved every 20 min or 500 steps\n" in said


@pytest.mark.parametrize(
    ("settings", "pace", "words"),
    [
        ({}, {"every_s": 300.0, "is_planned": True}, "300 s (planned)"),
        ({"every_steps": 50}, {"every_steps": 50, "is_planned": False}, "50 steps"),
        ({"every_s": float("inf"), "every_steps": 50}, {"every_steps": 50, "is_planned": False}, "50 steps"),
    ],
)
def test_a_checkpoint_says_how_often_its_job_saves(settings, pace, words):
    found = CheckpointCallback("/nowhere", **settings).pace
    assert (found, pace_in_words(found)) == (pace, words)


def test_a_place_without_checkpoints_is_reported(tmp_path, capsys):
    assert cli.main(["plan", "--url", str(tmp_path)]) == 1
    assert "has no checkpoint that is whole" in capsys.readouterr().err


@pytest.mark.slow
def test_a_running_job_says_where_it_saves(tmp_path, capsys, monkeypatch):
    save_with(tmp_path, {"n_servers": 2})
    report = {"checkpoints": str(tmp_path)}
    monkeypatch.setattr(running_jobs, "find_job", lambda bases, job: bases[0] / job)
    monkeypatch.setattr(running_jobs, "ask_status", lambda folder, timeout_s: report)
    assert cli.main(["plan", "--job", "ctr", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == "manifests/000001-00000001.json"
    report["checkpoints"] = ""
    assert cli.main(["plan", "--job", "ctr"]) == 1
    assert "saves nowhere, as far as this host's server knows" in capsys.readouterr().err


def test_a_job_that_does_not_run_here_is_reported(tmp_path, capsys):
    assert cli.main(["plan", "--job", "absent", "--dir", str(tmp_path)]) == 1
    assert "'absent' does not run here" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        (["--mtbf-hours", "28"], "how long a save takes is not known: give --save-s"),
        (["--save-s", "3"], "the mean time between failures is not known: give --mtbf-hours"),
        (["--save-s", "3", "--mtbf-hours", "-1"], "the prior above 0"),
        (["--save-s", "3", "--mtbf-hours", "1", "--target-pls", "2"], "target_pls"),
        (["--save-s", "3", "--mtbf-hours", "1", "--servers", "0"], "n_servers=0"),
        (["--costs", "absent.json", "--mtbf-hours", "1"], "cannot be read as JSON"),
        (["--save-s", "3", "--failures", "absent"], "cannot be read as text"),
        (["--url", "a", "--job", "b"], "give one of them"),
        ([*FIGURES, "--plot", "absent/plan.png"], "the plot cannot be written here"),
        ([*FIGURES, "--plot", "plan.nonsense"], "the plot cannot be written here"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(arguments, asks, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", *arguments]) == 1
    said = capsys.readouterr().err
    assert asks in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("text", ["3\n2\n", "0\n", "three\n", "nan\n"])
def test_failures_that_are_no_ascending_hours_are_refused(text, tmp_path, capsys):
    (tmp_path / "failures").write_text(text)
    assert cli.main(["plan", "--save-s", "3", "--failures", str(tmp_path / "failures")]) == 1
    assert "failures" in capsys.readouterr().err


@pytest.mark.slow
def test_a_simulation_prints_both_strategies_and_writes_its_results(tmp_path, capsys):
    out = tmp_path / "year.json"
    assert cli.main([*FEW, "--out", str(out), "--servers", "4", "8"]) == 0
    said = capsys.readouterr().out
    assert "full: 4 to 8 servers: overhead" in said
    lines = json.loads(out.read_text())["results"]
    assert [(line["servers"], line["strategy"]) for line in lines] == [
        (4, "full"),
        (4, "partial"),
        (8, "full"),
        (8, "partial"),
    ]
    assert lines[1]["pls"]["value"] > 0
    assert lines[1]["updates_lost"]["value"] > 0


@pytest.mark.slow
def test_a_simulation_takes_failures_as_they_were(tmp_path, capsys):
    (tmp_path / "trace").write_text("# hour,server\n100,3\n50,0\n9000,1\n")
    out = tmp_path / "year.json"
    assert cli.main([*FEW, "--failures", str(tmp_path / "trace"), "--out", str(out)]) == 0
    assert {line["failures"] for line in json.loads(out.read_text())["results"]} == {2}
    capsys.readouterr()
    (tmp_path / "trace").write_text("100,4\n")
    assert cli.main([*FEW, "--failures", str(tmp_path / "trace")]) == 1
    assert "has failures of server 4, of 4" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "1,2,3\n", "1,x\n", "1,0.5\n", "-1,0\n"])
def test_a_trace_that_is_none_is_refused(text, tmp_path: Path, capsys):
    (tmp_path / "trace").write_text(text)
    assert cli.main([*FEW, "--failures", str(tmp_path / "trace")]) == 1
    assert "expected lines of hour,server" in capsys.readouterr().err
