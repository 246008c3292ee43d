"""Rows to save and restore in tests: small models whose numbers say where they belong."""

from __future__ import annotations

import numpy as np
import torch

from recovery.rows import RowSource
from recovery.torch_rows.tensor_rows import RowParts, TensorRows


def two_tables(
    n_shards: int = 1, n_rows: int = 5000, seed: int | None = 7, dim: int = 4, shared: bool = False
) -> TensorRows:
    """`user` with a slot per weight and one per row, and the small `colour`; zeros when there is no seed."""
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> torch.Tensor:
        values = rng.standard_normal(shape, dtype=np.float32) if seed is not None else np.zeros(shape, np.float32)
        return torch.from_numpy(values)

    return TensorRows(
        {
            "user": RowParts(some(n_rows, dim), {"exp_avg": some(n_rows, dim), "sum": some(n_rows)}),
            "colour": RowParts(some(11, 2)),
        },
        n_shards,
        shared=shared,
    )


def train(rows: TensorRows, steps: int, seed: int, n_touched: int = 50) -> None:
    """Steps that change a few rows, the same ones for the same seed and step."""
    for _ in range(steps):
        rng = np.random.default_rng([seed, rows.last_step])
        changes = {name: rng.integers(0, len(parts.weight), n_touched) for name, parts in rows.tables.items()}
        for name, ids in changes.items():
            rows.touched(name, ids)
        with rows.step() as step:
            for name, ids in changes.items():
                for tensor in (rows.tables[name].weight, *rows.tables[name].slots.values()):
                    values = rng.standard_normal((len(ids), *tensor.shape[1:]), dtype=np.float32)
                    tensor[torch.from_numpy(ids)] = torch.from_numpy(values) + step


def values(rows: TensorRows) -> dict[str, np.ndarray]:
    """A copy of everything, as [n_rows, width] per table, whatever the number of shards."""
    return {
        name: np.concatenate(
            [t.numpy().reshape(len(t), -1) for t in (parts.weight, *parts.slots.values())], axis=1, dtype=np.float32
        )
        for name, parts in rows.tables.items()
    }


def shard_values(holder: RowSource, shard: int) -> list[bytes]:
    """Every byte of a shard."""
    return [
        np.ascontiguousarray(column).tobytes()
        for table in range(len(holder.schema.tables))
        for column in holder.slab(table, shard).columns
    ]


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), f"table {name!r} differs"
