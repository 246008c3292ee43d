"""`CheckpointCallback`: what a training script says about its checkpoints. The training framework acts on it.

Nothing is saved here: the framework that runs the callback (gba_hvd) asks `due`, has its servers save, and reports how
it went. For a training loop of your own there is `Checkpointer`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from typing import Any

from recovery.catalog.best_so_far import Best, BestSoFar
from recovery.catalog.best_step import UnsavedBest
from recovery.config import Config
from recovery.errors import BadInput, refuse_unknown
from recovery.old_names import accepts
from recovery.policies import is_lossless
from recovery.redaction import redacted
from recovery.schedule.adaptive import FIRST_INTERVAL_S, PLANNED_POLICY, Goals
from recovery.schedule.costs import STRATEGIES

log = logging.getLogger("recovery")


@accepts(last_gasp_s="final_checkpoint_s", memory_share="retain_state_share")
class CheckpointCallback:
    """Save to `url` and, when a job starts, resume from the newest good checkpoint there.

    url: a folder, or what fsspec knows: s3://bucket/job, gs://..., memory://...; one for each job. A relative folder is
        taken from the working directory now.
    every_s, every_steps: a checkpoint is due after so long since the last one began; the first to come counts. With
        neither, it is planned from what saving and loading was measured to take (`recovery.schedule.adaptive`), from
        `mtbf_h` (assumed mean time between failures of any host, corrected by those that happen) and `target_pls`, at
        most `longest_s` apart.
    total_samples: of the whole planned training, all epochs; what the portion of lost samples (PLS) is a portion of.
        None: not known, then it is of the samples so far, which overstates it.
    retain_state_share: the training state is retained in memory beside the rows while that takes at most this share of
        a step, so that a job that lost all its workers, but not its host, resumes with nothing lost; 0: never.
        When the last checkpoint fails it is retained once at any cost.
    final_checkpoint_s: for how long the servers may hold that memory for a final checkpoint when no job resumes; 0: not
                        at all.
    preemption_s: on SIGTERM the workers finish the step, have a checkpoint made and leave, at the latest after so many
        seconds; None: they leave at once.
    resume: False starts over beside the checkpoints that are there, and saves after them.
    takeover: write here although another job does; it will be refused from then on.
    recovery: when one of several hosts is lost: "partial" brings back the rows that went down with it, the others stay;
        "full" takes all workers back to the newest checkpoint that leaves out no change, and the samples since then are
        trained again; "auto" does what CPR's estimate says (`recovery.schedule.recovery_choice`), and plans the
        interval for it. The same on all workers.
    keep_best: name of a metric that the script reports, such as "valid_auc", the larger the better, or
        "-valid_logloss", the smaller the better: the first checkpoint from the step on at which it was best stays,
        beside those that `keep_last` keeps, and is due at once. The same on all workers.
    storage_options: for fsspec, see `open_store`. settings: fields of `recovery.config.Config` (policy, ...). Where the
        interval is planned and no policy is named, a job saves by "mfu" while partial recovery is planned, and by
        "delta" while full recovery is, as on one host, whose loss is the job's. With every policy, saves that may be
        the last take all changes.
    """

    def __init__(
        self,
        url: str,
        *,
        every_s: float | None = None,
        every_steps: int | None = None,
        mtbf_h: float | None = None,
        target_pls: float = 0.1,
        longest_s: float = 3600.0,
        total_samples: int | None = None,
        retain_state_share: float = 0.02,
        final_checkpoint_s: float = 60.0,
        preemption_s: float | None = None,
        resume: bool = True,
        takeover: bool = False,
        recovery: str = "auto",
        keep_best: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        known = (*signature(CheckpointCallback).parameters, *signature(Config).parameters, "r", "puts")
        for name in settings:
            refuse_unknown("CheckpointCallback: setting", name, known)
        if (every_s is not None and not every_s > 0) or (every_steps is not None and every_steps < 1):
            raise BadInput(f"every_s and every_steps must be positive, got {every_s} and {every_steps}")
        # A relative folder is of this process's working directory, and other processes save there.
        self.url = str(url) if "://" in str(url) else os.path.abspath(url)
        self.every_s, self.every_steps = every_s, every_steps
        self.resume, self.takeover = resume, takeover
        self.storage_options = dict(storage_options or {})
        if not 0 <= retain_state_share <= 1 or not final_checkpoint_s >= 0:
            raise BadInput(
                f"retain_state_share is a share of a step, 0 to 1, and final_checkpoint_s not negative, got "
                f"{retain_state_share} and {final_checkpoint_s}"
            )
        if preemption_s is not None and not preemption_s > 0:
            raise BadInput(f"preemption_s is a number of seconds above 0, got {preemption_s}")
        if total_samples is not None and total_samples < 1:
            raise BadInput(f"total_samples is the number of samples of the whole training, got {total_samples}")
        self.total_samples = total_samples
        self.retain_state_share, self.final_checkpoint_s = retain_state_share, final_checkpoint_s
        self.preemption_s = preemption_s
        if recovery not in STRATEGIES:
            raise BadInput(f"recovery {recovery!r} is not known: choose one of {', '.join(STRATEGIES)}")
        one_host = None
        is_named = settings.get("policy") is not None or "RECOVERY_POLICY" in os.environ
        self.policy_is_named = is_named
        if self.is_planned and not is_named and recovery != "full":
            one_host, settings["policy"] = Config.policy, PLANNED_POLICY
        self.config = Config.from_env(**settings)
        if recovery == "full" and not is_lossless(self.config.policy):
            raise BadInput(
                f"recovery='full' rolls back to checkpoints that leave out no change; those of policy "
                f"{self.config.policy!r} leave out rows, so they would be of no use. Use policy='delta' (or 'full'), "
                "or another recovery"
            )
        if not self.is_planned and longest_s != signature(CheckpointCallback).parameters["longest_s"].default:
            given = "every_s" if self.every_s is not None else "every_steps"
            raise BadInput(
                f"longest_s={longest_s} limits an interval that is planned, and {given} gives it: leave one of them out"
            )
        if self.config.save_bytes is not None and self.is_planned:
            raise BadInput(
                "save_bytes has no effect on an interval that is planned from what saves take: give every_s or "
                "every_steps as well, or row_fraction in its place"
            )
        self.recovery, self.keep_best = recovery, keep_best
        if keep_best is not None and not keep_best.removeprefix("-"):
            raise BadInput(
                f"keep_best is the name of a metric, such as 'valid_auc' or '-valid_logloss', got {keep_best!r}"
            )
        self.best_so_far = None if keep_best is None else BestSoFar(keep_best)
        self._is_chief = True
        self._of_another: list[Any] | None = None  # best, of the metric that the launch before has named
        goals = (mtbf_h, target_pls, longest_s, one_host, recovery)
        self.given = Goals(self.config.policy, self.config.row_fraction, *goals)
        self.planned_s = FIRST_INTERVAL_S
        self._last_step, self._last_s = 0, math.nan

    @property
    def is_planned(self) -> bool:
        """Whether the interval is planned, since none was configured."""
        return self.every_s is None and self.every_steps is None

    @property
    def pace(self) -> dict[str, Any]:
        """How often a checkpoint is due now, as the checkpoint itself has it: plain values.

        every_s, every_steps: where there is one, and it is finite; is_planned: it is the plan's
        """
        every_s = self.planned_s if self.is_planned else self.every_s
        found = {"every_s": every_s, "every_steps": self.every_steps, "is_planned": self.is_planned}
        return {name: value for name, value in found.items() if value is not None and value < math.inf}

    @property
    def compared(self) -> dict[str, Any]:
        """The settings that must be the same on all workers of a job, by the names of their arguments."""
        names = ("every_s", "every_steps", "total_samples", "resume", "final_checkpoint_s", "keep_best")
        given = self.given
        return {
            "url": redacted(self.url),
            "strict": self.config.strict,
            **{name: getattr(self, name) for name in names},
            "policy": given.policy,
            "row_fraction": given.r,
            "mtbf_h": given.mtbf_h,
            "target_pls": given.target_pls,
            "longest_s": given.longest_s,
            "recovery": given.strategy,
        }

    @property
    def best(self) -> dict[str, Any]:
        """The best value so far, as a checkpoint has it: best_step, best_metric, best_value, and best_until where an
        evaluation since was not better; best_unsaved_step, ..._value and ..._why of a better one that was not saved.
        Empty: none so far."""
        return {} if self.best_so_far is None else self.best_so_far.about

    @property
    def best_step(self) -> int | None:
        """Of the best value so far."""
        best = None if self.best_so_far is None else self.best_so_far.best
        return None if best is None else best.step

    @property
    def unsaved_best(self) -> UnsavedBest | None:
        """A model that was better than each that is saved, and cannot be saved any more."""
        return None if self.best_so_far is None else self.best_so_far.unsaved

    def best_is_due(self, step: int) -> bool:
        """Whether a checkpoint of `step`, where the job is, should be made for the best model."""
        return self.best_so_far is not None and self.best_so_far.is_due and step > self._last_step

    def given_interval_s(self, step_s: float) -> float | None:
        """The interval that the user gave, in seconds, for steps of `step_s`; None: it is planned."""
        by_steps = None if self.every_steps is None else self.every_steps * step_s
        found = [every_s for every_s in (self.every_s, by_steps) if every_s is not None]
        return min(found) if found else None

    def due(self, step: int, now_s: float) -> bool:
        """Whether a checkpoint should be made of `step`."""
        if step <= self._last_step:
            return False
        by_steps = self.every_steps is not None and step - self._last_step >= self.every_steps
        every_s = self.planned_s if self.is_planned else self.every_s
        return self.best_is_due(step) or by_steps or (every_s is not None and now_s - self._last_s >= every_s)

    def intervals(self, age_steps: int, age_s: float) -> float:
        """How many intervals between checkpoints have passed since one that is so old; the first to come counts."""
        by_steps = 0.0 if self.every_steps is None else age_steps / self.every_steps
        every_s = self.planned_s if self.is_planned else self.every_s
        return max(by_steps, 0.0 if every_s is None else age_s / every_s)

    def count_from(self, step: int, now_s: float) -> None:
        """The job starts at `step`: its first checkpoint is due an interval later, unless it resumed from one."""
        if math.isnan(self._last_s):
            self._last_step, self._last_s = step, now_s

    def began(self, step: int, now_s: float) -> None:
        """A checkpoint of `step` was begun."""
        self._last_step, self._last_s = step, now_s
        if self.best_so_far is not None:
            self.best_so_far.begun(step)

    def restored(self, step: int, now_s: float) -> None:
        """The job is as in a checkpoint of `step`."""
        self.began(step, now_s)
        self.done(step)

    def done(self, step: int) -> None:
        """The newest checkpoint has this step; it may be a little later than what was asked for."""
        self._last_step = max(self._last_step, step)
        if self.best_so_far is not None:
            self.best_so_far.done(step)

    def failed(self, why: str) -> None:
        """The checkpoint that was begun last was not saved."""
        if self.best_so_far is not None:
            self.best_so_far.failed(why)

    # The hooks of a callback of a training loop; this one only answers calls.

    def on_job(self, job: Any) -> None:
        self._is_chief = job.is_chief
        if self.best_so_far is not None:
            self.best_so_far.is_chief = job.is_chief

    def on_step(self, record: Any) -> None:
        pass

    def on_epoch(self, epoch: int) -> None:
        pass

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.best_so_far is not None and (value := metrics.get(self.best_so_far.metric)) is not None:
            self.best_so_far.measured(step, float(value))

    def on_event(self, event: Any) -> None:
        pass

    def on_end(self, status: str, error: BaseException | None) -> None:
        if self.keep_best is not None and self.best_step is None and self._is_chief and status == "FINISHED":
            log.warning(
                "keep_best=%r kept no checkpoint: no metric of this name was reported (`state.report`)", self.keep_best
            )

    def state_dict(self) -> dict[str, Any]:
        if self.best_step is None and self._of_another is not None:
            return {"best": self._of_another}
        if self.keep_best is None:
            return {}
        assert self.best_so_far is not None
        best = self.best_so_far.best
        named = [self.keep_best, 0.0 if best is None else best.value, self.best_step]
        return {"best": named, "best_so_far": self.best_so_far.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        name, value, step = state.get("best") or (None, 0.0, None)
        self._of_another = None
        if name == self.keep_best:
            if self.best_so_far is not None:  # (versions before had the best value only)
                best = None if step is None else asdict(Best(value, step, is_begun=True, is_saved=True))
                self.best_so_far.load(state.get("best_so_far") or {"best": best})
        elif step is not None:
            self._of_another = [name, value, step]
            reported = f"until a value of {self.keep_best!r} is reported"
            then = "as long as no metric is named" if self.keep_best is None else reported
            log.warning(
                "keep_best is %r now, and was %r in the launch before: the checkpoint that it kept, of the best model "
                "until step %d, stays %s", self.keep_best, name, step, then,
            )  # fmt: skip
