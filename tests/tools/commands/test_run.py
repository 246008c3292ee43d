"""`gba-hvd run`: which call it makes, and what it refuses."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.commands.run import _start, apart
from gba_hvd_tools.launch import start_watch
from gba_hvd_tools.launch.checks import check_discovery, check_interface, check_key_file, check_ssh, check_threads
from gba_hvd_tools.launch.command_line import Asked, Here, Launch, parse_hosts, parse_workers, plan

from gba_hvd.errors import BadInput

HERE = Here(16, "lo", frozenset({"localhost"}), "/bin/horovodrun", {})


def planned(workers: str, slots_now: int | None = None, here: Here = HERE, **more: Any) -> Launch:
    return plan(Asked(*parse_workers(workers), ["python", "train.py"], more.pop("hosts", {}), **more), here, slots_now)


def test_a_number_is_a_static_job_on_this_machine() -> None:
    launch = planned("4")
    command = "/bin/horovodrun -np 4 --network-interface lo python train.py"
    assert launch.words == f"OMP_NUM_THREADS=4 HOROVOD_CYCLE_TIME=5 {command}"
    assert launch.notes[0] == "OMP_NUM_THREADS=4: 16 cores here / 4 workers"
    assert "HOROVOD_CYCLE_TIME=5: rows and gradients do not go through Horovod" in launch.notes[1]


def test_horovods_cycle_is_set_where_no_step_waits_for_it() -> None:
    of_two_hosts = planned("4", hosts={"h1": 2, "h2": 2})
    for launch in (planned("2:3"), planned("4", hosts={"h1": 4}), of_two_hosts, planned("2:8", 1, discovery="x")):
        assert launch.variables["HOROVOD_CYCLE_TIME"] == "5"
    given = Here(16, "lo", frozenset({"localhost"}), "horovodrun", {"HOROVOD_CYCLE_TIME": "1"})
    for other in (planned("1"), planned("4", here=given)):
        assert "HOROVOD_CYCLE_TIME" not in other.variables


def test_one_worker_is_the_script_itself() -> None:
    assert planned("1").argv == ("python", "train.py")


def test_a_range_is_an_elastic_job() -> None:
    assert planned("2:3").argv == (
        "/bin/horovodrun", "-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script", "echo localhost:3",
        "--blacklist-cooldown-range", "30", "300", "--network-interface", "lo", "python", "train.py",
    )  # fmt: skip


def test_the_cooldown_in_the_printed_call_is_explained() -> None:
    (note,) = (note for note in planned("2:3").notes if "cooldown" in note)
    assert "of hosts whose workers all died: tried again after 60 to 90 s, then ever later, up to 300 s" in note
    assert "One dead worker of several on a host is started again after 2 s" in note
    assert not any("cooldown" in note for note in planned("3").notes)


def test_hosts_are_named_and_their_interface_is_looked_for() -> None:
    launch = planned("2:8", hosts={"h1": 4, "h2": 2}, log_dir="logs", job="ctr", key_file="/k")
    assert launch.argv[1:9] == ("-np", "6", "--min-np", "2", "--max-np", "8", "--host-discovery-script",
                                "echo h1:4; echo h2:2")  # fmt: skip
    assert "--network-interface" not in launch.argv
    assert launch.argv[launch.argv.index("--output-filename") + 1] == "logs"
    assert launch.variables == {
        "OMP_NUM_THREADS": "4", "HOROVOD_CYCLE_TIME": "5", "GBA_HVD_JOB_ID": "ctr", "GBA_HVD_JOB_NAME": "ctr",
        "GBA_HVD_KEY_FILE": "/k", "GBA_HVD_MIN_WORKERS": "2",
    }  # fmt: skip
    assert any("--network-interface NAME" in note for note in launch.notes)
    static = planned("6", hosts={"h1": 4, "h2": 2}, interface="eth0")
    assert static.argv[3:7] == ("-H", "h1:4,h2:2", "--network-interface", "eth0")
    assert any("--key-file FILE" in note for note in static.notes)


def test_a_job_with_discovery_starts_with_whom_it_finds() -> None:
    for slots, at_start in ((1, "2"), (5, "5"), (20, "8")):
        assert planned("2:8", slots, discovery="./hosts.sh").argv[2] == at_start


def test_threads_from_the_environment_stay_and_too_many_are_reported() -> None:
    launch = planned("4", here=Here(16, "lo", frozenset({"localhost"}), "horovodrun", {"OMP_NUM_THREADS": "8"}))
    assert "OMP_NUM_THREADS" not in launch.variables
    assert "would use 32 threads on 16 cores" in launch.notes[0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: planned("8:2"), "expected a number of workers like 4, or MIN:MAX"),
        (lambda: planned("0"), "expected a number of workers"),
        (lambda: planned("4", hosts={"h1": 2}), "--hosts has 2 slots, -np asks for at least 4"),
        (lambda: planned("4", discovery="x"), "--discovery is for elastic jobs"),
        (lambda: planned("1", log_dir="x"), "--log-dir is for jobs of several workers"),
        (lambda: planned("2", job="a job"), "expected 1 to 64 letters"),
        (lambda: parse_hosts("h1"), "expected host:slots, such as h1:4, got 'h1'"),
        (lambda: parse_hosts("h1:1,h1:2"), "named twice"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        call()


def test_a_dry_run_prints_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    assert cli.main(["run", "--dry-run", "-np", "2", str(script), "--epochs", "3"]) == 0
    said = capsys.readouterr()
    assert said.out.rstrip().endswith(f"-np 2 --network-interface lo env -- {sys.executable} {script} --epochs 3")
    assert "OMP_NUM_THREADS" in said.err
    assert cli.main(["run", "-np", "2", "nowhere.py"]) == 1
    assert "there is no file nowhere.py here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("run -np 2 train.py --n 8 --h x", "run -np 2 -- train.py --n 8 --h x"),
        ("run --dry --log-dir=x -Hh1:2 -np 2 train.py -H y", "run --dry --log-dir=x -Hh1:2 -np 2 -- train.py -H y"),
        ("run --job j -np 2 -- train.py --help", "run --job j -np 2 -- train.py --help"),
        ("run -np 2", "run -np 2"),
        ("run --help", "run --help"),
        ("report --h", "report --h"),
        ("", ""),
    ],
)
def test_what_follows_the_script_is_apart(line: str, after: str) -> None:
    assert apart(line.split()) == after.split()


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["1", "2"])
def test_arguments_of_the_script_are_its_own(tmp_path: Path, workers: str) -> None:
    """Abbreviations of options of ours and of horovodrun, and whole ones."""
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    own = ["--n", "8192", "--h", "-np", "7", "--verbose"]
    command = [str(Path(sys.executable).with_name("gba-hvd")), "run", "-np", workers, "train.py", *own]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(own)) == int(workers)


@pytest.mark.processes
def test_one_worker_is_as_python_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys; print(os.environ['OMP_NUM_THREADS'], sys.argv[1:]); sys.exit(3)"
    )
    command = [str(Path(sys.executable).with_name("gba-hvd")), "run", "-np", "1", "train.py", "--epochs", "3"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1].endswith("['--epochs', '3']")


@pytest.mark.parametrize(("output", "error"), [("stdout", errno.EPIPE), ("stderr", errno.ENOSPC)])
def test_a_job_starts_although_the_command_cannot_be_printed(
    output: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    started: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execvpe", lambda file, argv, variables: started.append(argv[-1]))
    monkeypatch.setattr(start_watch, "watch", lambda: {})
    monkeypatch.setattr(sys, output, stream := Mock(**{"write.side_effect": OSError(error, os.strerror(error))}))
    with pytest.raises(AssertionError, match="exec does not return"):
        cli.main(["run", "-np", "2", "train.py"])
    assert started == ["train.py"] and stream.write.called


@pytest.mark.parametrize("home", ["/proc/none", "~"])
def test_a_user_without_a_home_has_a_private_one_for_a_job_of_this_host(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    monkeypatch.setattr(os, "execvpe", lambda file, argv, variables: started.append(variables["HOME"]))
    monkeypatch.setattr(start_watch, "watch", lambda: {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", home)

    def start(**more: Any) -> None:
        _start(Launch(("x",), {}, ()), Asked(2, 2, False, ("train.py",), more.pop("hosts", {}), **more))

    made = tmp_path / f"gba-hvd-home-{os.geteuid()}"
    start()
    assert made.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().err.startswith(f"gba-hvd: HOME={made}: ")
    start(hosts={"h9.invalid": 1})
    start(discovery="./hosts.sh")
    assert started == [str(made), home, home], "the home of this host is not sent to others"
    monkeypatch.setenv("HOME", str(tmp_path))
    start()
    assert started[-1] == str(tmp_path)
    assert not capsys.readouterr().err
    made.chmod(0o777)
    monkeypatch.setenv("HOME", home)
    with pytest.raises(BadInput, match=r"is not a folder of this user alone.*set HOME"):
        start()


@pytest.mark.slow
def test_a_discovery_command_is_asked(tmp_path: Path) -> None:
    assert check_discovery("echo h1:2; echo h2:3")[1] == 5
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho h1\n")
    assert "not executable" in check_discovery(str(script))[0].found
    script.chmod(0o755)
    for command, words in ((str(script), "expected host:slots"), ("exit 3", "ended with 3"), ("sleep 60", "answer")):
        finding, slots = check_discovery(command, timeout_s=5.0 if command == "sleep 60" else 60.0)
        assert slots is None and finding.status == "FAIL" and words in finding.found, finding


def test_checks_say_what_to_do(tmp_path: Path) -> None:
    assert check_interface("eth7", lambda: {"lo": "127.0.0.1"}).advice == "name one of lo with --network-interface"
    assert check_interface("lo", lambda: {"lo": "127.0.0.1"}).status == "ok"
    refused = subprocess.CompletedProcess([], 255, "", "Permission denied (publickey).")
    assert "Permission denied" in check_ssh("h9.invalid", lambda command, timeout_s: refused).found
    assert check_ssh("localhost").status == "ok"
    for seconds, status in ((0, "warning"), (5, "ok")):
        settings = subprocess.CompletedProcess(
            [], 0, f"port 22\nserveraliveinterval {seconds}\nserveralivecountmax 3\n", ""
        )
        finding = check_ssh("h9.invalid", lambda command, timeout_s, answer=settings: answer)
        assert finding.status == status and ("ServerAliveInterval 5" in finding.advice) == (status == "warning")
    assert check_threads({}, lambda: 4).status == check_threads({"OMP_NUM_THREADS": "9"}, lambda: 4).status == "warning"
    assert check_threads({"OMP_NUM_THREADS": "2"}, lambda: 4).status == "ok"
    key = tmp_path / "key"
    assert "cannot be read" in check_key_file(str(key)).found
    key.write_text("0" * 64)
    key.chmod(0o644)
    assert check_key_file(str(key)).advice == f"chmod 600 {key}"
    key.chmod(0o600)
    assert check_key_file(str(key)).status == check_key_file(None, {}).status == "ok"
