"""What a running job reports to the outside: steps, metrics, events.

Data flows one way, from the training loop to the callbacks; a callback never changes training by what it returns.
MLflow tracking, the progress line, mode switching and checkpoints are callbacks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from recovery.old_names import accepts
from recovery.printable import printable
from recovery.redaction import redacted

OWN_POINT = "own_point"  # in the data of an event with readings: they are of its very step, not of the next point
KEEP_BEST = "keep_best"  # in `Job.settings`: the metric by which the checkpoint of the best model is kept


@accepts(leads_host="is_host_leader")
@dataclass(frozen=True)
class Job:
    """Where this process stands in the job. Callbacks receive it at the start and after every change of membership.

    `job_id` is the same on every worker and through every restart. `settings` are plain values that describe the run.
    `name` is what people call the job. `idle_settings` names those of `settings` that no mode uses which the job names.
    """

    job_id: str
    rank: int
    size: int
    local_rank: int
    host: str
    is_host_leader: bool  # exactly one worker per host
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    idle_settings: Sequence[str] = ()

    @property
    def is_chief(self) -> bool:
        """Exactly one worker per job, with rank 0: the one that reports for the job."""
        return self.rank == 0


@dataclass(frozen=True)
class StepRecord:
    """One applied global step, as this worker saw it; `Callback.on_step` receives it on every worker.

    In allreduce mode there is one for each step. In asynchronous modes a worker learns of several steps at once: then
    `step`, `samples_applied` and `epoch` are those of the newest, `seconds` is the time since its last record.
    """

    step: int  # number of optimizer applications so far, this one included
    epoch: int
    samples: int  # samples in this step, over all workers
    samples_applied: int  # so far in the job
    seconds: float  # since the previous step ended on this worker
    workers: int
    mode: str
    loss: float | None  # mean over the global batch, when the loop passes it
    grad_norm: float | None = None  # of the global step's gradient before it was clipped, where clipping is asked for
    # The same of every step since the previous record, as far as they are known: in asynchronous modes a worker
    # receives the news of several steps at once, with the norms of at most 64.
    grad_norms: tuple[float, ...] = ()
    # Learning rates of the dense groups that have parameters, in the optimizer's order, as the step used them.
    dense_lrs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Event:
    """Something worth keeping: membership changes, failures, evaluations, the end.

    `kind` is one word (`started`, `membership`, `worker_lost`, `rows_lost`, `finished`, `failed`, ...);
    `message` a sentence; `data` JSON values. `level` is "warning" where something that was asked for did not happen, or
    needs a person: then `message` also says why and what to do, and rank 0 logs it. Secrets and control characters of
    `message` are replaced.
    """

    kind: str
    step: int
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
    level: Literal["info", "warning"] = "info"
    unix_s: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", printable(redacted(self.message)))


class Callback:
    """Override what you need. Called on every worker, in the training thread: be quick, never raise for remote trouble.

    Order: `on_model`, then `on_start` in the first world of a launch, then `on_job` (again after each change of
    membership), then any of `on_step`, `on_epoch`, `on_metrics`, `on_event`, then `on_end` once. A job that continues
    in its process begins with `on_start` again.
    What `state_dict` returns (JSON values) travels with the elastic state, so a replacement worker continues from it:
    `load_state_dict` runs before `on_job` there.
    shows_events: a person reads events of level "info" in what rank 0's callback prints, so the log need not have them.
    uses_last_checkpoint: works at the end with the checkpoint that is saved then, so that one is saved in any case.
    problem: why it cannot do its work now, for `gba-hvd status`; empty: it can.
    """

    shows_events = False
    uses_last_checkpoint = False
    problem = ""

    def on_model(self, model: Any) -> None:
        """The callback was registered with the state of this model, an `nn.Module`. May raise BadInput."""

    def on_start(self, is_chief: bool, is_host_leader: bool) -> None:
        """The first world of a launch forms, and nothing is read yet. May raise BadInput: all workers end then."""

    def on_job(self, job: Job) -> None:
        """This process is in the job: called when the first world has formed, and after each change of membership."""

    def on_step(self, record: StepRecord) -> None:
        """A global step was applied. In asynchronous modes one record may stand for several steps."""

    def on_epoch(self, epoch: int) -> None:
        """The script is in this epoch, and reports metrics from it now: `on_metrics` comes next."""

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of this step were reported, by name: by the script (`TorchState.report`), or bytes on the wires."""

    def on_event(self, event: Event) -> None:
        """Something worth keeping happened; see `Event`."""

    def on_end(self, status: str, error: BaseException | None) -> None:
        """`status` is "FINISHED", "NOT_SAVED" (all steps are done, the checkpoint of the last one failed), "FAILED" or
        "KILLED" (interrupted). The worker's exit code is 0 in the first case only.
        """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
