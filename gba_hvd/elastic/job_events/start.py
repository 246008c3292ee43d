"""What the first world of a launch reports: where it begins, with what, and what was restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.elastic import learning_rates
from gba_hvd.elastic.job_events.not_restored import (
    passed_over,
    residuals_that_no_checkpoint_has,
    rows_of_other_steps,
)
from gba_hvd.elastic.job_events.settings import settings_of
from gba_hvd.elastic.job_events.vocabularies import changed_vocabularies
from gba_hvd.elastic.job_events.words import count, mode_of, place_of
from gba_hvd.elastic.launcher_start import launcher_started_s
from gba_hvd.elastic.learning_rates import ReplacedRates
from gba_hvd.elastic.training_state import Restored
from gba_hvd.membership import JoinResult
from gba_hvd.shm.layout import TableSpec
from gba_hvd.switching.requests import switching_of
from gba_hvd.tracking.recovery_records import LAUNCHER_STARTED
from gba_hvd.training.engine import Engine
from gba_hvd.training.parameter_watch import names_in_words
from recovery.redaction import redacted
from recovery.restore import Report

_TABLES_NAMED = 8
_VALUES_NAMED = 8
_RATES: tuple[str, ...] = ("dense_lr", "row_optimizer", "own_row_optimizers")  # settings that have learning rates


def training_begins(engine: Engine, replaced: ReplacedRates | None) -> None:
    """Report learning rates that are not the script's, or not the saved ones. When the training function, which may set
    others, has begun.
    """
    if replaced is None:
        return
    settings = settings_of(engine)
    rates = {name: settings[name] for name in _RATES if name in settings}
    for event in learning_rates.events_of(replaced, engine.model.optimizer, rates, engine.progress.step):
        engine.emit(event)


def parameters_changed(engine: Engine, untrained: list[str]) -> None:
    """Report parameters that nothing trains, and that the model did not have when training began."""
    engine.emit(_untrained(engine, untrained))


def _untrained(engine: Engine, names: list[str]) -> Event:
    text = (
        f"{names_in_words(names)}: parameters of the model with requires_grad that are in no group of the "
        "DistributedOptimizer. Nothing trains them, or an optimizer that workers do not share: then their models drift "
        "apart, as they do where a module is replaced with random values of each worker. Complete the model and give "
        "all to the optimizer before state.sync(), which elastic.run calls, or say requires_grad_(False)"
    )
    return Event("parameters_untrained", engine.progress.step, text, {"parameters": names}, level="warning")


def of_a_start(
    engine: Engine, joined: JoinResult, residuals_missing: int, restored: Restored | None
) -> Iterator[Event]:
    step, n_workers = engine.progress.step, engine.world.size
    text = (
        f"{place_of(engine, joined)}, job {engine.job.id}: {_what_is_trained(engine)}{_why_from_step_0(engine, joined)}"
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
        yield _untrained(engine, engine.model.untrained)
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
        facts |= {"seconds": report.seconds, "skipped": skipped, **engine.progress.delays()}
        facts["samples_then"] = engine.progress.account.applied
        yield Event("resumed", step, text, facts)
        steps_lost, so = _steps_lost(engine, report)
        yield from passed_over(engine, skipped, so, steps_lost)
        yield from changed_vocabularies(engine, report)
        yield from rows_of_other_steps(engine, report, joined.n_hosts)
    if joined.resumed is not None or joined.taken is not None:
        yield from residuals_that_no_checkpoint_has(engine, residuals_missing)
    if joined.taken is not None:
        text = f"resuming at step {step} where the launch before stood: {joined.taken.reason}"
        text += _beside_rows(engine, restored)
        facts = {"manifest": "", "from_memory": True, "rows_restored": 0, "rows_lost": 0}
        facts |= {"shard_steps_missed": joined.shard_steps_missed, **engine.progress.delays()}
        yield Event("resumed", step, text, facts)


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


def _steps_lost(engine: Engine, report: Report) -> tuple[int | None, str]:
    """Of a job that resumes: steps that only checkpoints have which cannot be used; and what becomes of them."""
    step = engine.progress.step
    newest = max((one.step for one in report.skipped if one.step is not None), default=None)
    if newest is None:
        return None, f"So what was trained after step {step:,} is lost, and trained again"
    lost = max(0, newest - step)
    return lost, f"So {count(lost, 'step')}, from {step:,} to {newest:,}, are lost, and trained again"


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
    frozen = "" if model.tables.n_trained else " (frozen: requires_grad_(False))"
    mode = mode_of(engine) if switching is None else switching.mode_at_start(engine.progress.step, mode_of(engine))
    saved = "no checkpoints" if checkpoints is None else f"checkpoints in {redacted(checkpoints.callback.url)}"
    if switching is not None and switching.wire == "plain":
        saved += (
            "; wire 'plain': what hosts send each other in asynchronous modes is neither secret nor protected against "
            "changes on the network, only processes with the job's key are let in"
        )
    return (
        f"mode {mode}, global batch {model.global_batch} in micro-batches of {model.micro_batch}, tables "
        f"{', '.join(tables[:_TABLES_NAMED])}{more}{frozen}, {saved}"
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
