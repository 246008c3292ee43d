"""Mode auto is about as fast as the better of its two modes, whatever happens to the workers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.commands.simulate.auto import SCENARIOS
from gba_hvd_tools.simulated import mode_choice
from gba_hvd_tools.simulated.mode_choice import Comparison, compare, random_cluster, scenarios

SECONDS = 480.0


def test_the_command_names_the_scenarios_that_there_are() -> None:
    assert tuple(scenarios(SECONDS)) == SCENARIOS


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_is_within_two_percent_of_the_better_mode_and_never_more_than_five_behind(name: str) -> None:
    found = compare(scenarios(SECONDS)[name])
    assert found.share >= 0.98
    assert found.worst_minute >= 0.95
    assert found.needless <= 1


@pytest.fixture(scope="module")
def clusters() -> list[Comparison]:
    return [compare(random_cluster(seed, seconds=600.0)) for seed in range(10)]


@pytest.mark.slow
def test_over_drawn_clusters_it_loses_less_than_two_percent(clusters: list[Comparison]) -> None:
    assert mean(max(0.0, 1 - one.share) for one in clusters) <= 0.02
    assert any(one.allreduce > one.gba for one in clusters) and any(one.gba > one.allreduce for one in clusters)


@pytest.mark.slow
def test_over_drawn_clusters_it_makes_no_more_than_one_needless_switch_each(clusters: list[Comparison]) -> None:
    assert mean(one.needless for one in clusters) <= 1
    assert sum(len(one.switches) for one in clusters) > 0


@pytest.mark.slow
def test_a_simulation_is_the_same_each_time() -> None:
    one, other = (compare(random_cluster(3, seconds=400.0)) for _ in range(2))
    assert (one.auto, one.switches) == (other.auto, other.switches)


@pytest.mark.slow
def test_a_job_that_has_no_reason_to_switch_is_compared_too() -> None:
    none = scenarios(SECONDS)["none"]
    cluster = replace(none, exchange_s=0 * none.exchange_s, serve_s=none.serve_s + 0.1)
    found = compare(cluster, trial_budget=0.0)
    assert not found.switches and not found.needless


@pytest.mark.slow
def test_a_policy_that_sees_both_modes_makes_no_trials_and_two_switches_for_a_straggler() -> None:
    found = compare(scenarios(SECONDS)["gba_dearer"], informed=True)
    assert [(one.to, one.is_trial) for one in found.switches] == [("gba", False), ("allreduce", False)]
    assert found.share >= 0.99 and found.worst_minute >= 0.95 and found.needless == 0


@pytest.mark.slow
def test_a_job_that_learns_nothing_from_its_switches_repeats_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison would notice."""
    monkeypatch.setattr("gba_hvd.switching.callback.learned", lambda stance, *_: stance)
    assert compare(scenarios(SECONDS)["gba_dearer"]).needless > 1


@pytest.mark.slow
def test_the_command_prints_and_stores_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "auto.json"
    words = ["simulate", "auto", "--scenarios", "noise", "--seconds", "360", "--out", str(file)]
    assert cli.main(words) == 0
    assert "noise" in capsys.readouterr().out and '"worst_minute"' in file.read_text()
    assert cli.main(["simulate", "auto", "--seconds", "10"]) != 0


def test_a_scenario_that_is_named_twice_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[str] = []

    def one(cluster: mode_choice.Cluster, informed: bool) -> Comparison:
        simulated.append(cluster.name)
        return Comparison(cluster.name, cluster.seconds, 1.0, 2.0, 1.5, 0.75, 0.7, 0.7, (), 0)

    monkeypatch.setattr(mode_choice, "compare", one)
    assert cli.main(["simulate", "auto", "--scenarios", "none", "noise", "none"]) == 0
    assert simulated == ["none", "noise"]


@pytest.mark.parametrize("out", [True, False])
def test_drawn_clusters_that_a_file_has_are_not_simulated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: bool
) -> None:
    simulated: list[str] = []

    def one(cluster: mode_choice.Cluster, informed: bool) -> Comparison:
        if len(simulated) == 3:
            raise KeyboardInterrupt
        simulated.append(cluster.name)
        switch = mode_choice.Switch(60.0, "gba", False, "slow")
        return Comparison(cluster.name, cluster.seconds, 1.0, 2.0, 1.5, 0.75, 0.7, 0.7, (switch,), 1)

    def command(*words: str) -> int:
        return cli.main(["simulate", "auto", *words, *(["--out", str(file)] if out else [])])

    monkeypatch.setattr(mode_choice, "compare", one)
    file = tmp_path / "auto.json"
    assert cli.main(["simulate", "auto", "--clusters", "4", "--seed", "7", "--out", str(file)]) == 130
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["cluster 7", "cluster 8", "cluster 9"]
    simulated.clear()
    assert command("--clusters", "3", "--seed", "9") == 0
    names = ["cluster 9", "cluster 10", "cluster 11"]
    assert simulated == (names[1:] if out else names)
    assert f"clusters: {5 if out else 3}\n" in capsys.readouterr().out
    found = json.loads(file.read_text())
    if out:
        assert found["summary"]["clusters"] == 5 and found["summary"]["switches an hour, mean"] == 1.0
        for words in (["--clusters", "4", "--informed"], ["--scenarios", "none"]):
            assert command(*words) == 1 and "measured with other settings" in capsys.readouterr().err
        assert json.loads(file.read_text()) == found
