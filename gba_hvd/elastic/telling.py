"""What callbacks are told of the world and of the end: the job they are in, who came and went, and what that cost.

Nothing is decided here; texts and numbers are made of what `membership` found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gba_hvd.callbacks import Event, Job
from gba_hvd.engine import Engine
from gba_hvd.membership import Joined


def world_formed(engine: Engine, joined: Joined, before: int | None, residuals_missing: int = 0) -> None:
    """Tell all callbacks where this worker stands now, and what became of the job.

    before: workers in the world that this worker was in, if it was in one.
    residuals_missing: in the checkpoint that the job goes on from: of so many workers
    """
    world = engine.world
    job = Job(engine.job_id, world.rank, world.size, world.local_rank, world.host, joined.leads_host, _settings(engine))
    for callback in engine.callbacks:
        callback.on_job(job)
    if engine.checkpoints is not None and world.rank == 0:
        engine.checkpoints.plan_pace(joined.n_hosts)
    if joined.is_restart:
        events = _of_a_change(engine, joined, before)
    else:
        events = _of_a_start(engine, joined, residuals_missing)
    for event in events:
        engine.emit(event)


def residuals_lost(engine: Engine, n_workers: int, lost: float | None) -> None:
    """What workers that are gone had not sent yet, if any are; lost: the sum of |residual|, if known."""
    if n_workers:
        known = "how much is not known" if lost is None else f"{lost:.3g} of |g|"
        text = f"{_count(n_workers, 'worker')} took gradients along that were not sent: {known}"
        engine.emit(Event("residual_lost", engine.step, text, {"workers": n_workers, "residual": lost}))


def ended(engine: Engine, status: str, error: BaseException | None) -> None:
    """Tell all callbacks how the job ended, and its account."""
    account = {f"samples_{k}": getattr(engine.account, k) for k in ("total", "applied", "dropped", "lost")}
    word = "finished" if error is None else f"{type(error).__name__}: {error}"
    facts = {**account, "restarts": engine.restarts, "refused": engine.refused, "reissued": engine.reissued}
    facts["lags"] = {str(k): n for k, n in sorted(engine.lags.items())}
    facts["staleness"] = {str(k): n for k, n in sorted(engine.staleness.items())}
    engine.emit(Event("finished" if error is None else "failed", engine.step, word, facts))
    for callback in engine.callbacks:
        callback.on_end(status, error)


def _settings(engine: Engine) -> dict[str, Any]:
    """What describes the run. Nothing that changes while it goes on: MLflow keeps the first value of a parameter."""
    of_the_mode = {"mode": "allreduce"} if engine.switching is None else engine.switching.describe()
    return {
        "tables": {t.name: [t.n_rows, t.dim] for t in engine.tables.layout.tables},
        "n_shards": engine.tables.layout.n_shards,
        "global_batch": engine.global_batch,
        "micro_batch": engine.micro_batch,
        "optimizer": type(engine.optimizer).__name__,
        "row_optimizer": repr(engine.tables.optimizer),
        "row_average": engine.row_average,
        "compression": "none" if engine.compression is None else engine.compression.spec.exactly,
        "row_compression": engine.row_compression.exactly,
        **{name: value for name, value in of_the_mode.items() if value is not None},
    }


def _of_a_start(engine: Engine, joined: Joined, residuals_missing: int) -> Iterator[Event]:
    step, n_workers = engine.step, engine.world.size
    yield Event("started", step, f"{_place(engine, joined)}, job {engine.job_id}", {"workers": n_workers})
    if (report := joined.resumed) is not None:
        name = report.manifest.name
        text = f"going on at step {step} from {name}: {report.n_rows:,} rows in {report.seconds:.1f} s"
        skipped = [f"{one.name}: {one.why}" for one in report.skipped]
        told = {"manifest": name, "rows_restored": report.n_rows, "rows_lost": report.n_lost, "age": report.age.mean}
        told |= {"seconds": report.seconds, "skipped": skipped}
        yield Event("resumed", step, text, told)
    if residuals_missing:
        text = f"the checkpoint lacks what {_count(residuals_missing, 'worker')} had not sent"
        yield Event("residual_lost", step, text, {"workers": residuals_missing})
    if joined.taken is not None:
        text = f"going on at step {step} where the lost job stood: {joined.taken.reason}"
        lost = {"rows_restored": 0, "rows_lost": 0, "shard_steps_missed": joined.shard_steps_missed}
        yield Event("resumed", step, text, {"manifest": "", "from_memory": True, **lost})


def _of_a_change(engine: Engine, joined: Joined, before: int | None) -> Iterator[Event]:
    step = engine.step
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
        yield Event("shard_steps_missed", step, text, facts)
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
        why = "no checkpoint was configured" if engine.checkpoints is None else "no checkpoint has them"
        why = joined.why_lost or why
        text = f"{joined.rows_lost:,} rows went down with their host and begin anew; {why}"
        yield Event("rows_lost", step, text, {**facts, "why": why})


def _pls(engine: Engine, joined: Joined) -> float:
    """Portion of lost samples, of all so far (CPR): each host's rows lost what came after their checkpoint."""
    n_rows = sum(table.n_rows for table in engine.tables.layout.tables)
    lost = sum((engine.account.applied - samples) * n for samples, n in joined.refilled)
    return lost / n_rows / max(1, engine.account.total)


def _place(engine: Engine, joined: Joined) -> str:
    return f"{_count(engine.world.size, 'worker')} on {_count(joined.n_hosts, 'host')}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n > 1 else ''}"
