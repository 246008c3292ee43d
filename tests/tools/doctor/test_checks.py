"""`gba-hvd doctor`: each check on machines in good and bad states, and what the person gets to read."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.commands import doctor
from gba_hvd_tools.doctor.allreduce_probe import run_group
from gba_hvd_tools.doctor.checks import (
    GIB,
    MIB,
    Finding,
    check_allreduce,
    check_file_systems,
    check_gpu,
    check_horovod,
    check_host_name,
    check_kernels,
    check_mlflow,
    check_python,
    check_shard_memory,
    check_torch,
)

from gba_hvd.shm.memory_limit import MemoryLimit


def modules(**known: Any) -> Callable[[str], Any]:
    """An importer that knows these modules only (`a__b` is module a.b); an exception as a module is raised."""

    def load(name: str) -> ModuleType:
        module = known.get(name.replace(".", "__"))
        if module is None:
            raise ImportError(f"No module named {name!r}")
        if isinstance(module, Exception):
            raise module
        return module  # type: ignore[no-any-return]

    return load


def fake_horovod(gloo: bool = True) -> SimpleNamespace:
    return SimpleNamespace(gloo_built=lambda: gloo, mpi_built=lambda: False, nccl_built=lambda: False)


@pytest.mark.parametrize(
    "finding",
    [
        check_python((3, 10, 1)),
        check_torch(modules()),
        check_kernels(modules()),
        check_horovod(modules()),
        check_horovod(modules(horovod=SimpleNamespace(__version__="0.28.1"), horovod__torch=OSError("bad symbol"))),
        check_horovod(modules(horovod=SimpleNamespace(__version__="0.28.1"), horovod__torch=fake_horovod(gloo=False))),
        check_shard_memory(Path("/nowhere")),
        check_mlflow(modules()),
        check_file_systems(modules()),
    ],
    ids=lambda finding: f"{finding.name}: {finding.found}"[:40],
)
def test_what_is_missing_fails_and_says_what_to_do(finding: Finding) -> None:
    assert finding.status == "FAIL"
    assert finding.advice


def test_a_horovod_with_gloo_is_well() -> None:
    finding = check_horovod(modules(horovod=SimpleNamespace(__version__="0.28.1"), horovod__torch=fake_horovod()))
    assert finding == Finding("horovod", "ok", "0.28.1, built for torch with gloo")


def test_another_torch_is_a_warning() -> None:
    torch = SimpleNamespace(__version__="2.12.0", get_num_threads=lambda: 1)
    assert check_torch(modules(torch=torch)).status == "warning"


def test_small_shared_memory_names_every_way_out(tmp_path: Path) -> None:
    finding = check_shard_memory(tmp_path, free_bytes=lambda folder: 64 * MIB)
    assert finding.status == "warning"
    assert "64 MiB" in finding.found
    for way_out in ("--shm-size", "remount", "GBA_HVD_SHARD_DIR"):
        assert way_out in finding.advice


@pytest.mark.parametrize(("used", "status"), [(3, "ok"), (7.5, "warning")])
def test_a_memory_limit_below_what_the_folder_has_is_named(tmp_path: Path, used: float, status: str) -> None:
    limit = MemoryLimit(8 * GIB, int(used * GIB), Path("/sys/fs/cgroup/memory.max"))
    finding = check_shard_memory(tmp_path, free_bytes=lambda folder: 64 * GIB, limit_of=lambda folder: limit)
    assert finding.status == status
    assert f"memory limit is 8.0 GiB, {used:.1f} GiB of it in use (/sys/fs/cgroup/memory.max)" in finding.found
    assert ("--memory" in finding.advice) == (status == "warning")


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    finding = check_shard_memory(tmp_path, writable=lambda folder: False)
    assert finding.status == "FAIL"
    assert "not writable" in finding.found


def test_the_folder_of_the_settings_is_the_one_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GBA_HVD_SHARD_DIR", str(tmp_path))
    assert str(tmp_path) in check_shard_memory().found


def unresolvable(name: str) -> str:
    raise socket.gaierror("Name or service not known")


@pytest.mark.parametrize(
    ("resolve", "environ", "status", "advised"),
    [
        (lambda name: "10.0.0.5", {}, "ok", ""),
        (lambda name: "127.0.1.1", {}, "warning", "--network-interface eth0"),
        (unresolvable, {}, "FAIL", "/etc/hosts"),
        (lambda name: "10.0.0.5", {"HOROVOD_GLOO_IFACE": "ib0"}, "FAIL", "HOROVOD_GLOO_IFACE=eth0"),
    ],
)
def test_the_host_name(resolve: Callable[[str], str], environ: dict[str, str], status: str, advised: str) -> None:
    finding = check_host_name("h1", resolve, lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.5"}, environ)
    assert finding.status == status
    assert advised in finding.advice


def launcher_there(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "horovodrun").touch()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


def test_a_failed_allreduce_shows_the_root_cause_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher_there(monkeypatch, tmp_path)
    output = "[0]<stderr>:RuntimeError: connect [127.0.0.1]: Connection refused\nProcess 1 exit with status code 1.\n"
    finding = check_allreduce(lambda command, timeout_s: (1, output))
    assert finding.status == "FAIL"
    assert finding.found == "exit status 1: [0]<stderr>:RuntimeError: connect [127.0.0.1]: Connection refused"
    assert "Process 1 exit" in finding.advice


def test_an_allreduce_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher_there(monkeypatch, tmp_path)
    finding = check_allreduce(lambda command, timeout_s: (None, ""), timeout_s=90)
    assert (finding.status, finding.found) == ("FAIL", "no result after 90 s: no output")


def test_without_a_launcher_the_allreduce_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "make setup" in check_allreduce().advice


@pytest.mark.slow
def test_a_command_that_takes_too_long_has_no_status() -> None:
    status, _ = run_group(["/bin/sh", "-c", "sleep 600 & wait"], timeout_s=0.2)
    assert status is None


def test_a_command_that_ends_gives_its_status_and_output() -> None:
    assert run_group(["/bin/sh", "-c", "echo one; echo two >&2; exit 3"], timeout_s=60) == (3, "one\ntwo\n")


def test_an_unreachable_tracking_server_is_a_warning() -> None:
    mlflow = modules(mlflow=SimpleNamespace(__version__="3.17.2"))
    environ = {"MLFLOW_TRACKING_URI": "http://tracking:5000"}
    assert check_mlflow(mlflow, environ, reachable=lambda uri: False).status == "warning"
    assert check_mlflow(mlflow, environ, reachable=lambda uri: True).status == "ok"
    assert "SQLite" in check_mlflow(mlflow, {}).found


@pytest.mark.parametrize(("lacking", "status"), [({"gs"}, "ok"), ({"s3", "gs"}, "warning"), ({"memory", "s3"}, "FAIL")])
def test_missing_file_systems_come_with_their_pip_command(lacking: set[str], status: str) -> None:
    def get_class(protocol: str) -> None:
        if protocol in lacking:
            raise ImportError(protocol)

    finding = check_file_systems(
        modules(fsspec=SimpleNamespace(__version__="2026.9.0", get_filesystem_class=get_class))
    )
    assert finding.status == status
    assert finding.found.count("pip install") == len(lacking)


def test_a_machine_without_gpu_is_well() -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    assert check_gpu(modules(torch=torch)).status == "ok"


def test_a_check_that_breaks_is_a_finding_and_the_others_still_run() -> None:
    def check_the_moon() -> Finding:
        raise RuntimeError("no telescope")

    findings = list(doctor.diagnose([check_the_moon, lambda: Finding("sun", "ok", "shines")]))
    assert [(each.name, each.status) for each in findings] == [("the moon", "FAIL"), ("sun", "ok")]
    assert "no telescope" in findings[0].found


@pytest.mark.slow
@pytest.mark.parametrize(("statuses", "exit_status"), [(["ok", "ok"], 0), (["ok", "warning"], 0), (["ok", "FAIL"], 1)])
def test_only_a_failure_makes_the_exit_status_one(
    statuses: list[Any], exit_status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = tuple(lambda i=i, s=s: Finding(f"c{i}", s, "found this", "do that") for i, s in enumerate(statuses))
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert cli.main(["doctor"]) == exit_status
    assert capsys.readouterr().out.count("found this") == 2
    assert cli.main(["doctor", "--json"]) == exit_status
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (exit_status == 0)
    assert [each["status"] for each in report["checks"]] == statuses


def test_the_summary_names_where_to_start() -> None:
    findings = [Finding("torch", "ok", ""), Finding("horovod", "FAIL", ""), Finding("allreduce", "FAIL", "")]
    assert doctor.summary(findings) == "not ready to train; start with: horovod"


@pytest.mark.processes
def test_this_machine_can_reduce_over_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "300")  # one of the two may come late
    assert check_allreduce(timeout_s=300).status == "ok"
