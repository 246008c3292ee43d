"""The gradients one server has been sent, until the step they belong to is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gba_hvd.embedding.row_gradients import RowGrad, merge, merge_contributors, unpack
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


def merge_pushes(
    pushes: Sequence[tuple[BufferedPush, float]],
    n_dense: int,
    dims: Sequence[int],
    damping: Callable[[int], Damping] = not_damped,
    dropped: Sequence[BufferedPush] | None = None,
    row_damping: Sequence[float] = (),
    counted: bool = False,
) -> tuple[np.ndarray, list[RowGrad]]:
    """Weighted sums over pushes: dense float32 [n_dense], and one row gradient per group of tables.

    A push of weight 0 takes no part: a row that only such pushes touched is not touched.
    damping: by the step of the dense values that a push was computed with, what more its dense part is multiplied by.
    row_damping: of each push, what more its rows are multiplied by; default 1.
    dropped: given where a row's last column counts its contributors, which no weight changes: pushes that count there,
    for rows that others touched, and have no other part
    counted: pushes come with the accesses of their rows.
    """
    dense = np.zeros(n_dense, dtype=np.float32)
    parts: list[list[tuple[RowGrad, float]]] = [[] for _ in dims]
    for (push, weight), by_rows in zip(pushes, row_damping or [1.0] * len(pushes), strict=True):
        if weight:
            dense += np.float32(weight) * damping(push.dense_step).dense * push.dense
            for group, grad in enumerate(unpack(push.rows, dims, counted)):
                parts[group].append((grad, weight * by_rows))
    empty = [RowGrad.none(dim, counted) for dim in dims]
    if dropped is None:
        return dense, [merge(some) if some else none for some, none in zip(parts, empty, strict=True)]
    unpacked = [unpack(push.rows, dims, counted) for push in dropped]
    others = [[grads[group] for grads in unpacked] for group in range(len(dims))]
    return dense, [
        merge_contributors(some, more) if some else none for some, more, none in zip(parts, others, empty, strict=True)
    ]
