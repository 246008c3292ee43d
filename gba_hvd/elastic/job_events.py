"""Reports to callbacks on the world and the end: which job they are in, who joined or left, and what that cost.

Nothing is decided here; texts and numbers are made of what `membership` found.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from gba_hvd.callbacks import Event, Job
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.comm.world_formation import Wait, stands
from gba_hvd.elastic import endings
from gba_hvd.membership import JoinResult
from gba_hvd.shm import retained_state
from gba_hvd.shm.job_board import Board
from gba_hvd.switching.requests import ModeRequests, switching_of
from gba_hvd.training.engine import Engine
from gba_hvd.training.parameter_watch import names_in_words
from recovery.redaction import redacted

log = logging.getLogger("gba_hvd")


def world_formed(engine: Engine, joined: JoinResult, before: int | None, residuals_missing: int = 0) -> None:
    """Report to all callbacks this worker's place in the job, and what became of the job.

    before: workers in the world that this worker was in, if it was in one.
    residuals_missing: in the checkpoint that the job resumes from: of so many workers
    """
    world = engine.world
    job = Job(
        engine.job.id, world.rank, world.size, world.local_rank, world.host, joined.leads_host, _settings(engine),
        engine.job.name,
    )  # fmt: skip
    for callback in engine.callbacks:
        callback.on_job(job)
    engine.host.board = _board(engine, joined) if joined.leads_host else None
    checkpoints = checkpoints_of(engine)
    if checkpoints is not None and world.rank == 0:
        checkpoints.schedule.plan_pace(joined.n_hosts)
    if joined.is_restart:
        events = _of_a_change(engine, joined, before)
    else:
        events = _of_a_start(engine, joined, residuals_missing)
    for event in events:
        engine.emit(event)


def _board(engine: Engine, joined: JoinResult) -> Board | None:
    """What `gba-hvd ps` shows on this host; None where there is no room for it."""
    checkpoints = checkpoints_of(engine)
    place = "" if checkpoints is None else redacted(checkpoints.callback.url)
    mode = "allreduce" if engine.mode is None else engine.mode.name
    try:
        return Board(
            engine.folder, mode, engine.progress.step, name=engine.job.name, job=engine.job.id,
            workers=engine.world.size, hosts=joined.n_hosts, switchable=switching_of(engine) is not None,
            checkpoints=place,
        )  # fmt: skip
    except OSError as error:
        text = (
            f"gba-hvd ps and gba-hvd status cannot show this job on {engine.world.host}: {error}; free some space there"
        )
        engine.emit(
            Event("not_shown", engine.progress.step, text, {"why": str(error)}, level="warning"), only_here=True
        )
        return None


def worker_gone(engine: Engine) -> None:
    """Other workers, or a server, do not answer: what comes next, beside what Horovod prints of it on every worker."""
    text = (
        "a worker is gone, or cannot be reached. Horovod's lines 'background loop uncaught exception' and 'Read error' "
        "(or 'Connection ...') are how the others notice, and are expected: the job goes on with those that are left"
    )
    engine.emit(Event("worker_lost", engine.progress.step, text, {"workers": engine.world.size}))


def world_was_late(engine: Engine, wait: Wait | None, meanwhile: str) -> None:
    """What the world that stands now took to form, if it was long, or broke up."""
    if wait is not None and wait.is_worth_a_word:
        engine.emit(stands(engine.progress.step, wait, engine.world.size, meanwhile))


def residuals_lost(engine: Engine, n_workers: int, lost: float | None) -> None:
    """What compression had not sent yet in workers that are gone; lost: the sum of its magnitudes, if known."""
    if n_workers and lost != 0:
        known = "how much is not known" if lost is None else f"their magnitudes add up to {lost:.3g}"
        text = f"gradients that compression held back in {_count(n_workers, 'worker')} that are gone are lost; {known}"
        engine.emit(
            Event(
                "residual_lost", engine.progress.step, text, {"workers": n_workers, "residual": lost}, level="warning"
            )
        )


def ended(engine: Engine, status: str, error: BaseException | None) -> None:
    """Report to all callbacks how the job ended, and its account."""
    account = {f"samples_{k}": getattr(engine.progress.account, k) for k in ("total", "applied", "dropped", "lost")}
    kinds = {"FINISHED": "finished", "KILLED": "interrupted", "NOT_SAVED": "not_saved"}
    kind = kinds.get(status, "failed")
    word = "finished" if error is None else f"{type(error).__name__}: {error}"
    if kind == "interrupted":
        word = f"by {_interruption(str(error))}"
    facts = {
        **account,
        "restarts": engine.progress.restarts,
        "refused": engine.progress.rejected,
        "reissued": engine.progress.reissued,
    }
    facts["lags"] = {str(k): n for k, n in sorted(engine.progress.lags.items())}
    facts["staleness"] = {str(k): n for k, n in sorted(engine.progress.staleness.items())}
    if kind == "interrupted" and (goes_on := _what_goes_on(engine)):
        facts["goes_on"] = goes_on
    switching = switching_of(engine)
    if status != "FAILED" and engine.world.rank == 0 and switching is not None:
        for event in switching.asked.shortfall(engine.progress.step, _obstacle(engine)):
            engine.emit(event)
    if status == "FINISHED" and engine.world.rank == 0 and switching is not None:
        for due in switching.overdue(engine.progress.step - 1):
            text = (
                f"switch_at={due} was not carried out: the job ended at step {engine.progress.step} before rank 0 "
                "asked for it, which it does before each of its micro-batches"
            )
            engine.emit(Event("switch_late", engine.progress.step, text, {"due": due}, level="warning"))
    engine.emit(Event(kind, engine.progress.step, word, facts, level="warning" if status == "NOT_SAVED" else "info"))
    for callback in engine.callbacks:
        try:
            callback.on_end(status, error)
        except KeyboardInterrupt:  # SIGTERM again: the others are called all the same
            log.warning("interrupted while %s was told of the end", type(callback).__name__)


def _interruption(error: str) -> str:
    """What a person reads. A launcher passes Ctrl-C on to its workers as SIGTERM."""
    if "HOROVOD_RANK" in os.environ and error.startswith(endings.SIGTERM):
        return f"Ctrl-C or SIGTERM{error.removeprefix(endings.SIGTERM)}"
    return error or "Ctrl-C"


def _what_goes_on(engine: Engine) -> str:
    """Where the same command begins; empty where it starts over. On the chief."""
    checkpoints = checkpoints_of(engine)
    if checkpoints is None or not checkpoints.callback.resume or engine.world.rank != 0:
        return ""
    saved_step, grace_s = checkpoints.schedule.saved_step, engine.model.tables.config.grace_s
    # Memory is found again by the job's id, which is given to the job or stands in its newest checkpoint.
    in_memory = retained_state.is_there(engine.folder) and bool(engine.model.tables.config.job_id or saved_step >= 0)
    saved = f"from step {saved_step:,}, of the newest checkpoint" if saved_step >= 0 else ""
    memory = (
        f"from step {engine.progress.step:,} if it comes within {grace_s:g} s of the end, while that is kept in memory"
    )
    found = [text for text in (memory if in_memory else "", saved) if text]
    if not found:
        return ""
    return f"when all workers have ended, the same command goes on {', else '.join(found)}"


def _obstacle(engine: Engine) -> str:
    """Why an asynchronous mode that waits for servers is not on."""
    requests = engine.participant(ModeRequests)
    if requests is None or not requests.waiting:
        return ""
    own = "" if engine.host.server is None else engine.host.server.why_not_ready(to_enter=True)
    return f"the companion servers were not up at the end; {own or 'the log of the workers of other hosts says why'}"


def _settings(engine: Engine) -> dict[str, Any]:
    """What describes the run. Nothing that changes while it runs: MLflow stores the first value of a parameter."""
    switching = switching_of(engine)
    of_the_mode = {"mode": "allreduce"} if switching is None else switching.describe()
    return {
        "tables": {t.name: [t.n_rows, t.dim] for t in engine.model.tables.layout.tables},
        "n_shards": engine.model.tables.layout.n_shards,
        "global_batch": engine.model.global_batch,
        "micro_batch": engine.model.micro_batch,
        "optimizer": type(engine.model.optimizer).__name__,
        "row_optimizer": repr(engine.model.tables.optimizer),
        "row_average": engine.model.row_average,
        "compression": "none" if engine.model.compression is None else engine.model.compression.spec.exactly,
        "row_compression": engine.model.row_compression.exactly,
        **{name: value for name, value in of_the_mode.items() if value is not None},
    }


def _of_a_start(engine: Engine, joined: JoinResult, residuals_missing: int) -> Iterator[Event]:
    step, n_workers = engine.progress.step, engine.world.size
    yield Event("started", step, f"{_place(engine, joined)}, job {engine.job.id}", {"workers": n_workers})
    if engine.model.untrained:
        text = (
            f"{names_in_words(engine.model.untrained)}: parameters of the model with requires_grad that are in no "
            "group of the DistributedOptimizer. Nothing trains them, or an optimizer that workers do not share: then "
            "their models drift apart. Give them to the optimizer before it goes to DistributedOptimizer, or say "
            "requires_grad_(False)"
        )
        yield Event("parameters_untrained", step, text, {"parameters": engine.model.untrained}, level="warning")
    if (report := joined.resumed) is not None:
        name = report.manifest.name
        text = f"going on at step {step} from {name}: {report.n_rows:,} rows in {report.seconds:.1f} s"
        skipped = [f"{one.name}: {one.why}" for one in report.skipped]
        told = {"manifest": name, "rows_restored": report.n_rows, "rows_lost": report.n_lost, "age": report.age.mean}
        told |= {"seconds": report.seconds, "skipped": skipped}
        yield Event("resumed", step, text, told)
    if residuals_missing:
        text = f"the checkpoint lacks what {_count(residuals_missing, 'worker')} had not sent"
        yield Event("residual_lost", step, text, {"workers": residuals_missing}, level="warning")
    if engine.model.row_coder is not None and (joined.resumed is not None or joined.taken is not None):
        text = (
            "what row compression had not sent yet is in no checkpoint, nor in memory that is kept: the gradients that "
            "waited in the workers' residuals of rows are lost, at most about one step's worth for each row"
        )
        yield Event("row_residual_lost", step, text, level="warning")
    if joined.taken is not None:
        text = f"going on at step {step} where the lost job stood: {joined.taken.reason}"
        lost = {"rows_restored": 0, "rows_lost": 0, "shard_steps_missed": joined.shard_steps_missed}
        yield Event("resumed", step, text, {"manifest": "", "from_memory": True, **lost})


def _of_a_change(engine: Engine, joined: JoinResult, before: int | None) -> Iterator[Event]:
    step = engine.progress.step
    was = "" if before is None else f", before {before}"
    facts = {
        "workers": engine.world.size,
        "shard_steps_missed": joined.shard_steps_missed,
        "rows_lost": joined.rows_lost,
        "rows_restored": joined.rows_restored,
    }
    yield Event("membership", step, f"{_place(engine, joined)}{was}; going on at step {step}", facts)
    if joined.shard_steps_missed:
        text = f"{joined.shard_steps_missed} shards missed a step that their worker died in"
        yield Event("shard_steps_missed", step, text, facts, level="warning")
    if joined.rows_restored:
        text = (
            f"{joined.rows_restored:,} rows that went down with their host came back from the checkpoint; "
            f"they are {joined.rows_age:.0f} steps old"
        )
        if joined.skipped:
            text += f"; newer ones cannot be used: {'; '.join(joined.skipped)}"
        told = {"pls": _pls(engine, joined), "age": joined.rows_age, "skipped": list(joined.skipped)}
        yield Event("rows_restored", step, text, {**facts, **told, "manifest": ", ".join(joined.restored_from)})
    if joined.rows_lost:
        why = "no checkpoint was configured" if checkpoints_of(engine) is None else "no checkpoint has them"
        why = joined.why_lost or why
        text = f"{joined.rows_lost:,} rows went down with their host and begin anew; {why}"
        yield Event("rows_lost", step, text, {**facts, "why": why}, level="warning")


def _pls(engine: Engine, joined: JoinResult) -> float:
    """Portion of lost samples, of all so far (CPR): each host's rows lost what came after their checkpoint."""
    n_rows = sum(table.n_rows for table in engine.model.tables.layout.tables)
    lost = sum((engine.progress.account.applied - samples) * n for samples, n in joined.refilled)
    return lost / n_rows / max(1, engine.progress.account.total)


def _place(engine: Engine, joined: JoinResult) -> str:
    return f"{_count(engine.world.size, 'worker')} on {_count(joined.n_hosts, 'host')}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n > 1 else ''}"
