"""For tests: rows to save, a store in memory, and saves made one after the other in the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from recovery.config import Config
from recovery.errors import NotFound, StoreError
from recovery.format.manifest import Manifest
from recovery.selection.selector import Selection
from recovery.storage.store import Store, checked
from recovery.torch_rows.tensor_rows import RowParts, TensorRows
from recovery.write.multipart import SaveTarget, commit_parts, save_part

SMALL = Config(section_bytes=8 << 10, blob_bytes=32 << 10, level=0)


@dataclass
class Saver:
    """Saves rows as the checkpointer does, in the calling thread and without claims.

    made: every manifest so far
    """

    rows: TensorRows
    store: Store
    config: Config = SMALL
    epoch: int = 1
    made: list[Manifest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.selection = Selection(self.rows, self.config, rng=np.random.default_rng(0))

    def save(
        self, kind: str | None = None, state: bytes | None = None, about: dict[str, Any] | None = None, ahead: int = 0
    ) -> Manifest:
        """The first one is full, the others are of the configured policy; the state says the step by default.

        ahead: steps that the rows have and the state has not
        """
        kind = kind or (self.config.policy if self.made else "full")
        number, step = len(self.made) + 1, self.rows.last_step - ahead
        parent = None if kind == "full" else self.made[-1].name
        target = SaveTarget(self.epoch, number, kind, parent, step, 10 * step, self.rows.schema, about or {})
        written = save_part(self.rows, self.selection, self.store, target, self.config)
        state = b"state of step %d" % step if state is None else state
        manifest, _ = commit_parts(
            self.store, self.selection, target, [written], lambda parts: state, unix_clock=lambda: 0.0
        )
        self.made.append(manifest)
        return manifest


class RamStore:
    """The simplest store that is right: a dict. Writes each object whole, or not at all."""

    def __init__(self) -> None:
        self.url = "ram://test"
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        data = b"".join(pieces)
        with self._lock:
            if self.objects.setdefault(checked(name), data) != data:
                raise StoreError(f"{name}: another object of this name is there already")

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        with self._lock:
            if name not in self.objects:
                raise NotFound(f"{self.url}: {name}: there is no such object")
            return self.objects[name][start : None if n_bytes is None else start + n_bytes]

    def names(self, prefix: str) -> dict[str, int]:
        with self._lock:
            return {name: len(data) for name, data in self.objects.items() if name.startswith(prefix)}

    def delete(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                self.objects.pop(name, None)


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
    """A copy of everything, as [n_rows, width] per table, for any number of shards."""
    return {
        name: np.concatenate(
            [t.numpy().reshape(len(t), -1) for t in (parts.weight, *parts.slots.values())], axis=1, dtype=np.float32
        )
        for name, parts in rows.tables.items()
    }
