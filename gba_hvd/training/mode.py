"""What a mode is: the object that carries a worker's steps, and that others ask about it.

`batches` asks it for an epoch's micro-batches, the optimizer gives it their gradients, `evaluate` has it score;
`membership` and `elastic` settle, recover and close it when worlds change. Which mode it is, they do not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from gba_hvd.dense_gradients import DenseGradients
from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.epoch import EpochPlan
from gba_hvd.metrics import Scores
from gba_hvd.ps.messages import JobPosition, LeaseGrant
from gba_hvd.ps.worker.worker import PsWorker


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch being computed. index: its place in the epoch; is_last: of this worker's share of the step."""

    index: int
    n_samples: int
    is_last: bool
    started_s: float
    lease: LeaseGrant | None = None  # where servers lease micro-batches


@dataclass(frozen=True)
class MicroGradients:
    """What came of it, beside the dense gradients in their buffer: per group of tables the gradients of rows.

    seconds: that it took; not_finite: what of it is not, in words
    """

    rows: list[list[RowGrad]]
    loss: float | None
    seconds: float
    not_finite: str


@dataclass(frozen=True)
class RankFacts:
    """What a new world asks of a rank's mode.

    held_step: the step whose row gradients it holds undecided, -1: none. generation: of the mode with servers, 0: in
    none; membership: the change of membership that it stands for there
    """

    held_step: int = -1
    generation: int = 0
    membership: int = 0


class EpochRun(Protocol):
    """An epoch as a mode trains it: its micro-batches, and what is done between them."""

    cut: EpochPlan
    epoch: int
    n_samples: int

    def read(self, index: int) -> Any:
        """Micro-batch `index`, for the user."""

    def keys(self, batches: list[Any]) -> list[np.ndarray]:
        """The rows that some batches use: per group of tables int64 [n]."""

    # Where workers step together: on all of them at the same step.

    def between_steps(self) -> None:
        """The memory, an interruption, a checkpoint, the retained state, in this order. Raises to leave the loop."""

    def change_mode(self) -> bool:
        """Carry out the mode request that all agreed on; whether the engine's mode is another one now."""

    def steps_done(self) -> None:
        """After the epoch's last step."""

    # Where servers lease micro-batches: on each worker for itself.

    def leases_begin(self) -> None:
        """Before the first lease."""

    def lease_came(self) -> None:
        """Report what other threads met meanwhile."""

    def before_micro_batch(self) -> None:
        """The memory, a checkpoint, and leaving after one. Before the micro-batch begins: a worker that waits here for
        a checkpoint takes part in the rounds of the others.
        """

    def leases_end(self) -> None:
        """The epoch is over."""

    def leave_mode(self, position: JobPosition) -> None:
        """The servers ran dry at `position`: go back to allreduce. Raises when the world must be formed again first."""


@dataclass(frozen=True)
class EvaluationRun:
    """A dataset to be scored. batch: samples in one forward pass; `score` returns the model's outputs, float32 [B].

    activation, exact_limit: as `evaluate` has them
    """

    model: nn.Module
    take: Callable[[np.ndarray], Any]
    n_samples: int
    batch: int
    keys: Callable[[list[Any]], list[np.ndarray]]
    label: Callable[[Any], Tensor]
    activation: Literal["sigmoid", "none"] | None
    exact_limit: int

    def rows(self, first: int, n: int) -> Any:
        """Samples `first` to `first + n`, as far as there are any; None past the end."""
        numbers = np.arange(first, min(first + n, self.n_samples), dtype=np.int64)
        return self.take(numbers) if len(numbers) else None

    def score(self, loaded: Any) -> np.ndarray:
        outputs: np.ndarray = self.model(loaded).float().cpu().numpy()
        return outputs

    def labels(self, loaded: Any) -> np.ndarray:
        labels: np.ndarray = self.label(loaded).cpu().numpy()
        return labels


class Rejoin(Protocol):
    """Forms Horovod's world again beside a mode that continues without it.

    number: the membership that the present world stands for; n_formed: worlds formed so far
    """

    number: int
    n_formed: int

    def stop(self, timeout_s: float | None = None, waits: Callable[[], None] = ...) -> bool: ...


class Mode(Protocol):
    """name: of `mode_names`. servers: the conversation with the servers that train, None where workers step together.

    rejoin: where the world is formed again beside the training
    """

    name: str

    @property
    def servers(self) -> PsWorker | None: ...

    rejoin: Rejoin | None

    # --- the epoch ---------------------------------------------------------------------------------------------------

    def micro_batches(self, epoch: EpochRun) -> Generator[Any, None, bool]:
        """This worker's micro-batches, one after the other. Returns whether the epoch is over; if not, the mode is."""

    def submit(self, micro: MicroBatch, loss: Tensor | float | None) -> None:
        """Take in the gradients of a micro-batch: close the step if it was the last of the share, or push them."""

    @property
    def is_within_step(self) -> bool:
        """Some micro-batches of a step that is not applied yet were taken in."""

    def evaluate(self, job: EvaluationRun) -> Scores: ...

    # --- the world ---------------------------------------------------------------------------------------------------

    @property
    def survives_world(self) -> bool:
        """Training continues without Horovod's world, so its workers can form it again after a failure."""

    def rank_facts(self) -> RankFacts: ...

    def settle(self, catches_up: bool, row_factor: float, step: int) -> bool:
        """A world forms, and `step` is the newest that was decided. Apply what is held, or discard it.

        catches_up: this rank missed the result of that step; row_factor: what its row gradients are multiplied by.
        Returns whether the others made that step without this worker.
        """

    def on_hosts_updated(self) -> None:
        """From Horovod's notification thread, on rank 0 only: the next commit, or heartbeat, carries it to all."""

    def recover(self) -> None:
        """After a failure: leave the step in flight; or export the dense state and be the engine's mode no more."""

    def leave_together(self, patience_s: float) -> None:
        """Training is over for this worker: return when it is for all, or after a while."""

    def close(self, finished: bool = True) -> None:
        """finished: training or the mode is over; otherwise this worker alone leaves. May be called twice."""


@runtime_checkable
class SharesReplica(Protocol):
    """A mode whose micro-batches several threads of a worker may compute at once, on one replica."""

    await_threads: Callable[[], None]

    def hand_to_thread(self) -> MicroBatch:
        """The micro-batch that was begun, for another thread, which ends it by `submit_from_thread`."""

    def submit_from_thread(self, micro: MicroBatch, loss: Tensor | float | None, dense: DenseGradients) -> str:
        """`submit` of one of several threads, with gradients of its own.

        Safe in several threads at once, but only one may call for each micro-batch. Returns what was not finite and is
        still to be reported, or nothing.
        """

    def fail_leases(self, error: BaseException) -> None:
        """From another thread: the thread that waits for the next lease raises this."""

    def leave_loop(self) -> None:
        """As if the loop over the micro-batches had been left; nothing where the replica was submitted already."""
