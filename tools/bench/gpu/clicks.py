"""The batches that all contestants train on, drawn once for each size, in files that workers load completely."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..harness import dlrm

ID_ZIPF = 1.05


@dataclass(frozen=True)
class Clicks:
    """Batches, each trained on once.

    ids:   int64   [n, 26, B * bag]  by table, those of a sample beside each other
    dense: float32 [n, B, 13]
    label: float32 [n, B]
    """

    ids: Tensor
    dense: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)

    @property
    def batch(self) -> int:
        """B, the samples of a batch."""
        return self.label.shape[1]

    @property
    def bag(self) -> int:
        """Ids that a sample has of each table."""
        return self.ids.shape[2] // self.batch

    @classmethod
    def load(cls, folder: Path) -> Clicks:
        """What `write` wrote there."""
        return cls(*(torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("ids", "dense", "label")))

    def pinned(self) -> Clicks:
        """In memory from which copies to the GPU run beside the CPU's work."""
        return Clicks(self.ids.pin_memory(), self.dense.pin_memory(), self.label.pin_memory())


def write(folder: Path, n_rows: int, batch: int, bag: int, n_batches: int, seed: int) -> None:
    """Draw the batches and store them, for tables of `n_rows` rows each; read by `Clicks.load`.

    Ids follow Zipf's law. Which id is the n-th most frequent is drawn for each table. Labels depend on a dense feature
    and on the parity of a sample's first id in the first table. They are the same for any number of cores.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = (n_batches, dlrm.N_TABLES, batch * bag)
    ids = np.lib.format.open_memmap(folder / "ids.npy", mode="w+", dtype=np.int64, shape=shape)
    shares = np.cumsum(np.arange(1, n_rows + 1, dtype=np.float64) ** -ID_ZIPF)

    def fill(table: int) -> None:
        rng = np.random.default_rng((seed, table))
        id_of_rank = rng.permutation(n_rows)
        for of_batch in ids[:, table]:
            ranks = np.searchsorted(shares, rng.random(batch * bag) * shares[-1], side="right")
            np.take(id_of_rank, ranks, out=of_batch, mode="clip")

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # numpy draws and searches without Python's lock
        list(pool.map(fill, range(dlrm.N_TABLES)))
    rng = np.random.default_rng((seed, dlrm.N_TABLES))
    dense = rng.standard_normal((n_batches, batch, dlrm.N_DENSE), dtype=np.float32)
    logit = dense[:, :, 0] + 2.0 * (ids[:, 0, ::bag] % 2) - 2.0
    label = (rng.random((n_batches, batch)) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    ids.flush()
    np.save(folder / "dense.npy", dense)
    np.save(folder / "label.npy", label)
