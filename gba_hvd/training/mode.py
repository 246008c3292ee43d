"""What a mode is: the object that carries a worker's steps, and that others ask about it.

`batches` asks it for an epoch's micro-batches, the optimizer gives it their gradients, `evaluate` has it score;
`membership` and `elastic` settle, recover and close it when worlds change. Which mode it is, they do not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from gba_hvd.embedding.bags import BagLookups
from gba_hvd.embedding.on_device.row_gradients import RowGrads, on_host
from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.epoch import EpochPlan
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.metrics.accumulators import Frames, Part
from gba_hvd.metrics.ranking import Items, Queries
from gba_hvd.ps.messages import JobPosition, LeaseGrant
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.reading.read_ahead import ReadAhead


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch being computed. index: its place in the epoch; is_last: of this worker's share of the step.

    n_micro: in allreduce mode it may be so many micro-batches, neighbours from `index` on
    beside_s: seconds of the user's loop since the optimizer.step() before, see `LoopTime`
    """

    index: int
    n_samples: int
    is_last: bool
    started_s: float
    lease: LeaseGrant | None = None  # where servers lease micro-batches
    n_micro: int = 1
    beside_s: float = 0.0


@dataclass(frozen=True)
class MicroGradients:
    """What came of it, beside the dense gradients in their buffer: per group of tables the gradients of rows.

    seconds: that it took, with what the loop did beside it; not_finite: what of it is not, in words
    contributors: of several micro-batches, how many of them contain each row, where that is asked for
    """

    rows: RowGrads
    loss: float | None
    seconds: float
    not_finite: str
    contributors: list[RowGrad] | None = None

    @property
    def rows_on_host(self) -> list[list[RowGrad]]:
        """The same, all of them in the host's memory."""
        return [[on_host(grad) for grad in some] for some in self.rows]


@dataclass(frozen=True)
class RankFacts:
    """What a new world asks of a rank's mode.

    held_step: the step whose row gradients it holds undecided, -1: none. generation: of the mode with servers, 0: in
    none; membership: the change of membership that it stands for there
    """

    held_step: int = -1
    generation: int = 0
    membership: int = 0


@dataclass(frozen=True)
class CountRun:
    """n things, numbered from 0, that have a number of samples each, to be found out before a segment is trained.

    count: how many one has; called on some worker. rank_of: of a thing and the number of workers, the rank that counts
    it where workers step together
    """

    epoch: int
    segment: int
    n: int
    count: Callable[[int], int]
    rank_of: Callable[[int, int], int]


class EpochRun(Protocol):
    """An epoch, or a segment of it, as a mode trains it: its micro-batches, and what is done between them.

    order_digest: of the samples in their order
    """

    cut: EpochPlan
    epoch: int
    segment: int
    order_digest: int
    n_samples: int

    def expect(self, coming: Iterable[range]) -> None:
        """Micro-batches that this worker will probably `read` next, in this order: they may be read ahead."""

    def read(self, index: int, n_micro: int = 1) -> Any:
        """So many micro-batches from `index` on, as one batch for the user."""

    def runs_model(self, batch: Any) -> bool:
        """Whether `keys` of this batch runs the model, which only the training thread may do."""

    def keys(self, batches: list[Any]) -> list[np.ndarray]:
        """The rows that some batches use: per group of tables int64 [n]."""

    def bags(self, batches: list[Any]) -> BagLookups | None:
        """The same with bags apart, where the rows of bags are pooled by their hosts; else None."""

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
        a checkpoint takes part in the rounds of the others. Also while a lease is awaited.
        """

    def leases_end(self) -> None:
        """The epoch is over."""

    def leave_mode(self, position: JobPosition) -> None:
        """The servers ran dry at `position`: go back to allreduce. Raises when the world must be formed again first."""


@dataclass
class SampleReader:
    """A dataset that is read in order, a forward pass at a time.

    take: samples by number, int64 [n], as one batch for the user. batch: samples in one forward pass. keys: the rows
    that some batches use, per group of tables int64 [n]. ahead: what reads up to `depth` batches before they are
    needed; None: nothing. first: the first sample of the batch that was read last
    """

    take: Callable[[np.ndarray], Any]
    n_samples: int
    batch: int
    keys: Callable[[list[Any]], list[np.ndarray]]
    ahead: ReadAhead | None = None
    depth: int = 0
    first: int = 0

    def expect(self, firsts: Iterable[int]) -> None:
        """The batches that begin with these samples come next, in this order."""
        if self.ahead is not None:
            self.ahead.expect(
                (first, min(self.batch, self.n_samples - first)) for first in firsts if first < self.n_samples
            )

    def rows(self, first: int, n: int) -> Any:
        """Samples `first` to `first + n`, as far as there are any; None past the end."""
        n = min(n, self.n_samples - first)
        if n <= 0:
            return None
        self.first = first
        if self.ahead is not None:
            return self.ahead.read((first, n))
        return self.take(np.arange(first, first + n, dtype=np.int64))

    @property
    def n_batches(self) -> int:
        return -(-self.n_samples // self.batch)


Pull = Callable[[SampleReader, list[Any]], None]
"""Fetch the rows of other hosts that some batches of a reader use."""


@dataclass(frozen=True)
class EvaluationRun:
    """A dataset to be evaluated.

    parts: what is measured, the same on all workers. measure: a forward pass of one batch; of each part its frames, see
    `accumulators.DTYPES`. prepare: run once, before the first batch that this worker measures; no worker waits in it
    """

    model: nn.Module
    samples: SampleReader
    parts: tuple[Part, ...]
    measure: Callable[[Any], list[Frames]]
    prepare: Callable[[Pull], None] | None = None


@dataclass(frozen=True)
class RetrievalRun:
    """Queries whose relevant items are to be found among all items, by the dot products of their vectors.

    items_of, queries_of: forward passes of one batch; the former also takes the position of its first item. k: as in
    `ranking.query_sums`. alone: the same as an evaluation in which each worker has all items
    """

    model: nn.Module
    items: SampleReader
    queries: SampleReader
    items_of: Callable[[Any, int], Items]
    queries_of: Callable[[Any], Queries]
    k: tuple[int, ...]
    alone: EvaluationRun


class Rejoin(Protocol):
    """Forms Horovod's world again beside a mode that continues without it.

    number: the membership that the present world stands for; n_formed: worlds formed so far
    """

    number: int
    n_formed: int

    def stop(self, timeout_s: float | None = None, waits: Callable[[], None] = ...) -> bool: ...


class Mode(Protocol):
    """name: of `mode_names`. servers: the conversation with the servers that train, None where there are none.

    steps_together: all workers make the same step at the same time, and meet in collectives; else servers lease
    micro-batches to each worker for itself.

    rejoin: where the world is formed again beside the training
    """

    name: str
    steps_together: bool

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

    @property
    def batches_in_step(self) -> int:
        """Batches in the step at hand, over all workers, which agree on it; 0 where servers lease micro-batches."""

    @property
    def computed_in_step(self) -> int:
        """Samples of a step that is not applied yet: if each worker took in as many batches of it as this one did.

        Where servers make the steps: of all workers, as the coordinator last had it.
        """

    def evaluate(self, job: EvaluationRun) -> list[dict[str, Any]]:
        """The result of each part (`accumulators.combined`) over all samples; the same on all workers."""

    def count(self, job: CountRun) -> list[int]:
        """How many samples each thing has; the same on all workers."""

    def retrieve(self, job: RetrievalRun) -> list[float]:
        """The sums over all queries, see `ranking.query_sums`; the same on all workers."""

    def others_wait(self) -> AbstractContextManager[None]:
        """See `between_epochs.others_wait`."""

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

    def take_over_from_servers(self) -> None:
        """They end with the job: have the dense state and the position here that they stand at."""

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
