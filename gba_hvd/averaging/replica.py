"""One worker's replica of the dense parameters, and the lock that its two users share.

The training thread steps it with the user's optimizer, the thread of the rounds takes copies and mixes results in. Each
holds the lock for that long and for nothing else: never during a forward or backward pass, never while a message is on
its way. Parameters are written through `p.data`, so that autograd takes a mixing between forward and backward for what
it is in ShadowSync: lock-free training on values that move a little.

The replica is open while the worker trains an epoch. Closed, it takes no part in rounds and they leave it alone: while
an evaluation uses other values, and from an epoch's end until the first micro-batch of the next. `incarnation`
counts the openings: what a round brings back to a replica that was closed meanwhile is of no use, and is dropped.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gba_hvd.averaging.algorithms import add_difference_, interpolate_
from gba_hvd.gradients.dense_gradients import DenseGradients


@dataclass(frozen=True)
class ReplicaSnapshot:
    """A replica at one moment. values: float32 [n]; phase: as passed to `open`; n_steps: local steps so far."""

    values: Tensor
    phase: int
    incarnation: int
    n_steps: int


def is_finite(values: Tensor) -> bool:
    """Whether no number is NaN or infinite. A finite sum proves it; a sum of large numbers may overflow."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


class Replica:
    """Safe for the two threads that share it."""

    def __init__(self, dense: DenseGradients) -> None:
        self._parameters, self._sizes, self.n = dense.parameters, dense.sizes, dense.n
        self._lock = threading.Lock()
        self._phase = self._incarnation = 0
        self._is_open = False
        self.n_steps = 0

    @property
    def is_open(self) -> bool:
        return self._is_open

    def step(self, step_dense: Callable[[], None]) -> int:
        """Step the user's optimizer once. Returns the number of the step, from 1."""
        with self._lock:
            step_dense()
            self.n_steps += 1
            return self.n_steps

    def open(self, phase: int, values: Tensor | None = None) -> None:
        """Take part in rounds from now on; with these values, if given."""
        with self._lock:
            if values is not None:
                self._write(values)
            self._phase, self._incarnation, self._is_open = phase, self._incarnation + 1, True

    def close(self) -> ReplicaSnapshot | None:
        """Take no part from now on. Returns the replica as it is, None if it was closed already."""
        with self._lock:
            if not self._is_open:
                return None
            self._is_open = False
            return self._copied()

    def copy(self) -> ReplicaSnapshot | None:
        """The replica as it is now, None if it is closed."""
        with self._lock:
            return self._copied() if self._is_open else None

    def mix_in_(self, copy: ReplicaSnapshot, target: Tensor, share: float, mixing: str) -> bool:
        """Pull the replica towards `target` by `averaging`'s formula. False: it was closed meanwhile, nothing changed.

        copy: what this replica gave to the round.
        """
        with self._lock:
            if not self._is_open or copy.incarnation != self._incarnation:
                return False
            now = self._read()
            if mixing == "difference":
                add_difference_(now, copy.values, target, share)
            else:
                interpolate_(now, target, share)
            self._write(now)
            return True

    def overwrite_(self, values: Tensor) -> None:
        """Overwrite a closed replica."""
        with self._lock:
            assert not self._is_open
            self._write(values)

    def _copied(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self._read(), self._phase, self._incarnation, self.n_steps)

    def _read(self) -> Tensor:
        parts = [p.data.detach().cpu().reshape(-1) for p in self._parameters]
        return torch.cat(parts) if parts else torch.empty(0)

    def _write(self, values: Tensor) -> None:
        for p, part in zip(self._parameters, values.split(self._sizes) if self._sizes else (), strict=True):
            p.data.copy_(part.view_as(p))
