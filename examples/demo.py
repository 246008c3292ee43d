"""The demonstration: one of three workers grows slow and recovers, two are killed, a host is lost; the job ends well.

    python examples/demo.py            # what `make demo` runs; about three minutes, results in runs/demo

The job begins in allreduce, changes to gba by itself while one worker is slow, and back when it has recovered. In each
mode a worker is killed, and its replacement joins; the second one on a host of its own, which takes its share of the
rows. Then this host is lost with them, and they come back from the newest checkpoint. Saves take the rows used most
(`mfu`), as they do by default where the interval is planned for partial recovery; here it is given, to be short. Every
micro-batch takes 50 ms, as on an accelerator, so that three workers fit on two cores. The truth behind the synthetic
clicks is known, so the AUC can be held against the best that is possible at all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from demo_hosts import WORKERS, Hosts, folder_of_memory, launched
from demo_watch import CHIEF, DemoFailed, Watch, Worker
from gba_hvd.faults import FaultSchedule

AUC_MARGIN = 0.01
MARGINS = (
    "(gba is entered for a large gain and left at a small one: switching.enter_gain, leave_gain in configs/demo.yaml)"
)
SAVES = "(the rows used most: checkpoint.policy=mfu in demo_hosts.py, the default where partial recovery is planned)"
SERVICE_S = 0.05  # of a micro-batch
SLOW, FACTOR, SLOW_FROM, SLOW_TO = 1, 6, 60, 300  # which worker is how many times slower, between which global steps
STEPS_BETWEEN = 10  # after a change of mode, before a worker is killed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR")
    parser.add_argument("--undisturbed", action="store_true", help="no process is slowed down or killed")
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
    for old in (out / "checkpoints", out / "recovery.jsonl"):  # else the job would resume from the last demonstration's
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    faults = FaultSchedule().serve(SERVICE_S)
    if disturbed:
        faults = faults.slow(SLOW, FACTOR, SLOW_FROM, SLOW_TO)
    faults.dump(out / "faults.json")
    print(
        f"Three workers train DeepFM on synthetic clicks, {SERVICE_S * 1000:.0f} ms for each micro-batch.", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="gba-hvd-demo-") as scratch, folder_of_memory() as memory:
        hosts = Hosts(Path(scratch), memory)
        with launched(out, hosts, overrides) as job:
            watch = Watch(job, out, deadline)
            if disturbed:
                disturb(watch, hosts)
            watch.until(lambda: job.poll() is not None, "the end of training")
        if job.returncode != 0:
            raise DemoFailed(f"horovodrun ended with status {job.returncode}")
    return checked(out / "summary.json", disturbed)


def disturb(watch: Watch, hosts: Hosts) -> None:
    """The story, printed as it happens. Slowness comes and goes by the fault schedule, the rest is done here."""
    watch.until(lambda: watch.step() >= SLOW_FROM, f"global step {SLOW_FROM}")
    watch.say(f"worker {SLOW} takes {FACTOR} times as long from now on; in allreduce all wait for it")
    watch.until(lambda: watch.mode() == "gba", "the change to gba")
    watch.say(f"the job has changed to gba by itself; no worker waits for worker {SLOW} any more")
    replaced(watch, kill_a_worker(watch, 2))
    watch.until(lambda: watch.step() >= SLOW_TO, f"global step {SLOW_TO}")
    watch.say(f"worker {SLOW} is as fast as the others again")
    watch.until(lambda: watch.mode() == "allreduce", "the change back to allreduce")
    watch.say("the job has changed back to allreduce by itself")
    victim = kill_a_worker(watch, 1, hosts.separate)
    replaced(watch, victim)
    watch.say("it is on a host of its own, and its share of the rows has moved there")
    lose_a_host(watch, victim.host, hosts)


def kill_a_worker(watch: Watch, rank: int, before: Callable[[str], None] = lambda name: None) -> Worker:
    """Returns the worker that was killed. before: done just before, with the name of its host."""
    mode, first = watch.mode(), watch.step()
    watch.until(lambda: watch.step() >= first + STEPS_BETWEEN, f"{STEPS_BETWEEN} more steps")
    victim = next(worker for worker in watch.workers() if worker.rank == rank)
    before(victim.host)
    os.kill(victim.pid, signal.SIGKILL)
    what = f"worker {rank} (process {victim.pid}) killed with SIGKILL, in {mode}"
    watch.say(f"{what}; its host may come back in a second")
    return victim


def lose_a_host(watch: Watch, name: str, hosts: Hosts) -> None:
    """Kill worker, companion server and keeper of a host at once, and remove its memory; wait for its rows."""
    first, n_restored = watch.step(), len(watch.recovery("rows_restored"))
    watch.until(
        lambda: watch.step() >= first + STEPS_BETWEEN and watch.mode() == "allreduce", f"{STEPS_BETWEEN} more steps"
    )
    watch.until(lambda: bool(watch.recovery("checkpoint")), "a checkpoint")
    (victim,) = (worker for worker in watch.workers() if worker.host == name)
    killed = {victim.pid} | hosts.processes_of_separate()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(hosts.second, ignore_errors=True)
    watch.say(f"that host is lost: its {len(killed)} processes killed with SIGKILL, the rows in its memory gone")
    watch.until(lambda: len(watch.recovery("rows_restored")) > n_restored, "the return of its rows")
    restored = watch.recovery("rows_restored")[-1]
    watch.say(
        f"{restored['rows_restored']:,} rows are back from the checkpoint, {restored['age']:.0f} steps old; the others "
        f"stayed as they were (portion of lost samples {restored['pls']:.5f})"
    )
    replaced(watch, victim)


def replaced(watch: Watch, victim: Worker) -> None:
    """Wait for the replacement that Horovod starts on the host."""

    def joined() -> Worker | None:
        now = watch.workers()
        new = [worker for worker in now if worker.host == victim.host and worker.pid != victim.pid]
        return new[0] if new and watch.n_workers() == len(now) == WORKERS else None

    watch.until(lambda: joined() is not None, "a replacement")
    new = joined()
    watch.say(f"a replacement has joined{'' if new is None else f' (process {new.pid})'}")


def checked(path: Path, disturbed: bool) -> dict[str, Any]:
    """Read the summary; raise DemoFailed unless it shows what the demo promises."""
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DemoFailed(f"the job ended without writing {path}") from error
    if summary.get("status", "FINISHED") != "FINISHED":
        raise DemoFailed(f"the job is {summary['status']}: {summary['error']}; everything it printed is in output.log")
    account = {name: summary[f"samples_{name}"] for name in ("total", "applied", "dropped", "lost")}
    if account["applied"] + account["dropped"] + account["lost"] != account["total"]:
        raise DemoFailed(f"the account of samples does not add up: {account}")
    if disturbed and summary["restarts"] < 3:
        raise DemoFailed(f"two workers were killed and a host lost, yet {summary['restarts']} restarts were counted")
    changes = [(switch["from"], switch["to"]) for switch in summary["switches"]]
    if disturbed and changes[:2] != [("allreduce", "gba"), ("gba", "allreduce")]:
        raise DemoFailed(f"the job was to change to gba and back by itself, its changes were {changes}")
    if not summary["checkpoints"]["count"]:
        raise DemoFailed(f"the job was to be saved, its checkpoints were {summary['checkpoints']}")
    back = [one for one in summary["recoveries"] if one["rows_restored"] and not one["rows_lost"]]
    if disturbed and not back:
        raise DemoFailed(f"the rows of the lost host were to come back, its recoveries were {summary['recoveries']}")
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
        *([("", MARGINS)] if summary["switches"] else []),
    ]
    saved = summary["checkpoints"]
    lines.append(("Checkpoints", f"{saved['count']}, the newest of step {saved['last']['saved_step']:,}"))
    lines.append(("", SAVES))
    for one in summary["recoveries"]:
        rows = f"{one['rows_restored']:,} rows restored, {one['rows_lost']:,} lost"
        pls = "" if one["pls"] is None else f"; portion of lost samples {one['pls']:.5f}"
        lines.append(("Lost host", f"at step {one['step']:,}: {rows}{pls}"))
    if stale["max"] is not None:
        lines.append(("Staleness", f"{stale['mean']:.2f} steps on average, at most {stale['max']}, while in gba"))
    lines.append(("Summary", f"{out / 'summary.json'}, everything printed: {out / 'output.log'}"))
    if tracked := _last_line(out / "output.log", CHIEF + "MLflow: "):
        lines.append(("MLflow", tracked))
    return "\n".join(["", *(f"{title:<13}{text}" for title, text in lines)])


def _switch_words(switch: dict[str, Any]) -> str:
    why = switch["reason"].removeprefix(f"to {switch['to']}: ")
    return f"to {switch['to']} at step {switch['step']:,}: {why}"


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
