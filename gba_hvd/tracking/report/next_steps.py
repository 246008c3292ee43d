"""What a reader of the report can do next: decided from the records alone, each step with its reason and a command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gba_hvd.tracking.report.overview import open_warnings
from gba_hvd.tracking.report.tables import counted
from gba_hvd.tracking.run_history import END_NOT_REPORTED

if TYPE_CHECKING:
    from gba_hvd.tracking.run_history import RunHistory

_ENDED = ("FINISHED", "FAILED", "KILLED")
_MANY_DROPPED = 0.05  # of all samples


@dataclass(frozen=True)
class NextStep:
    text: str
    command: str = ""


_NO_CHECKPOINT = NextStep(
    "The job saved no checkpoint, so it starts over. Register one, and the next failure costs minutes:",
    "recovery.CheckpointCallback(URL, every_s=60)",
)


def next_steps(story: RunHistory) -> list[NextStep]:
    """The most urgent first."""
    if story.status not in _ENDED:
        return [*_of_warnings(story), NextStep("The job has not ended: see where it stands.", _status(story))]
    steps = [*_of_an_end(story), *_of_warnings(story), *_of_losses(story), *_of_the_model(story), *_of_quality(story)]
    return steps or [NextStep("Nothing is left to do.")]


def _status(story: RunHistory) -> str:
    return f"gba-hvd status {shlex.quote(story.job_id)}" if story.job_id else "gba-hvd status"


def _of_an_end(story: RunHistory) -> list[NextStep]:
    if story.status == "FINISHED":
        return []
    step, place = story.newest_checkpoint, story.checkpoint_place
    newest = story.events_of("started", "membership", "failed", "interrupted", "not_saved")[-1:]
    if newest and newest[0].get("data", {}).get("to_repair"):
        begins = "" if step is None else f": it resumes from the newest checkpoint, so far of step {step:,}"
        text = (
            f"Repair first what the job ended with, which is met again otherwise. Then start the same command{begins}."
        )
        return [NextStep(text), *([_NO_CHECKPOINT] if step is None and place == "" else [])]
    look = f"gba-hvd checkpoint ls {shlex.quote(place)}" if place else "gba-hvd checkpoint ls URL"
    if step is not None and story.reason == END_NOT_REPORTED:
        text = (
            f"Start the same command again: it resumes from the checkpoint of step {step:,}, or from a newer one. The "
            "records end with the process that reported; other workers may have saved after that. See what is there:"
        )
        return [NextStep(text, look)]
    if step is not None:
        return [NextStep(f"Start the same command again: it resumes from the checkpoint of step {step:,}.")]
    if place != "":
        text = (
            "Start the same command again: it resumes from the newest checkpoint, if there is one. The records name "
            "none, but one may have been saved and not reported. See what is there:"
        )
        return [NextStep(text, look)]
    return [_NO_CHECKPOINT]


def _of_warnings(story: RunHistory) -> list[NextStep]:
    n = len(open_warnings(story))
    return [NextStep(f"Read the table of warnings ({n:,} not over): each says what to do.")] if n else []


def _of_losses(story: RunHistory) -> list[NextStep]:
    steps = []
    if any(one["rows_lost"] for one in story.recoveries) and not story.checkpoints:
        steps.append(NextStep("Rows of a lost host started over, since there was no checkpoint:",
                              "recovery.CheckpointCallback(URL, every_s=60)"))  # fmt: skip
    elif story.pls:
        text = f"Rows came back older than they were (PLS {story.pls:.5f}). If that costs quality, save more often:"
        steps.append(NextStep(text, "gba-hvd plan --help"))
    account = story.account
    n_stale = story.dropped_for.get("stale", 0)
    if account and n_stale > _MANY_DROPPED * account["total"]:
        share = n_stale / account["total"]
        below = "ages of dense values" if story.params.get("staleness_of") == "values" else "staleness"
        steps.append(NextStep(f"{share:.0%} of the samples were too stale and dropped: see the {below} below."))
    return steps


def _not_the_best(story: RunHistory) -> str:
    """What to know of a checkpoint that was saved after the best epoch."""
    best, kept = story.best, story.kept_best
    newest = story.checkpoints[-1].get("step", 0)
    if kept is not None and kept.saved_step != newest:
        return f", which is not the best model: --step {kept.saved_step} is, with {kept.words}"
    if best is None or newest <= best.step or kept is not None or story.adds_an_epoch:
        return ""
    return (
        f", which is not the model of {best.name}, the best one (--step N: an older one that `gba-hvd checkpoint ls` "
        "has)"
    )


def _of_the_model(story: RunHistory) -> list[NextStep]:
    logged = story.logged_model
    if logged is not None:
        name, version = logged.get("name"), logged.get("version")
        uri = f"models:/{name}/{version}" if name and version else str(logged["model_uri"])
        serve = NextStep(f"Serve the model{_of_step(logged)}, or score a data frame with mlflow.pyfunc.load_model:",
                         f"mlflow models serve --env-manager local -m {shlex.quote(uri)}")  # fmt: skip
        return [*_of_a_better_model(story), serve]
    if story.model_awaited:
        return [NextStep("The model is still being logged: the report is written again when it is there.")]
    if story.checkpoints:
        url = shlex.quote(str(story.checkpoints[-1].get("url") or "URL"))
        text = f"No model was logged with this run. Make one from the newest checkpoint{_not_the_best(story)}:"
        return [NextStep(text, f"gba-hvd model export {url} MODEL_URL --build FILE.py:CALLABLE")]  # fmt: skip
    if story.status == "FINISHED":
        return [NextStep("Neither a model nor a checkpoint was saved with this run. Log the model of the next job:",
                         "gba_hvd.MLflowCallback(log_model=gba_hvd.LogModel(...))")]  # fmt: skip
    return []


def _of_step(logged: Mapping[str, object]) -> str:
    step = logged.get("model_step")
    return f" of step {step:,}" if isinstance(step, int) else ""


def _of_a_better_model(story: RunHistory) -> list[NextStep]:
    """Where the logged model is not the best one: how to get that, now and in the next job."""
    if not (better := story.better_than_logged):
        return []
    kept, logged = story.kept_best, story.logged_model or {}
    text = f"The logged model is{_of_step(logged)}. The best one was {better}"
    if kept is None:
        return [NextStep(f"{text}, and no checkpoint was kept of it. For the next job:",
                         "CheckpointCallback(URL, keep_best=METRIC) and LogModel(of='best')")]  # fmt: skip
    url = shlex.quote(str(story.checkpoint_place or "URL"))
    command = f"gba-hvd model export {url} MODEL_URL --step {kept.saved_step} --build FILE.py:CALLABLE"
    return [
        NextStep(f"{text}. Make a model of it (LogModel(of='best') logs and registers it in the next job):", command)
    ]


def _of_quality(story: RunHistory) -> list[NextStep]:
    best, measured = story.best, story.measured
    if best is None:
        return [NextStep("How good the model is is not known: report scores of data it was not trained on:",
                         "state.report(valid_auc=...)")]  # fmt: skip
    if story.adds_an_epoch:  # of other data, to which the epochs before do not compare
        return []
    after = [one for one in measured if one.step > best.step]
    if story.status == "FINISHED" and len(measured) > 1 and not after:
        return [NextStep("The last epoch is the best one: more epochs may be better still.")]
    if len(after) >= 2:
        return [NextStep(f"No epoch after {best.name} was better: {counted(len(after), 'epoch')} could be saved.")]
    return []
