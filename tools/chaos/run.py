"""One schedule carried out and checked; many, one after the other, that resume where they were interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recovery.storage.rename import replace_file

from . import oracle, services
from .job import APART_GRACE_S, GRACE_S, NAMES, ChaosJob
from .oracle import Record
from .outside import Outside
from .plan import CHECKPOINT_S, EPOCHS, SAMPLES, FaultPlan

LIMIT_S = 300.0
END_S = 60.0  # what a busy machine may take to end a job's processes
_LOOK_S = 0.1
_REPOSITORY = Path(__file__).resolve().parents[2]
_MEMORY_MB, _DISK_MB = 64, 16


@dataclass(frozen=True)
class ScheduleOutcome:
    """Outcome of one schedule. skipped: why it cannot run here."""

    record: Record
    wrong: list[str]
    skipped: str = ""

    def as_json(self) -> dict[str, Any]:
        wait = oracle.standstill(self.record)
        return {
            "seed": self.record.plan["seed"], "skipped": self.skipped, "wrong": self.wrong,
            "standstill": {"seconds": wait.seconds, "after_step": wait.after_step, "words": list(wait.words[-20:])},
            "record": asdict(self.record),
        }  # fmt: skip


def run_plan(plan: FaultPlan, folder: Path, keep: bool = False) -> ScheduleOutcome:
    """Carry out one schedule in `folder` (must not exist), check it. The folder stays if asked for, or if it failed."""
    if plan.needs_mounts and (why := services.can_mount()):
        return ScheduleOutcome(Record(asdict(plan)), [], why)
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        tracking = _tracking(plan, folder, stack)
        job = ChaosJob(plan, folder, tracking)
        stack.callback(shutil.rmtree, job.shard_dir, ignore_errors=True)  # however this ends, after file systems in it
        try:
            for kind, path, size in (("full_memory", job.shard_dir, _MEMORY_MB), ("full_disk", job.disk, _DISK_MB)):
                if kind in plan.needs_mounts:
                    stack.enter_context(services.small_file_system(path, size))
            proxies = []
            if any(fault["kind"].startswith("network_") for fault in plan.outside):
                for name in NAMES[: plan.workers]:
                    proxies.append(services.Proxy(job.shard_dir / name, plan.seed))
                    stack.callback(proxies[-1].close)
                    job.proxy[name] = proxies[-1].ports
        except OSError as error:
            job.remove()
            return ScheduleOutcome(Record(asdict(plan)), [], str(error))
        try:
            record = _carry_out(job, Outside(job, proxies))
        finally:
            job.kill()
        if plan.replay and record.exit_code == 0:
            record.replay = replay(job)
        wrong = oracle.violations(record, plan.may_fail)
        (folder / "record.json").write_text(json.dumps(asdict(record)))
        if keep or wrong:
            shutil.copytree(job.shard_dir, folder / "shm", dirs_exist_ok=True, ignore=_only_logs)
    if not keep and not wrong:
        job.remove()
    return ScheduleOutcome(record, wrong)


def _only_logs(folder: str, names: list[str]) -> set[str]:
    return {n for n in names if not (n.endswith(".log") or os.path.isdir(os.path.join(folder, n)))}


def _tracking(plan: FaultPlan, folder: Path, stack: contextlib.ExitStack) -> str:
    """The tracking server's URI, and the proxy or process behind it."""
    if plan.tracking == "good":
        return f"sqlite:///{folder}/mlflow.db"
    if plan.tracking in ("tracking_hangs", "tracking_500"):
        server = services.BadTracking(hangs=plan.tracking == "tracking_hangs")
        stack.callback(server.close)
        return server.uri
    with socket.create_server(("127.0.0.1", 0)) as closed:  # no process listens there when it is closed
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


def _carry_out(job: ChaosJob, outside: Outside) -> Record:
    plan = job.plan
    record = Record(asdict(plan), total=EPOCHS * SAMPLES, checkpoint_s=CHECKPOINT_S if plan.checkpoints else None)
    job.start()
    record.started = job.started_s
    offset, step = 0, 0
    deadline = time.monotonic() + LIMIT_S
    while job.exit_code is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        now = job.last_step()
        step = max(step, now)
        outside.look(step)
        offset = _listen(job, record, offset)
    if job.exit_code is None:
        record.limit = LIMIT_S
        job.kill()
    record.exit_code, record.ended = job.exit_code, time.time()
    outside.end()
    _listen(job, record, offset)
    until = time.monotonic() + (APART_GRACE_S if plan.apart else GRACE_S) + END_S
    while (alive := job.processes()) and time.monotonic() < until:
        time.sleep(0.2)
    record.left = [job.describe(pid) for pid in alive] + job.left_files()
    _collect(job, record)
    record.fired = job.fired_inside() + record.fired + outside.fired
    if plan.tracking in ("tracking_hangs", "tracking_500", "tracking_away"):
        record.fired.append({"kind": plan.tracking, "step": 0, "time": record.started})
    return record


def _listen(job: ChaosJob, record: Record, offset: int) -> int:
    """Add what was logged since; times are of when it was found."""
    with open(job.log_file, "rb") as file:
        file.seek(offset)
        whole, newline, _ = file.read().rpartition(b"\n")
    if not newline:
        return offset
    for line in whole.decode(errors="replace").splitlines():
        level = "error" if "Error" in line else "warning" if "warn" in line.lower() else "info"
        record.words.append((time.time(), level, line[:300]))
    return offset + len(whole) + 1


def _collect(job: ChaosJob, record: Record) -> None:
    """From the workers' notes."""
    newest = 0
    for note in sorted(job.notes(), key=lambda note: float(note["time"])):
        at = float(note["time"])
        if "step" in note and note["step"] > newest:
            newest = note["step"]
            record.steps.append((at, newest))
            record.last_workers = note["workers"]
        elif "event" in note:
            record.words.append((at, note["level"], f"{note['event']}: {note['message']}"[:300]))
            if note["event"] == "checkpoint":
                record.checkpoints.append(at)
            elif note["event"] == "checkpoint_failed":
                record.words.append((at, "warning", "the checkpoint failed"))
        elif "evaluated" in note:
            record.words.append((at, "info", f"epoch {note['evaluated']} evaluated"))
        elif "end" in note:
            record.ends.append(note["end"])
        elif "fired" in note:
            record.fired.append({"kind": note["fired"], "step": note["at_step"], "time": at})
    record.words.sort()
    record.result = job.result()
    record.tracked = _tracked(job.folder / "mlflow.db")
    record.spooled = any('"FINISHED"' in path.read_text() for path in (job.out / "spool").glob("*.jsonl"))


def _tracked(database: Path) -> str | None:
    """The status of the job's one run; several are named, none is None."""
    if not database.exists():
        return None
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        found = [status for (status,) in connection.execute("select status from runs")]
    return found[0] if len(found) == 1 else f"{len(found)} runs" if found else None


def replay(job: ChaosJob) -> dict[str, Any]:
    """What the independent computation of the repository's tests says; a reason where it is not there."""
    if not (_REPOSITORY / "tests" / "replay" / "__main__.py").exists():
        return {"replayed": False, "why": "tests/replay is not installed: run from a checkout"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.replay", str(job.trace), str(job.out / "result.npz"), str(job.plan_file)],
        cwd=_REPOSITORY, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        found = {"replayed": True, "wrong": f"the replay failed: {done.stderr[-500:]}"}
    return found


def run_plans(plans: Mapping[str, FaultPlan], out: Path, keep: bool = False, again: bool = False) -> int:
    """By name, those that have no result yet, or all again. Prints a line for each; returns how many failed."""
    n_failed = 0
    (out / "results").mkdir(parents=True, exist_ok=True)
    for name, plan in plans.items():
        path, folder = out / "results" / f"{name}.json", out / "jobs" / name
        if path.exists() and not again:
            n_failed += bool(json.loads(path.read_text())["wrong"])
            continue
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
        outcome = run_plan(plan, folder.absolute(), keep)
        replace_file(path, json.dumps(outcome.as_json()))
        n_failed += bool(outcome.wrong)
        print(line_of(outcome), flush=True)
    return n_failed


def line_of(outcome: ScheduleOutcome) -> str:
    record, plan = outcome.record, outcome.record.plan
    if outcome.skipped:
        return f"seed {plan['seed']}: skipped: {outcome.skipped}"
    fired = ", ".join(fault["kind"] for fault in record.fired) or "no fault"
    about = f"{plan['workers']} workers, {fired}; {record.ended - record.started:.0f} s"
    if record.replay is not None:
        done = record.replay.get("replayed")
        about += f"; replayed, off by {record.replay.get('worst', 1):.1e}" if done else "; no replay"
    verdict = "well" if not outcome.wrong else "FAILED: " + "; ".join(outcome.wrong)
    return f"seed {plan['seed']}: {verdict} ({about})"
