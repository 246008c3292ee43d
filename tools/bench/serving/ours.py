"""The models with our tables: what builds them where they are opened, and what writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import gba_hvd
from gba_hvd.embedding.row_optimizers import RowOptimizer
from gba_hvd.shm.shard_memory import ShardMemory

from .models import DIM, Plain, Shape, dense_of, logits_of, request, shape_of


class Served(nn.Module):
    def __init__(self, shape: Shape, shard_dir: str | None = None, optimizer: RowOptimizer | None = None) -> None:
        super().__init__()
        self.tables = gba_hvd.EmbeddingTables(
            {name: (n, DIM) for name, n in shape.tables.items()},
            optimizer=optimizer or gba_hvd.SGD(lr=0.1),
            features={
                name: gba_hvd.Feature(field.table, pooling=None if field.ids_per_sample else "sum")
                for name, field in shape.fields.items()
            },
            shard_dir=shard_dir,
        )
        self.dense, self._is_stacked = dense_of(shape.name), shape.name != "din"

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        if self._is_stacked:
            logits: Tensor = self.dense(batch.dense, self.tables.stacked(batch.ids))
            return logits
        return logits_of(self.dense, batch.dense, self.tables(batch.ids))


def build(name: str, n_rows: int) -> Served:
    """The builder of the saved model."""
    return Served(shape_of(name, n_rows))


def batch(shape: Shape, n: int, seed: int) -> gba_hvd.Batch:
    ids, features = request(shape, n, seed)
    return gba_hvd.Batch({**ids}, features, torch.zeros(n))


def write(folder: Path, name: str, n_rows: int) -> None:
    """`ours`: the saved model; `torch.pt`: the state_dict of the same model in plain torch; `mlflow`: that, pickled."""
    import mlflow.pytorch

    from .models import Packed

    shape, memory_folder = shape_of(name, n_rows), folder / "memory"
    memory_folder.mkdir(parents=True)
    torch.manual_seed(1)
    model = Served(shape, str(memory_folder))
    memory = ShardMemory.create_or_open(memory_folder, "bench", model.tables.layout, grace_s=0)
    try:
        model.tables.memory, memory.initial = memory, model.tables.initial_rows
        shards = list(range(model.tables.layout.n_shards))
        memory.reserve(shards)
        for shard in shards:
            memory.init_shard(shard, 0)
        gba_hvd.save_model(
            model,
            folder / "ours",
            build=f"{__name__}:build",
            arguments={"name": name, "n_rows": n_rows},
            input_example=batch(shape, 2, 0),
        )
        weights = {
            f"tables.{name}.weight": torch.from_numpy(model.tables.rows(name, np.arange(n)))
            for name, n in shape.tables.items()
        }
    finally:
        memory.close()
    plain = Plain(shape)
    plain.load_state_dict({**weights, **{f"dense.{k}": v for k, v in model.dense.state_dict().items()}}, assign=True)
    plain.eval().requires_grad_(False)
    torch.save(plain.state_dict(), folder / "torch.pt")
    mlflow.pytorch.save_model(Packed(plain), folder / "mlflow", pip_requirements=[], serialization_format="pickle")
