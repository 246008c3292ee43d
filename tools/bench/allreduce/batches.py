"""The batches that all peers train on, drawn once for each shape and stored in files that workers load completely."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..harness import dlrm
from .shape import Field, Shape

ID_ZIPF, LENGTH_ZIPF = 1.05, 1.5


@dataclass(frozen=True)
class ShapeBatch:
    """ids: by field int64 [n]; lengths: by field int64 [B], ids of each sample. dense: float32 [B, 13]; label: [B]"""

    ids: dict[str, Tensor]
    lengths: dict[str, Tensor]
    dense: Tensor
    label: Tensor

    def offsets(self, name: str) -> Tensor:
        """int64 [B], where each sample's ids begin."""
        lengths = self.lengths[name]
        return lengths.cumsum(0) - lengths


def write(folder: Path, shape: Shape, batch: int, n_batches: int, workers: int, seed: int = 0) -> dict[str, float]:
    """A file of all batches for each worker; read by `load`. Returns means: ids, and distinct rows of a whole step."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    ranks = {table: rng.permutation(n_rows) for table, n_rows in shape.tables.items()}  # of the n-th most frequent id
    n_ids, n_distinct = 0, 0
    for i in range(n_batches):
        touched: dict[str, list[np.ndarray]] = {table: [] for table in shape.tables}
        for worker in range(workers):
            arrays: dict[str, np.ndarray] = {"dense": rng.normal(size=(batch, dlrm.N_DENSE)).astype(np.float32)}
            for name, field in shape.fields.items():
                lengths = _lengths(rng, field, batch)
                ids = ranks[field.table][_zipf(rng, shape.tables[field.table], ID_ZIPF, int(lengths.sum()))]
                arrays |= {f"ids {name}": ids, f"lengths {name}": lengths}
                touched[field.table].append(ids)
                n_ids += len(ids)
            logit = arrays["dense"][:, 0] - 1.0
            arrays["label"] = (rng.random(batch) < 1 / (1 + np.exp(-logit))).astype(np.float32)
            np.savez(folder / f"{worker}_{i}.npz", **arrays)  # type: ignore[arg-type]  # the stub lacks **
        n_distinct += sum(len(np.unique(np.concatenate(some))) for some in touched.values() if some)
    (folder / "batches.json").write_text(json.dumps({"n_batches": n_batches}))
    n_samples = n_batches * workers * batch
    return {"ids_per_sample": n_ids / n_samples, "distinct_rows_per_step": n_distinct / n_batches}


def load(folder: Path, shape: Shape, rank: int) -> list[ShapeBatch]:
    """The batches of one worker."""
    n_batches = json.loads((folder / "batches.json").read_text())["n_batches"]
    return [_read(folder / f"{rank}_{i}.npz", shape) for i in range(n_batches)]


def joined(parts: Sequence[ShapeBatch]) -> ShapeBatch:
    """Several workers' batches as one."""
    return ShapeBatch(
        {name: torch.cat([part.ids[name] for part in parts]) for name in parts[0].ids},
        {name: torch.cat([part.lengths[name] for part in parts]) for name in parts[0].lengths},
        torch.cat([part.dense for part in parts]),
        torch.cat([part.label for part in parts]),
    )


def cut(batch: ShapeBatch, n: int) -> list[ShapeBatch]:
    """The batch as n equal ones; its size is a multiple of n."""
    lengths = {name: of_field.chunk(n) for name, of_field in batch.lengths.items()}
    ids = {name: batch.ids[name].split([int(part.sum()) for part in parts]) for name, parts in lengths.items()}
    dense, label = batch.dense.chunk(n), batch.label.chunk(n)
    return [
        ShapeBatch(
            {name: parts[i] for name, parts in ids.items()},
            {name: parts[i] for name, parts in lengths.items()},
            dense[i],
            label[i],
        )
        for i in range(n)
    ]


def _read(path: Path, shape: Shape) -> ShapeBatch:
    with np.load(path) as file:
        found = {name: torch.from_numpy(file[name]) for name in file.files}
    return ShapeBatch(
        {name: found[f"ids {name}"] for name in shape.fields},
        {name: found[f"lengths {name}"] for name in shape.fields},
        found["dense"],
        found["label"],
    )


def _lengths(rng: np.random.Generator, field: Field, batch: int) -> np.ndarray:
    least, most = field.ids
    return least + _zipf(rng, most - least + 1, LENGTH_ZIPF, batch)


def _zipf(rng: np.random.Generator, n: int, exponent: float, size: int) -> np.ndarray:
    """int64 [size] of 0 to n - 1: i with a probability in proportion to (i + 1) ** -exponent."""
    shares = np.cumsum(np.arange(1, n + 1, dtype=np.float64) ** -exponent)
    ranks: np.ndarray = np.searchsorted(shares, rng.random(size) * shares[-1], side="right")
    return ranks.astype(np.int64).clip(max=n - 1)
