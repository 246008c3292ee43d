"""What Horovod, as we build it, does that the published one does not (`tools.build_horovod` says why)."""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import multiprocessing
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from .cluster import HOROVODRUN, wait_for

pytestmark = [pytest.mark.processes]
PATIENCE_S = 60.0
JOINS = "import horovod.torch as hvd; hvd.init()"
TRIES_TWICE = """
import os
import horovod.torch as hvd
try:
    hvd.init()
except ValueError as error:
    print(error)
hvd.shutdown()
os.environ.update({name: "1" for name in ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE")})
hvd.init()
print("a world of", hvd.size())
"""
GIVES_UP = """
import time, torch
import horovod.torch as hvd
from horovod.torch import mpi_ops
from gba_hvd.comm import collectives
from gba_hvd.comm.world_formation import Forming
hvd.init()
world = collectives.HorovodWorld()
try:
    world.sum_("cancelled", torch.ones(4), cancelled=lambda: True)
except collectives.WorldLeft:
    (cancelled,) = mpi_ops._handle_map
    while not hvd.poll(cancelled):
        time.sleep(0.01)
    collectives.initialise_again(Forming())
    values = torch.ones(4)
    collectives.HorovodWorld().sum_("cancelled", values)
    print("the next world sums", values.sum().item(), "and keeps", len(mpi_ops._handle_map))
"""
WATCHES = """
import torch
import horovod.torch as hvd
from gba_hvd.comm import collectives
from gba_hvd.comm.world_formation import Forming
collectives._WATCHED_S = 0.0  # all waits are watched
hvd.init()
for formed in range(2):
    for trained in range(2):  # a script that trains twice
        world = collectives.HorovodWorld()
        looks = iter((False, False, True))
        world.wait_until("rows", looks.__next__, lambda seconds: None, range(2))
    world.sum_("met", torch.ones(1))
    if not formed:
        collectives.initialise_again(Forming())
print("no wait was refused")
"""


@pytest.fixture
def rendezvous() -> Iterator[tuple[int, Any]]:
    """Where workers find each other, as the launcher has it: its port, and what they have put there, by scope."""
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer(0)
    port = server.start()
    server.init([])
    yield port, server._httpd.cache
    server.stop()
    server._httpd.server_close()


def worker(script: str, rank: int, port: int) -> subprocess.Popen[str]:
    """One of two, on one host."""
    world = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    place = {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": "lo"}
    place["GLOO_TIMEOUT_SECONDS"] = 1  # five times that, if it is the dead one that would have connected
    how = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "HOSTNAME": "localhost"}
    environ = {f"HOROVOD_{name}": str(value) for name, value in (world | place | how).items()}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | environ, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_worker_that_dies_while_the_world_forms_does_not_take_the_others_along(rendezvous: tuple[int, Any]) -> None:
    port, reported = rendezvous
    with worker(JOINS, 1, port) as dies:
        try:
            wait_for(lambda: reported.get("global"), "the address of rank 1", PATIENCE_S)
        finally:
            os.kill(dies.pid, signal.SIGKILL)
        dies.communicate(timeout=PATIENCE_S)
    with worker(TRIES_TWICE, 0, port) as survivor:
        said, errors = survivor.communicate(timeout=PATIENCE_S)
    assert survivor.returncode == 0, errors
    assert "initialization failed" in said
    assert said.endswith("a world of 1\n")


class SlowDiscovery:
    """Two hosts. Once `slow` is set, asking takes until `answer` is."""

    def __init__(self) -> None:
        self.slow, self.asked, self.answer = threading.Event(), threading.Event(), threading.Event()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        if self.slow.is_set():
            self.asked.set()
            assert self.answer.wait(PATIENCE_S)
        return {"stays": 1, "dies": 1}


class Launches:
    """Workers, as the launcher sees them: one of host "dies" does so on request, once."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.die, self.end = threading.Event(), threading.Event()

    def __call__(self, slot: Any, events: list[threading.Event]) -> tuple[int, float]:
        self.hosts.append(slot.hostname)
        if self.hosts.count("dies") == 1 and slot.hostname == "dies":
            assert self.die.wait(PATIENCE_S)
            return 1, time.time()
        assert self.end.wait(PATIENCE_S)
        return 0, time.time()


def test_a_worker_that_died_is_started_again_although_its_host_is_taken_back_at_once() -> None:
    """The launcher waits for an answer about hosts when it forms the next world; meanwhile the cooldown ends."""
    from horovod.runner.elastic.driver import ElasticDriver

    discovery, launches, rendezvous = SlowDiscovery(), Launches(), Mock()
    driver = ElasticDriver(rendezvous, discovery, min_num_proc=1, max_num_proc=2, cooldown_range=(1, 1))
    driver.wait_for_available_slots(2)
    driver.start(2, launches)
    wait_for(lambda: sorted(launches.hosts) == ["dies", "stays"], "both workers, each started in a thread", PATIENCE_S)
    discovery.slow.set()
    assert discovery.asked.wait(PATIENCE_S)
    launches.die.set()
    survivor = threading.Thread(target=driver.record_ready, args=("stays", 0), daemon=True)
    survivor.start()
    hosts = driver._host_manager._hosts_state
    wait_for(
        lambda: hosts["dies"].is_blacklisted() and hosts["dies"].is_resurrected(), "the cooldown's end", PATIENCE_S
    )
    discovery.answer.set()
    survivor.join(PATIENCE_S)
    started_again = lambda: launches.hosts.count("dies") == 2  # noqa: E731
    wait_for(lambda: survivor.is_alive() or started_again(), "the worker that died, started in a thread", PATIENCE_S)
    launches.end.set()
    driver.stop()
    assert not survivor.is_alive(), "the next world was not formed"
    assert driver.world_size() == 2
    assert launches.hosts.count("dies") == 2, "the worker that died was taken for alive"


def test_a_worker_that_is_ended_keeps_its_exit_status_for_the_launcher() -> None:
    from horovod.runner.common.util.safe_shell_exec import terminate_executor_shell_and_children

    ended = subprocess.Popen("exit 3", shell=True)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it is over, and nobody has asked for its status
    terminate_executor_shell_and_children(ended.pid)
    assert ended.wait() == 3


def test_a_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.runner.common.util import safe_shell_exec

    monkeypatch.setattr(safe_shell_exec, "GRACEFUL_TERMINATION_TIME_S", 0.1)
    stubborn = subprocess.Popen(
        "trap '' TERM; echo ready; while :; do sleep 0.05; done", shell=True, stdout=subprocess.PIPE
    )
    assert stubborn.stdout is not None and stubborn.stdout.readline() == b"ready\n"
    safe_shell_exec.terminate_executor_shell_and_children(stubborn.pid)
    assert stubborn.wait() == -signal.SIGKILL
    stubborn.stdout.close()


def test_an_operation_that_was_given_up_is_forgotten_in_the_next_world() -> None:
    environ = {"HOROVOD_CYCLE_TIME": "200"}  # ms: it is given up before it began
    done = subprocess.run(
        [sys.executable, "-c", GIVES_UP], check=False, env=os.environ | environ, text=True, capture_output=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert "the next world sums 4.0 and keeps 0" in done.stdout, done.stdout + done.stderr


def test_each_of_a_scripts_trainings_watches_its_waits() -> None:
    done = subprocess.run(
        [HOROVODRUN, "-np", "2", "-H", "localhost:2", "--network-interface", "lo", sys.executable, "-c", WATCHES],
        check=False, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.stdout.count("no wait was refused") == 2, done.stdout + done.stderr


HANGS = """
import signal, sys, time
from pathlib import Path
import horovod.torch as hvd
hvd.init()
hangs = Path(sys.argv[1])
if hvd.rank() == 1:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    hangs.touch()
    time.sleep(3600)
while not hangs.exists():
    time.sleep(0.05)
hvd.shutdown()
hvd.init()
print("finished in a world of", hvd.size())
"""


def test_a_worker_that_asks_for_no_place_is_named_and_ended(tmp_path: Path) -> None:
    """Whatever it makes of SIGTERM, it is the other one that finishes the job."""
    script = tmp_path / "work.py"
    script.write_text(HANGS)
    elastic = ["-np", "2", "--min-np", "1", "--host-discovery-script", "echo localhost:2", "--elastic-timeout", "16"]
    command = [str(HOROVODRUN), *elastic, sys.executable, str(script), str(tmp_path / "hangs")]
    done = subprocess.run(command, check=False, text=True, capture_output=True, timeout=2 * PATIENCE_S)
    said = done.stdout + done.stderr
    assert re.search(r"waited \d+ s for the next world, for lack of localhost\[1\]: .* ended in \d+ s", said), said
    assert re.search(r"ending localhost\[1\]: no request .* waited \d+ s \(--elastic-timeout\)", said), said
    assert done.returncode == 0 and "finished in a world of 1" in said, said


def test_a_worker_is_gone_though_its_child_holds_its_output(tmp_path: Path) -> None:
    script, left = tmp_path / "work.sh", tmp_path / "pid"
    script.write_text(f"echo works\nsleep 600 & echo $! > {left}; kill -9 $$\n")
    command = [str(HOROVODRUN), "-np", "1", "sh", str(script)]
    try:
        done = subprocess.run(command, check=False, text=True, capture_output=True, timeout=PATIENCE_S)
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)  # raises if it is gone
    assert done.returncode == 1 and "works" in done.stdout, done.stdout + done.stderr


FAILS_LATE = """
import os, signal, sys, time
from pathlib import Path
import horovod.torch as hvd
died = Path(sys.argv[1])
def wait_for(name):
    while not died.with_name(name).exists():
        time.sleep(0.05)
if died.exists():
    died.with_name("late joiner").touch()
    wait_for("finished")
    sys.exit("a late joiner that fails")
hvd.init()
if hvd.rank() == 1:
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "3"
try:
    while True:  # alone, until the launcher takes the late joiner in
        time.sleep(0.2)
        hvd.shutdown()
        hvd.init()
except ValueError:  # it is in the world, and did not come in time
    wait_for("late joiner")
    died.with_name("finished").touch()
"""


def test_a_job_that_survivors_finish_has_succeeded_although_a_newcomer_fails_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(FAILS_LATE)
    elastic = ["-np", "2", "--min-np", "1", "--max-np", "2", "--host-discovery-script", "echo localhost:2"]
    command = [str(HOROVODRUN), *elastic, sys.executable, str(script), str(tmp_path / "died")]
    done = subprocess.run(command, check=False, text=True, capture_output=True, timeout=2 * PATIENCE_S)
    said = done.stdout + done.stderr
    assert (tmp_path / "late joiner").exists(), said
    assert done.returncode == 0, said
    assert "worker localhost[1] ended with exit code 1; the others have finished the job" in said


LEAVES_BY_ITSELF = """
import sys
import horovod.torch as hvd
hvd.init()
if hvd.rank() == 1:
    sys.exit(0)
hvd.shutdown()
hvd.init()  # the world without it
print("trains on")
"""


def test_a_job_that_a_worker_leaves_by_itself_has_not_finished(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(LEAVES_BY_ITSELF)
    elastic = ["-np", "2", "--min-np", "1", "--max-np", "2", "--host-discovery-script", "echo localhost:2"]
    command = [str(HOROVODRUN), *elastic, sys.executable, str(script)]
    done = subprocess.run(command, check=False, text=True, capture_output=True, timeout=2 * PATIENCE_S)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "the job has not finished: localhost[1] left with exit code 0 while localhost[0] trained on" in said, said
    assert "has succeeded" not in said and "Traceback" not in said, said


DIES_AT_ITS_START = """
import os, signal, sys, time
from pathlib import Path
died = Path(sys.argv[1])
if died.exists():
    sys.exit("a late joiner that fails")
import horovod.torch as hvd
hvd.init()
if hvd.rank() == 1:
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:  # alone, until the launcher starts the late joiner
        time.sleep(0.2)
        hvd.shutdown()
        hvd.init()
except ValueError:
    hvd.shutdown()
    hvd.init()
    print("continues in a world of", hvd.size())
"""


def test_a_late_joiner_that_dies_at_its_start_is_not_awaited(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(DIES_AT_ITS_START)
    elastic = ["-np", "2", "--min-np", "1", "--max-np", "2", "--host-discovery-script", "echo localhost:2"]
    elastic += ["--gloo-timeout-seconds", "600"]  # of a worker that waits in hvd.init()
    command = [str(HOROVODRUN), *elastic, sys.executable, str(script), str(tmp_path / "died")]
    done = subprocess.run(command, check=False, text=True, capture_output=True, timeout=PATIENCE_S)
    said = done.stdout + done.stderr
    assert "a late joiner that fails" in said and "continues in a world of 1" in said, said
    assert done.returncode == 0, said


SIGNALLED = """
import os, signal, threading
from horovod.runner import gloo_run
for _ in range(300):
    gloo_run.ended_by.clear()
    event = gloo_run.register_shutdown_event()
    if not (child := os.fork()):
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getppid(), signal.SIGINT)
        os._exit(0)
    while len(gloo_run.ended_by) < 2 or not event.is_set():
        event.wait(0.001)
    os.waitpid(child, 0)
print("set each time")
"""


def test_two_signals_at_once_end_the_launcher() -> None:
    assert "set each time" in printed(SIGNALLED)


GIVES_SLOTS_UP_AT_ONCE = """
from horovod.runner import launch
from horovod.runner.elastic import discovery
discovery.SLOT_FAILURES = 1
launch.run_commandline()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.variant)])
def test_a_signal_ends_a_launcher_that_waits_for_slots(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "work.sh"
    script.write_text(f'[ "$HOROVOD_SLOT" = 1 ] && exit 3\nexec {sys.executable} -c "{JOINS}"\n')
    elastic = ["-np", "2", "--min-np", "2", "--max-np", "2", "--host-discovery-script", "echo localhost:2"]
    command = [sys.executable, "-c", GIVES_SLOTS_UP_AT_ONCE, *elastic, "sh", str(script)]
    with subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as launcher:
        limit = threading.Timer(PATIENCE_S, launcher.kill)  # its workers end with it
        limit.start()
        try:
            assert launcher.stderr is not None
            said = next((line for line in launcher.stderr if "its slot is given up" in line), "")
            launcher.send_signal(number)
            said += launcher.stderr.read()
            status = launcher.wait()
        finally:
            limit.cancel()
            launcher.kill()
    assert "localhost[1] failed (failure 1 of 1)" in said, said
    assert status == 128 + number and "\nhorovodrun: interrupted\n" in f"\n{said}", (status, said)
    assert "Traceback" not in said, said


def test_a_slot_that_fails_rests_longer_each_time_and_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    from horovod.runner.elastic.discovery import FixedHosts, HostManager

    hosts = HostManager(FixedHosts({"h": 3}))
    hosts.update_available_hosts()
    for pause in ("in 2 s", "in 4 s", "in 8 s", "in 16 s", "given up"):
        hosts._hosts_state["h"]._closed_slots.clear()
        hosts.close_slot("h", 1)
        assert pause in capsys.readouterr().err
        assert hosts.current_hosts.get_open_slots("h") == [0, 2]
        assert hosts.current_hosts.count_available_slots() == 2
    assert not hosts.update_available_hosts()
    hosts._hosts_state["h"]._closed_slots[1] = 0.0
    assert hosts.update_available_hosts(), "the workers are to be notified that a slot is open again"
    assert hosts.current_hosts.get_open_slots("h") == [0, 1, 2]


class Registry:
    def __init__(self) -> None:
        from horovod.runner.elastic.registration import WorkerStateRegistry

        self.driver, self.hosts = Mock(host_assignments={}, interrupted=False), Mock()
        self.driver.finished.return_value = self.hosts.is_blacklisted.return_value = False
        self.registry = WorkerStateRegistry(self.driver, self.hosts)

    def ends(self, states: dict[tuple[str, int], str]) -> None:
        self.registry.reset(len(states))
        threads = [
            threading.Thread(target=self.registry._record_state, args=(*key, state)) for key, state in states.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)


def test_a_host_is_given_up_when_none_of_its_workers_lives() -> None:
    run = Registry()
    run.ends({("a", 0): "READY", ("a", 1): "FAILURE", ("b", 0): "FAILURE", ("b", 1): "FAILURE"})
    run.hosts.close_slot.assert_called_once_with("a", 1)
    assert {call.args for call in run.hosts.blacklist.call_args_list} == {("b",)}
    run.driver.resume.assert_called_once()


def test_no_slot_is_closed_and_no_world_follows_once_a_signal_has_come() -> None:
    run = Registry()
    run.driver.interrupted = True
    run.ends({("a", 0): "READY", ("a", 1): "FAILURE"})
    run.driver.stop.assert_called_once()
    run.hosts.close_slot.assert_not_called()
    run.driver.resume.assert_not_called()


def test_a_worker_that_dies_while_its_job_waits_for_slots_in_vain_is_not_awaited() -> None:
    run = Registry()
    dies = threading.Thread(target=run.registry.record_failure, args=("a", 0), daemon=True)

    def waits_in_vain() -> None:
        dies.start()
        wait_for(lambda: run.registry._action_event._cond._waiters, "the thread of the dead worker", PATIENCE_S)
        run.driver.interrupted = True
        raise RuntimeError("no slots")

    def stop() -> None:
        run.driver.finished.return_value = True

    run.driver.resume.side_effect, run.driver.stop.side_effect = waits_in_vain, stop
    run.ends({("a", 0): "READY", ("a", 1): "FAILURE"})
    run.driver.stop.assert_called_once()
    dies.join(PATIENCE_S)
    assert not dies.is_alive()


def test_workers_that_end_after_one_whose_end_could_not_be_dealt_with_are_not_kept_waiting() -> None:
    run = Registry()
    run.driver.stop.side_effect = RuntimeError("cannot stop")
    run.registry.reset(1)
    with pytest.raises(RuntimeError, match="cannot stop"):
        run.registry.record_failure("a", 0)
    assert run.registry._action_event.is_set()


def test_an_elastic_job_says_what_it_waits_for(tmp_path: Path) -> None:
    elastic = ["-np", "2", "--min-np", "2", "--host-discovery-script", "echo localhost:1", "--elastic-timeout", "12"]
    command = [str(HOROVODRUN), *elastic, "true"]
    done = subprocess.run(command, check=False, text=True, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert re.search(r"waiting for 2 free slots on 1 host\(s\) or more; there are [01] on [01]; disc", done.stderr)
    assert "Timed out waiting for minimum number of slots" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("end", "status"), [("kill -9 $$", 0), ("exit 3", 1)])
def test_a_job_that_a_survivor_finishes_has_succeeded_unless_another_worker_failed_by_itself(
    tmp_path: Path, end: str, status: int
) -> None:
    script, hosts = tmp_path / "work.sh", tmp_path / "hosts.sh"
    script.write_text(f'[ "$HOROVOD_RANK" = 0 ] || {end}\n')
    hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)
    elastic = ["-np", "2", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(hosts)]
    command = [str(HOROVODRUN), *elastic, "--network-interface", "lo", "sh", str(script)]
    done = subprocess.run(command, check=False, text=True, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == status, done.stdout + done.stderr


def discovered(command: str) -> dict[str, int]:
    from horovod.runner.elastic.discovery import HostDiscoveryScript

    found: dict[str, int] = HostDiscoveryScript(command, 4).find_available_hosts_and_slots()
    return found


def test_a_discovery_script_is_run_by_a_shell_and_its_changed_answer_is_seen(tmp_path: Path) -> None:
    assert discovered('echo "$(cat /proc/$PPID/comm):1"') == {"sh": 1}, "no Python process between the two"
    hosts = tmp_path / "hosts"
    for answer, expected in (("a:2\nb:3\n", {"a": 2, "b": 3}), ("a:2\n", {"a": 2}), ("c\n", {"c": 4}), ("", {})):
        hosts.write_text(answer)
        assert discovered(f"cat {hosts}") == expected
    assert discovered("cat; echo a:1") == {"a": 1}, "standard input is empty"
    for command, status in (("exit 3", 3), ("kill -9 $$", 137)):
        with pytest.raises(RuntimeError, match=f"Exit code: {status}"):
            discovered(command)


def test_a_discovery_script_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.runner.elastic import discovery

    monkeypatch.setattr(discovery, "DISCOVERY_TIMEOUT_SECONDS", 0.5)
    for command in ("sleep 600", "sleep 600 & echo a:1", "setsid sleep 5"):  # the last one is left to itself
        with pytest.raises(RuntimeError, match=rf"did not end within 0.5 s .* was killed: {command}"):
            discovered(command)
    monkeypatch.undo()
    assert discovered("echo a:1") == {"a": 1}


@pytest.mark.parametrize("line", ["some words", "a:many"])
def test_a_discovery_script_that_prints_something_else_is_shown(line: str) -> None:
    from horovod.runner.elastic.discovery import HostDiscoveryScript

    with pytest.raises(RuntimeError, match=rf"printed '{line}', expected lines like \"host:slots\""):
        HostDiscoveryScript(f"echo {line}", None).find_available_hosts_and_slots()


class FailsLater:
    """Hosts once, then errors."""

    def __init__(self) -> None:
        self.n_asked = 0

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        self.n_asked += 1
        if self.n_asked > 1:
            raise RuntimeError("the script failed")
        return {"a": 1}


def test_a_discovery_script_that_fails_later_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    from horovod.runner.elastic.driver import ElasticDriver

    discovery = FailsLater()
    driver = ElasticDriver(Mock(), discovery, min_num_proc=1, max_num_proc=1)
    wait_for(lambda: discovery.n_asked > 3, "failures", PATIENCE_S)
    driver.stop()
    assert capsys.readouterr().err.count("the script failed. The hosts known before stay") == 1


def test_a_discovery_script_of_a_removed_folder_is_run_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    assert discovered("echo $(pwd):1") == {str(gone): 1}
    gone.rmdir()
    assert discovered("echo $(pwd):1") == {"/": 1}
    assert capfd.readouterr().err == ""


def test_a_process_that_a_discovery_script_leaves_behind_lives(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    assert discovered(f"sleep 600 >/dev/null 2>&1 & echo $! > {left}; echo a:1") == {"a": 1}
    os.kill(int(left.read_text()), signal.SIGKILL)  # raises if there is no such process


def test_a_discovery_script_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    runs = tmp_path / "pid"
    command = f"echo $$ > {runs}.new; mv {runs}.new {runs}; exec sleep 600"
    asks = "import sys; from horovod.runner.elastic.discovery import HostDiscoveryScript as Script\n"
    asks += "Script(sys.argv[1], 1).find_available_hosts_and_slots()"
    with subprocess.Popen([sys.executable, "-c", asks, command]) as launcher:
        wait_for(runs.exists, "the script", PATIENCE_S)
        script = Path(f"/proc/{runs.read_text().strip()}/cmdline")
        wait_for(lambda: b"sleep" in script.read_bytes(), "its command", PATIENCE_S)  # empty within exec
        launcher.kill()
    wait_for(lambda: not script.exists() or not script.read_bytes(), "the end of the script", PATIENCE_S)


KNOWS_ITS_BUILD = """
import sys
from horovod.common.util import gloo_built, mpi_built
print(gloo_built(), mpi_built(), "torch" in sys.modules)
"""
BETWEEN_WORLDS = """
import os
import horovod.torch as hvd
hvd.init()
os.environ["HOROVOD_ELASTIC"] = "1"
hvd.shutdown()
print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
"""


def printed(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, text=True, capture_output=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_horovod_was_built_with_is_known_without_torch() -> None:
    assert printed(KNOWS_ITS_BUILD) == "True False False"


def test_between_worlds_an_elastic_worker_has_the_place_of_the_last_one() -> None:
    assert printed(BETWEEN_WORLDS) == "0 1 0 1 0 1"


def test_a_worker_that_died_while_it_asked_the_launcher_is_no_error() -> None:
    from horovod.runner.http.http_server import KVStoreHandler

    request = KVStoreHandler.__new__(KVStoreHandler)
    request.path, request.wfile, request.request_version = "/scope/key", Mock(), "HTTP/1.0"
    request.requestline, request.client_address, request.server = "GET", ("127.0.0.1", 1), Mock(verbose=False)
    request._get_value = lambda scope, key: b"value"
    request.close_connection = False
    request.wfile.write.side_effect = BrokenPipeError
    request.do_GET()
    assert request.wfile.write.called and request.close_connection


def test_each_slot_has_its_log_and_the_last_line_says_why_the_job_failed(tmp_path: Path) -> None:
    elastic = ["-np", "1", "--min-np", "1", "--max-np", "1", "--host-discovery-script", "echo localhost:1"]
    command = [str(HOROVODRUN), *elastic, "--network-interface", "lo", "--output-filename", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(
            [*command, "sh", "-c", "echo here; exit 3"], check=False, text=True, capture_output=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr.strip().splitlines()[-1] == "Exit code: 3", done.stderr
        assert "stop running" not in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "localhost.0" / "stdout").read_text().count("here") == 2


PRINTS_MUCH = """
i=0
while [ $i -lt 4000 ]; do
  echo "line $i of many, more of them than a pipe without a reader holds"
  i=$((i+1))
done
touch "$1.$HOROVOD_RANK"
"""


@pytest.mark.parametrize("elastic", [False, True])
def test_a_job_outlives_the_reader_of_its_output(tmp_path: Path, elastic: bool) -> None:
    script, done = tmp_path / "work.sh", tmp_path / "done"
    script.write_text(PRINTS_MUCH)
    how = ["--min-np", "2", "--host-discovery-script", "echo localhost:2"] if elastic else ["--output-filename", "logs"]
    command = [str(HOROVODRUN), "-np", "2", *how, "--network-interface", "lo", "sh", str(script), str(done)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as launcher:
        limit = threading.Timer(PATIENCE_S, launcher.kill)  # its workers end with it
        limit.start()
        try:
            assert launcher.stdout is not None and launcher.stderr is not None
            assert " of many" in launcher.stdout.readline()
            launcher.stdout.close()
            said = launcher.stderr.read()
            status = launcher.wait()
        finally:
            limit.cancel()
            launcher.kill()
    assert status == 0 and done.with_name("done.0").exists() and done.with_name("done.1").exists(), said
    reason = "cannot write to stdout (Broken pipe), which nobody reads any more: the job continues"
    assert said.splitlines() == [f"horovodrun: {reason}, its further output there is lost"]
    if not elastic:
        assert (tmp_path / "logs" / "rank.1" / "stdout").read_text().count(" of many") == 4000


def forwarded(text: bytes, stream: Any) -> None:
    """Have the launcher's thread read a worker's output to the end and write it to a stream."""
    from horovod.runner.common.util.safe_shell_exec import prefix_connection

    reader, writer = multiprocessing.Pipe(duplex=False)
    os.write(writer.fileno(), text)
    writer.close()
    prefix_connection(reader, stream, "stdout", 0, False)


def test_what_a_full_disk_does_not_take_is_counted_and_the_rest_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    class Disk(io.RawIOBase):
        name, n_writes, content = "<stdout>", 0, b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.n_writes += 1
            if 2 <= self.n_writes <= 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.content += bytes(data)
            return len(data)

    disk = Disk()
    forwarded(b"a\nb\nc\nd\ne\n", io.TextIOWrapper(io.BufferedWriter(disk)))
    assert disk.content == b"[0]<stdout>:a\n[0]<stdout>:b\n[0]<stdout>:e\n"  # b: the stream has kept it
    assert capsys.readouterr().err.splitlines() == [
        "horovodrun: cannot write to stdout (No space left on device): the job continues, its output there is lost "
        "until a write succeeds; each line tries again",
        "horovodrun: stdout can be written again; lines lost: 2",
    ]


def test_output_that_cannot_be_decoded_or_encoded_is_no_error() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    forwarded("ä".encode() + b"\xff\n", stream)
    assert stream.buffer.getvalue() == b"[0]<stdout>:\\xe4\\ufffd\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("output", ["stdout", "stderr"])
def test_a_launcher_whose_output_nobody_reads_ends_without_an_error(output: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    other = "stderr" if output == "stdout" else "stdout"
    command = [str(HOROVODRUN), "-np", "1", "sh", "-c", "echo here; echo here >&2; exit 3"]
    try:
        ended = subprocess.run(
            command, check=False, text=True, timeout=PATIENCE_S, **{output: writer, other: subprocess.PIPE}
        )
    finally:
        os.close(writer)
    said = getattr(ended, other)
    assert ended.returncode == 1 and "here" in said and "Exception" not in said and "Traceback" not in said, said


def test_a_worker_whose_log_file_cannot_be_made_is_started(tmp_path: Path) -> None:
    (tmp_path / "localhost.0").touch()
    elastic = ["-np", "1", "--min-np", "1", "--host-discovery-script", "echo localhost:1"]
    command = [str(HOROVODRUN), *elastic, "--network-interface", "lo", "--output-filename", str(tmp_path), "echo", "hi"]
    ended = subprocess.run(command, check=False, text=True, capture_output=True, timeout=PATIENCE_S)
    assert ended.returncode == 0 and "hi" in ended.stdout, ended.stdout + ended.stderr
    assert f"cannot write the output of localhost.0 to {tmp_path}/localhost.0 (File exists)" in ended.stderr


def test_a_job_whose_launchers_output_is_closed_goes_on() -> None:
    command = f"exec {HOROVODRUN} -np 1 sh -c 'yes | head -100000; echo done >&2' >&-"  # more than a pipe holds
    ended = subprocess.run(["sh", "-c", command], check=False, text=True, stderr=subprocess.PIPE, timeout=PATIENCE_S)
    assert ended.returncode == 0 and "done" in ended.stderr, ended.stderr


@pytest.mark.parametrize("ignored", [False, True])
def test_a_hangup_ends_the_launcher_unless_it_is_ignored(tmp_path: Path, ignored: bool) -> None:
    """As SIGTERM does, and with its worker."""
    (ready := tmp_path / "ready").touch()
    script = 'trap "echo ended; exit 5" TERM; rm "$1"; while [ ! -e "$1" ]; do sleep 0.05; done'
    command = [str(HOROVODRUN), "-np", "1", "sh", "-c", script, "sh", str(ready)]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        launcher = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    finally:
        signal.signal(signal.SIGHUP, before)
    with launcher:
        try:
            wait_for(lambda: not ready.exists(), "the worker", PATIENCE_S)
            launcher.send_signal(signal.SIGHUP)
            if ignored:
                ready.touch()
            said, _ = launcher.communicate(timeout=PATIENCE_S)
        finally:
            launcher.kill()
    assert launcher.returncode == (0 if ignored else 128 + signal.SIGHUP), said
    # Behind it may stand what Python's resource tracker warns of, where the launcher ends while a thread frees a lock.
    assert ("ended\nhorovodrun: interrupted\n" in said) is not ignored, said


def test_a_driver_that_is_interrupted_does_not_wait_for_its_discovery_script() -> None:
    from horovod.runner.elastic.driver import ElasticDriver

    class Slow:
        begun, end = threading.Event(), threading.Event()

        def find_available_hosts_and_slots(self) -> dict[str, int]:
            self.begun.set()
            self.end.wait(PATIENCE_S)
            return {"localhost": 1}

    slow = Slow()
    driver = ElasticDriver(Mock(), slow, min_num_proc=1, max_num_proc=1)

    assert slow.begun.wait(PATIENCE_S)
    threading.Thread(target=driver.interrupt, daemon=True).start()
    wait_for(lambda: driver.interrupted, "the interruption", PATIENCE_S)
    ends = threading.Thread(target=driver.stop, daemon=True)
    ends.start()
    ends.join(PATIENCE_S / 2)
    assert not ends.is_alive()
    slow.end.set()
    driver._discovery_thread.join()


def test_workers_start_on_other_hosts_although_the_working_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from horovod.runner import gloo_run

    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(gloo_run.network, "resolve_host_address", lambda host: "192.0.2.1")
    run = Mock(return_value=0)
    monkeypatch.setattr(gloo_run.safe_shell_exec, "execute", run)
    settings = Mock(elastic=True, output_filename=None, verbose=0, ssh_port=None, ssh_identity_file=None)
    start = gloo_run._exec_command_fn(settings, {})
    gone.rmdir()
    assert start("work", Mock(rank=0, hostname="elsewhere"), [])[0] == 0
    assert f"cd {gone} " in run.call_args.args[0]


class RunsCode:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def asked(port: int, method: str, path: str, body: bytes = b"") -> int:
    """The status of the answer of the launcher's port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, body or None)
        return connection.getresponse().status


@pytest.fixture
def driver() -> Iterator[tuple[int, Mock]]:
    """The port of an elastic launcher, and what has the worlds there."""
    from horovod.runner.elastic.rendezvous import create_rendezvous_handler
    from horovod.runner.http.http_server import RendezvousServer

    server, driver = RendezvousServer(0), Mock()
    port = server.start(create_rendezvous_handler(driver), host="127.0.0.1")
    server.init([])
    yield port, driver
    server.stop()
    server._httpd.server_close()


def test_what_strangers_send_to_the_launcher_or_a_worker_is_not_executed(
    driver: tuple[int, Mock], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor what is signed with a worker's key: the launcher takes both from whoever comes."""
    from horovod.runner.common.util import codec, network
    from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationClient, WorkerNotificationService

    (port, launcher), path, code = driver, "/worker_addresses/localhost:0", RunsCode(tmp_path / "ran")
    assert asked(port, "PUT", path, codec.dumps_base64(code, to_ascii=False)) == 400
    assert "mkdir is refused: only plain data is read here" in caplog.text and caplog.text.count("\n") == 1
    told, key = Mock(), b"k" * 32
    service = WorkerNotificationService(key, ["lo"], told)
    try:
        value = (service.addresses(), key)
        assert asked(port, "PUT", path, codec.dumps_base64(value, to_ascii=False)) == 200
        launcher.register_worker_server.assert_called_once_with("localhost", 0, *value)
        assert asked(port, "GET", path) == 404, "who has the key can send messages"
        client = WorkerNotificationClient(*value, verbose=0)
        client.notify_hosts_updated(7, HostUpdateResult.mixed)
        told.handle_hosts_updated.assert_called_once_with(7, HostUpdateResult.mixed)
        for wire in (service._wire, client._wire):
            signed = io.BytesIO()
            network.Wire(key).write(code, signed)
            signed.seek(0)
            with pytest.raises(pickle.UnpicklingError, match="only plain data"):
                wire.read(signed)
    finally:
        service.shutdown()
    assert not code.path.exists()


def test_the_ports_of_horovod_are_those_of_the_named_interface(driver: tuple[int, Mock]) -> None:
    from horovod.runner.elastic.worker import WorkerNotificationManager

    port, launcher = driver
    manager = WorkerNotificationManager()
    manager.init("127.0.0.1", port, nic="lo", hostname="localhost", local_rank=0)
    try:
        assert manager._service._server.server_address[0] == "127.0.0.1"
        assert launcher.register_worker_server.called
    finally:
        manager._service.shutdown()


SHOWS_ITS_HOST = """
import os, subprocess
lines = subprocess.run(["ps", "-eww", "-o", "args"], check=True, text=True, capture_output=True).stdout
print("secret:", os.environ["A_SECRET"][::-1], "shown:", os.environ["A_SECRET"] in lines)
with open("/proc/net/tcp") as ports:
    listens = {line.split()[1] for line in ports if line.split()[3] == "0A"}
print("at:", [at for at in listens if int(at[-4:], 16) == int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])])
"""


@pytest.mark.parametrize("elastic", [False, True])
def test_the_environment_of_local_workers_is_on_no_command_line(tmp_path: Path, elastic: bool) -> None:
    """Nor is the launcher's port open at other addresses."""
    script = tmp_path / "work.py"
    script.write_text(SHOWS_ITS_HOST)
    how = ["--min-np", "1", "--host-discovery-script", "echo localhost:1"] if elastic else []
    command = [str(HOROVODRUN), "-np", "1", *how, "--network-interface", "lo", sys.executable, str(script)]
    secret = f"xyz{os.getpid()}abc"
    done = subprocess.run(
        command, check=False, text=True, capture_output=True, timeout=PATIENCE_S, env={**os.environ, "A_SECRET": secret}
    )
    assert done.returncode == 0 and f"secret: {secret[::-1]} shown: False" in done.stdout, done.stdout + done.stderr
    assert "at: ['0100007F:" in done.stdout, done.stdout


def test_requests_without_end_are_refused(driver: tuple[int, Mock], monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.runner.common.util import network
    from horovod.runner.elastic.worker import WorkerNotificationService

    port, _ = driver
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.putrequest("PUT", "/global/0")
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders()
        assert connection.getresponse().status == 400
    monkeypatch.setattr(network, "REQUEST_TIMEOUT_S", 0.01)
    service = WorkerNotificationService(b"k" * 32, ["lo"], Mock())
    try:
        for n_bytes in (-1, (1 << 20) + 1):
            with pytest.raises(EOFError, match=f"of {n_bytes} bytes was announced"):
                service._wire.read(io.BytesIO(b"d" * 32 + struct.pack("i", n_bytes)))
        with socket.create_connection(("127.0.0.1", service.get_port()), PATIENCE_S) as silent:
            assert silent.recv(1) == b"", "it closes the connection"
    finally:
        service.shutdown()
