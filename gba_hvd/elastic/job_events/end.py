"""How a job ended, its account, and what the same command does next."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.elastic import endings
from gba_hvd.elastic.job_events.words import count, mode_of
from gba_hvd.elastic.job_health import health_of
from gba_hvd.epoch import position_in
from gba_hvd.errors import BadInput
from gba_hvd.switching.requests import ModeRequests, switching_of
from gba_hvd.training.engine import Engine

log = logging.getLogger("gba_hvd")


def ended(engine: Engine, status: str, error: BaseException | None) -> None:
    """Report to all callbacks how the job ended, and its account."""
    kinds = {"FINISHED": "finished", "KILLED": "interrupted", "NOT_SAVED": "not_saved"}
    kind = kinds.get(status, "failed")
    ends_alone = kind == "failed" and (engine.world.size == 1 or not endings.is_elastic())  # else others continue
    if kind != "failed" or ends_alone:
        engine.reports.job_ends(finished=kind == "finished")
    if kind == "finished":  # (it may wait, for the rows of neighbours)
        engine.reports.last_vocabularies()
    account = {f"samples_{k}": getattr(engine.progress.account, k) for k in ("total", "applied", "dropped", "lost")}
    if engine.progress.account.redone:
        account["samples_redone"] = engine.progress.account.redone
    word = "finished" if error is None else f"{type(error).__name__}: {error}"
    if kind == "interrupted":
        word = f"by {_interruption(str(error))}"
    facts = {
        **account,
        "restarts": engine.progress.changes,
        "refused": engine.progress.refused,
        "reissued": engine.progress.reissued,
        "lasted_s": max(0.0, time.time() - (engine.progress.launched_unix_s or time.time())),
        "dropped_for": engine.progress.account.dropped_for,
        "pauses": [[one.cause, one.seconds, one.step] for one in engine.reports.pauses.over],
        **engine.progress.delays(),
    }
    facts["arrivals"] = [[[age, round(share, 6)] for age, share in step] for step in engine.progress.arrivals]
    is_refused = isinstance(error, BadInput) and not _has_begun(engine)  # and would be again
    to_repair = kind == "failed" and endings.is_to_repair(error)
    continued_by = (
        _what_continues(engine, to_repair) if kind == "interrupted" or (ends_alone and not is_refused) else ""
    )
    if continued_by:
        facts["goes_on"] = continued_by + (_steps_not_saved(engine) if kind == "interrupted" else "")
    if to_repair:
        facts["to_repair"] = True
    if status == "FINISHED":
        left_early(engine)
    if engine.progress.left.words:
        facts["left_early"] = engine.progress.left.words
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


def left_early(engine: Engine, epoch: int | None = None) -> None:
    """Report an epoch that was left with steps to come. epoch: the one that begins; None: the training function ends,
    as it may between two steps.

    Workers other than rank 0 cannot know whether they left alone: the log of one that did is to say so.
    """
    if (left := engine.progress.left.settle(epoch)) is None:
        return
    rank, at_end = engine.world.rank, epoch is None
    if rank and not left.is_within_step:
        log.info("rank %d %s", rank, left.words_alone)
    elif left.is_within_step or not at_end:
        text = f"rank {rank} {left.words_alone}" if rank else left.words(at_end=at_end)
        event = Event("epoch_unfinished", engine.progress.step, text, left.facts)
        if left.steps_together:  # else no worker can tell where a step ends
            event = replace(event, level="warning")
        engine.reports.once(event, only_here=True)


def _nothing_trained(engine: Engine) -> Event | None:
    """A launch that finished without a step: the epochs that it asked for were complete, or it asked for none."""
    progress = engine.progress
    if progress.launched_at != progress.step:
        return None
    epochs = progress.complete_before
    text = (
        f"this launch trained no step: {_of_complete_epochs(epochs, progress.step) if epochs else _of_no_epoch(engine)}"
    )
    return Event("nothing_trained", progress.step, text, {"epochs": epochs}, level="warning")


def _of_complete_epochs(epochs: Sequence[int], step: int) -> str:
    following = max(epochs) + 1
    which = f"epoch {epochs[0]} was" if len(epochs) == 1 else f"epochs {', '.join(map(str, epochs))} were"
    return (
        f"{which} complete in what it resumed from (step {step}). New data is trained in the next epoch: `for "
        f"state.epoch in range({following}, ...)`. If a launch that had finished was repeated, nothing is missing"
    )


def _of_no_epoch(engine: Engine) -> str:
    progress = engine.progress
    asked = "its script called batches() for no epoch"
    if progress.epoch is not None:
        asked = f"nothing of epoch {progress.epoch} was left, or its loop ended before the first step"
    position = position_in(progress.state_dict())
    if position is None:
        return f"{asked}, and no launch before has trained one"
    stands = f"{asked}. The job stands at step {progress.step} ({position.words})"
    if not position.is_complete:
        return f"{stands}. What is left of epoch {position.epoch} is trained by a launch that asks for this epoch"
    return (
        f"{stands}. If it was to evaluate only, or a launch that had finished was repeated, nothing is missing. Data "
        "of an earlier epoch that was never trained is trained in a later one: `for state.epoch in "
        f"range({position.epoch + 1}, ...)`. Corrected data of an earlier epoch is trained in its place, after "
        "`gba-hvd checkpoint rollback` to a checkpoint from before it"
    )


def _has_begun(engine: Engine) -> bool:
    """Whether this worker ever had a state to train."""
    return engine.progress.launched_at is not None or engine.progress.step > 0


def _never_switched(engine: Engine) -> Event | None:
    """Of a launch in mode "auto" that trained and stayed in its mode: the reason of the newest decision."""
    switching, step = switching_of(engine), engine.progress.step
    if switching is None or engine.progress.launched_at == step or not _has_begun(engine):
        return None
    if not (why := switching.why_never_switched(_obstacle(engine))):
        return None
    return Event("auto_stayed", step, f'mode "auto" never left {mode_of(engine)}: {why}', {"mode": mode_of(engine)})


def _interruption(error: str) -> str:
    """What a person reads. A launcher passes Ctrl-C on to its workers as SIGTERM."""
    if "HOROVOD_RANK" in os.environ and error.startswith(endings.SIGTERM):
        return f"Ctrl-C or SIGTERM{error.removeprefix(endings.SIGTERM)}"
    return error or "Ctrl-C"


def _what_continues(engine: Engine, to_repair: bool = False) -> str:
    """Where the same command begins; empty where it starts over and nothing was trained. On the chief.

    to_repair: it would end as this launch, unless something is changed first, the newest checkpoint perhaps
    """
    if engine.world.rank != 0:
        return ""
    step, checkpoints = engine.progress.step, checkpoints_of(engine)
    if endings.is_interactive():
        return f"a further call in this process continues at step {step:,}, with the rows that it has" if step else ""
    if why := endings.why_at_step_0(engine):
        found = [f"starts at step 0 again, since {why}{endings.may_yet_be_saved(engine)}"] if step > 0 else []
    else:
        assert checkpoints is not None
        newest = f"step {checkpoints.schedule.saved_step:,}"
        at = f"the newest checkpoint, so far of {newest}" if to_repair else f"{newest}, of the newest checkpoint"
        found = [f"resumes from {at}{endings.may_yet_be_saved(engine)}"]
    if kept := endings.kept_in_memory(engine):
        found.insert(0, kept)
    when = "when that is repaired and all workers have ended" if to_repair else "when all workers have ended"
    return f"{when}, the same command {', else '.join(found)}" if found else ""


def _steps_not_saved(engine: Engine) -> str:
    """How an interruption would cost no step, where it does. On the chief."""
    checkpoints = checkpoints_of(engine)
    if (
        endings.is_interactive()
        or checkpoints is None
        or checkpoints.callback.preemption_s is not None
        or not checkpoints.callback.resume
    ):
        return ""
    n_steps = engine.progress.step - max(0, checkpoints.schedule.saved_step)
    if n_steps < 1:
        return ""
    which = f"{count(n_steps, 'step')} {'are' if n_steps > 1 else 'is'}"
    return (
        f". {which} in no checkpoint, and computed again from there: "
        "CheckpointCallback(preemption_s=4) saves before workers leave"
    )


def _obstacle(engine: Engine) -> str:
    """Why an asynchronous mode that waits for servers is not on; empty where none waits."""
    requests = engine.participant(ModeRequests)
    if requests is None or not requests.waiting:
        return ""
    own = "" if engine.host.server is None else engine.host.server.why_not_ready(to_enter=True)
    if not own and engine.world.size == 1 + len(engine.host.neighbours):  # one host, and its servers are up by now
        return "the companion servers came up when the job had ended, or nearly: it was too short"
    return f"the companion servers were not up at the end; {own or 'the log of the workers of other hosts says why'}"
