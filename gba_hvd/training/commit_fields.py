"""The numbers that ride on a step's commit, so that a step needs no other collective: who has which of them.

They stand behind the dense gradients in one tensor, `DenseGradients.total`, and are summed with them. The layout is
made once for each world:

    step            the eight of `STEP`, one number each
    participants    fields of the participants in the commit: requests of modes, checkpoints, bytes on the wires
    micro_batch_s   a number for each worker: its seconds per micro-batch
    reading_s       the same: its seconds of waiting for batches in the step
    rows            of each worker, where rows travel compressed between hosts: see `compression.row_exchange`
    dense           of each worker, where dense gradients are compressed: see `compression.dense_exchange`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from gba_hvd.gradients.dense_gradients import DenseGradients

if TYPE_CHECKING:
    from gba_hvd.ps.worker.worker import PsWorker

STEP = ("samples", "loss", "loss_weight", "hosts_updated", "n_bad", "bad_micro", "rates", "row_squares", "rows_trained")


class StepParticipant(ABC):
    """Something that all workers agree on by the commits of steps. The same on every worker; one of each kind.

    A subclass says how many numbers it has on a commit; a hook that it does not override does nothing.

    order: of their numbers on a commit, and in which they read it. waiting: in words, what was agreed on and waits
    for servers that are not up; waits_to_enter: it is a mode; measures_micro_batches: it needs to know how long single
    micro-batches take, where several are computed as one batch; as of the newest commit, so the same on all workers
    """

    name: str
    order: int
    waiting: Sequence[str] = ()
    measures_micro_batches = False

    @abstractmethod
    def n_fields(self) -> int:
        """How many numbers it has on a commit."""

    def before_commit(self, fields: Tensor) -> None:
        """Write this worker's share, zeros so far, of what is summed over the workers."""

    def after_commit(self, agreed: Sequence[float]) -> None:
        """The sums, on every worker alike, when the step is applied."""

    def after_step(self, micro_batch_s: Sequence[float], step_s: float, n_micro: int, together: int) -> None:
        """After that, and after callbacks have received the step.

        micro_batch_s: of each worker, 0 where it had none; n_micro: micro-batches in the step; together: of these, in
        each batch that a worker computed at once
        """

    def before_micro_batch(self, servers: PsWorker, waited_s: float) -> None:
        """In an asynchronous mode. waited_s: for the lease of the micro-batch."""

    def paused(self) -> None:
        """In an asynchronous mode: this worker does not train between two epochs, nor did it while it evaluated."""

    def epoch_over(self, servers: PsWorker) -> None:
        """In an asynchronous mode: this worker has left the loop over an epoch, at its end or before, or the mode."""

    def mode_entered(self) -> None:
        """An asynchronous mode has begun."""

    def rolled_back(self, step: int) -> None:
        """The job rolled back to the checkpoint of `step` (full recovery): what is known of later steps is void."""

    @property
    def waits_to_enter(self) -> bool:
        return False

    def missing_mode(self, mode: str) -> str:
        """The mode that was asked for while the job is in `mode`; empty when it is where it should be."""
        return ""


class CommitFields:
    """Views of the numbers by name, behind the dense gradients. `lay_out` empties them all."""

    def __init__(self, dense: Callable[[], DenseGradients]) -> None:
        self._dense = dense
        self._at: dict[str, slice] = {}
        self.lay_out({})

    def lay_out(self, sizes: Mapping[str, int]) -> None:
        """sizes: how many numbers each has behind those of the step, in this order."""
        start = 0
        for name, size in {**dict.fromkeys(STEP, 1), **sizes}.items():
            self._at[name] = slice(start, start + size)
            start += size
        self._dense().resize_extra(start)

    def __getitem__(self, name: str) -> Tensor:
        return self._dense().extra[self._at[name]]

    def __setitem__(self, name: str, value: float) -> None:
        self._dense().extra[self._at[name]] = value

    def add(self, name: str, value: float) -> None:
        self._dense().extra[self._at[name]] += value

    def read(self) -> dict[str, list[float]]:
        """All of them as plain values."""
        values = self._dense().extra.tolist()
        return {name: values[at] for name, at in self._at.items()}
