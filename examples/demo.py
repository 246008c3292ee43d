"""The demonstration: three workers train, one of them grows slow and recovers, two are killed; the job ends well.

    python examples/demo.py            # what `make demo` runs; about two minutes, results in runs/demo

The job begins in allreduce, changes to gba by itself while one worker is slow, and back when it has recovered. In each
mode a worker is killed, and its replacement joins. Every micro-batch takes 50 ms, as on an accelerator, so that three
workers fit on two cores. The truth behind the synthetic clicks is known, so the AUC can be held against the best that
is possible at all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from gba_hvd.faults import FaultSchedule

EXAMPLES = Path(__file__).resolve().parent
AUC_MARGIN = 0.01
CHIEF = "[0]<stdout>:"  # what horovodrun puts before the lines of rank 0
WORKERS = 3
SERVICE_S = 0.05  # of a micro-batch
SLOW, FACTOR, SLOW_FROM, SLOW_TO = 1, 6, 60, 300  # which worker is how many times slower, between which global steps
STEPS_BETWEEN = 10  # after a change of mode, before a worker is killed


class DemoFailed(Exception):
    """The demonstration did not show what it should."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR")
    parser.add_argument("--undisturbed", action="store_true", help="nobody is slowed down or killed")
    parser.add_argument("--timeout-s", type=float, default=480.0, help="longest time for the whole demonstration")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings, as for train_ctr.py")
    given = parser.parse_intermixed_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        deadline = time.monotonic() + given.timeout_s
        summary = demonstrate(given.out, not given.undisturbed, given.overrides, deadline)
    except DemoFailed as failure:
        print(f"\nThe demo failed: {failure}\n{_tail(given.out / 'output.log')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; everything the demo started has been ended.", file=sys.stderr)
        return 130
    print(outcome(summary, given.out))
    return 0


def demonstrate(out: Path, disturbed: bool, overrides: list[str], deadline: float) -> dict[str, Any]:
    """Run the job, disturb it on the way, and return the checked summary."""
    out.mkdir(parents=True, exist_ok=True)
    for left in [out / "summary.json", out / "output.log", *(out / "pulse").glob("*.json")]:
        left.unlink(missing_ok=True)
    faults = FaultSchedule().serve(SERVICE_S)
    if disturbed:
        faults = faults.slow(SLOW, FACTOR, SLOW_FROM, SLOW_TO)
    faults.dump(out / "faults.json")
    print(
        f"Three workers train DeepFM on synthetic clicks, {SERVICE_S * 1000:.0f} ms for each micro-batch.", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="gba-hvd-demo-") as scratch, launched(out, Path(scratch), overrides) as job:
        watch = Watch(job, out, deadline)
        if disturbed:
            disturb(watch)
        watch.until(lambda: job.poll() is not None, "the end of training")
        if job.returncode != 0:
            raise DemoFailed(f"horovodrun ended with status {job.returncode}")
    return checked(out / "summary.json", disturbed)


def disturb(watch: Watch) -> None:
    """The story, told where it happens. Slowness comes and goes by the fault schedule, the rest is done here."""
    watch.until(lambda: watch.step() >= SLOW_FROM, f"global step {SLOW_FROM}")
    watch.tell(f"worker {SLOW} takes {FACTOR} times as long from now on; in allreduce all wait for it")
    watch.until(lambda: watch.mode() == "gba", "the change to gba")
    watch.tell(f"the job has changed to gba by itself; nobody waits for worker {SLOW} any more")
    replaced(watch, 2)
    watch.until(lambda: watch.step() >= SLOW_TO, f"global step {SLOW_TO}")
    watch.tell(f"worker {SLOW} is as fast as the others again")
    watch.until(lambda: watch.mode() == "allreduce", "the change back to allreduce")
    watch.tell("the job has changed back to allreduce by itself")
    replaced(watch, 1)


def replaced(watch: Watch, rank: int) -> None:
    """Kill a worker and wait for the replacement that Horovod starts."""
    mode, first = watch.mode(), watch.step()
    watch.until(lambda: watch.step() >= first + STEPS_BETWEEN, f"{STEPS_BETWEEN} more steps")
    before = set(watch.pids().values())
    victim = watch.pids()[rank]
    os.kill(victim, signal.SIGKILL)
    watch.tell(f"worker {rank} (process {victim}) killed with SIGKILL, in {mode}; its host may come back in a second")

    def joined() -> set[int]:
        now = set(watch.pids().values())
        return now - before if watch.n_workers() == len(now) == WORKERS and victim not in now else set()

    watch.until(lambda: bool(joined()), "a replacement")
    watch.tell(f"a replacement has joined (process {min(joined())})")


@contextmanager
def launched(out: Path, scratch: Path, overrides: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`horovodrun` on three "hosts" that are all this machine; on the way out every process it started is gone."""
    discovery = scratch / "hosts.sh"
    discovery.write_text("\n".join(["#!/bin/sh", *(f"echo {name}:1" for name in host_names()), ""]))
    discovery.chmod(0o700)
    command = [
        str(Path(sys.executable).with_name("horovodrun")),
        *("-np", str(WORKERS), "--min-np", "1", "--max-np", str(WORKERS), "--host-discovery-script", str(discovery)),
        *("--blacklist-cooldown-range", "1", "2", "--network-interface", "lo"),
        *(sys.executable, "-u", str(EXAMPLES / "train_ctr.py"), "--out", str(out)),
        *("--config", str(EXAMPLES / "configs" / "demo.yaml"), "--faults", str(out / "faults.json"), *overrides),
    ]
    with open(out / "output.log", "wb") as log:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )  # fmt: skip
        try:
            yield job
        finally:
            for impatient in (signal.SIGINT, signal.SIGTERM):
                signal.signal(impatient, signal.SIG_IGN)  # what follows ends by itself, and must not be cut short
            if job.poll() is None:
                print("Ending the job ...", file=sys.stderr, flush=True)
            _end(job)


def host_names() -> list[str]:
    """Three names of this machine. Horovod excludes whole hosts after a failure, so each worker gets one of its own."""
    addresses = [a.address for of in psutil.net_if_addrs().values() for a in of if a.family == socket.AF_INET]
    resolves = []
    try:
        if socket.gethostbyname(socket.gethostname()) in addresses:
            resolves = [socket.gethostname()]
    except OSError:
        pass  # the name is not in /etc/hosts
    names = list(dict.fromkeys(["localhost", "127.0.0.1", *resolves, *addresses]))
    if len(names) < WORKERS:
        raise DemoFailed(f"this machine has only the names {names}: put its host name into /etc/hosts")
    return names[:WORKERS]


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

    def pids(self) -> dict[int, int]:
        """The process of each rank."""
        found = {}
        for file in (self.out / "pulse").glob("worker-*.json"):
            if worker := self._pulse(file.name):
                found[int(worker["rank"])] = int(worker["pid"])
        return found

    def tell(self, what: str) -> None:
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


def checked(path: Path, disturbed: bool) -> dict[str, Any]:
    """Read the summary; raise DemoFailed unless it shows what the demo promises."""
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DemoFailed(f"the job ended without writing {path}") from error
    account = {name: summary[f"samples_{name}"] for name in ("total", "applied", "dropped", "lost")}
    if account["applied"] + account["dropped"] + account["lost"] != account["total"]:
        raise DemoFailed(f"the account of samples does not add up: {account}")
    if disturbed and summary["restarts"] < 2:
        raise DemoFailed(f"two workers were killed, yet {summary['restarts']} restarts were counted")
    changes = [(switch["from"], switch["to"]) for switch in summary["switches"]]
    if disturbed and changes[:2] != [("allreduce", "gba"), ("gba", "allreduce")]:
        raise DemoFailed(f"the job was to change to gba and back by itself, its changes were {changes}")
    if summary["auc"] is None or summary["auc"] < summary["auc_bayes"] - AUC_MARGIN:
        raise DemoFailed(
            f"AUC {summary['auc']} is not within {AUC_MARGIN} of the best possible, {summary['auc_bayes']}"
        )
    return summary


def outcome(summary: dict[str, Any], out: Path) -> str:
    """The result for a person."""
    total, applied, dropped, lost = (summary[f"samples_{name}"] for name in ("total", "applied", "dropped", "lost"))
    course = f"{summary['workers']} workers in {summary['seconds']:.0f} s; restarts: {summary['restarts']}"
    stale = summary["staleness"]
    lines = [
        (
            "Test AUC",
            f"{summary['auc']:.4f}; the best that any model can reach on this log is {summary['auc_bayes']:.4f}",
        ),
        ("Log loss", f"{summary['logloss']:.4f}"),
        ("Samples", f"{total:,} = {applied:,} applied + {dropped:,} dropped + {lost:,} lost"),
        ("Steps", f"{summary['steps']:,} on {course}"),
        *(("Switch", _switch_words(switch)) for switch in summary["switches"]),
    ]
    if stale["max"] is not None:
        lines.append(("Staleness", f"{stale['mean']:.2f} steps on average, at most {stale['max']}, while in gba"))
    lines.append(("Summary", f"{out / 'summary.json'}, everything printed: {out / 'output.log'}"))
    if tracked := _last_line(out / "output.log", CHIEF + "MLflow: "):
        lines.append(("MLflow", tracked))
    return "\n".join(["", *(f"{title:<13}{text}" for title, text in lines)])


def _switch_words(switch: dict[str, Any]) -> str:
    why = switch["reason"].removeprefix(f"to {switch['to']}: ")
    return f"to {switch['to']} at step {switch['step']:,}: {why}"


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its workers; kill what is left of either."""
    if job.poll() is not None:
        return
    family = psutil.Process(job.pid).children(recursive=True)
    job.terminate()
    try:
        job.wait(timeout=15)
    except subprocess.TimeoutExpired:
        family += psutil.Process(job.pid).children(recursive=True)
        job.kill()
        job.wait()
    # The senders of MLflow records outlive the workers by a few seconds, to deliver the last ones.
    _, left = psutil.wait_procs(family, timeout=20)
    for process in left:  # psutil compares start times, so a process number in use again is not touched
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=5)


def _last_line(log: Path, start: str) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(start)]
    return lines[-1].removeprefix(start) if lines else ""


def _tail(log: Path, n_lines: int = 30) -> str:
    if not log.exists():
        return ""
    return "\n".join([f"The last lines of {log}:", *log.read_text(errors="replace").splitlines()[-n_lines:]])


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
