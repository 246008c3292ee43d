"""TorchRec 1.8: tables spread over the workers (`table_wise`), fbgemm's fused Adagrad, DDP for the dense part, gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.streamable import Pipelineable

from ..harness import dlrm
from . import batches, worker
from .batches import ShapeBatch
from .shape import SHAPES, Shape

_FUSED = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": dlrm.LEARNING_RATE, "eps": dlrm.EPS}


@dataclass
class Inputs(Pipelineable):  # type: ignore[misc]
    ids: KeyedJaggedTensor
    dense: Tensor
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Inputs:
        return self

    def pin_memory(self) -> Inputs:
        return self

    def record_stream(self, stream: Any) -> None:
        pass


class Model(nn.Module):
    """An `EmbeddingBagCollection`; with histories an `EmbeddingCollection`, which looks up single ids as well.

    Answers with the loss, and once more as the output that TorchRec's pipeline hands on.
    """

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

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        found, dense = self.tables(inputs.ids), inputs.dense
        loss = binary_cross_entropy_with_logits(self._logits(found, dense), inputs.label)
        return loss, loss.detach()

    def _logits(self, found: Any, dense: Tensor) -> Tensor:
        shape = self._shape
        if not shape.histories:
            logits: Tensor = self.dense(dense, found.values().view(-1, len(shape.fields), shape.dim), [])
            return logits
        rows = torch.stack([found[name].values() for name in shape.pooled], dim=1)
        histories = [found[name].values().view(-1, shape.fields[name].ids[1], shape.dim) for name in shape.histories]
        logits = self.dense(dense, rows, histories)
        return logits


def inputs_of(shape: Shape, batch: ShapeBatch) -> Inputs:
    values = torch.cat([batch.ids[name] for name in shape.fields])
    lengths = torch.cat([batch.lengths[name] for name in shape.fields]).int()
    return Inputs(KeyedJaggedTensor.from_lengths_sync(list(shape.fields), values, lengths), batch.dense, batch.label)


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


def plain(
    model: DistributedModelParallel, optimizer: torch.optim.Optimizer, prepared: Sequence[Inputs]
) -> Callable[[int], float]:
    def step(i: int) -> float:
        optimizer.zero_grad()
        loss, _ = model(prepared[i % len(prepared)])
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def pipelined(
    model: DistributedModelParallel, optimizer: torch.optim.Optimizer, prepared: Sequence[Inputs]
) -> Callable[[int], float]:
    """TorchRec's own training pipeline."""
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    endless = itertools.cycle(prepared)
    return lambda i: float(pipeline.progress(endless))


def main() -> None:
    parser = worker.parser(__doc__)
    parser.add_argument("--pipeline", action="store_true", help="exchange the next batch's ids while computing")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    prepared = [inputs_of(shape, one) for one in batches.load(args.clicks, shape, rank)]
    model = sharded(Model(shape), shape, size)
    optimizer = torch.optim.Adagrad(
        [parameter for name, parameter in model.named_parameters() if ".tables." not in f".{name}"],
        lr=dlrm.LEARNING_RATE,
        eps=dlrm.EPS,
    )
    step = (pipelined if args.pipeline else plain)(model, optimizer, prepared)
    worker.time_steps(args, rank, step, dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
