"""Reports to callbacks on the world and the end: which job they are in, who joined or left, and what that cost.

Nothing is decided here; texts and numbers are made of what `membership` found.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gba_hvd.callbacks import KEEP_BEST, Event, Job
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.comm.world_formation import Wait, stands
from gba_hvd.elastic import endings, learning_rates
from gba_hvd.elastic.job_health import health_of
from gba_hvd.elastic.launcher_start import launcher_started_s
from gba_hvd.elastic.learning_rates import ReplacedRates
from gba_hvd.elastic.training_state import Restored
from gba_hvd.errors import BadInput
from gba_hvd.membership import JoinResult
from gba_hvd.shm import retained_state
from gba_hvd.shm.job_board import Board
from gba_hvd.shm.layout import TableSpec
from gba_hvd.shm.shard_memory import is_alive
from gba_hvd.switching.requests import ModeRequests, switching_of
from gba_hvd.tracking.recovery_records import LAUNCHER_STARTED
from gba_hvd.training.engine import Engine
from gba_hvd.training.parameter_watch import names_in_words
from recovery.callback import CheckpointCallback
from recovery.redaction import redacted
from recovery.restore import Report

log = logging.getLogger("gba_hvd")

_TABLES_NAMED = _VALUES_NAMED = 8
_RATES: tuple[str, ...] = ("dense_lr", "row_optimizer", "own_row_optimizers")  # settings that have learning rates
MIN_WORKERS = "GBA_HVD_MIN_WORKERS"  # set by `gba-hvd run`: the MIN of -np


def world_formed(
    engine: Engine,
    joined: JoinResult,
    before: int | None,
    residuals_missing: int = 0,
    restored: Restored | None = None,
) -> None:
    """Report to all callbacks this worker's place in the job, and the job's changes.

    before: workers in the world that this worker was in, if it was in one.
    residuals_missing: in the checkpoint that the job resumes from, or rolled back to: of so many workers
    restored: beside the rows, by a job that resumes, on the rank that read it
    """
    world, switching = engine.world, switching_of(engine)
    job = Job(
        engine.job.id, world.rank, world.size, world.local_rank, world.host, joined.is_host_leader, _settings(engine),
        engine.job.name, () if switching is None else sorted(switching.idle_settings),
    )  # fmt: skip
    for callback in engine.callbacks:
        callback.on_job(job)
    engine.host.is_leader = joined.is_host_leader
    engine.host.board = _board(engine, joined) if joined.is_host_leader else None
    checkpoints = checkpoints_of(engine)
    if checkpoints is not None and world.rank == 0:
        checkpoints.schedule.plan_pace(joined.n_hosts)
    if joined.is_restart:
        events = _of_a_change(engine, joined, before, residuals_missing)
    else:
        engine.progress.launched_at, engine.progress.launched_unix_s = engine.progress.step, time.time()
        events = _of_a_start(engine, joined, residuals_missing, restored)
    for event in events:
        engine.emit(event)
    engine.rollback.unreported = None
    if joined.leaders_apart:
        text = (
            "the workers could not be connected, so Horovod carries rows between hosts and sums the dense gradients "
            f"over all workers: the same model, in slower steps. {joined.leaders_apart}. Workers listen on ports that "
            "the system gives them, on Horovod's network interface: see what blocks these. Until then, "
            "HOROVOD_CYCLE_TIME=1 makes steps faster"
        )
        data = {"why": joined.leaders_apart}
        engine.emit(Event("leaders_not_connected", engine.progress.step, text, data, level="warning"))
    if joined.is_host_leader and not joined.is_restart:
        _warn_of_threads(engine, torch.get_num_threads(), len(os.sched_getaffinity(0)))


def _warn_of_threads(engine: Engine, n_threads: int, n_cores: int) -> None:
    """Once at the start, by each host leader: workers that compute with more threads than the host has cores."""
    n_workers = 1 + len(engine.host.neighbours)
    if n_threads > 1 and n_threads * n_workers > n_cores:
        text = (
            f"{n_workers} workers on {engine.world.host} compute with {n_threads} threads each, and it has {n_cores} "
            "cores for them: they slow each other down, often many times. Start the job with "
            f"OMP_NUM_THREADS={max(1, n_cores // n_workers)} (cores / workers), or with gba-hvd run, which sets it"
        )
        data = {"workers": n_workers, "threads": n_threads, "cores": n_cores}
        event = Event("too_many_threads", engine.progress.step, text, data, level="warning")
        engine.emit(event, only_here=True)


def _board(engine: Engine, joined: JoinResult) -> Board | None:
    """What `gba-hvd ps` shows on this host; None where there is no room for it."""
    checkpoints = checkpoints_of(engine)
    place = "" if checkpoints is None else redacted(checkpoints.callback.url)
    try:
        return Board(
            engine.folder, _mode(engine), engine.progress.step, name=engine.job.name, job=engine.job.id,
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


def _mode(engine: Engine) -> str:
    return "allreduce" if engine.mode is None else engine.mode.name


def worker_gone(engine: Engine) -> None:
    """Other workers, or a server, do not answer: what comes next, beside what Horovod prints of it on every worker."""
    text = (
        "a worker is gone, or cannot be reached: the job continues with those that are left. Horovod's lines "
        "'background loop uncaught exception' and 'Read error' (or 'Connection ...') are expected"
    )
    data: dict[str, Any] = {"workers": engine.world.size}
    if (n_left := engine.reports.n_working) is not None:
        n_left = min(n_left, engine.world.size - sum(not is_alive(pid) for pid in engine.host.neighbours.values()))
        data["left"] = n_left
        text += f". Training continues with {_count(n_left, 'worker')}{_fewer_than_asked(n_left)}"
    engine.emit(Event("worker_lost", engine.progress.step, text, data))


def _fewer_than_asked(n_workers: int, environ: Mapping[str, str] = os.environ) -> str:
    """An asynchronous mode needs no world, and so not the least number of workers that the launcher forms one of."""
    least = environ.get(MIN_WORKERS, "")
    if not least.isdecimal() or n_workers >= int(least):
        return ""
    return f", fewer than the {least} of `-np MIN:MAX`, until the launcher has started others"


def pauses_for_workers(engine: Engine) -> None:
    """In allreduce mode, on rank 0: the world is left to let workers in, which the launcher starts only then."""
    text = "workers are let in: training pauses until they have started (imports and what the script does first)"
    engine.emit(Event("workers_awaited", engine.progress.step, text, {"workers": engine.world.size}))


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
    kinds = {"FINISHED": "finished", "KILLED": "interrupted", "NOT_SAVED": "not_saved"}
    kind = kinds.get(status, "failed")
    ends_alone = kind == "failed" and (engine.world.size == 1 or not endings.is_elastic())  # else others continue
    if kind != "failed" or ends_alone:
        engine.reports.job_ends(finished=kind == "finished")
    account = {f"samples_{k}": getattr(engine.progress.account, k) for k in ("total", "applied", "dropped", "lost")}
    if engine.progress.account.redone:
        account["samples_redone"] = engine.progress.account.redone
    word = "finished" if error is None else f"{type(error).__name__}: {error}"
    if kind == "interrupted":
        word = f"by {_interruption(str(error))}"
    facts = {
        **account,
        "restarts": engine.progress.restarts,
        "refused": engine.progress.rejected,
        "reissued": engine.progress.reissued,
        "lasted_s": max(0.0, time.time() - (engine.progress.launched_unix_s or time.time())),
        "dropped_for": engine.progress.account.dropped_for,
        "pauses": [[one.cause, one.seconds, one.step] for one in engine.reports.pauses.over],
    }
    facts |= _delays(engine)
    facts["arrivals"] = [[[age, round(share, 6)] for age, share in step] for step in engine.progress.arrivals]
    is_refused = isinstance(error, BadInput) and not _has_begun(engine)  # and would be again
    if (kind == "interrupted" or (ends_alone and not is_refused)) and (continued_by := _what_continues(engine)):
        facts["goes_on"] = continued_by + (_steps_not_saved(engine) if kind == "interrupted" else "")
    if status == "FINISHED" and engine.world.rank == 0 and (idle := _nothing_trained(engine)):
        engine.emit(idle)
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
    if engine.world.rank == 0 and (stayed := _never_switched(engine)):
        engine.emit(stayed)
    if (health := health_of(engine)) is not None:
        facts["warnings"] = health.account(with_another=status == "NOT_SAVED")  # which the next event is
    engine.emit(Event(kind, engine.progress.step, word, facts, level="warning" if status == "NOT_SAVED" else "info"))
    for callback in engine.callbacks:
        try:
            callback.on_end(status, error)
        except KeyboardInterrupt:  # SIGTERM again: the others are called all the same
            log.warning("interrupted while %s was processing the end", type(callback).__name__)


def _nothing_trained(engine: Engine) -> Event | None:
    """A launch that finished without a step, since the epochs that it asked for were complete."""
    progress = engine.progress
    if progress.launched_at != progress.step or not progress.complete_before:
        return None
    epochs, following = progress.complete_before, max(progress.complete_before) + 1
    which = f"epoch {epochs[0]} was" if len(epochs) == 1 else f"epochs {', '.join(map(str, epochs))} were"
    text = (
        f"this launch trained no step: {which} complete in what it resumed from (step {progress.step}). New data is "
        f"trained in the next epoch: `for state.epoch in range({following}, ...)`. If a launch that had finished was "
        "repeated, nothing is missing"
    )
    return Event("nothing_trained", progress.step, text, {"epochs": epochs}, level="warning")


def _has_begun(engine: Engine) -> bool:
    """Whether this worker ever had a state to train."""
    return engine.progress.launched_at is not None or engine.progress.step > 0


def _never_switched(engine: Engine) -> Event | None:
    """Of a launch in mode "auto" that trained and stayed in its mode: the reason of the newest decision."""
    switching, step = switching_of(engine), engine.progress.step
    if switching is None or engine.progress.launched_at == step or not _has_begun(engine):
        return None
    if not (why := switching.why_never_switched()):
        return None
    return Event("auto_stayed", step, f'mode "auto" never left {_mode(engine)}: {why}', {"mode": _mode(engine)})


def _delays(engine: Engine) -> dict[str, Any]:
    """How late gradients came, in the job so far."""
    progress = engine.progress
    return {
        "staleness": {str(k): n for k, n in sorted(progress.staleness.items())},
        "lags": {str(k): n for k, n in sorted(progress.lags.items())},
        "gaps": {str(rank): list(found) for rank, found in sorted(progress.gaps.items())},
    }


def _interruption(error: str) -> str:
    """What a person reads. A launcher passes Ctrl-C on to its workers as SIGTERM."""
    if "HOROVOD_RANK" in os.environ and error.startswith(endings.SIGTERM):
        return f"Ctrl-C or SIGTERM{error.removeprefix(endings.SIGTERM)}"
    return error or "Ctrl-C"


def _what_continues(engine: Engine) -> str:
    """Where the same command begins; empty where it starts over and nothing was trained. On the chief."""
    if engine.world.rank != 0:
        return ""
    step, checkpoints = engine.progress.step, checkpoints_of(engine)
    if why := endings.why_at_step_0(engine):
        found = [f"starts at step 0 again, since {why}{_may_yet_be_saved(engine)}"] if step > 0 else []
    else:
        assert checkpoints is not None
        found = [f"resumes from step {checkpoints.schedule.saved_step:,}, of the newest checkpoint"]
    if _is_found_in_memory(engine):
        grace_s = engine.model.tables.config.grace_s
        found.insert(
            0, f"resumes from step {step:,} if it comes within {grace_s:g} s of the end, while that is kept in memory"
        )
    return f"when all workers have ended, the same command {', else '.join(found)}" if found else ""


def _steps_not_saved(engine: Engine) -> str:
    """How an interruption would cost no step, where it does. On the chief."""
    checkpoints = checkpoints_of(engine)
    if checkpoints is None or checkpoints.callback.preemption_s is not None or not checkpoints.callback.resume:
        return ""
    n_steps = engine.progress.step - max(0, checkpoints.schedule.saved_step)
    if n_steps < 1:
        return ""
    which = f"{_count(n_steps, 'step')} {'are' if n_steps > 1 else 'is'}"
    return (
        f". {which} in no checkpoint, and computed again from there: "
        "CheckpointCallback(preemption_s=4) saves before workers leave"
    )


def _is_found_in_memory(engine: Engine) -> bool:
    """By the job's id, which is given to the job or stands in its newest checkpoint."""
    checkpoints, memory = checkpoints_of(engine), engine.model.tables.memory  # no memory: the world had not formed
    if checkpoints is None or not checkpoints.callback.resume or memory is None:
        return False
    has_name = bool(engine.model.tables.config.job_id) or checkpoints.schedule.saved_step >= 0
    return has_name and retained_state.is_there(memory.folder)


def _may_yet_be_saved(engine: Engine) -> str:
    checkpoints = checkpoints_of(engine)
    if engine.host.server is None or checkpoints is None or not checkpoints.callback.resume:
        return ""
    is_possible = checkpoints.callback.final_checkpoint_s > 0
    return ", unless its servers save a last one when all workers have ended" if is_possible else ""


def _obstacle(engine: Engine) -> str:
    """Why an asynchronous mode that waits for servers is not on."""
    requests = engine.participant(ModeRequests)
    if requests is None or not requests.waiting:
        return ""
    own = "" if engine.host.server is None else engine.host.server.why_not_ready(to_enter=True)
    if not own and engine.world.size == 1 + len(engine.host.neighbours):  # one host, and its servers are up by now
        return "the companion servers came up when the job had ended, or nearly: it was too short"
    return f"the companion servers were not up at the end; {own or 'the log of the workers of other hosts says why'}"


def _settings(engine: Engine) -> dict[str, Any]:
    """What describes the run. Nothing that changes while it runs: MLflow stores the first value of a parameter."""
    switching, checkpoints = switching_of(engine), checkpoints_of(engine)
    tables = engine.model.tables
    row_optimizer, owns = learning_rates.row_optimizers(engine.model)
    own = {t.name: repr(owns[t.optimizer - 1]) for t in tables.layout.tables if t.optimizer}
    hashed = tables.layout.hashed_settings()
    of_the_mode = {"mode": "allreduce"} if switching is None else switching.describe()
    return {
        "tables": {t.name: [t.n_rows, t.dim] for t in engine.model.tables.layout.tables},
        **({"hashed_tables": hashed} if hashed else {}),
        "n_shards": engine.model.tables.layout.n_shards,
        "global_batch": engine.model.global_batch,
        "micro_batch": engine.model.micro_batch,
        **({} if engine.model.sync_micro_batch is None else {"sync_micro_batch": engine.model.sync_micro_batch}),
        "optimizer": type(engine.model.optimizer).__name__,
        **_dense_settings(engine.model.optimizer),
        "row_optimizer": repr(row_optimizer),
        **({"own_row_optimizers": own} if own else {}),
        "row_average": engine.model.row_average,
        "compression": "none" if engine.model.compression is None else engine.model.compression.spec.exactly,
        "row_compression": engine.model.row_compression.exactly,
        **({} if checkpoints is None else _checkpoint_settings(checkpoints.callback)),
        **{name: value for name, value in of_the_mode.items() if value is not None},
        **({} if switching is None else {"rule_reason": switching.rule_reason}),
    }


def _checkpoint_settings(callback: CheckpointCallback) -> dict[str, Any]:
    """Of the plan, what it goes by; of an interval that was given, that. What is not set is left out."""
    given = callback.given
    found = {"recovery": callback.recovery, "policy": given.policy, "target_pls": given.target_pls}
    found |= {"row_fraction": given.r, "total_samples": callback.total_samples}
    found |= {"checkpoint_every_s": callback.every_s, "checkpoint_every_steps": callback.every_steps}
    found |= {KEEP_BEST: callback.keep_best}
    if callback.is_planned:
        found |= {"mtbf_h": given.mtbf_h, "longest_s": given.longest_s}
    return {name: value for name, value in found.items() if value is not None}


def _dense_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Largest of the groups: the learning rate before schedules, and momentum of SGD, where a schedule moves it the
    largest of the schedule; of other optimizers the `betas`, of each group where groups differ.
    """
    groups = [group for group in optimizer.param_groups if group.get("gba_hvd") != "tables"]
    found: dict[str, Any] = {"dense_lr": max(float(group.get("initial_lr", group["lr"])) for group in groups)}
    if isinstance(optimizer, torch.optim.SGD):
        found["dense_momentum"] = max(float(group.get("max_momentum", group["momentum"])) for group in groups)
        if dampening := max(float(group["dampening"]) for group in groups):
            found["dense_dampening"] = dampening
    betas = [[float(beta) for beta in group["betas"]] for group in groups if "betas" in group]
    if betas:
        found["dense_betas"] = betas[0] if all(one == betas[0] for one in betas) else betas
    return found


def training_begins(engine: Engine, replaced: ReplacedRates | None) -> None:
    """Report learning rates that are not the script's, or not the saved ones. When the training function, which may set
    others, has begun.
    """
    if replaced is None:
        return
    settings = _settings(engine)
    rates = {name: settings[name] for name in _RATES if name in settings}
    for event in learning_rates.events_of(replaced, engine.model.optimizer, rates, engine.progress.step):
        engine.emit(event)


def _of_a_start(
    engine: Engine, joined: JoinResult, residuals_missing: int, restored: Restored | None
) -> Iterator[Event]:
    step, n_workers = engine.progress.step, engine.world.size
    text = (
        f"{_place(engine, joined)}, job {engine.job.id}: {_what_is_trained(engine)}{_why_from_step_0(engine, joined)}"
        f"{_assigned(engine, joined)}"
    )
    checkpoints = checkpoints_of(engine)
    place = "" if checkpoints is None else redacted(checkpoints.callback.url)
    data = {"workers": n_workers, "checkpoints": place, LAUNCHER_STARTED: launcher_started_s()}
    yield Event("started", step, text, data)
    if engine.faults is not None and (lasting := engine.faults.lasting):
        text = f"on purpose, as the FaultSchedule says: {'; '.join(fault.words for fault in lasting)}"
        yield Event("faults_lasting", step, text, {"faults": [fault.entry() for fault in lasting]})
    if engine.model.untrained:
        text = (
            f"{names_in_words(engine.model.untrained)}: parameters of the model with requires_grad that are in no "
            "group of the DistributedOptimizer. Nothing trains them, or an optimizer that workers do not share: then "
            "their models drift apart. Give them to the optimizer before it goes to DistributedOptimizer, or say "
            "requires_grad_(False)"
        )
        yield Event("parameters_untrained", step, text, {"parameters": engine.model.untrained}, level="warning")
    if engine.model.row_coder is not None and joined.n_hosts == 1:
        text = (
            f"row_compression={engine.model.row_compression.exactly} changes nothing on one host: its workers share "
            "the rows in memory, none travel. It takes effect when a second host joins; else leave it out"
        )
        yield Event("row_compression_idle", step, text, {"hosts": 1}, level="warning")
    if checkpoints is not None and checkpoints.callback.recovery == "partial" and joined.n_hosts == 1:
        text = (
            "CheckpointCallback(recovery='partial') has no effect on one host: when it is lost, all rows are, and the "
            "job resumes from its newest checkpoint. It takes effect when a second host joins; else leave it out"
        )
        yield Event("recovery_idle", step, text, {"hosts": 1}, level="warning")
    if (report := joined.resumed) is not None:
        name = report.manifest.name
        text = f"resuming at step {step} from {name}: {report.n_rows:,} rows in {report.seconds:.1f} s"
        text += _without_room(report, joined.n_hosts) + _beside_rows(engine, restored)
        skipped = [one.words for one in report.skipped]
        facts = {"manifest": name, "rows_restored": report.n_rows, "rows_lost": report.n_lost, "age": report.age.mean}
        facts |= {"seconds": report.seconds, "skipped": skipped, **_delays(engine)}
        facts["samples_then"] = engine.progress.account.applied
        yield Event("resumed", step, text, facts)
        steps_lost, so = _steps_lost(engine, report)
        yield from _passed_over(engine, skipped, so, steps_lost)
        yield from _changed_vocabularies(engine, report)
    if joined.resumed is not None or joined.taken is not None:
        yield from _residuals_that_no_checkpoint_has(engine, residuals_missing)
    if joined.taken is not None:
        text = f"resuming at step {step} where the launch before stood: {joined.taken.reason}"
        text += _beside_rows(engine, restored)
        lost = {"rows_restored": 0, "rows_lost": 0, "shard_steps_missed": joined.shard_steps_missed, **_delays(engine)}
        yield Event("resumed", step, text, {"manifest": "", "from_memory": True, **lost})


def _beside_rows(engine: Engine, restored: Restored | None) -> str:
    """`; with them dense values, ..., epoch 2, scheduler; new: streams of random numbers`"""
    if restored is None:
        return ""
    rates = learning_rates.in_words(learning_rates.rates_of(engine.model.optimizer))
    values = [_named_value(name, value) for name, value in restored.values.items()]
    more = [f"and {len(values) - _VALUES_NAMED} more values"] * (len(values) > _VALUES_NAMED)
    found = ["dense values", f"the state of the optimizers, learning rates ({rates})", *values[:_VALUES_NAMED], *more]
    fresh = [f"{name} (not saved)" for name in restored.not_saved]
    (found if restored.random else fresh).append("streams of random numbers")
    text = f"; restored, too: {', '.join(found)}"
    text += f"; as the script begins: {', '.join(fresh)}" if fresh else ""
    return text + (f"; saved, and not used: {', '.join(restored.not_used)}" if restored.not_used else "")


def _named_value(name: str, value: Any) -> str:
    return f"{name} {value}" if isinstance(value, bool | int | float) else name


def _passed_over(engine: Engine, skipped: Sequence[str], so: str, steps_lost: int | None = None) -> Iterator[Event]:
    """A warning of newer checkpoints that cannot be used, where there are any. so: what follows for the job."""
    checkpoints = checkpoints_of(engine)
    if not skipped or checkpoints is None:
        return
    text = (
        f"newer checkpoints cannot be used: {'; '.join(skipped)}. {so}. Nothing need be done for the job to continue; "
        "to learn what else is damaged: gba-hvd checkpoint verify "
        f"{shlex.quote(redacted(checkpoints.callback.url))}. Unless somebody removed or changed objects there, check "
        "the disk, or the store"
    )
    data = {"skipped": list(skipped), "steps_lost": steps_lost}
    yield Event("checkpoint_damaged", engine.progress.step, text, data, level="warning")


def _steps_lost(engine: Engine, report: Report) -> tuple[int | None, str]:
    """Of a job that resumes: steps that only checkpoints have which cannot be used; and what becomes of them."""
    step = engine.progress.step
    newest = max((one.step for one in report.skipped if one.step is not None), default=None)
    if newest is None:
        return None, f"So what was trained after step {step:,} is lost, and trained again"
    lost = max(0, newest - step)
    return lost, f"So {_count(lost, 'step')}, from {step:,} to {newest:,}, are lost, and trained again"


def _without_room(report: Report, n_hosts: int) -> str:
    """By table, the ids that went since the rows that they may have were all taken; empty: none did."""
    here = " of this host" * (n_hosts > 1)
    return "".join(
        f"; {n:,} ids of table {table!r}, the least used, found no room among its {rows:,} rows{here}: all those that "
        "such an id may have were taken; more capacity helps"
        for table, (n, rows) in report.without_room.items()
    )


def _what_is_trained(engine: Engine) -> str:
    """`mode allreduce, global batch 96 in micro-batches of 16, tables user 300 x 8, item 40 x 6, checkpoints in /ck`

    Of a hashed table `sku 4,096 ids and 4,000 shared rows x 16 by hash`.
    """
    model, switching, checkpoints = engine.model, switching_of(engine), checkpoints_of(engine)
    tables = [_shape(table, model.tables.layout.n_shards) for table in model.tables.layout.tables]
    more = f" and {len(tables) - _TABLES_NAMED} more" * (len(tables) > _TABLES_NAMED)
    mode = _mode(engine) if switching is None else switching.mode_at_start(engine.progress.step, _mode(engine))
    saved = "no checkpoints" if checkpoints is None else f"checkpoints in {redacted(checkpoints.callback.url)}"
    if switching is not None and switching.wire == "plain":
        saved += (
            "; wire 'plain': what hosts send each other in asynchronous modes is neither secret nor protected against "
            "changes on the network, only processes with the job's key are let in"
        )
    return (
        f"mode {mode}, global batch {model.global_batch} in micro-batches of {model.micro_batch}, tables "
        f"{', '.join(tables[:_TABLES_NAMED])}{more}, {saved}"
    )


def _shape(table: TableSpec, n_shards: int) -> str:
    if (spec := table.hashed) is None:
        return f"{table.name} {table.n_rows:,} x {table.dim}"
    own, shared = spec.entries * n_shards, spec.fallback * n_shards
    return f"{table.name} {own:,} ids and {shared:,} shared rows x {table.dim} by hash"


def _why_from_step_0(engine: Engine, joined: JoinResult) -> str:
    """Why a job with checkpoints resumes from none; empty where it does, or has none. The same on all workers.

    Where there are some and none can be used, the job does not start.
    """
    checkpoints = checkpoints_of(engine)
    if checkpoints is None or _resumes(engine, joined):
        return ""
    if not checkpoints.callback.resume:
        return "; resume=False: checkpoints that are there are not read, and training begins at step 0"
    return "; no checkpoint was found there, so training begins at step 0"


def _resumes(engine: Engine, joined: JoinResult) -> bool:
    is_known = joined.resumed is not None or joined.taken is not None  # to the rank that looked
    return is_known or (engine.world.rank != joined.source and engine.progress.step > 0)


def _assigned(engine: Engine, joined: JoinResult) -> str:
    """What becomes of rows that the script assigned (`tables.assign`); empty where it assigned none."""
    names = engine.model.tables.initial_rows.assigned
    if not names:
        return ""
    which = f"; rows that the script assigned, of {names_in_words(names)}, "
    if _resumes(engine, joined):
        return f"{which}are not used: the job resumes, with the rows that it had"
    return f"{which}are where training begins: weights alone, their optimizer slots begin at zero"


def _changed_vocabularies(engine: Engine, report: Report) -> Iterator[Event]:
    """What hashed tables do in another way than the job that saved the checkpoint."""
    saved, now = report.manifest.about.get("hashed", {}), engine.model.tables.layout.hashed_settings()
    for table, settings in now.items():
        before, sizes = saved.get(table, {}), ("capacity", "fallback_rows", "fallback_hashes")
        compared = {name: (before.get(name, value), value) for name, value in settings.items() if name not in sizes}
        changed = {name: list(values) for name, values in compared.items() if values[0] != values[1]}
        texts = [
            f"{name} was {_said(was)} when the checkpoint was saved and is {_said(value)}"
            for name, (was, value) in changed.items()
        ]
        if changed:
            texts[-1] += ": that holds for ids that come from now on, rows that are there stay as they are"
        if text := _changed_sums(table, settings["fallback_hashes"], engine, report):
            changed["fallback_hashes"] = [before.get("fallback_hashes", 1), settings["fallback_hashes"]]
            texts.append(text)
        if moved := _moved_shared_rows(table, settings, engine, report):
            changed["fallback_rows"] = [moved[0], settings["fallback_rows"]]
            texts.append(moved[1])
        is_empty = table in report.without_filter
        if is_empty:
            texts.append(
                "the checkpoint has no counts of lookups of ids without a row that fit (they are kept where the number "
                f"of shards stays): such an id needs admit_after={settings['admit_after']} lookups from here on"
            )
        if texts:
            data = {"table": table, "changed": changed, "counts_kept": not is_empty}
            text = f"table {table!r}: {'; '.join(texts)}"
            yield Event("vocabulary_changed", engine.progress.step, text, data, level="warning")


def _changed_sums(table: str, hashes: int, engine: Engine, report: Report) -> str:
    """What becomes of ids without a row whose shared rows are not those that they had; empty: they are the same."""
    schema, n_shards = report.manifest.schema, engine.model.tables.layout.n_shards
    was = next((one.shared_hashes for one in schema.tables if one.name == table), hashes)
    if was == hashes and (hashes == 1 or schema.n_shards == n_shards):
        return ""
    if was == hashes:
        return (
            f"the second shared row of an id without a row is another one in {n_shards} shards than in "
            f"{schema.n_shards}, and starts as zeros"
        )
    said = f"ids without a row had {was} shared row{'s' * (was > 1)} each when the checkpoint was saved, "
    if hashes == 1:
        return said + "and have the first of them: fallback_hashes=2 keeps both"
    return said + "and are sums of 2, of which the second starts as zeros: fallback_hashes=1 keeps what was there"


def _moved_shared_rows(table: str, settings: dict[str, Any], engine: Engine, report: Report) -> tuple[int, str] | None:
    """(shared rows in the checkpoint, what becomes of them), where their number here is no multiple; else None.

    With two hashes each has half of the rows, in equal parts in all shards.
    """
    schema, n_shards = report.manifest.schema, engine.model.tables.layout.n_shards
    saved = next((one for one in schema.tables if one.name == table), None)
    if saved is None:
        return None
    rows, hashes, was_rows = settings["fallback_rows"], settings["fallback_hashes"], saved.shared_rows * schema.n_shards
    was = was_rows // saved.shared_hashes
    if rows // hashes % was == 0:
        return None
    has_both = hashes == 1 or (saved.shared_hashes, schema.n_shards) == (hashes, n_shards)
    return was_rows, (
        f"{rows:,} shared rows are here, {was_rows:,} are in the checkpoint: many ids without a row find other shared "
        f"rows than those that they trained. fallback_rows={hashes * math.lcm(was, n_shards)}, or a multiple of it, "
        f"keeps {'them' if has_both else 'the first of each id'}"
    )


def _said(setting: Any) -> str:
    return f"{setting:g}" if isinstance(setting, float) else str(setting) or "none"


def _residuals_that_no_checkpoint_has(engine: Engine, missing: int) -> Iterator[Event]:
    step = engine.progress.step
    if missing:
        text = f"the checkpoint lacks what {_count(missing, 'worker')} had not sent"
        yield Event("residual_lost", step, text, {"workers": missing}, level="warning")
    if engine.model.row_coder is not None:
        text = (
            "what row compression had not sent yet is in no checkpoint, nor in memory that is kept: the gradients that "
            "waited in the workers' residuals of rows are lost, at most about one step's worth for each row"
        )
        yield Event("row_residual_lost", step, text, level="warning")


def _rolled_back(engine: Engine, facts: dict[str, Any]) -> Event:
    """Full recovery: of the same kind as a restart, since all that readers do about steps made again is the same."""
    text = (
        f"full recovery: all workers rolled back from step {facts['from_step']:,} to {facts['manifest']}, "
        f"{facts['rows_restored']:,} rows in {facts['seconds']:.1f} s; {facts['samples_redone']:,} samples are trained "
        f"again, each counts once; {facts['strategy_reason']}"
    )
    return Event("resumed", engine.progress.step, text, facts)


def _step_in_part(step: int, n_missed: int, n_shards: int) -> str:
    return (
        f"a worker died while it applied step {step:,}: {n_missed} of {n_shards} shards have this step in part or not "
        f"at all, which costs about {min(1.0, n_missed / n_shards):.0%} of the row updates of this one step at most. "
        "Dense parameters and all other rows have it, and its samples count as applied: none is lost or repeated. "
        "Nothing is to be done; the next steps train these rows as usual"
    )


def _of_a_change(engine: Engine, joined: JoinResult, before: int | None, residuals_missing: int = 0) -> Iterator[Event]:
    step = engine.progress.step
    was = "" if before is None else f", before {before}"
    facts: dict[str, Any] = {
        "workers": engine.world.size,
        "shard_steps_missed": joined.shard_steps_missed,
        "rows_lost": joined.rows_lost,
        "rows_restored": joined.rows_restored,
    }
    yield Event("membership", step, f"{_place(engine, joined)}{was}; resuming at step {step}", facts)
    if joined.shard_steps_missed and joined.rolled_back is None:
        text = _step_in_part(step, joined.shard_steps_missed, engine.model.tables.layout.n_shards)
        yield Event("shard_steps_missed", step, text, facts, level="warning")
    if engine.rollback.unreported is not None:
        facts_of_it = engine.rollback.unreported
        yield _rolled_back(engine, facts_of_it)
        so = f"So the job went back to {facts_of_it['manifest']}, and trains the steps since then again"
        yield from _passed_over(engine, facts_of_it["skipped"], so)
        yield from _residuals_that_no_checkpoint_has(engine, residuals_missing)
    loss, lost = _portion_lost(engine, joined)
    if joined.decision is not None and joined.rolled_back is None:
        loss |= joined.decision.event_data()
        lost += f"; {joined.decision.reason}"
    if joined.rows_restored:
        text = (
            f"{joined.rows_restored:,} rows that went down with their host came back from the checkpoint; "
            f"they are {joined.rows_age:.0f} steps old; {lost}"
        )
        data = {"age": joined.rows_age, "skipped": list(joined.skipped), **loss}
        manifests = ", ".join(joined.restored_from)
        yield Event("rows_restored", step, text, {**facts, **data, "manifest": manifests})
        so = f"So lost rows came back from {manifests}, without what they had learned since then"
        yield from _passed_over(engine, joined.skipped, so)
    if joined.rows_lost:
        why = "no checkpoint was configured" if checkpoints_of(engine) is None else "no checkpoint has them"
        why = joined.why_lost or why
        text = f"{joined.rows_lost:,} rows went down with their host and are reinitialised; {why}"
        if not joined.rows_restored:  # else one event reports both
            facts |= loss
            text += "" if joined.decision is None else f"; {joined.decision.reason}"
        yield Event("rows_lost", step, text, {**facts, "why": why}, level="warning")
    if (above := _above_target(engine, loss)) is not None:
        yield above


def _above_target(engine: Engine, loss: Mapping[str, Any]) -> Event | None:
    """A warning when this recovery has lost something, and all so far have lost more than is tolerable."""
    if not loss.get("pls") or loss["pls_total"] <= loss["target_pls"]:
        return None
    text = (
        f"the recoveries so far have a PLS of {loss['pls_total']:.3g}, above target_pls={loss['target_pls']:g}: "
        "save more often (a shorter every_s, or fewer every_steps), or recover with recovery='full'"
    )
    checkpoints = checkpoints_of(engine)
    if checkpoints is not None and checkpoints.callback.total_samples is None:
        text += (
            "; CheckpointCallback(total_samples=...) is not given, so that this is of the samples so far, and too much"
        )
    return Event("pls_above_target", engine.progress.step, text, dict(loss), level="warning")


def _portion_lost(engine: Engine, joined: JoinResult) -> tuple[dict[str, Any], str]:
    """CPR's portion of lost samples, and in words: by this recovery, and by all so far. Empty without checkpoints.

    Each row from its own last save; of all samples of the planned training, or, where that number is not configured, of
    those so far.
    """
    account, checkpoints = engine.progress.account, checkpoints_of(engine)
    if checkpoints is None:
        return {}, ""
    now, so_far = (
        joined.samples_lost(account.applied, engine.model.tables.layout.n_rows),
        checkpoints.schedule.samples_lost,
    )
    given = checkpoints.callback.total_samples
    total = max(1, account.total, given or 0)
    what = "of the planned training" if given else "so far (CheckpointCallback(total_samples=...) is not given)"
    text = f"PLS {now / total:.3g}, {so_far / total:.3g} with all recoveries so far, of {total:,} samples {what}"
    target = checkpoints.callback.given.target_pls
    return {"pls": now / total, "pls_total": so_far / total, "target_pls": target, "total_samples": total}, text


def _place(engine: Engine, joined: JoinResult) -> str:
    return f"{_count(engine.world.size, 'worker')} on {_count(joined.n_hosts, 'host')}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n > 1 else ''}"
