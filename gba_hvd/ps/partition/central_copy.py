"""A server's part of the central copy, where workers train replicas of their own: blended, overwritten, the mean.

Uses the dense part, which makes each change visible completely or not at all; submitted replicas are in memory only.
`averaging` has the formulas; workers and coordinator decide when replicas are submitted (`replica_worker`).

The mean of a phase is put into the dense part, then into a file of its own, and only then is it reported. So a
worker that asks a successor for it gets what the others got, though they may have blended into the copy since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gba_hvd.averaging.algorithms import MeanOfReplicas, interpolate_
from gba_hvd.ps import validation
from gba_hvd.ps.messages import Blend, NotFinite, ProtocolError, Publish, SubmitReplica
from gba_hvd.ps.partition.dense_part import DensePart
from recovery import state_codec
from recovery.storage.rename import replace_file


@dataclass
class _SubmittedReplicas:
    """Submitted for one phase: the mean so far, whose replicas are in it, and those of workers that may come back."""

    mean: MeanOfReplicas
    workers: set[int] = field(default_factory=set)
    early: dict[int, tuple[torch.Tensor, list[Mapping[str, Any]]]] = field(default_factory=dict)

    def whole(self) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """(values float32 [n], state of each tensor) of all; nothing may be added from here on."""
        while self.early:  # once, also if the mean cannot be put in its place and is asked for again
            worker, (values, state) = self.early.popitem()
            self.mean.add(values, state)
            self.workers.add(worker)
        return self.mean.mean()


class CentralCopy:
    """Not thread-safe: belongs to the server's main thread.

    A phase is over when its mean was made: what comes of it later, from a worker that was away, changes nothing.
    generation: of the mode; a mean of an earlier one is none
    """

    def __init__(self, dense: DensePart, generation: int) -> None:
        self._dense, self._generation = dense, generation
        self._path = dense.path.with_suffix(".mean")
        self._sizes = [t.size for t in dense.tensors]
        self._over = -1  # the last phase whose mean was made
        self._gathered: tuple[np.ndarray, bytes] | None = None
        self._members: set[int] = set()  # the workers whose replicas are in it
        self._handed: dict[int, _SubmittedReplicas] = {}  # by phase
        self._newest: dict[int, int] = {}  # by worker: number of its last round
        self._find_mean()

    def blend(self, request: Blend, frames: Sequence[Any]) -> np.ndarray:
        """w_ps <- (1-a) w_ps + a w_i; returns w_ps, float32 [n]. Raises ProtocolError, then nothing is changed."""
        if not 0 < request.elasticity <= 1:
            raise ProtocolError(f"an elasticity is above 0 and at most 1, got {request.elasticity}")
        values = self._values(frames, 1, "replica")
        known = self._newest.get(request.worker, -1)
        if request.phase > self._over and request.number > known:
            blended = interpolate_(
                torch.from_numpy(self._dense.values.copy()), torch.from_numpy(values), request.elasticity
            )
            self._dense.replace_(blended.numpy())
            self._newest[request.worker] = request.number
        return self._dense.values.copy()

    def publish(self, request: Publish, frames: Sequence[Any]) -> None:
        """Overwrite values, optimizer state, or both. Raises ProtocolError, then nothing is changed."""
        if len(frames) != 2:
            raise ProtocolError(f"Publish comes with two frames, got {len(frames)}")
        values = self._values(frames, 2, "values") if len(frames[0]) else None
        state = self._state(frames[1]) if len(frames[1]) else None
        if request.phase > self._over:
            self._dense.replace_(values, state)

    def submit(self, request: SubmitReplica, frames: Sequence[Any]) -> bool:
        """Add a replica to the mean of its phase, once per worker. Returns whether it counts; if not, it came too late.

        Raises ProtocolError, then nothing is changed.
        """
        values, state = self._values(frames, 2, "replica"), self._state(frames[1])
        worker, phase = request.worker, request.phase
        if phase <= self._over:
            return phase == self._over and worker in self._members  # a repeated request
        handed = self._handed.setdefault(phase, _SubmittedReplicas(MeanOfReplicas(len(values), len(self._sizes))))
        if worker in handed.workers:
            return True
        if request.early:
            handed.early[worker] = torch.from_numpy(values), state
        else:
            handed.early.pop(worker, None)
            handed.mean.add(torch.from_numpy(values), state)
            handed.workers.add(worker)
        return True

    def gather(self, phase: int) -> tuple[np.ndarray, bytes]:
        """Become the mean of the replicas submitted for this phase, once, and stay as it is if there are none.

        Returns values and optimizer state (state_codec) as they were then: by the time the last worker asks, the first
        may have blended into the next epoch's copy.
        """
        if phase > self._over:
            handed = self._handed.get(phase)
            if handed is not None:
                values, state = handed.whole()
                self._dense.replace_(values.numpy(), state)
            self._over, self._gathered = phase, self._now()
            self._members = set() if handed is None else handed.workers
            self._keep_mean()
            self._handed = {later: handed for later, handed in self._handed.items() if later > phase}
        return self._gathered if phase == self._over and self._gathered else self._now()

    def _keep_mean(self) -> None:
        assert self._gathered is not None
        values, state = self._gathered
        packed = np.frombuffer(state, dtype=np.uint8)
        facts = {"generation": self._generation, "phase": self._over, "values": values, "state": packed}
        facts["members"] = sorted(self._members)
        replace_file(self._path, state_codec.encode(facts))

    def _find_mean(self) -> None:
        """What a server that died had made last."""
        if not self._path.exists():
            return
        facts = state_codec.decode(self._path.read_bytes())
        if facts["generation"] == self._generation:
            self._over, self._gathered = facts["phase"], (facts["values"], facts["state"].tobytes())
            self._members = set(facts["members"])

    def _now(self) -> tuple[np.ndarray, bytes]:
        return self._dense.values.copy(), state_codec.encode(self._dense.state())

    def _values(self, frames: Sequence[Any], n_frames: int, what: str) -> np.ndarray:
        if len(frames) != n_frames:
            raise ProtocolError(f"a {what} comes with {n_frames} frames, got {len(frames)}")
        values = validation.array_of(frames[0], "float32", what)
        if len(values) != sum(self._sizes):
            raise ProtocolError(f"a {what} of {len(values)} numbers, the tensors here have {sum(self._sizes)}")
        if not validation.all_finite(values):
            ends = np.cumsum(self._sizes)
            first = int(np.flatnonzero(~np.isfinite(values))[0])
            name = self._dense.tensors[int(np.searchsorted(ends, first, side="right"))].name
            raise NotFinite(f"the {what} has numbers that are not finite: {name}")
        return values.copy()

    def _state(self, frame: Any) -> list[Mapping[str, Any]]:
        return validation.optimizer_state(frame, len(self._sizes))
