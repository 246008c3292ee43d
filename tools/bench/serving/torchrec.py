"""TorchRec's inference on a CPU: quantised collections, which fbgemm looks up, with float32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.inference.modules import quantize_embeddings
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantizedCollection

from .models import DIM, Shape, dense_of, logits_of, request


class Served(nn.Module):
    def __init__(self, shape: Shape, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.shape = shape
        of_table = {name: [f for f, field in shape.fields.items() if field.table == name] for name in shape.tables}
        config: Any = EmbeddingConfig if shape.name == "din" else EmbeddingBagConfig
        configs = [
            config(name=name, embedding_dim=DIM, num_embeddings=n, feature_names=of_table[name])
            for name, n in shape.tables.items()
        ]
        collection = EmbeddingCollection if shape.name == "din" else EmbeddingBagCollection
        self.tables = collection(tables=configs, device=torch.device("meta"))
        kind = "embeddings" if shape.name == "din" else "embedding_bags"
        weights = {f"{kind}.{name}.weight": state[f"tables.{name}.weight"] for name in shape.tables}
        self.tables.load_state_dict(weights, assign=True)
        self.dense = dense_of(shape.name)
        self.dense.load_state_dict({k.removeprefix("dense."): v for k, v in state.items() if k.startswith("dense.")})

    def forward(self, ids: KeyedJaggedTensor, features: Tensor) -> Tensor:
        found = self.tables(ids)
        if self.shape.name == "din":
            rows = {}
            for name, field in self.shape.fields.items():
                values = found[name].values()
                rows[name] = values.view(-1, field.ids_per_sample, DIM) if field.ids_per_sample else values
            return logits_of(self.dense, features, rows)
        logits: Tensor = self.dense(features, found.values().view(-1, len(self.shape.fields), DIM))
        return logits


def load(folder: Path, shape: Shape) -> nn.Module:
    model = Served(shape, torch.load(folder / "torch.pt")).eval()
    quantized: nn.Module = quantize_embeddings(
        model, torch.float, inplace=True, additional_qconfig_spec_keys=[EmbeddingCollection],
        additional_mapping={EmbeddingCollection: QuantizedCollection},
    )  # fmt: skip
    return quantized


def input_of(shape: Shape, n: int, seed: int) -> tuple[KeyedJaggedTensor, Tensor]:
    ids, features = request(shape, n, seed)
    lengths = [torch.full((n,), max(1, field.ids_per_sample), dtype=torch.int32) for field in shape.fields.values()]
    values = torch.cat([ids[name].flatten() for name in shape.fields])
    return KeyedJaggedTensor.from_lengths_sync(list(shape.fields), values, torch.cat(lengths)), features
