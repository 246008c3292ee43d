"""What the demonstration sees of its job: output, steps, workers, checkpoints. It waits here, and gives up here."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctr.recovery_log import read_events

CHIEF = "[0]<stdout>:"  # what horovodrun puts before the lines of rank 0


class DemoFailed(Exception):
    """The demonstration did not show what it should."""


@dataclass(frozen=True)
class Worker:
    rank: int
    pid: int
    host: str  # its name for Horovod


class Watch:
    """Waits for conditions while it shows what the chief prints. Gives up when the job ends or the time is over."""

    def __init__(self, job: subprocess.Popen[bytes], out: Path, deadline: float) -> None:
        self.job, self.out, self.deadline = job, out, deadline
        self._shown = 0

    def until(self, condition: Callable[[], bool], awaited: str) -> None:
        while not condition():
            self._show()
            if self.job.poll() is not None and not condition():
                raise DemoFailed(f"the job ended with status {self.job.returncode} while waiting for {awaited}")
            if time.monotonic() > self.deadline:
                raise DemoFailed(f"no time left while waiting for {awaited}")
            time.sleep(0.05)
        self._show()

    def step(self) -> int:
        return int(self._pulse("step.json").get("step", -1))

    def mode(self) -> str:
        return str(self._pulse("step.json").get("mode", ""))

    def n_workers(self) -> int:
        return int(self._pulse("step.json").get("workers", 0))

    def workers(self) -> list[Worker]:
        """By rank, as they last wrote."""
        written = [self._pulse(file.name) for file in (self.out / "pulse").glob("worker-*.json")]
        found = [Worker(int(one["rank"]), int(one["pid"]), str(one["host"])) for one in written if one]
        return sorted(found, key=lambda one: one.rank)

    def recovery(self, kind: str) -> list[dict[str, Any]]:
        """What the events of one kind carried, so far."""
        return [event["data"] for event in read_events(self.out / "recovery.jsonl") if event["event"] == kind]

    def say(self, what: str) -> None:
        self._show()
        print(f"--- step {self.step()}: {what} ---", flush=True)

    def _pulse(self, name: str) -> dict[str, Any]:
        try:
            values: dict[str, Any] = json.loads((self.out / "pulse" / name).read_text())
        except FileNotFoundError:
            return {}
        return values

    def _show(self) -> None:
        with open(self.out / "output.log", "rb") as log:
            log.seek(self._shown)
            new = log.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._shown += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(CHIEF):
                print(line.removeprefix(CHIEF), flush=True)
