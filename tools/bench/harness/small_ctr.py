"""The click model and the samples that all emulated workers train, in files that workers map.

A small model on a synthetic log of known truth: its real compute is far below the emulated service time, and its AUC
can be held against the best that is possible at all. Imports torch; the dense part and the rule are the same for all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from . import dlrm
from . import emulated_accelerators as emulated

TABLES = {f"c{i}": rows for i, rows in enumerate([100, 300, 1000, 1000, 2000, 5000, 10_000, 50_000])}
FIELDS = list(TABLES)
DIM, N_DENSE, HIDDEN = 8, 4, (64, 32)
N_HELD_OUT = 50_000
INIT_STD = 0.01
# Adagrad, element by element, on rows and dense parameters alike: torch has it for sparse gradients too.
LEARNING_RATE, EPS = 0.05, 1e-8


class Tower(nn.Module):
    """The dense part: an MLP over all embeddings and the dense features."""

    def __init__(self, hidden: Sequence[int] = HIDDEN) -> None:
        super().__init__()
        self.layers = dlrm.mlp((len(FIELDS) * DIM + N_DENSE, *hidden, 1), last_relu=False)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """dense: [B, 4], rows: [B, 8, 8] -> logits [B]"""
        logits: Tensor = self.layers(torch.cat([rows.flatten(1), dense], dim=1))
        return logits.squeeze(1)


class OneTable(nn.Module):
    """For peers without ours: one table for all fields; its gradient is dense."""

    def __init__(self, hidden: Sequence[int] = HIDDEN) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(TABLES.values()), DIM)
        nn.init.normal_(self.table.weight, std=INIT_STD)
        self.first_rows = first_rows()
        self.tower = Tower(hidden)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """ids: int64 [8, B], dense: float32 [B, 4] -> logits [B]"""
        logits: Tensor = self.tower(dense, self.table((ids + self.first_rows).T))
        return logits


def write(folder: Path, n_samples: int, seed: int = 0) -> None:
    """ids.npy int32 [n, 8], dense.npy float32 [n, 4], label.npy float32 [n], held-out samples last; about.json."""
    from gba_hvd.data import SyntheticClickLog  # here, so that the peers' workers start without ours

    folder.mkdir(parents=True, exist_ok=True)
    n = n_samples + N_HELD_OUT
    log = SyntheticClickLog(n, TABLES, n_dense=N_DENSE, seed=seed)
    ids = np.lib.format.open_memmap(folder / "ids.npy", "w+", np.int32, (n, len(FIELDS)))
    dense = np.lib.format.open_memmap(folder / "dense.npy", "w+", np.float32, (n, N_DENSE))
    label = np.lib.format.open_memmap(folder / "label.npy", "w+", np.float32, (n,))
    for at in range(0, n, 1 << 16):
        rows = np.arange(at, min(at + (1 << 16), n))
        batch = log.take(rows)
        ids[rows] = np.stack([np.asarray(column) for column in batch.ids.values()], axis=1)
        dense[rows], label[rows] = batch.dense, batch.label
    held_out = SyntheticClickLog(N_HELD_OUT, TABLES, n_dense=N_DENSE, seed=seed, start=n_samples)
    (folder / "about.json").write_text(json.dumps({"bayes_auc": held_out.bayes_auc()}))


@dataclass(frozen=True)
class Samples:
    """Samples `first` to `first + n` of the files. ids: int32 [N, 8], dense: float32 [N, 4], label: float32 [N]."""

    ids: np.ndarray
    dense: np.ndarray
    label: np.ndarray
    first: int
    n: int

    @classmethod
    def train(cls, folder: Path, n: int) -> Samples:
        return cls(*_files(folder), 0, n)

    @classmethod
    def held_out(cls, folder: Path) -> Samples:
        files = _files(folder)
        return cls(*files, len(files[2]) - N_HELD_OUT, N_HELD_OUT)

    def __len__(self) -> int:
        return self.n

    def tensors(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """ids int64 [8, n], dense float32 [n, 4], label float32 [n]"""
        at = rows + self.first
        ids = np.ascontiguousarray(self.ids[at].T, dtype=np.int64)
        return torch.from_numpy(ids), torch.from_numpy(self.dense[at]), torch.from_numpy(self.label[at])

    def micro(self, index: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.tensors(np.arange(index * size, (index + 1) * size))


def _files(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, dense, label = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "dense", "label"))
    return ids, dense, label


def drawn(seed: int, n: int, n_rows: Sequence[int] = tuple(TABLES.values())) -> tuple[Tensor, Tensor, Tensor]:
    """Uniform ids int64 [8, n] below n_rows, dense float32 [n, 4], label float32 [n]."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, np.array(n_rows)[:, None], (len(FIELDS), n))
    dense = rng.standard_normal((n, N_DENSE), dtype=np.float32)
    label = (rng.random(n) < 0.25).astype(np.float32)
    return torch.from_numpy(ids), torch.from_numpy(dense), torch.from_numpy(label)


def first_rows() -> Tensor:
    """int64 [8, 1]: where each field begins in one table that has the rows of all fields."""
    return torch.tensor([0, *np.cumsum(list(TABLES.values()))[:-1]]).unsqueeze(1)


def auc(predict: Callable[[Tensor, Tensor], Tensor], samples: Samples, block: int = 5000) -> float:
    """AUC of `predict(ids [8, n], dense [n, 4]) -> logits [n]`."""
    from gba_hvd.metrics.scores import exact_auc  # here, so that the peers' workers start without ours

    logits, labels = [], []
    with torch.no_grad():
        for at in range(0, len(samples), block):
            ids, dense, label = samples.tensors(np.arange(at, min(at + block, len(samples))))
            logits.append(predict(ids, dense).numpy())
            labels.append(label.numpy())
    return exact_auc(np.concatenate(logits), np.concatenate(labels))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments of every emulated worker."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--data", type=Path, required=True, help="folder of samples")
    parser.add_argument("--result", type=Path, required=True, help="file that gets what the chief measured")
    parser.add_argument("--scenario", required=True)
    parser.add_argument("--service-s", type=float, required=True)
    parser.add_argument("--measured-s", type=float, required=True)
    parser.add_argument("--started", type=Path, help="file that the chief makes as its first micro-batch begins")
    return parser


def scenario_of(args: argparse.Namespace) -> emulated.Scenario:
    return emulated.scenarios(args.service_s, args.measured_s)[args.scenario]
