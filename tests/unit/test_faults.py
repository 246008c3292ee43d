"""Faults come when planned, once, to whom they were meant for, and leave a record."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.callbacks import Callback
from gba_hvd.errors import BadInput
from gba_hvd.faults import Fault, FaultSchedule, InjectedFault

EVERYTHING = (
    FaultSchedule()
    .serve(seconds=0.05)
    .slow(worker=3, factor=5, from_step=10, to_step=20)
    .gamma(worker=1, shape=50, factor=1.5, seed=4)
    .gamma()
    .kill(worker=1, at_step=3)
    .stop(worker=2, at_step=4, seconds=1.5)
    .raise_(worker=0, at_step=5)
    .kill_server(host=0, at_step=6)
    .stop_server(host=1, at_step=7, seconds=2)
    .drop_push(worker=2, at_step=5)
    .delay_push(worker=0, at_step=8, seconds=0.5)
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "fired"


def in_another_process(act: Callable[[], Any]) -> int:
    """Its process number. It ends as `act` does, with exit code 0 if that was true, 1 if false, 2 if it raised."""
    if pid := os.fork():
        return pid
    try:
        os._exit(0 if act() else 1)
    finally:
        os._exit(2)


def has_stopped_and_gone_on(pid: int) -> bool:
    """Wait until the process was stopped and goes on. That it stands still is seen only by who looks in time."""
    status = os.waitpid(pid, os.WUNTRACED | os.WCONTINUED)[1]
    if os.WIFSTOPPED(status):
        status = os.waitpid(pid, os.WCONTINUED)[1]
    return os.WIFCONTINUED(status)  # the kernel reports it of a process that had stopped, and of no other


def ended_with(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A process to kill and stop."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


# Slow workers


def test_without_faults_nobody_sleeps() -> None:
    assert FaultSchedule().service(rank=0, step=0, seconds=0.3) == 0.0


def test_a_slow_worker_is_slow_between_its_steps_only() -> None:
    faults = FaultSchedule().slow(worker=3, factor=5, from_step=10, to_step=20)
    assert [faults.service(3, step, 0.1) for step in (9, 10, 19, 20)] == pytest.approx([0, 0.4, 0.4, 0])
    assert faults.service(2, 15, 0.1) == 0.0


def test_slowdowns_multiply() -> None:
    faults = FaultSchedule().slow(worker=0, factor=2).slow(worker=0, factor=3, from_step=5)
    assert [faults.service(0, step, 1.0) for step in (4, 5)] == pytest.approx([1.0, 5.0])


def test_an_emulated_accelerator_takes_its_time_with_the_real_time_inside() -> None:
    faults = FaultSchedule().serve(seconds=0.05).slow(worker=3, factor=5)
    assert faults.service(0, 0, 0.01) == pytest.approx(0.04)
    assert faults.service(3, 0, 0.01) == pytest.approx(0.24)
    assert faults.service(0, 0, 0.07) == 0.0


def test_gamma_times_repeat_and_have_the_mean_and_spread_they_were_given() -> None:
    faults = FaultSchedule().serve(seconds=1.0).gamma(shape=100, factor=2.0, seed=7)
    times = [faults.service(1, 0, 0.0, micro=i) for i in range(2000)]
    assert times == [faults.service(1, 99, 0.0, micro=i) for i in range(2000)]
    assert statistics.mean(times) == pytest.approx(2.0, rel=0.01)
    assert statistics.stdev(times) == pytest.approx(0.2, rel=0.1)


def test_gamma_times_differ_by_worker_by_micro_batch_and_by_seed() -> None:
    def time(rank: int, micro: int, seed: int) -> float:
        return FaultSchedule().serve(1.0).gamma(seed=seed).service(rank, 0, 0.0, micro)

    assert len({time(0, 0, 0), time(1, 0, 0), time(0, 1, 0), time(0, 0, 1)}) == 4


def test_gamma_times_of_one_worker_leave_the_others_alone_and_go_by_the_step_without_an_index() -> None:
    faults = FaultSchedule().serve(1.0).gamma(worker=1)
    assert faults.service(0, 0, 0.0) == 1.0
    assert faults.service(1, 4, 0.0) == faults.service(1, 4, 0.0, micro=4) != faults.service(1, 5, 0.0)


@pytest.mark.slow
@given(st.integers(0, 5), st.integers(0, 30), st.floats(0, 10))
def test_nobody_ever_sleeps_less_than_nothing(rank: int, step: int, seconds: float) -> None:
    assert EVERYTHING.service(rank, step, seconds) >= 0


# Files


def test_a_schedule_survives_its_file(tmp_path: Path, folder: Path) -> None:
    for schedule in (EVERYTHING, FaultSchedule(EVERYTHING.faults, folder), FaultSchedule()):
        schedule.dump(tmp_path / "faults.json")
        again = FaultSchedule.load(tmp_path / "faults.json")
        assert again.faults == schedule.faults
        assert again.folder == schedule.folder


def test_a_file_says_only_what_matters(tmp_path: Path) -> None:
    FaultSchedule().slow(worker=3, factor=5).dump(tmp_path / "faults.json")
    assert json.loads((tmp_path / "faults.json").read_text()) == {
        "faults": [{"kind": "slow", "worker": 3, "factor": 5}]
    }


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"kind": "kil", "worker": 1, "at_step": 3}, "did you mean 'kill'"),
        ({"kind": "explode"}, "no fault is of kind 'explode': serve, slow"),
        ({"kind": 3}, "no fault is of kind 3"),
        ({"worker": 1}, 'object with a "kind"'),
        ("kill", 'object with a "kind"'),
        ({"kind": "kill", "worker": 1, "at_stp": 3}, "has no 'at_stp': did you mean 'at_step'"),
        ({"kind": "kill", "worker": 1, "at_step": 3, "seconds": 1}, "has no 'seconds': it takes worker, at_step"),
        ({"kind": "kill", "worker": 1}, "needs 'at_step'"),
        ({"kind": "kill", "worker": None, "at_step": 3}, "needs 'worker'"),
        ({"kind": "kill", "worker": -1, "at_step": 3}, "worker must be a whole number"),
        ({"kind": "kill", "worker": 1, "at_step": 2.5}, "at_step must be a whole number"),
        ({"kind": "kill", "worker": True, "at_step": 2}, "worker must be a whole number"),
        ({"kind": "slow", "worker": 1, "factor": 0}, "factor must be a positive number"),
        ({"kind": "slow", "worker": 1, "factor": 0.2}, "factor must be 1 or more, 0.2 would make worker 1 faster"),
        ({"kind": "slow", "worker": 1, "factor": "5"}, "factor must be a positive number"),
        ({"kind": "slow", "worker": 1, "factor": 5, "from_step": 5, "to_step": 5}, "beyond from_step"),
        ({"kind": "serve", "seconds": float("inf")}, "seconds must be a positive number"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_with_its_place(tmp_path: Path, entry: Any, says: str) -> None:
    file = tmp_path / "faults.json"
    file.write_text(json.dumps({"faults": [{"kind": "serve", "seconds": 1}, entry]}))
    with pytest.raises(BadInput, match="fault 1: ") as caught:
        FaultSchedule.load(file)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot read a fault schedule"),
        ("[]", "expected"),
        ('{"faults": {}}', "expected"),
        ('{"faults": [], "fodler": "x"}', "'fodler' is not known"),
        ('{"faults": [], "folder": 3}', "must be a path"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "faults.json").write_text(text)
    with pytest.raises(BadInput, match=says):
        FaultSchedule.load(tmp_path / "faults.json")
    with pytest.raises(BadInput, match="cannot read"):
        FaultSchedule.load(tmp_path / "missing.json")


def test_a_fault_has_only_the_fields_of_its_kind() -> None:
    with pytest.raises(BadInput, match="has no 'factor'"):
        Fault("kill", worker=1, at_step=3, factor=2.0)


# Once


def test_building_makes_a_new_schedule_every_time(folder: Path) -> None:
    start = FaultSchedule(folder=folder).serve(seconds=0.05)
    slower = start.slow(worker=0, factor=2)
    assert (len(start.faults), len(slower.faults)) == (1, 2)
    assert slower.folder == folder


def test_a_schedule_is_a_callback() -> None:
    assert isinstance(FaultSchedule(), Callback)


def test_planned_are_the_faults_that_fire_once() -> None:
    assert EVERYTHING.planned == list(EVERYTHING.faults[4:])
    assert EVERYTHING.lasting == list(EVERYTHING.faults[:4])
    assert EVERYTHING.fired == []


def test_lasting_faults_are_said_in_words() -> None:
    faults = FaultSchedule().serve(0.02).slow(2, 6, 100, 4000).gamma(shape=50)
    assert [fault.words for fault in faults.lasting] == [
        "every micro-batch takes at least 0.02 s",
        "worker 2 takes 6 times as long from step 100 until 4,000",
        "every worker takes 1 times as long, times draws from Gamma(50) from step 0 to the end",
    ]


def test_a_fault_is_due_for_its_worker_from_its_step_on() -> None:
    faults = FaultSchedule().raise_(worker=1, at_step=3)
    assert faults.due(1, 2) == faults.due(0, 3) == []
    assert faults.due(1, 3) == faults.due(1, 7) == faults.planned


@pytest.mark.parametrize("with_folder", [True, False])
def test_a_fault_fires_once(folder: Path, with_folder: bool) -> None:
    faults = FaultSchedule(folder=folder if with_folder else None, clock=lambda: 12.5).raise_(worker=1, at_step=3)
    (fault,) = faults.due(1, 4)
    with pytest.raises(InjectedFault, match="worker 1 raises at step 3"):
        faults.carry_out(fault, step=4)
    assert faults.due(1, 4) == []
    assert not faults.carry_out(fault)
    assert faults.fired == faults.planned
    (firing,) = faults.firings
    assert (firing.pid, firing.step, firing.unix_s) == (os.getpid(), 4, 12.5)


def test_a_restarted_worker_and_the_one_who_reads_afterwards_know_what_fired(folder: Path) -> None:
    schedules = [FaultSchedule(folder=folder).raise_(worker=1, at_step=3).raise_(worker=1, at_step=9) for _ in range(3)]
    with pytest.raises(InjectedFault):
        schedules[0].carry_out(schedules[0].due(1, 3)[0])
    restarted, reader = schedules[1:]
    assert restarted.due(1, 3) == []
    assert not restarted.carry_out(restarted.planned[0])
    assert reader.fired == reader.planned[:1]
    assert reader.firings == schedules[0].firings


def test_the_same_fault_planned_twice_fires_twice(folder: Path) -> None:
    faults = FaultSchedule(folder=folder).drop_push(worker=2, at_step=5).drop_push(worker=2, at_step=5)
    assert [faults.push_fault(2, step) for step in (5, 5, 6)] == [*faults.planned, None]
    assert faults.fired == faults.planned


@pytest.mark.slow
def test_only_one_of_many_processes_fires_a_fault(folder: Path) -> None:
    faults = FaultSchedule(folder=folder).drop_push(worker=0, at_step=0)
    workers = [in_another_process(lambda: faults.push_fault(0, 0)) for _ in range(8)]
    assert sorted(ended_with(pid) for pid in workers) == [0, *[1] * 7]
    assert faults.fired == faults.planned


def test_a_fault_whose_record_another_thread_has_read_meanwhile_is_carried_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, close = FaultSchedule(folder=folder).raise_(worker=0, at_step=1), os.close

    def close_and_read(fd: int) -> None:
        close(fd)
        monkeypatch.undo()
        assert schedule.fired == schedule.planned

    monkeypatch.setattr(os, "close", close_and_read)
    with pytest.raises(InjectedFault):
        schedule.carry_out(schedule.planned[0])


def test_a_record_cut_short_counts_as_fired(folder: Path) -> None:
    faults = FaultSchedule(folder=folder).drop_push(worker=0, at_step=2)
    folder.mkdir()
    (folder / "fault-000-drop_push.json").touch()
    assert faults.push_fault(0, 2) is None
    assert [(firing.fault, firing.pid) for firing in faults.firings] == [(faults.planned[0], 0)]


def test_the_records_of_another_schedule_are_not_taken_for_ours(folder: Path) -> None:
    FaultSchedule(folder=folder).drop_push(worker=0, at_step=2).push_fault(0, 2)
    other = FaultSchedule(folder=folder).drop_push(worker=1, at_step=2)
    with pytest.raises(BadInput, match="left by another schedule"):
        other.push_fault(1, 2)


def test_the_folder_can_be_named_later(folder: Path) -> None:
    faults = FaultSchedule().drop_push(worker=0, at_step=0)
    faults.record_in(folder)
    faults.push_fault(0, 0)
    assert len(list(folder.iterdir())) == 1


# Carried out


def test_push_faults_go_to_the_push_path_and_the_others_do_not() -> None:
    faults = FaultSchedule().delay_push(worker=1, at_step=2, seconds=0.5).raise_(worker=1, at_step=2)
    assert [fault.kind for fault in faults.due(1, 2)] == ["raise"]
    assert faults.push_fault(0, 2) is faults.push_fault(1, 1) is None
    late = faults.push_fault(1, 2)
    assert late is not None
    assert (late.kind, late.seconds) == ("delay_push", 0.5)
    assert faults.push_fault(1, 2) is None


def test_only_faults_that_are_due_can_be_carried_out() -> None:
    faults = FaultSchedule().drop_push(worker=1, at_step=2).serve(seconds=1)
    for fault in (*faults.faults, Fault("kill", worker=0, at_step=0)):
        with pytest.raises(BadInput, match=r"take it from due\(\)"):
            faults.carry_out(fault)


@pytest.mark.slow
def test_a_killed_worker_is_dead_and_has_left_its_record(folder: Path) -> None:
    faults = FaultSchedule(folder=folder).kill(worker=1, at_step=3)
    worker = in_another_process(lambda: faults.carry_out(faults.due(1, 3)[0]))
    assert ended_with(worker) == -signal.SIGKILL
    assert faults.fired == faults.planned
    assert faults.firings[0].pid == worker


@pytest.mark.slow
def test_a_stopped_worker_stops_and_goes_on(folder: Path) -> None:
    faults = FaultSchedule(folder=folder).stop(worker=1, at_step=3, seconds=0.05)
    may_end, end = os.pipe()
    worker = in_another_process(lambda: faults.carry_out(faults.due(1, 3)[0]) and os.read(may_end, 1))
    try:
        assert has_stopped_and_gone_on(worker)
    finally:
        os.write(end, b"!")
        assert ended_with(worker) == 0
        os.close(may_end), os.close(end)
    assert faults.fired == faults.planned


def test_any_worker_kills_a_server_and_only_one_does(folder: Path, server: subprocess.Popen[bytes]) -> None:
    schedules = [FaultSchedule(folder=folder).kill_server(host=1, at_step=3) for _ in range(2)]
    found = [schedule.due(rank, 3)[0] for rank, schedule in enumerate(schedules)]
    assert schedules[0].carry_out(found[0], {1: server.pid})
    assert not schedules[1].carry_out(found[1], {1: server.pid})
    assert server.wait() == -signal.SIGKILL
    assert schedules[1].fired == schedules[1].planned


@pytest.mark.slow
def test_a_server_is_stopped_and_goes_on(server: subprocess.Popen[bytes]) -> None:
    faults = FaultSchedule().stop_server(host=0, at_step=0, seconds=0.05)
    assert faults.carry_out(faults.due(5, 0)[0], {0: server.pid})
    assert has_stopped_and_gone_on(server.pid)


def test_the_fault_of_a_server_that_is_elsewhere_or_dead_stays_due(server: subprocess.Popen[bytes]) -> None:
    faults = FaultSchedule().kill_server(host=1, at_step=3)
    server.kill()
    server.wait()
    for pids in (None, {}, {0: os.getpid()}, {1: server.pid}):
        assert not faults.carry_out(faults.due(0, 3)[0], pids)
    assert faults.fired == []
