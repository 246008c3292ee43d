"""From settings to tables and a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

import gba_hvd
from ctr.config import Embedding, JobConfig
from ctr.dcn import DCNv2
from ctr.deepfm import DeepFM
from ctr.dlrm import DLRM
from gba_hvd.embedding.row_optimizers import RowOptimizer
from gba_hvd.errors import BadInput

RULES: dict[str, Callable[..., RowOptimizer]] = {
    "sgd": gba_hvd.SGD,
    "row_adagrad": gba_hvd.RowAdagrad,
    "adagrad": gba_hvd.Adagrad,
    "adam": gba_hvd.Adam,
}


def row_optimizer(config: Embedding) -> RowOptimizer:
    return RULES[config.optimizer](lr=config.lr, weight_decay=config.weight_decay)


def table_shapes(config: JobConfig, rows: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """(rows, columns) of each table. DeepFM keeps its linear weights in one more column."""
    columns = config.embedding.dim + (config.model.kind == "deepfm")
    return {name: (n_rows, columns) for name, n_rows in rows.items()}


def build_tables(config: JobConfig, rows: Mapping[str, int]) -> gba_hvd.EmbeddingTables:
    return gba_hvd.EmbeddingTables(
        table_shapes(config, rows),
        optimizer=row_optimizer(config.embedding),
        seed=config.seed,
        init_std=config.embedding.init_std,
        mode=config.embedding.pooling,
    )


def refuse_single_sample(config: JobConfig, n_samples: int) -> None:
    """Batch norm cannot take its statistics from a last micro-batch of one sample."""
    if config.model.batch_norm and n_samples % config.train.micro_batch == 1:
        raise BadInput(
            f"the last micro-batch of {n_samples:,} samples would have 1 sample, and batch norm needs 2: "
            f"change train.micro_batch ({config.train.micro_batch}) or set model.batch_norm=false"
        )


def build_model(config: JobConfig, tables: gba_hvd.EmbeddingTables, n_dense: int) -> nn.Module:
    model = config.model
    shared: dict[str, Any] = {
        "n_dense": n_dense, "hidden": model.hidden, "batch_norm": model.batch_norm, "dropout": model.dropout,
    }  # fmt: skip
    if model.kind == "deepfm":
        return DeepFM(tables, **shared)
    if model.kind == "dlrm":
        return DLRM(tables, bottom=model.bottom, interaction=model.interaction, **shared)
    return DCNv2(tables, cross_layers=model.cross_layers, structure=model.structure, **shared)
