"""The batches all peers train on, drawn once per benchmark and stored in files that workers load completely.

So reading data costs no peer anything, and all see the same ids in the same order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from . import dlrm


def write(folder: Path, batch: int, n_batches: int, workers: int, *, zipf: float = 1.05, seed: int = 0) -> None:
    """Per worker r: ids_r.npy int64 [n_batches, 26, batch], dense_r.npy float32 [n_batches, batch, 13], label_r.npy."""
    from gba_hvd.data import SyntheticClickLog  # here, because it imports torch

    folder.mkdir(parents=True, exist_ok=True)
    tables = {f"c{i}": dlrm.N_ROWS for i in range(dlrm.N_TABLES)}
    log = SyntheticClickLog(workers * n_batches * batch, tables, n_dense=dlrm.N_DENSE, seed=seed, zipf=zipf)
    rows = np.arange(len(log)).reshape(workers, n_batches, batch)
    for worker in range(workers):
        taken = [log.take(rows[worker, i]) for i in range(n_batches)]
        ids = [[np.asarray(column) for column in b.ids.values()] for b in taken]
        np.save(folder / f"ids_{worker}.npy", np.array(ids))
        np.save(folder / f"dense_{worker}.npy", np.stack([b.dense for b in taken]))
        np.save(folder / f"label_{worker}.npy", np.stack([b.label for b in taken]))
