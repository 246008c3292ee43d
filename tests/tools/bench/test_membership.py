"""What the benchmark of membership changes computes from what workers noted. No launch of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from gba_hvd_tools.bench.harness import elastic_job, measure
from gba_hvd_tools.bench.membership import command as membership
from gba_hvd_tools.bench.membership.command import Worker


def every(seconds: float, first: float, last: float) -> list[float]:
    return [first + seconds * i for i in range(int((last - first) / seconds + 1.5))]


def test_a_pause_is_the_longest_gap_of_the_change_less_the_usual_one():
    ends = [*every(0.1, 0.0, 5.0), *every(0.1, 8.0, 9.0), *every(0.1, 9.5, 12.0)]
    found = membership.pause(ends, killed_s=5.05, joined_s=10.0)
    assert found.pause_s == pytest.approx(2.9)
    assert found.usual_s == pytest.approx(0.1)
    assert found.n == 17


def test_who_goes_on_as_before_has_no_pause():
    found = membership.pause(every(0.1, 0.0, 9.0), killed_s=3.02, joined_s=8.07)
    assert found.pause_s == pytest.approx(0.0)


@pytest.mark.parametrize(("killed_s", "joined_s"), [(2.0, 4.95), (2.95, 6.0), (3.0, 4.9)])
def test_a_gap_that_began_before_the_kill_or_ends_after_the_late_joiner_counts(killed_s: float, joined_s: float):
    ends = [*every(0.1, 0.0, 2.9), *every(0.1, 5.0, 7.0)]
    assert membership.pause(ends, killed_s, joined_s).pause_s == pytest.approx(2.0)


@pytest.mark.parametrize(("killed_s", "joined_s"), [(5.05, 6.0), (0.55, 2.85)])
def test_a_gap_before_the_kill_or_after_the_late_joiner_does_not_count(killed_s: float, joined_s: float):
    ends = [*every(0.1, 0.0, 2.9), *every(0.1, 5.0, 7.0)]
    assert membership.pause(ends, killed_s, joined_s).pause_s == pytest.approx(0.0)


def test_the_late_joiner_is_who_was_not_there_before():
    workers = {5: Worker(5, 0, (1.0, 2.0)), 6: Worker(6, 1, (1.0,))}
    assert membership.joined(workers, {5, 6}) is None
    assert membership.joined({**workers, 9: Worker(9, 1, (7.5, 8.0))}, {5, 6}) == 7.5


def test_only_whole_lines_of_a_worker_count(tmp_path: Path):
    marks = tmp_path / "marks"
    marks.mkdir()
    (marks / "11").write_text("2\n10.5\n11.5\n12")
    (marks / "12").write_text("1\n")
    (marks / "13").write_text("")
    assert membership.read(tmp_path) == {11: Worker(11, 2, (10.5, 11.5))}


def test_the_kill_waits_for_three_warm_workers():
    def workers(*n_ends: int) -> dict[int, Worker]:
        return {pid: Worker(pid, pid, tuple(map(float, range(n)))) for pid, n in enumerate(n_ends)}

    assert membership.ready(workers(20, 31, 20))
    assert not membership.ready(workers(20, 31, 19))
    assert not membership.ready(workers(20, 31))


def test_the_headline_has_medians_and_the_worst_by_contestant():
    rows = [
        {"contestant": name, "pause_s": pause, "joined_after_s": 8.0, "work_share": share}
        for name, pause, share in [("gba", 0.1, 1.0), ("gba", 0.3, 0.9), ("gba", 0.2, 1.0), ("horovod", 9.0, 0.1)]
    ]
    found = membership.headline(rows)
    assert found["pause_s"] == {"gba": 0.2, "horovod": 9.0}
    assert found["pause_s_worst"] == {"gba": 0.3, "horovod": 9.0}
    assert found["work_share"]["gba"] == 1.0


def test_the_job_is_elastic_over_three_names_of_this_machine(tmp_path: Path):
    script = elastic_job.discovery(tmp_path)
    assert script.read_text().splitlines()[1:] == [f"echo {name}:1" for name in measure.NAMES]
    command = membership.variant("gba", script).command
    assert command[-2:] == ("--contestant", "gba")
    assert command[command.index("--min-np") + 1] == "2"
