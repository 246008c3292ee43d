"""Full recovery: what a worker takes over of the checkpoint that all roll back to, and what it forgets.

`membership.full_recovery` has the order; this is its last part, on one worker, when all rows are as of the checkpoint.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.elastic.training_state import TrainingState
from gba_hvd.membership import JoinResult
from gba_hvd.training.engine import Engine
from recovery import state_codec
from recovery.redaction import redacted


def load(engine: Engine, state: TrainingState, joined: JoinResult) -> None:
    """On the source: take over the checkpoint's training state. The others get it from here.

    The account is the checkpoint's, so that a sample that is trained again counts once; how many these are is counted
    apart (`SampleAccount.redone`). What is of the running job stays: its claim, what it measured, the mode that an
    operator or the script asks for.
    """
    back, checkpoints, progress = joined.rolled_back, checkpoints_of(engine), engine.progress
    assert back is not None and back.state is not None and checkpoints is not None and joined.decision is not None
    before, step, counts = copy(progress.account), progress.step, (progress.restarts, progress.changes)
    pauses = engine.reports.pauses.state_dict()
    forget_residuals(engine)
    engine.model.tables.on_device.forget()
    where = f"the checkpoint at {redacted(checkpoints.store.url)} ({back.manifest})"
    state.resume(state_codec.decode(back.state, where), where)
    state.restored = None  # of a start only
    progress.account.rolled_back(before)
    progress.restarts, progress.changes = counts
    engine.reports.pauses.load_state_dict(pauses, with_open=True)
    checkpoints.rolled_back_to(back.epoch, back.number)
    checkpoints.schedule.rolled_back_to(back.samples_lost, back.seconds, engine.reports.seconds_since_step)
    engine.rollback.number, engine.rollback.decision = engine.rollback.number + 1, None
    # One that was complete and that was not reported is reported with this one.
    earlier = engine.rollback.unreported or {"from_step": step, "samples_redone": 0}
    total = max(1, progress.account.total, checkpoints.callback.total_samples or 0)
    facts: dict[str, Any] = {
        "manifest": back.manifest, "rows_restored": back.rows, "rows_lost": 0, "age": back.age,
        "seconds": back.seconds, "skipped": list(back.skipped), "from_step": max(step, earlier["from_step"]),
        "samples_redone": progress.account.redone - before.redone + earlier["samples_redone"],
        "samples_redone_total": progress.account.redone,
        "pls": 0.0, "pls_total": back.samples_lost / total, "total_samples": total,
        "target_pls": checkpoints.callback.given.target_pls, **joined.decision.event_data(),
    }  # fmt: skip
    engine.rollback.unreported = facts
    engine.rolled_back()


def forget(engine: Engine) -> None:
    """On every other worker that had a state, when it has the source's."""
    forget_residuals(engine)
    engine.model.tables.on_device.forget()
    engine.rolled_back()


def forget_residuals(engine: Engine) -> None:
    """What compression has not sent is of steps that do not count any more; the checkpoint has its own."""
    if engine.model.compression is not None:
        engine.model.compression.feedback.clear()
    if engine.model.row_coder is not None:
        engine.model.row_coder.clear()
