"""How a worker has its spool delivered to MLflow: by a sender process that is started, looked after, and awaited.

Every problem is reported once, with what to do. Nothing here talks to MLflow or imports it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gba_hvd.tracking.reach import Reach
from gba_hvd.tracking.records import PAGE_QUERY
from gba_hvd.tracking.sender_handle import SenderProcess
from gba_hvd.tracking.spool import SpoolStatus, SpoolWriter, log_path, model_path, read_status, remove, unsent
from recovery.redaction import redacted

_LOOK_EVERY_S = 10.0
_RESTARTS = 3
_QUIET_S = 2.0  # so long the end of a job that finished waits for the sender without a word
_MODEL_BYTES_S = 8 << 20  # the least that a model is expected to be logged with, while the end waits
_MODEL_S = 120.0  # beyond that, for what MLflow imports and checks; in seconds, or in a minute where others compute


class SpoolDelivery:
    """Of one spool. timeout_s: how long the end of training may wait for the last records"""

    def __init__(self, writer: SpoolWriter, timeout_s: float) -> None:
        self._writer, self._path, self._timeout_s = writer, writer.path, timeout_s
        self._model_s = 0.0  # how long the end waits for a model beyond that
        self._waited_s = timeout_s  # at most, at the end
        self._sender: SenderProcess | None = None
        self._sender_ended = False  # at the end, before all was sent
        self._restarts = 0
        self._next_look_s = 0.0
        self._reported_problem: str | None = None
        self._reported_text = ""
        self._reach = Reach()

    @property
    def is_due(self) -> bool:
        """Whether it is time for another look."""
        return time.monotonic() >= self._next_look_s

    def look(self, is_chief: bool) -> None:
        """Start the sender, or start it again; report each problem to the user once."""
        self._next_look_s = time.monotonic() + _LOOK_EVERY_S
        self.put_spool_back()
        status = read_status(self._path)
        if self._sender is None or (not self._sender.alive() and not status.stopped and self._restarts < _RESTARTS):
            self._restarts += self._sender is not None
            self._start_sender()
        problem = self._writer.obstacle or self._writer.problem
        where = f"wait in {self._path}"
        if problem:
            where = "are lost" if self._writer.lost else "wait in memory"
        if is_chief:
            has_run, now_s = status.run_id is not None, time.time()
            unreached = self._reach.look(status.problem, status.offset, self._writer.n_bytes, has_run, now_s)
            problem = problem or unreached
        text = f"records {where}: {problem}" if problem else "records are being sent again"
        if problem != self._reported_problem or (problem and text != self._reported_text):
            self._reported_problem, self._reported_text = problem, text
            say(text, at=time.strftime("%H:%M:%S "))

    @property
    def problem(self) -> str:
        """What keeps records from MLflow now, and what that costs; empty: nothing does."""
        if self._reported_problem is None:
            return ""
        since_s = self._reach.since_unix_s
        since = "" if since_s is None else f" since {_time_of_day(since_s)}"
        lost = self._writer.lost
        cost = f"{lost:,} records are lost" if lost else "records wait, nothing is lost so far"
        return f"MLflow{since}: {cost}: {self._reported_problem}"

    @property
    def run_id(self) -> str | None:
        return read_status(self._path).run_id

    def put_spool_back(self) -> None:
        """Where it was removed: write it again; another sender sends it from its beginning."""
        if not self._writer.is_removed:
            return
        if self._sender is not None:
            self._sender.end(within_s=1.0)  # before the copy, which has what it appended
        self._sender, self._restarts = None, 0
        if not self._writer.put_back():
            return
        say(f"{self._path} was removed: it is written again, with all of its records")

    def expect_model(self, n_bytes: int) -> None:
        """The sender logs a model, too, which takes longer. Without a time-out the end waits no longer for it."""
        self._model_s = _MODEL_S if self._timeout_s > 0 else 0.0
        self._timeout_s += n_bytes / _MODEL_BYTES_S

    def wait(self, has_finished: bool, is_chief: bool) -> None:
        """Until all is sent, at most the time-out. What ends this worker meanwhile does not end the sender.

        has_finished: the training, so no launcher is about to kill this process
        """
        path, quiet_s = self._path, min(_QUIET_S, self._timeout_s) if has_finished else 0.0
        if not quiet_s:
            self._report_wait(self._timeout_s, may_be_killed=True)
        if self._sender is None or not self._sender.alive():
            if read_status(path).stopped or read_status(path).done:
                return
            self._start_sender()
        if self._sender is None:
            return

        def is_over() -> bool:
            now = read_status(path)
            return now.done or now.stopped

        is_sent = quiet_s > 0 and self._await(is_over, quiet_s)
        rest_s, self._waited_s = self._timeout_s - quiet_s, self._timeout_s
        if quiet_s and rest_s > 0 and not is_sent and is_chief:
            self._report_wait(rest_s, may_be_killed=False)
        is_sent = is_sent or self._await(is_over, rest_s)
        if not is_sent and self._model_s and not _is_in_trouble(path):
            say(f"MLflow is logging the model, for {self._model_s:.0f} s more at most; nothing need be done")
            self._waited_s += self._model_s
            self._await(lambda: is_over() or _is_in_trouble(path), self._model_s)
            is_sent = is_over()
        self._sender_ended = not is_over() and not self._sender.alive()
        if not is_sent and not read_status(path).recorded:
            self._sender.end(within_s=5.0)

    def report(self, status: str, run_id: str | None, is_chief: bool) -> None:
        """What was delivered, and what was not. status: of the run; run_id: as far as it is known"""
        path, delivered = self._path, read_status(self._path)
        if delivered.dropped:
            with contextlib.suppress(FileNotFoundError):
                print(log_path(path).read_text()[-4000:], file=sys.stderr)
            say(f"{delivered.dropped} values were not recorded, see above")
        if self._writer.lost:
            say(f"{self._writer.lost:,} records are lost: {self._writer.problem}")
        if delivered.report_problem and is_chief:
            made = f"gba-hvd report {delivered.run_id or run_id} writes the page to a file"
            say(f"the run lacks its report and pictures ({delivered.report_problem}): {made}")
        if delivered.note:
            say(delivered.note)
        if delivered.done:
            if delivered.model_problem:
                say(delivered.model_problem)
            remove(path)
        if delivered.done or delivered.recorded:
            if is_chief:
                self._report_delivered(delivered, status, delivered.run_id or run_id)
            return
        if not os.path.exists(path):
            say(f"what MLflow did not get is lost: {path} is not there{_because(self._writer.obstacle)}")
            return
        n_unsent = unsent(path)
        silent = f"no answer within {self._waited_s:.0f} s"
        if self._sender_ended:
            silent = "the process that sends records has ended (killed, or out of memory?)"
            silent += f", as have {self._restarts} that were started in its place" * bool(self._restarts)
        why = delivered.problem or f"{silent}; see {log_path(path)}"
        say(f"NOT everything reached MLflow ({n_unsent:,} records did not): {why}")
        say(f"they are kept in {path}; {how_to_send(path)}")

    def _report_delivered(self, delivered: SpoolStatus, status: str, run_id: str | None) -> None:
        of_step = "" if delivered.model_step is None else f", of step {delivered.model_step:,}"
        what = f"The model is {delivered.served_as}{of_step}. " if delivered.served_as else ""
        what += f"Alias {delivered.alias_move}. " if delivered.alias_move else ""
        what += "" if delivered.done else "Everything is recorded; its plots are still being drawn. "
        what += self._outages
        if not delivered.done and model_path(self._path).exists():
            what = f"Everything else is recorded. {self._outages}"
            say(delivered.model_problem or self._model_is_being_logged())
        print(f"MLflow: run {run_id} is {status}. {what}{how_to_open(delivered)}", flush=True)

    def _start_sender(self) -> None:
        if not os.path.exists(self._path):  # nothing can be written; what is in the way is reported
            return
        try:
            self._sender = SenderProcess(self._path)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"the process that sends records cannot be started: {error}; {how_to_send(self._path)}")

    def _await(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """As `SenderProcess.wait`. One that ended before was killed, perhaps: another one takes its place."""
        assert self._sender is not None
        deadline_s = time.monotonic() + timeout_s
        is_over = self._sender.wait(until, timeout_s)
        while is_over and not until() and not self._sender.alive() and self._restarts < _RESTARTS:
            self._restarts += 1
            self._start_sender()
            is_over = self._sender.wait(until, max(0.0, deadline_s - time.monotonic()))
        return is_over

    def _report_wait(self, at_most_s: float, may_be_killed: bool) -> None:
        path = self._path
        rest = (
            f". If this process is killed meanwhile, they wait in {path}; {how_to_send(path)}" if may_be_killed else ""
        )
        say(f"sending the last records takes up to {at_most_s:.0f} s; nothing need be done{rest}")

    def _model_is_being_logged(self) -> str:
        path, by = self._path, "" if self._sender is None else f" by process {self._sender.pid}"
        return (
            f"the model is still being logged{by}, which continues when this one ends: nothing need be done. Where "
            f"that process ends with the job, as in a container, {model_path(path)} stays: {how_to_send(path)}"
        )

    @property
    def _outages(self) -> str:
        """A sentence, where MLflow did not take records for a while."""
        spans = [f"{_time_of_day(one.since_unix_s)} to {_time_of_day(one.until_unix_s)}" for one in self._reach.over]
        if self._reach.since_unix_s is not None:  # and they came through after the last step
            spans.append(f"{_time_of_day(self._reach.since_unix_s)} to the end")
        return f"It was out of reach from {' and from '.join(spans)}; what waited was sent. " if spans else ""


def how_to_open(status: SpoolStatus) -> str:
    """One sentence with the exact command or address."""
    uri = redacted(status.tracking_uri or "")
    page = f"/#/experiments/{status.experiment_id}/runs/{status.run_id}{PAGE_QUERY}"
    if uri.startswith(("http://", "https://")):
        return f"Open {uri.rstrip('/')}{page}"
    return f"Open it: mlflow ui --backend-store-uri '{uri}' and then http://127.0.0.1:5000{page}"


def how_to_send(spool: Path) -> str:
    return f"send them with: gba-hvd mlflow send {shlex.quote(str(spool))}"


def _is_in_trouble(spool: Path) -> bool:
    """Whether what is left cannot be sent now."""
    status = read_status(spool)
    return status.problem is not None or status.model_problem is not None


def _because(obstacle: str | None) -> str:
    return f", and cannot be made: {obstacle}" if obstacle else ": it was removed"


def say(message: str, at: str = "") -> None:
    """at: the time of day, of what may come at any moment"""
    print(f"{at}MLflow: {message}", file=sys.stderr, flush=True)


def _time_of_day(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
