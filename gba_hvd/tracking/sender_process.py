"""The sender process: follows the spool of the worker that started it until that worker says `end` or is gone.

Decides how long delivering is tried; what is delivered and how is in `sender.py`. Started by `MLflowCallback`;
`send_left_behind` does the same later for a spool whose records could not be sent in time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gba_hvd.tracking.host_metrics import HostReporter
from gba_hvd.tracking.sender import Sender, say
from gba_hvd.tracking.sender_handle import Owner
from gba_hvd.tracking.spool import SpoolStatus, read_lines, remove

ORPHAN_TIMEOUT_S = 30.0
TERMINATED_TIMEOUT_S = 3.0


@contextlib.contextmanager
def locked(spool: Path) -> Iterator[bool]:
    """Whether this process is the only sender of the spool, for as long as the block lasts."""
    with spool.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def prepare_process() -> None:
    """This process waits and retries by its own rules, so MLflow's must be short; and it says what matters itself."""
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "10"
    os.environ["MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT"] = "30"
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # a traceback for what is raised as well


def follow(spool: Path, owner: Owner, tick_s: float = 0.2) -> bool:
    """Drain the spool of a living worker until it ends or is gone; True when everything was delivered.

    The one that lives longer removes the spool then: the worker, which waits for that, or this process.
    """
    sender = Sender(spool)
    deadline_s = float("inf")

    def hurry(signum: int, frame: object) -> None:
        nonlocal deadline_s
        deadline_s = min(deadline_s, time.monotonic() + TERMINATED_TIMEOUT_S)

    signal.signal(signal.SIGTERM, hurry)
    with HostReporter(spool) as reporter:
        while True:
            # Asked before the spool is read, so that nothing written before the worker's death is overlooked.
            gone = owner.is_gone()
            now = time.monotonic()
            if gone and not sender.orphaned:
                sender.orphaned = True
                deadline_s = min(deadline_s, now + ORPHAN_TIMEOUT_S)
            sender.look()
            job = sender.newest_job
            reporter.set_progress(job if not gone else None, sender.last_step)
            sender.turn(now)
            if sender.status.done:
                while spool.exists() and not owner.is_gone():
                    time.sleep(tick_s)
                remove(spool)
                return True
            if sender.status.stopped or now > deadline_s:
                return False
            time.sleep(tick_s)


def send_left_behind(spool: Path, timeout_s: float, before_each: Callable[[], object] = lambda: None) -> SpoolStatus:
    """Deliver a spool whose worker is gone; removes it when everything was taken. Any other file is left alone.

    before_each: called before each try and each batch; may raise, and the rest stays in the spool
    """
    if not _is_spool(spool):
        return SpoolStatus(problem="its first line is no job record, so it is no spool of gba_hvd", stopped=True)
    sender = Sender(spool, before_each)
    sender.orphaned = sender.late = True
    deadline_s = time.monotonic() + timeout_s
    while True:
        before_each()
        sender.turn(time.monotonic())
        if sender.status.done:
            remove(spool)
            return sender.status
        if sender.status.stopped or time.monotonic() > deadline_s:
            return sender.status
        time.sleep(0.2)


def _is_spool(path: Path) -> bool:
    lines = read_lines(path, 0)
    return bool(lines) and lines[0].record.get("kind") == "job"


def main() -> int:
    parser = argparse.ArgumentParser(description="Follow a spool and send it to MLflow (started by MLflowCallback).")
    parser.add_argument("spool", type=Path)
    parser.add_argument("--parent", nargs=2, type=int, metavar=("PID", "BEGAN"), required=True)
    args = parser.parse_args()
    prepare_process()
    os.nice(5)  # training comes first
    with locked(args.spool) as mine:
        if not mine:
            say("another sender is at work on this spool")
            return 1
        return 0 if follow(args.spool, Owner(*args.parent)) else 1
