"""What `bench ps` runs, keeps and prints. No launch, but for the last test."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gba_hvd_tools.bench.harness import measure, noise
from gba_hvd_tools.bench.ps import command as ps

OURS = ["ours 1, 1 in flight, run 1", "ours 2, 1 in flight, run 1"]


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ps.add_parser(parser.add_subparsers())
    return parser.parse_args(["ps", *words])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In place of launches: the names of what would be launched."""
    found: list[str] = []

    def result_of(variant: measure.Variant, more: list[Any], *_: object) -> list[measure.Row]:
        found.append(variant.name)
        client, in_flight = variant.command.index(f"{ps.__package__}.client"), int(variant.command[-1])
        about = {"contestant": variant.command[client + 1], "servers": int(variant.command[-3]), "in_flight": in_flight}
        times = {"rows_per_s": in_flight * 2e6, "ms": 4.0 / in_flight, "cpu_ms_client": 1.5, "cpu_ms_servers": 2.5}
        times |= {"kernel_ms_client": 0.25, "kernel_ms_servers": 0.75}
        return [{**about, "rows": more[1], "what": what, **times} for what in ps.WHATS]

    monkeypatch.setattr(measure, "result_of", result_of)
    return found


def test_the_result_and_the_tables_say_that_contestants_ran_beside_noise(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: noise.Noise) -> noise.Noise:
        launched.append(f"noise {self._share}")
        return self

    monkeypatch.setattr(noise.Noise, "__enter__", run)
    words = ["--rows", "8", "--runs", "1", "--contestants", "ours"]
    for name, more in (("quiet", []), ("noisy", ["--noise", "0.3"])):
        args = options("--out", str(tmp_path / name), *words, *more)
        assert args.run(args) == 0
        printed = capsys.readouterr().out
        assert ("pull, medians, beside noise of 0.3 of each core" in printed) == (name == "noisy")
    assert launched == ["noise 0.0", *OURS, "noise 0.3", *OURS]
    quiet, noisy = (json.loads((tmp_path / name).read_text())["settings"] for name in ("quiet", "noisy"))
    assert noisy == {**quiet, "noise": 0.3} and quiet["noise"] is None


def test_several_pushes_in_flight_are_measured_beside_one_after_the_other(
    tmp_path: Path, launched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rows", "8", "--runs", "1", "--contestants", "ours", "rpc", "--in-flight", "1", "4"]
    args = options("--out", str(tmp_path / "out.json"), *words)
    assert args.run(args) == 0
    peers = ["rpc 1, 1 in flight, run 1", "rpc 2, 1 in flight, run 1"]
    assert launched == [*OURS, *peers, *(name.replace(", 1 in", ", 4 in") for name in (*OURS, *peers))]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["rows_per_s"]["ours 2 8 pull_push"] == 2e6
    assert found["rows_per_s"]["ours 2 8 pull_push 4 in flight"] == 8e6
    assert found["push_vs_rpc"] == 1.0, "of one in flight"
    printed = capsys.readouterr().out
    assert found["push_vs_rpc 4 in flight"] == 1.0 and "push_vs_rpc 4 in flight: 1.0" in printed
    assert "pull and push in turn, medians" in printed
    args = options("--out", str(tmp_path / "out.json"), "--in-flight", "0")
    assert args.run(args) == 1 and "--in-flight must be at least 1, got 0" in capsys.readouterr().err


def test_processor_time_of_client_and_servers_stands_beside_the_rates(
    tmp_path: Path, launched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    args = options("--out", str(tmp_path / "out.json"), "--rows", "8", "--runs", "1", "--contestants", "ours")
    assert args.run(args) == 0
    pulls = capsys.readouterr().out.split("pull, medians")[1].splitlines()
    titles, figures = (next(line for line in pulls if word in line) for word in ("CPU ms client", "2.00"))
    assert titles.index("CPU ms client") < titles.index("in the kernel") < titles.index("CPU ms servers")
    assert figures.split()[-5:] == ["4.00", "1.50", "0.25", "2.50", "0.75"]


@pytest.mark.slow
def test_processor_time_is_of_one_request_and_of_each_process() -> None:
    from gba_hvd_tools.bench.ps.client import N_REQUESTS, timed

    calls = []

    def request(number: int) -> None:
        calls.append(number)
        until_s = time.process_time() + 0.002
        while time.process_time() < until_s:
            os.stat(".")

    found = timed(request, lambda: None, 8, 0.1, [os.getpid(), os.getpid()])
    assert 2.0 <= found["cpu_ms_client"] < min(4.0, 1.1 * found["ms"])
    assert 0 < found["kernel_ms_client"] < found["cpu_ms_client"]
    assert found["rows_per_s"] == pytest.approx(8 / found["ms"] * 1000)
    tick_ms = 1000 / os.sysconf("SC_CLK_TCK") / (len(calls) - N_REQUESTS)  # of user and kernel time of both
    assert found["cpu_ms_servers"] == pytest.approx(2 * found["cpu_ms_client"], abs=4 * tick_ms)


def test_a_second_call_runs_only_what_has_no_row_and_refuses_other_settings(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*words: str) -> int:
        args = options("--out", str(tmp_path / "out.json"), "--rows", "8", "--contestants", "ours", "rpc", *words)
        return int(args.run(args))

    works = measure.result_of

    def fails(variant: measure.Variant, *more: Any) -> Any:
        if variant.name.startswith("rpc 2"):
            raise measure.RunFailed("no luck")
        return works(variant, *more)

    with monkeypatch.context() as broken:
        broken.setattr(measure, "result_of", fails)
        assert measured("--runs", "1") == 1
    first = json.loads((tmp_path / "out.json").read_text())
    assert first["failures"] == {"rpc 2, 1 in flight, run 1": "no luck"} and len(first["rows"]) == 3 * len(ps.WHATS)
    launched.clear()
    assert measured("--runs", "1", "--in-flight", "1", "2") == 0
    assert launched == [
        "rpc 2, 1 in flight, run 1",
        *(f"{c} {n}, 2 in flight, run 1" for c in ("ours", "rpc") for n in ps.SERVERS),
    ]
    whole = json.loads((tmp_path / "out.json").read_text())
    assert whole["rows"][: len(first["rows"])] == first["rows"] and whole["pull_vs_rpc_by_servers"] == {"1": 1, "2": 1}
    assert measured("--runs", "1", "--in-flight", "2", "--contestants", "ours_plain", "--wire", "plain") == 0
    grown = json.loads((tmp_path / "out.json").read_text())
    assert grown["commands"].keys() == {"ours", "rpc", "ours_plain"}
    assert {name: value for name, value in whole.items() if "_vs_" in name}.items() <= grown.items()
    whole = grown
    capsys.readouterr()
    assert measured("--noise", "0.3") == 1
    assert "other settings (noise: None in the file, 0.3 now)" in capsys.readouterr().err
    assert measured("--seconds", "2") == 1
    assert json.loads((tmp_path / "out.json").read_text()) == whole


class Server:
    """A socket to an echo server that answers in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answered = 0

    def send_multipart(self, frames: list[Any], copy: bool) -> None:
        self.asked.append("push" if len(frames) == 3 else "pull")

    def recv_multipart(self, copy: bool) -> list[Any]:
        self.answered += 1
        return [SimpleNamespace(buffer=bytes(4 * ps.DIM if self.asked[self.answered - 1] == "pull" else 8))]


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_so_many_pushes_of_a_peer_are_on_the_way_and_a_pull_gets_its_own_answer(in_flight: int) -> None:
    from gba_hvd_tools.bench.ps.client import Echo

    servers, ids, grads = [Server(), Server()], np.arange(2), np.ones((2, ps.DIM), np.float32)
    echo, most = Echo(servers, (), in_flight), []
    for _ in range(6):
        echo.push(ids, grads)
        most.append(len(servers[1].asked) - servers[1].answered)
    assert max(most) == (0 if in_flight == 1 else in_flight)
    assert [len(rows) for rows in echo.pull(ids)] == [ps.DIM] * 2
    echo.push(ids, grads)
    echo.flush()
    assert all(server.answered == len(server.asked) == 8 for server in servers)


@pytest.mark.slow
@pytest.mark.processes
def test_four_pushes_of_a_worker_are_in_flight_in_one_launch(tmp_path: Path) -> None:
    args = options("--out", str(tmp_path / "out.json"), "--rows", "64", "--seconds", "0.05")
    rows = ps.launch(ps.Run("ours_plain", 2, 4, 0), tmp_path, args)
    assert [(row["what"], row["in_flight"]) for row in rows] == [(what, 4) for what in (*ps.WHATS, "lease")]
    assert all(row["rows_per_s"] > 0 for row in rows[:3]) and rows[3]["n"] > 0
