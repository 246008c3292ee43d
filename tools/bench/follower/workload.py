"""What the job trains and the follower serves: the model, its samples, and digests of its state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

import gba_hvd
from gba_hvd.data.synthetic import Zipf

from ..harness import dlrm
from ..serving.models import Shape, shape_of
from ..serving.ours import Served

MODEL = "dlrm"
BUILD = f"{Served.__module__}:build"
MICRO_BATCH, EPOCH_STEPS = 512, 50
_ZIPF = 1.05
_REQUEST_SEED, _REQUEST_SAMPLES = 1 << 40, 64


def shape(n_rows: int) -> Shape:
    return shape_of(MODEL, n_rows)


def arguments(n_rows: int) -> dict[str, object]:
    """Of `BUILD`."""
    return {"name": MODEL, "n_rows": n_rows}


class Clicks:
    """Samples of one epoch, with ids by Zipf's law; those of a micro-batch follow from its first row."""

    def __init__(self, of: Shape, n_samples: int, epoch: int) -> None:
        self._shape, self._n, self._epoch = of, n_samples, epoch

    def __len__(self) -> int:
        return self._n

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        return drawn(self._shape, len(rows), self._epoch * self._n + int(rows[0]))


def drawn(of: Shape, n: int, seed: int) -> gba_hvd.Batch:
    """n samples; a click is likelier where the first dense feature is large."""
    rng = np.random.default_rng(seed)
    ids = {name: torch.from_numpy(Zipf(size, _ZIPF).ranks(rng.random(n))) for name, size in of.tables.items()}
    dense = rng.standard_normal((n, of.n_dense), dtype=np.float32)
    label = (rng.random(n) < 1 / (1 + np.exp(1 - dense[:, 0]))).astype(np.float32)
    return gba_hvd.Batch({**ids}, torch.from_numpy(dense), torch.from_numpy(label))


def request(of: Shape) -> gba_hvd.Batch:
    """The samples that every request has, so that equal states give equal answers."""
    return drawn(of, _REQUEST_SAMPLES, _REQUEST_SEED)


def model_and_optimizer(n_rows: int, workers: int) -> tuple[Served, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Served(shape(n_rows), optimizer=gba_hvd.Adagrad(lr=dlrm.LEARNING_RATE, eps=dlrm.EPS))
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=dlrm.LEARNING_RATE, eps=dlrm.EPS),
        model.tables,
        global_batch=workers * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
    )
    return model, optimizer


def digest_of_model(model: Served, of: Shape) -> str:
    """Of the rows of all tables, which this process has, and the dense part."""
    rows = (model.tables.rows(name, np.arange(n)) for name, n in of.tables.items())
    return digest(rows, model.state_dict())


def digest(rows: Iterable[np.ndarray], dense: Mapping[str, Tensor]) -> str:
    """Of every bit. rows: of each table, in the order of the shape's"""
    found = hashlib.blake2b(digest_size=16)
    for one in rows:
        found.update(one.tobytes())
    for name in sorted(dense):
        found.update(dense[name].detach().numpy().tobytes())
    return found.hexdigest()


def digest_of_answer(logits: Tensor) -> str:
    return hashlib.blake2b(logits.numpy().tobytes(), digest_size=16).hexdigest()
