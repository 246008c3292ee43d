"""The demonstration: two workers train under elastic Horovod, one of them is killed, the job goes on and ends well.

    python examples/demo.py            # what `make demo` runs; about two minutes, results in runs/demo

The truth behind the synthetic clicks is known, so the AUC can be held against the best that is possible at all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
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

EXAMPLES = Path(__file__).resolve().parent
AUC_MARGIN = 0.01
CHIEF = "[0]<stdout>:"  # what horovodrun puts before the lines of rank 0


class DemoFailed(Exception):
    """The demonstration did not show what it should."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR")
    parser.add_argument(
        "--kill-at-step", type=int, default=100, help="global step at which a worker is killed; 0 = none"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0, help="longest time for the whole demonstration")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings, as for train_ctr.py")
    given = parser.parse_intermixed_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        summary = demonstrate(
            given.out, given.kill_at_step, given.overrides, deadline=time.monotonic() + given.timeout_s
        )
    except DemoFailed as failure:
        print(f"\nThe demo failed: {failure}\n{_tail(given.out / 'output.log')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; everything the demo started has been ended.", file=sys.stderr)
        return 130
    print(outcome(summary, given.out))
    return 0


def demonstrate(out: Path, kill_at_step: int, overrides: list[str], deadline: float) -> dict[str, Any]:
    """Run the job, kill a worker on the way, and return the checked summary."""
    out.mkdir(parents=True, exist_ok=True)
    for left in [out / "summary.json", out / "output.log", *(out / "pulse").glob("*.json")]:
        left.unlink(missing_ok=True)
    print("Two workers train DeepFM on synthetic clicks", end="")
    print(f"; at step {kill_at_step} one of them will be killed." if kill_at_step else ".", flush=True)
    with tempfile.TemporaryDirectory(prefix="gba-hvd-demo-") as scratch, launched(out, Path(scratch), overrides) as job:
        watch = Watch(job, out, deadline)
        if kill_at_step:
            watch.until(lambda: watch.step() >= kill_at_step, f"global step {kill_at_step}")
            victim = json.loads((out / "pulse" / "worker-1.json").read_text())["pid"]
            os.kill(victim, signal.SIGKILL)
            print(f"--- step {watch.step()}: worker 1 (process {victim}) killed with SIGKILL ---", flush=True)
        watch.until(lambda: job.poll() is not None, "the end of training")
        if job.returncode != 0:
            raise DemoFailed(f"horovodrun ended with status {job.returncode}")
    return checked(out / "summary.json", killed=kill_at_step > 0)


@contextmanager
def launched(out: Path, scratch: Path, overrides: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`horovodrun` on two "hosts" that are both this machine; on the way out every process it started is gone."""
    discovery = scratch / "hosts.sh"
    # Horovod excludes whole hosts after a failure, so each worker gets a host name of its own.
    discovery.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    discovery.chmod(0o700)
    command = [
        str(Path(sys.executable).with_name("horovodrun")),
        *("-np", "2", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(discovery)),
        *("--blacklist-cooldown-range", "1", "2", "--network-interface", "lo"),
        *(sys.executable, "-u", str(EXAMPLES / "train_ctr.py"), "--out", str(out)),
        *("--config", str(EXAMPLES / "configs" / "synthetic.yaml"), *overrides),
    ]
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    with open(out / "output.log", "wb") as log:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={"OMP_NUM_THREADS": threads, **os.environ},
        )  # fmt: skip
        try:
            yield job
        finally:
            for impatient in (signal.SIGINT, signal.SIGTERM):
                signal.signal(impatient, signal.SIG_IGN)  # what follows ends by itself, and must not be cut short
            if job.poll() is None:
                print("Ending the job ...", file=sys.stderr, flush=True)
            _end(job)


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
        try:
            return int(json.loads((self.out / "pulse" / "step.json").read_text())["step"])
        except FileNotFoundError:
            return -1

    def _show(self) -> None:
        with open(self.out / "output.log", "rb") as log:
            log.seek(self._shown)
            new = log.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._shown += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(CHIEF):
                print(line.removeprefix(CHIEF), flush=True)


def checked(path: Path, killed: bool) -> dict[str, Any]:
    """Read the summary; raise DemoFailed unless it shows what the demo promises."""
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DemoFailed(f"the job ended without writing {path}") from error
    account = {name: summary[f"samples_{name}"] for name in ("total", "applied", "dropped", "lost")}
    if account["applied"] + account["dropped"] + account["lost"] != account["total"]:
        raise DemoFailed(f"the account of samples does not add up: {account}")
    if killed and summary["restarts"] < 1:
        raise DemoFailed("a worker was killed, yet no restart was counted")
    if summary["auc"] is None or summary["auc"] < summary["auc_bayes"] - AUC_MARGIN:
        raise DemoFailed(
            f"AUC {summary['auc']} is not within {AUC_MARGIN} of the best possible, {summary['auc_bayes']}"
        )
    return summary


def outcome(summary: dict[str, Any], out: Path) -> str:
    """The result for a person."""
    total, applied, dropped, lost = (summary[f"samples_{name}"] for name in ("total", "applied", "dropped", "lost"))
    course = f"{summary['workers']} workers in {summary['seconds']:.0f} s; restarts: {summary['restarts']}"
    return f"""
Test AUC     {summary["auc"]:.4f}; the best that any model can reach on this log is {summary["auc_bayes"]:.4f}
Log loss     {summary["logloss"]:.4f}
Samples      {total:,} = {applied:,} applied + {dropped:,} dropped + {lost:,} lost
Steps        {summary["steps"]:,} on {course}
Summary      {out / "summary.json"}, everything printed: {out / "output.log"}
{_last_line(out / "output.log", CHIEF + "MLflow: ")}"""


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
    return "MLflow       " + lines[-1].removeprefix(start) if lines else ""


def _tail(log: Path, n_lines: int = 30) -> str:
    if not log.exists():
        return ""
    return "\n".join([f"The last lines of {log}:", *log.read_text(errors="replace").splitlines()[-n_lines:]])


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
