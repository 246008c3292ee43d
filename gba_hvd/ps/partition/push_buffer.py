"""The gradients one server has been sent, until the step they belong to is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gba_hvd.embedding.row_gradients import RowGrad, merge, unpack
from gba_hvd.update_rules.rule import Damping, not_damped


@dataclass(frozen=True)
class BufferedPush:
    """Gradients of one micro-batch's mean loss, for the rows and dense tensors of one server.

    dense: float32 [n]
    rows:  float32 words (`row_gradients.pack_by_owner`)
    dense_step: the step of the dense values they were computed with, -1 if not known
    worker: who computed them
    residual: float32, what that worker had not sent after it (`partition.residuals`); None: not known
    """

    micro: int
    serial: int
    dense: np.ndarray
    rows: np.ndarray
    dense_step: int = -1
    worker: int = -1
    residual: np.ndarray | None = None

    @property
    def n_bytes(self) -> int:
        return self.dense.nbytes + self.rows.nbytes + (0 if self.residual is None else self.residual.nbytes)


class PushBuffer:
    """Pushes by the lease they answer. Not thread-safe: the server that owns the buffer serialises access."""

    def __init__(self) -> None:
        self._pushes: dict[tuple[int, int], BufferedPush] = {}
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._pushes)

    def __contains__(self, lease: tuple[int, int]) -> bool:
        """Whether the push that answers this lease (micro-batch, serial) is here."""
        return lease in self._pushes

    def add(self, push: BufferedPush) -> bool:
        """Store a push; False when it is here already."""
        key = push.micro, push.serial
        if key in self._pushes:
            return False
        self._pushes[key] = push
        self.n_bytes += push.n_bytes
        return True

    def find(self, leases: Iterable[tuple[int, int]]) -> dict[tuple[int, int], BufferedPush]:
        """The pushes that answer these leases (micro-batch, serial); those not here are left out."""
        return {key: self._pushes[key] for key in leases if key in self._pushes}

    def take(self, leases: Iterable[tuple[int, int]]) -> dict[tuple[int, int], BufferedPush]:
        """Remove and return the pushes that answer these leases (micro-batch, serial); those not here are left out."""
        found = {key: self._pushes.pop(key) for key in leases if key in self._pushes}
        self.n_bytes -= sum(push.n_bytes for push in found.values())
        return found

    def discard_before(self, serial: int) -> None:
        """Discard pushes of leases that will never be asked for."""
        self.take([key for key in self._pushes if key[1] < serial])

    def clear(self) -> None:
        self._pushes, self.n_bytes = {}, 0


def merge_pushes(
    pushes: Sequence[tuple[BufferedPush, float]],
    n_dense: int,
    dims: Sequence[int],
    damping: Callable[[int], Damping] = not_damped,
) -> tuple[np.ndarray, list[RowGrad]]:
    """Weighted sums over pushes: dense float32 [n_dense], and one row gradient per group of tables.

    A push of weight 0 takes no part: a row that only such pushes touched is not touched.
    damping: by the step of the dense values that a push was computed with, what more it is multiplied by.
    """
    dense = np.zeros(n_dense, dtype=np.float32)
    parts: list[list[tuple[RowGrad, float]]] = [[] for _ in dims]
    for push, weight in pushes:
        if weight:
            by = damping(push.dense_step)
            dense += np.float32(weight) * by.dense * push.dense
            for group, grad in enumerate(unpack(push.rows, dims)):
                parts[group].append((grad, weight * by.rows))
    empty = [RowGrad(np.empty(0, np.int64), np.empty((0, dim), np.float32)) for dim in dims]
    return dense, [merge(some) if some else none for some, none in zip(parts, empty, strict=True)]
