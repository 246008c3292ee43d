"""What simulated workers train, where one numpy expression is the model: a quadratic, and logistic regression.

The click model with tables is in `click_task`. A gradient depends on the values and on the micro-batch's number only,
so all rules and worker counts of a seed see the same noise and the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gba_hvd.data import SyntheticClickLog
from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.embedding.row_optimizers import SGD, RowOptimizer
from gba_hvd.errors import BadInput
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.shard_memory import ShardMemory


class SimulatedTask(Protocol):
    """A model: `n` dense values, and tables in the shard memory that it is given."""

    layout: Layout
    row_optimizer: RowOptimizer
    start: np.ndarray  # float32 [n]

    def use(self, memory: ShardMemory) -> None:
        """Rows are read from here."""

    def gradient(self, values: np.ndarray, micro: int) -> tuple[np.ndarray, list[RowGrad]]:
        """Gradient of micro-batch `micro` at these dense values and the rows as they are: float32 [n], one RowGrad per
        group.
        """

    def measure(self, values: np.ndarray) -> float:
        """How good the model is: a loss, the less the better."""

    def evaluate(self, values: np.ndarray) -> dict[str, float]:
        """More of it, at the end; rows are still there."""


_NO_TABLES = Layout.of({"none": (1, 1)}, (), 1, seed=0, init_std=0.0)


def no_rows(layout: Layout) -> list[RowGrad]:
    return [RowGrad(np.empty(0, np.int64), np.empty((0, group.dim), np.float32)) for group in layout.groups]


class NoTables:
    """What a task without tables has of one."""

    layout: Layout = _NO_TABLES
    row_optimizer: RowOptimizer = SGD(lr=0.0)

    def use(self, memory: ShardMemory) -> None:
        pass

    def evaluate(self, values: np.ndarray) -> dict[str, float]:
        return {}


class Quadratic(NoTables):
    """Loss 1/2 sum_j h_j x_j^2, from x = 1; a micro-batch's gradient is h x + noise sqrt(h) z, z standard normal.

    curvatures: h, each above 0. Raises BadInput.
    """

    def __init__(self, curvatures: Sequence[float], noise: float = 0.0, seed: int = 0) -> None:
        self._h = np.array(curvatures, np.float32)
        if self._h.ndim != 1 or not len(self._h) or not (self._h > 0).all():
            raise BadInput(f"curvatures must be numbers above 0, got {list(curvatures)[:10]}")
        if not noise >= 0:
            raise BadInput(f"noise must not be negative, got {noise}")
        self._noise, self._seed = np.float32(noise) * np.sqrt(self._h), seed
        self.start = np.ones(len(self._h), np.float32)

    def gradient(self, values: np.ndarray, micro: int) -> tuple[np.ndarray, list[RowGrad]]:
        slope = self._h * values
        if self._noise.any():
            slope += self._noise * np.random.default_rng([self._seed, micro]).standard_normal(len(values), np.float32)
        return slope, no_rows(self.layout)

    def measure(self, values: np.ndarray) -> float:
        return float(0.5 * (self._h * values.astype(np.float64) ** 2).sum())


class Logistic(NoTables):
    """Logistic regression on a synthetic click log, a weight for each value of each field: all of it dense.

    micro_batch: samples. Measured is the log loss of samples that are not trained.
    """

    FIELDS, ROWS, N_DENSE, N_HELD_OUT = 6, 40, 4, 4000

    def __init__(self, samples: int, micro_batch: int, seed: int = 0) -> None:
        tables = {f"c{i}": self.ROWS for i in range(self.FIELDS)}
        log = SyntheticClickLog(samples + self.N_HELD_OUT, tables, n_dense=self.N_DENSE, seed=seed)
        batch = log.take(np.arange(samples + self.N_HELD_OUT))
        ids = np.stack([np.asarray(column) for column in batch.ids.values()], axis=1)
        at = self.N_DENSE + 1 + ids + self.ROWS * np.arange(self.FIELDS)
        self._x = np.zeros((len(ids), self.N_DENSE + 1 + self.FIELDS * self.ROWS), np.float32)
        self._x[:, 0] = 1.0
        self._x[:, 1 : self.N_DENSE + 1] = batch.dense
        np.put_along_axis(self._x, at, np.float32(1.0), axis=1)
        self._y, self._n, self._b = np.asarray(batch.label), samples, micro_batch
        self.start = np.zeros(self._x.shape[1], np.float32)

    def gradient(self, values: np.ndarray, micro: int) -> tuple[np.ndarray, list[RowGrad]]:
        rows = slice(micro * self._b % self._n, micro * self._b % self._n + self._b)
        x, y = self._x[rows], self._y[rows]
        return x.T @ (_sigmoid(x @ values) - y) / np.float32(len(y)), no_rows(self.layout)

    def measure(self, values: np.ndarray) -> float:
        logit, y = self._x[self._n :] @ values, self._y[self._n :]
        return float(np.mean(np.logaddexp(0, logit.astype(np.float64)) - y * logit))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1 / (1 + np.exp(-np.clip(x, -60, 60)))
    return found
