"""What a worker knows of its job: which one it is, how far the training is, what it was asked to do, its host."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gba_hvd.comm.traffic import Sums, larger
from gba_hvd.epoch import EpochOrder, SampleAccount, run_number
from gba_hvd.errors import NonFiniteGradient
from gba_hvd.gradients.clipping import Factors
from gba_hvd.gradients.loss_scale import LossScale
from gba_hvd.ps.messages import JobPosition
from gba_hvd.ps.worker.host_server import HostServer
from gba_hvd.reading import trained_scaling
from gba_hvd.reading.datasets import source_names
from gba_hvd.reading.trained_vocabularies import Trained, of_state, to_state
from gba_hvd.shm import memory_limit
from gba_hvd.shm.job_board import Board
from gba_hvd.training.left_epoch import LeftEpochs
from gba_hvd.training.step_hooks import StepHooks


@dataclass(frozen=True)
class JobIdentity:
    """Which job this is. Replaced by `Engine.identify` alone, as a whole.

    id: the job's name in folders and stores, the same on all workers and through restarts; name: what people call it.

    key: secret of the job, for its servers. settings: fingerprint of what all workers agree on, see `membership`
    """

    id: str = ""
    name: str = ""
    key: bytes = b""
    settings: int = 0
    worker_id: int = field(default_factory=lambda: secrets.randbits(62))


@dataclass
class Signals:
    """What this worker is to do before the next step.

    hosts_updated: Horovod found other hosts (only rank 0 is notified); interrupt_due: all workers know it by now, and
    stop at the same step. workers_come: those hosts have slots for workers that this world does not have.
    preempt_deadline_s: SIGTERM came, leave by this monotonic time.
    requested_mode: (mode, reason), agreed by all workers
    """

    hosts_updated: bool = False
    workers_come: bool = False
    interrupt_due: bool = False
    preempt_deadline_s: float | None = None
    requested_mode: tuple[str, str] | None = None

    def clear_interrupt(self) -> None:
        self.interrupt_due = self.hosts_updated = False


@dataclass
class LocalHost:
    """What this worker shares with the others of its host.

    is_leader: this worker is the host's leader. server: the line to the companion server, there; board: what other
    processes read of the job, there too. neighbours: processes of the other workers, by rank
    n_kills: of `memory_limit.n_kills`, those that were there before, or are reported
    """

    is_leader: bool = False
    server: HostServer | None = None
    board: Board | None = None
    neighbours: dict[int, int] = field(default_factory=dict)
    n_kills: int = field(default_factory=memory_limit.n_kills)

    def killed_for_memory(self) -> str:
        """Reported once: that the kernel has killed processes here; empty: it has not."""
        before, self.n_kills = self.n_kills, memory_limit.n_kills()
        if (n := self.n_kills - before) <= 0:
            return ""
        limit = memory_limit.tightest()
        killed = f"The kernel has killed {n} process{'es' * (n > 1)} of this container or service (status 137)"
        if limit is None:
            return f"{killed} for lack of memory: dmesg names them"
        return (
            f"{killed}, probably at its memory limit ({limit.file}: {limit.limit / 2**30:.2f} GiB): raise it "
            "(docker run --memory=..., Kubernetes: resources.limits.memory)"
        )


@dataclass
class Rollback:
    """Full recoveries of this job: all workers roll back to a checkpoint while the job runs.

    number: how many are behind the state that this worker has; a state that has more of them is the newer one, of
    any step. decision: the one that was agreed on and is not complete on this worker, as plain values; None: there
    is none. unreported: what came of the one that is complete, until callbacks have it
    """

    number: int = 0
    decision: dict[str, Any] | None = None
    unreported: dict[str, Any] | None = None

    @property
    def agreed_number(self) -> int:
        """Number of recoveries that this worker knows to have been agreed on."""
        return self.number + (self.decision is not None)

    def shared(self) -> dict[str, Any]:
        """What travels with the training state."""
        return {"number": self.number, "unreported": self.unreported}

    def load(self, shared: Mapping[str, Any] | None) -> None:
        """The inverse, on a worker that takes over the training state; what it decided before is done then."""
        shared = shared or {}  # of a version before
        self.number, self.decision = shared.get("number", 0), None
        self.unreported = shared.get("unreported") or self.unreported


@dataclass
class Cursor:
    """Where training stands in the data: steps done of one epoch, or of one segment of it. Epoch -1: before the first.

    moved: index -> the micro-batch that stands in its place in this epoch, after resuming from an asynchronous mode
    n_steps: of the epoch or segment; 0: not known yet
    """

    epoch: int = -1
    steps_done: int = 0
    moved: dict[int, int] = field(default_factory=dict)
    segment: int = 0
    n_steps: int = 0

    def is_in(self, epoch: int, segment: int) -> bool:
        return (self.epoch, self.segment) == (epoch, segment)


@dataclass(frozen=True)
class Passed:
    """What happened since this worker last knew: steps, their samples, how many were skipped; the loss scale before."""

    steps: int
    samples: int
    skipped: int
    scale: float


class Progress:
    """How far the training is. Between two steps it is the same on all workers in allreduce mode.

    step: optimizer applications so far. restarts: worlds that formed after the first one; changes: those that had other
    workers than the one before. workers: of the newest one, as (host, process); same_workers: the one before had the
    same. account: of all samples. staleness, dense_ages (stored as `lags`): how often a
    gradient, or the dense values that it was computed with, were so many steps old, in asynchronous modes. gaps: by
    rank, as of `ps.partition.gaps.GapMeter.by_worker`, and the worker's id, in the newest of these modes. arrivals:
    there, ages by step, of its newest steps (`update_rules.delay_sequence`), as rank 0 received them. traffic: bytes on
    the wires of all workers, by mode (`comm.traffic`). refused: gradients that were not finite; reissued: micro-batches
    that were leased again. order, dataset: of the newest epoch whose batches were asked for. vocabularies: those of
    all datasets that were trained; scaling: of their numbers, of each column the newest. n_steps: in the epoch at hand.
    factors: what multiplied the gradients of the newest step that this worker saw. epoch: the one whose batches this
    worker asked for last, None: none yet; epoch_over: it has had them all; n_evaluated: evaluations since either has
    changed. launched_at: the step at which this worker's launch began, None: it has come later. launched_unix_s: when
    the first world of the launch had formed. complete_before: epochs whose batches were asked for here before any was
    trained, and that had none left. n_reported: calls of `state.report` with scores since workers met in allreduce mode
    """

    def __init__(self, loss_scale: LossScale | None, hooks: StepHooks) -> None:
        self.loss_scale, self.hooks = loss_scale, hooks
        self.step, self.restarts, self.changes = 0, 0, 0
        self.workers: frozenset[tuple[int, int]] = frozenset()
        self.same_workers = False
        self.cursor, self.account = Cursor(), SampleAccount()
        self.order: EpochOrder | None = None
        self.dataset: object = None
        self.vocabularies: Trained = {}
        self.scaling: trained_scaling.Scaling = {}
        self.staleness: dict[int, int] = {}
        self.dense_ages: dict[int, int] = {}
        self.gaps: dict[int, tuple[int, float, float, int]] = {}
        self.arrivals: Sequence[Sequence[tuple[int, float]]] = ()
        self.traffic: dict[str, Sums] = {}
        self.refused = self.reissued = 0
        self.factors = Factors()
        self.n_steps = 1
        self.epoch: int | None = None
        self.n_evaluated, self.epoch_over = 0, False
        self.left = LeftEpochs()
        self.launched_at: int | None = None
        self.launched_unix_s: float | None = None
        self.complete_before: list[int] = []
        self.n_reported = 0

    def world_formed(self, workers: frozenset[tuple[int, int]], is_restart: bool) -> None:
        self.same_workers, self.workers = workers == self.workers, workers
        self.restarts += is_restart
        self.changes += is_restart and not self.same_workers

    def source_names(self) -> Sequence[str]:
        """Of the files or shards that are trained; empty where the dataset does not name them."""
        return source_names(self.dataset)

    def begin_evaluation(self) -> tuple[int, int]:
        """(phase, ordinal), which name an evaluation in asynchronous modes: the same on all workers.

        By the epoch that this worker is in itself: the cursor follows the fastest worker.
        """
        epoch = self.cursor.epoch if self.epoch is None else self.epoch
        self.n_evaluated += 1
        return 2 * run_number(epoch, 0) + self.epoch_over, self.n_evaluated - 1

    @property
    def n_applied(self) -> int:
        """Steps so far that were not skipped for an overflow."""
        return self.step - self.account.steps_skipped

    def delays(self) -> dict[str, Any]:
        """How late gradients came, in the job so far; for events."""
        return {
            "staleness": {str(k): n for k, n in sorted(self.staleness.items())},
            "lags": {str(k): n for k, n in sorted(self.dense_ages.items())},
            "gaps": {str(rank): list(found) for rank, found in sorted(self.gaps.items())},
        }

    # --- in the training state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "cursor": asdict(self.cursor),
            "order": None if self.order is None else asdict(self.order),
            "vocabularies": to_state(self.vocabularies),
            "scaling": trained_scaling.to_state(self.scaling),
            "account": asdict(self.account),
            "restarts": self.restarts,
            "changes": self.changes,
            "step_hooks": self.hooks.ran_until,
            "staleness": [[k, n] for k, n in self.staleness.items()],
            "lags": [[k, n] for k, n in self.dense_ages.items()],
            "gaps": [[rank, *found] for rank, found in self.gaps.items()],
            "traffic": {mode: list(sums) for mode, sums in self.traffic.items()},
            "refused": self.refused,
            "reissued": self.reissued,
            "loss_scale": None if self.loss_scale is None else list(self.loss_scale.now),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Older ones lack `step_hooks`, `order`, `vocabularies`, `scaling`, `loss_scale`, `lags`, `gaps`, `traffic`,
        `changes`."""
        self.step, self.restarts = state["step"], state["restarts"]
        self.changes = state.get("changes", self.restarts)
        self.cursor = Cursor(**state["cursor"])
        self.account = SampleAccount.of_state(state["account"], was_asynchronous=bool(state["staleness"]))
        self.epoch = None
        self.hooks.ran_until = state.get("step_hooks", self.n_applied)
        order = state.get("order")
        self.order = None if order is None else EpochOrder(**order)
        self.vocabularies = of_state(state.get("vocabularies", {}))
        self.scaling = trained_scaling.of_state(state.get("scaling", {}))
        self.staleness = {k: n for k, n in state["staleness"]}
        self.dense_ages = {k: n for k, n in state.get("lags", ())}
        self.gaps = {rank: (n, gap, steps, worker) for rank, n, gap, steps, worker in state.get("gaps", ())}
        self.traffic = {mode: (a, b, c, d, e, f) for mode, (a, b, c, d, e, f) in state.get("traffic", {}).items()}
        self.refused, self.reissued = state["refused"], state["reissued"]
        self._load_scale(state.get("loss_scale"))

    # --- on the wire, as the coordinator of servers has it -----------------------------------------------------------

    def to_wire(self) -> JobPosition:
        return JobPosition(
            step=self.step, epoch=self.cursor.epoch, segment=self.cursor.segment, steps_done=self.cursor.steps_done,
            n_steps=self.cursor.n_steps, account=asdict(self.account), staleness=dict(self.staleness),
            dense_ages=dict(self.dense_ages), refused=self.refused, reissued=self.reissued,
            remapped=self.cursor.moved, loss_scale=None if self.loss_scale is None else self.loss_scale.now,
            traffic=dict(self.traffic),
        )  # fmt: skip

    def load_wire(self, position: JobPosition) -> None:
        """Where servers stand: of a checkpoint of an asynchronous mode, or newer than this worker."""
        self.step, self.account = position.step, SampleAccount(**position.account)
        self.cursor = Cursor(position.epoch, position.steps_done, position.remapped, position.segment, position.n_steps)
        self.staleness, self.dense_ages = position.staleness, position.dense_ages
        self.gaps = {rank: (n, gap, steps, worker) for rank, n, gap, steps, worker in position.gaps} or self.gaps
        self.arrivals = position.arrivals or self.arrivals
        self.traffic = larger(self.traffic, position.traffic)
        self.refused, self.reissued = position.refused, position.reissued
        self._load_scale(position.loss_scale)

    def merge(self, position: JobPosition) -> Passed | None:
        """Take over what the coordinator says, unless this worker knows more; returns what passed since.

        Raises NonFiniteGradient when the servers could apply nothing more.
        """
        if position.failure:
            raise NonFiniteGradient(
                f"{position.failure}. None was applied: the model is as after step {position.step}. "
                "Lower the learning rate, or look at the data"
            )
        if position.step < self.step or not position.account:
            return None
        step, samples, skipped = self.step, self.account.total, self.account.steps_skipped
        scale = 0.0 if self.loss_scale is None else self.loss_scale.scale
        self.load_wire(position)
        return Passed(self.step - step, self.account.total - samples, self.account.steps_skipped - skipped, scale)

    def _load_scale(self, now: Any) -> None:
        if self.loss_scale is not None:
            self.loss_scale.load(now)
