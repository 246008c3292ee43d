"""TorchRec 1.8: tables spread over the workers (`table_wise`), fbgemm's fused Adagrad, DDP for the dense part, gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.streamable import Pipelineable

from ..harness import dlrm, peer_worker

FIELDS = [f"c{i}" for i in range(dlrm.N_TABLES)]


@dataclass
class TorchrecBatch(Pipelineable):  # type: ignore[misc]
    ids: KeyedJaggedTensor
    dense: Tensor
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> TorchrecBatch:
        return self

    def pin_memory(self) -> TorchrecBatch:
        return self

    def record_stream(self, stream: Any) -> None:
        pass


class DLRM(nn.Module):
    """Answers with the loss, and once more as the output that TorchRec's pipeline hands on."""

    def __init__(self) -> None:
        super().__init__()
        bound = dlrm.N_ROWS**-0.5
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{field}",
                    embedding_dim=dlrm.DIM,
                    num_embeddings=dlrm.N_ROWS,
                    feature_names=[field],
                    weight_init_min=-bound,
                    weight_init_max=bound,
                )
                for field in FIELDS
            ],
        )
        self.dense = dlrm.DenseDLRM()

    def forward(self, batch: TorchrecBatch) -> tuple[Tensor, Tensor]:
        rows = self.tables(batch.ids).values()
        logits = self.dense(batch.dense, rows.view(-1, dlrm.N_TABLES, dlrm.DIM))
        loss = binary_cross_entropy_with_logits(logits, batch.label)
        return loss, loss.detach()


def main() -> None:
    parser = peer_worker.parser(__doc__)
    parser.add_argument("--pipeline", action="store_true", help="exchange the next batch's ids while computing")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    clicks = peer_worker.Clicks.load(args.clicks, rank)
    lengths = torch.ones(clicks.ids[0].numel(), dtype=torch.int32)
    batches = [
        TorchrecBatch(KeyedJaggedTensor.from_lengths_sync(FIELDS, ids.flatten(), lengths), dense, label)
        for ids, dense, label in zip(clicks.ids, clicks.dense, clicks.label, strict=True)
    ]
    model = sharded(DLRM(), size)
    optimizer = torch.optim.Adagrad(
        [parameter for name, parameter in model.named_parameters() if ".tables." not in f".{name}"],
        lr=dlrm.LEARNING_RATE,
        eps=dlrm.EPS,
    )

    def plain(i: int) -> float:
        optimizer.zero_grad()
        loss, _ = model(batches[i % len(batches)])
        loss.backward()
        optimizer.step()
        value: float = loss.item()
        return value

    step = pipelined(model, optimizer, batches) if args.pipeline else plain
    peer_worker.time_steps(args, rank, step, dist.barrier)
    dist.destroy_process_group()


def sharded(model: DLRM, size: int) -> DistributedModelParallel:
    """Tables dealt out one by one, each trained by fbgemm inside the backward pass; the rest in DDP."""
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": dlrm.LEARNING_RATE, "eps": dlrm.EPS}
    )
    # Without `compute_kernel` the plan says "dense", which is slower and, on a CPU, does not train the tables at all.
    plan = construct_module_sharding_plan(
        model.tables,
        {f"t_{field}": table_wise(rank=i % size, compute_kernel="fused") for i, field in enumerate(FIELDS)},
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


def pipelined(
    model: DistributedModelParallel, optimizer: torch.optim.Optimizer, batches: list[TorchrecBatch]
) -> Callable[[int], float]:
    """TorchRec's own training pipeline."""
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    endless = itertools.cycle(batches)

    def step(i: int) -> float:
        return float(pipeline.progress(endless))

    return step


if __name__ == "__main__":
    main()
