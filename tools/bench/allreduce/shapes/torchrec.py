"""TorchRec 1.8: tables spread over the workers (`table_wise`), fbgemm's fused Adagrad, DDP for the dense part, gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from ...harness import dlrm, peer_worker
from . import batches, worker
from .batches import ShapeBatch
from .shape import Shape

_FUSED = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": dlrm.LEARNING_RATE, "eps": dlrm.EPS}
Inputs = tuple[KeyedJaggedTensor, Tensor]


class Model(nn.Module):
    """An `EmbeddingBagCollection`; with histories an `EmbeddingCollection`, which looks up single ids as well."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape, self.dense = shape, shape.dense()
        kind, config = (
            (EmbeddingCollection, EmbeddingConfig) if shape.histories else (EmbeddingBagCollection, EmbeddingBagConfig)
        )
        self.tables = kind(
            device=torch.device("meta"),
            tables=[
                config(
                    name=f"t_{table}",
                    embedding_dim=shape.dim,
                    num_embeddings=n_rows,
                    feature_names=[name for name, field in shape.fields.items() if field.table == table],
                    weight_init_min=-(n_rows**-0.5),
                    weight_init_max=n_rows**-0.5,
                )
                for table, n_rows in shape.tables.items()
            ],
        )

    def forward(self, inputs: Inputs) -> Tensor:
        (ids, dense), shape = inputs, self._shape
        found: Any = self.tables(ids)
        if not shape.histories:
            logits: Tensor = self.dense(dense, found.values().view(len(dense), -1, shape.dim), [])
            return logits
        rows = torch.stack([found[name].values() for name in shape.pooled], dim=1)
        histories = [found[name].values().view(len(dense), -1, shape.dim) for name in shape.histories]
        logits = self.dense(dense, rows, histories)
        return logits


def inputs_of(shape: Shape, batch: ShapeBatch) -> Inputs:
    values = torch.cat([batch.ids[name] for name in shape.fields])
    lengths = torch.cat([batch.lengths[name] for name in shape.fields]).int()
    return KeyedJaggedTensor.from_lengths_sync(list(shape.fields), values, lengths), batch.dense


def sharded(model: Model, shape: Shape, size: int) -> DistributedModelParallel:
    """Tables dealt out one by one, each trained by fbgemm inside the backward pass; the rest in DDP."""
    kind = EmbeddingCollectionSharder if shape.histories else EmbeddingBagCollectionSharder
    sharder = kind(fused_params=_FUSED)
    plan = construct_module_sharding_plan(
        model.tables,
        {f"t_{table}": table_wise(rank=i % size, compute_kernel="fused") for i, table in enumerate(shape.tables)},
        sharder=sharder,
        local_size=size,
        world_size=size,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"tables": plan}),
        sharders=[sharder],
    )


def main() -> None:
    args, shape = worker.arguments(__doc__)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    prepared = [(inputs_of(shape, one), one.label) for one in batches.load(args.clicks, shape, rank)]
    model = sharded(Model(shape), shape, size)
    optimizer = torch.optim.Adagrad(
        [parameter for name, parameter in model.named_parameters() if ".tables." not in f".{name}"],
        lr=dlrm.LEARNING_RATE,
        eps=dlrm.EPS,
    )
    peer_worker.time_steps(args, rank, worker.training_step(prepared, model, optimizer), dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
