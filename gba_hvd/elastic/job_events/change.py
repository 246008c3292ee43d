"""What a later world reports: who is in it, which rows came back, and which did not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.elastic.job_events.not_restored import passed_over, residuals_that_no_checkpoint_has
from gba_hvd.elastic.job_events.words import place_of
from gba_hvd.membership import JoinResult
from gba_hvd.training.engine import Engine


def of_a_change(engine: Engine, joined: JoinResult, before: int | None, residuals_missing: int = 0) -> Iterator[Event]:
    step = engine.progress.step
    was = "" if before is None else f", before {before}"
    facts: dict[str, Any] = {
        "workers": engine.world.size,
        "shard_steps_missed": joined.shard_steps_missed,
        "rows_lost": joined.rows_lost,
        "rows_restored": joined.rows_restored,
    }
    of_world: dict[str, Any] = {"hosts": joined.n_hosts}
    if engine.progress.same_workers:
        was, of_world = ", the same as before", of_world | {"same_workers": True}
    yield Event("membership", step, f"{place_of(engine, joined)}{was}; resuming at step {step}", facts | of_world)
    if joined.shard_steps_missed and joined.rolled_back is None:
        text = _step_in_part(step, joined.shard_steps_missed, engine.model.tables.layout.n_shards)
        yield Event("shard_steps_missed", step, text, facts, level="warning")
    if engine.rollback.unreported is not None:
        facts_of_it = engine.rollback.unreported
        yield _rolled_back(engine, facts_of_it)
        so = f"So the job went back to {facts_of_it['manifest']}, and trains the steps since then again"
        yield from passed_over(engine, facts_of_it["skipped"], so)
        yield from residuals_that_no_checkpoint_has(engine, residuals_missing)
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
        yield from passed_over(engine, joined.skipped, so)
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


def of_a_continuation(engine: Engine, joined: JoinResult) -> Iterator[Event]:
    """The job had ended in this process, which trains on."""
    step = engine.progress.step
    facts = {"workers": engine.world.size, "shard_steps_missed": joined.shard_steps_missed}
    text = f"training continues in this process from step {step:,}, with the rows and all else that it has"
    yield Event("continued", step, f"{place_of(engine, joined)}: {text}", facts)
    if joined.shard_steps_missed:
        text = (
            f"an interruption cut step {step + 1:,} short: {joined.shard_steps_missed} of "
            f"{engine.model.tables.layout.n_shards} shards have it in part, and are not trained in it again. Nothing "
            "is to be done; the next steps train these rows as usual"
        )
        yield Event("shard_steps_missed", step, text, facts, level="warning")


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
