"""Evaluations in asynchronous modes: leased work like training, so that no worker waits for a slow or dead one.

An evaluation is named by (phase, how many the phase had before); a phase is an epoch's batches, or what follows them,
or the counting of a segment.
The first worker to ask gives its buffers (batch norm statistics) to all, so that one model is evaluated. What workers
measure is added up as it comes, by `accumulators`; a worker that asks after the end, a late joiner for example, gets
the result. None of it survives the coordinator's process: the evaluation begins again.

A lease that takes too long is taken back, also from a worker that lives: it may hang. One that comes after that shows
how long a batch may take.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gba_hvd.epoch import EpochPlan, SampleAccount
from gba_hvd.metrics.accumulators import DTYPES, Part, accumulator, combined
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.coordinator.ledger import Ledger
from gba_hvd.ps.messages import Evaluate, EvaluationReply, LeaseGrant, Mismatch, ProtocolError, Score
from gba_hvd.ps.validation import array_of

_KEPT = 8
log = logging.getLogger("gba_hvd")


@dataclass(frozen=True)
class _Given:
    """A lease on a batch, and since when."""

    worker: int
    micro: int
    since_s: float


class _Evaluation:
    def __init__(self, request: Evaluate, buffers: bytes) -> None:
        self.request, self.buffers = request, buffers
        cut = EpochPlan(request.n_samples, request.batch, request.batch)
        self.ledger = Ledger(cut, Discipline("async"), epoch=0, steps_done=0, step=0, account=SampleAccount())
        self.measured = [accumulator(part) for part in request.parts]
        self.result: list[dict[str, Any]] | None = None
        self.like_probabilities: list[str] = []
        self.given: dict[int, _Given] = {}  # by serial number, leases that no score has come for
        self.late: dict[int, _Given] = {}  # the same, that were taken back


class Evaluations:
    """Not thread-safe: belongs to the server's main thread."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """lease_s: how long a lease may take, until a longer one is seen."""
        self._lease_s, self._clock = lease_s, clock
        self._evaluations: dict[tuple[int, int], _Evaluation] = {}

    def ask(self, request: Evaluate, frames: Sequence[Any]) -> tuple[EvaluationReply, Sequence[Any]]:
        """A lease on some samples, the result, or neither: ask again soon. Frame of the answer: the buffers.

        Raises Mismatch when this worker scores other samples than the others.
        """
        key = request.epoch, request.ordinal
        found = self._evaluations.get(key)
        if found is None:
            if len(frames) != 1:
                raise ProtocolError(f"Evaluate comes with one frame, got {len(frames)}")
            found = self._evaluations[key] = _Evaluation(request, bytes(frames[0]))
            for oldest in list(self._evaluations)[:-_KEPT]:  # as they were begun: by name, a late count is the first
                del self._evaluations[oldest]
        theirs, mine = found.request, request
        if (theirs.n_samples, theirs.batch) != (mine.n_samples, mine.batch):
            text = f"{theirs.n_samples} samples in batches of {theirs.batch}, here {mine.n_samples} of {mine.batch}"
            raise Mismatch(f"the workers disagree about evaluation {key}: {text}")
        if theirs.parts != mine.parts:
            raise Mismatch(f"the workers disagree about evaluation {key}: {theirs.parts}, here {mine.parts}")
        if found.like_probabilities:
            return EvaluationReply(like_probabilities=found.like_probabilities), ()
        if found.result is not None:
            return EvaluationReply(result=found.result), ()
        answer = found.ledger.lease(request.worker, request.request)
        if not isinstance(answer, LeaseGrant):
            return EvaluationReply(), (found.buffers,)
        found.given.setdefault(answer.serial, _Given(request.worker, answer.micro, self._clock()))
        return EvaluationReply(answer), (found.buffers,)

    def score(self, request: Score, frames: Sequence[Any]) -> None:
        """Take in the scores of one lease; ignored when they came before, or the lease was taken away."""
        found = self._evaluations.get((request.epoch, request.ordinal))
        if found is None or found.result is not None or found.like_probabilities:
            return
        if (late := found.late.pop(request.serial, None)) is not None:
            self._lease_s = max(self._lease_s, 2 * (self._clock() - late.since_s))
        parts = found.request.parts
        if not 0 <= request.micro < found.ledger.cut.n_steps:
            raise ProtocolError(f"batch {request.micro} of {found.ledger.cut.n_steps}")
        measured = _by_part(parts, frames)
        for part, some in zip(parts, measured, strict=True):
            if wrong := part.wrong(some, found.ledger.cut.samples_of_micro(request.micro)):
                raise ProtocolError(f"batch {request.micro}, task {part.name!r}: {wrong}")
        if found.ledger.accept(request.worker, request.micro, request.serial) == "accepted":
            found.given.pop(request.serial, None)
            for so_far, some in zip(found.measured, measured, strict=True):
                so_far.add(some)
            if request.micro == 0:
                found.like_probabilities = [
                    part.name for part, some in zip(parts, measured, strict=True) if part.look_like_probabilities(some)
                ]
            while (plan := found.ledger.next_step()) is not None:
                found.ledger.applied(plan.step)
            if found.ledger.finished:
                states = [so_far.state() for so_far in found.measured]
                found.result = [combined(part, [state]) for part, state in zip(parts, states, strict=True)]

    def take_back_late(self) -> list[int]:
        """Leases that take too long are for others. Called now and then. Returns who had them."""
        now_s, workers = self._clock(), []
        for (phase, ordinal), evaluation in self._evaluations.items():
            if evaluation.like_probabilities:  # it is refused, and what was leased is of no use
                continue
            for serial, given in list(evaluation.given.items()):
                if now_s - given.since_s > self._lease_s:
                    evaluation.late[serial] = evaluation.given.pop(serial)
                    evaluation.ledger.revoke(given.micro)
                    workers.append(given.worker)
                    log.warning(
                        "evaluation %d of phase %d: worker %d has had batch %d for %.0f s, another one gets it",
                        ordinal, phase, given.worker, given.micro, now_s - given.since_s,
                    )  # fmt: skip
        return workers

    def leave(self, worker: int) -> None:
        """A worker is silent or gone: others compute what it had."""
        for evaluation in self._evaluations.values():
            evaluation.ledger.leave(worker)
            evaluation.given = {serial: one for serial, one in evaluation.given.items() if one.worker != worker}


def _by_part(parts: Sequence[Part], frames: Sequence[Any]) -> list[list[np.ndarray]]:
    """The frames of a `Score` as arrays, of each part its own. Raises ProtocolError."""
    n = sum(len(DTYPES[part.kind]) for part in parts)
    if len(frames) != n:
        raise ProtocolError(f"Score comes with {n} frames here, got {len(frames)}")
    left = iter(frames)
    return [[array_of(next(left), dtype, f"{part.kind}, {dtype}") for dtype in DTYPES[part.kind]] for part in parts]
