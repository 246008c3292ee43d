"""`CheckpointCallback`: what a training script says about its checkpoints. The training framework acts on it.

Nothing is saved here: the framework that runs the callback (gba_hvd) asks `due`, has its servers save, and reports how
it went. For a training loop of your own there is `Checkpointer`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from recovery.config import Config
from recovery.errors import BadInput
from recovery.old_names import accepts
from recovery.schedule.adaptive import FIRST_INTERVAL_S, Goals


@accepts(last_gasp_s="final_checkpoint_s", memory_share="retain_state_share")
class CheckpointCallback:
    """Save to `url` and, when a job starts, resume from the newest good checkpoint there.

    url: a folder, or what fsspec knows: s3://bucket/job, gs://..., memory://...; one for each job. A relative folder is
        taken from the working directory now.
    every_s, every_steps: a checkpoint is due after so long since the last one began; the first to come counts. With
        neither, it is planned from what saving and loading was measured to take (`recovery.schedule.adaptive`), from
        `mtbf_h` (assumed mean time between failures of any host, corrected by those that happen) and `target_pls`, at
        most `longest_s` apart.
    retain_state_share: the training state is retained in memory beside the rows while that takes at most this share of
        a step, so that a job that lost all its workers, but not its host, resumes with nothing lost; 0: never.
    final_checkpoint_s: for how long the servers may hold that memory for a final checkpoint when nobody resumes; 0: not
                        at all.
    preemption_s: on SIGTERM the workers finish the step, have a checkpoint made and leave, at the latest after so many
        seconds; None: they leave at once.
    resume: False starts over beside the checkpoints that are there, and saves after them.
    takeover: write here although another job does; it will be refused from then on.
    storage_options: for fsspec, see `open_store`. settings: fields of `recovery.config.Config` (policy, ...).
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
        retain_state_share: float = 0.02,
        final_checkpoint_s: float = 60.0,
        preemption_s: float | None = None,
        resume: bool = True,
        takeover: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
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
        self.retain_state_share, self.final_checkpoint_s, self.preemption_s = (
            retain_state_share,
            final_checkpoint_s,
            preemption_s,
        )
        self.config = Config.from_env(**settings)
        self.given = Goals(self.config.policy, self.config.row_fraction, mtbf_h, target_pls, longest_s)
        self.planned_s = FIRST_INTERVAL_S
        self._last_step, self._last_s = 0, math.nan

    @property
    def is_planned(self) -> bool:
        """Whether nobody said how often to save."""
        return self.every_s is None and self.every_steps is None

    def due(self, step: int, now_s: float) -> bool:
        """Whether a checkpoint should be made of `step`."""
        if math.isnan(self._last_s):
            self._last_s, self._last_step = now_s, step
        if step <= self._last_step:
            return False
        by_steps = self.every_steps is not None and step - self._last_step >= self.every_steps
        every_s = self.planned_s if self.is_planned else self.every_s
        return by_steps or (every_s is not None and now_s - self._last_s >= every_s)

    def intervals(self, age_steps: int, age_s: float) -> float:
        """How many intervals between checkpoints have passed since one that is so old; the first to come counts."""
        by_steps = 0.0 if self.every_steps is None else age_steps / self.every_steps
        every_s = self.planned_s if self.is_planned else self.every_s
        return max(by_steps, 0.0 if every_s is None else age_s / every_s)

    def began(self, step: int, now_s: float) -> None:
        """A checkpoint of `step` was begun, or restored."""
        self._last_step, self._last_s = step, now_s

    def done(self, step: int) -> None:
        """The newest checkpoint has this step; it may be a little later than what was asked for."""
        self._last_step = max(self._last_step, step)

    # What a callback of a training loop has; this one only speaks when asked.

    def on_job(self, job: Any) -> None:
        pass

    def on_step(self, record: Any) -> None:
        pass

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def on_event(self, event: Any) -> None:
        pass

    def on_end(self, status: str, error: BaseException | None) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
