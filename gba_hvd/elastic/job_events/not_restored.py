"""What no recovery brings back: newer checkpoints that cannot be used, the step of some rows, gradients that waited in
residuals.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.elastic.job_events.words import count
from gba_hvd.training.engine import Engine
from recovery.redaction import redacted
from recovery.restore import Report


def passed_over(engine: Engine, skipped: Sequence[str], so: str, steps_lost: int | None = None) -> Iterator[Event]:
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


def rows_of_other_steps(engine: Engine, report: Report, n_hosts: int) -> Iterator[Event]:
    """A warning of rows that were saved at another step than the dense part. Not of asynchronous modes, where rows
    and dense values never are of one step.
    """
    step, by_step, about = report.step, report.of_other_steps, report.manifest.about
    if about.get("mode") != "allreduce" or not by_step:
        return
    n_ahead = sum(n for at, n in by_step.items() if at > step)
    n_behind = sum(by_step.values()) - n_ahead
    parts, here = list[str](), " of this host" * (n_hosts > 1)
    if n_ahead:
        steps = f"step {step + 1:,}" if max(by_step) == step + 1 else f"steps {step + 1:,} to {max(by_step):,}"
        parts.append(f"{n_ahead:,} rows{here} are as of {steps}: what was trained of them there is trained twice")
    if n_behind:
        parts.append(f"{n_behind:,} rows{here} are as of step {min(by_step):,}, and miss what was trained since")
    if about.get("last_gasp"):
        way = (
            "The servers made this checkpoint when the workers had died within a step. preemption_s= saves between two "
            "steps before workers leave; a restart while memory is kept continues without this"
        )
    else:
        way = "They were read while training continued: CheckpointCallback(strict=True) avoids it"
    text = f"the dense part of {report.manifest.name} is of step {step:,}, and {'; '.join(parts)}. {way}"
    data = {"rows_ahead": n_ahead, "rows_behind": n_behind, "manifest": report.manifest.name}
    yield Event("rows_of_other_steps", engine.progress.step, text, data, level="warning")


def residuals_that_no_checkpoint_has(engine: Engine, missing: int) -> Iterator[Event]:
    step = engine.progress.step
    if missing:
        text = f"the checkpoint lacks what {count(missing, 'worker')} had not sent"
        yield Event("residual_lost", step, text, {"workers": missing}, level="warning")
    if engine.model.row_coder is not None:
        text = (
            "what row compression had not sent yet is in no checkpoint, nor in memory that is kept: the gradients that "
            "waited in the workers' residuals of rows are lost, at most about one step's worth for each row"
        )
        yield Event("row_residual_lost", step, text, level="warning")


def residuals_lost(engine: Engine, n_workers: int, lost: float | None) -> None:
    """What compression had not sent yet in workers that are gone; lost: the sum of its magnitudes, if known."""
    if n_workers and lost != 0:
        known = "how much is not known" if lost is None else f"their magnitudes add up to {lost:.3g}"
        text = f"gradients that compression held back in {count(n_workers, 'worker')} that are gone are lost; {known}"
        engine.emit(
            Event(
                "residual_lost", engine.progress.step, text, {"workers": n_workers, "residual": lost}, level="warning"
            )
        )
