"""How much the rows that MFU takes differ by what is counted: accesses, or steps with an access.

Accesses are drawn by Zipf's law, step by step, as between two saves; no training.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recovery.selection import importance

N_ROWS, N_STEPS = 100_000, 200
BATCHES = (256, 1024, 4096, 16_384)
ZIPFS = (0.8, 1.05, 1.3)
COLUMNS = {
    "Zipf": "{zipf:g}", "global batch": "{global_batch:,}", "rows in common": "{rows_in_common:.1%}",
    "accesses in rows taken": "{accesses_saved:.2%}", "the same, by steps": "{accesses_saved_by_steps:.2%}",
}  # fmt: skip


def compared(r: float, seed: int) -> list[dict[str, Any]]:
    """For each law and global batch: the rows in common, and the share of all accesses that each choice has."""
    return [_of(zipf, batch, r, np.random.default_rng([seed, batch])) for zipf in ZIPFS for batch in BATCHES]


def _of(zipf: float, batch: int, r: float, rng: np.random.Generator) -> dict[str, Any]:
    popularity = np.arange(1, N_ROWS + 1) ** -zipf
    up_to = np.cumsum(popularity / popularity.sum())
    accesses, steps = np.zeros(N_ROWS, np.uint32), np.zeros(N_ROWS, np.uint32)
    for _ in range(N_STEPS):
        rows, times = np.unique(np.searchsorted(up_to, rng.random(batch)), return_counts=True)
        accesses[rows] += times.astype(np.uint32)
        steps[rows] += 1
    k = importance.n_taken("mfu", N_ROWS, r)
    order = rng.permutation(N_ROWS)  # ties are not won by the popular rows
    by_accesses, by_steps = (order[importance.largest(counts[order], k)] for counts in (accesses, steps))
    total = int(accesses.sum())
    return {
        "zipf": zipf,
        "global_batch": batch,
        "rows_in_common": len(np.intersect1d(by_accesses, by_steps)) / max(1, len(by_accesses)),
        "accesses_saved": float(accesses[by_accesses].sum() / total),
        "accesses_saved_by_steps": float(accesses[by_steps].sum() / total),
    }
