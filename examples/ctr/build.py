"""From settings to tables and a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd
from ctr.chosen_items import ITEM, ChosenItems
from ctr.config import Dense, Embedding, JobConfig, Model
from ctr.datasets import Log
from ctr.dcn import DCNv2
from ctr.deepfm import DeepFM
from ctr.dien import DIEN
from ctr.din import DIN
from ctr.dlrm import DLRM
from ctr.sequences import SequenceLog
from ctr.youtube_dnn import YoutubeDNN
from gba_hvd.batch import Batch
from gba_hvd.data import ClickLog, SyntheticBehaviourLog
from gba_hvd.data.behaviour import PADDING
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


def dense_optimizer(config: Dense, model: nn.Module) -> torch.optim.Optimizer:
    of: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=config.momentum, **of)
    return torch.optim.Adam(model.parameters(), **of)


def table_shapes(config: JobConfig, rows: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """(rows, columns) of each table, padding rows included. DeepFM keeps its linear weights in one more column."""
    columns = config.embedding.dim + (config.model.kind == "deepfm")
    return {name: (n_rows, columns) for name, n_rows in rows.items()}


def build_tables(
    config: JobConfig, log: Log, kind: type[gba_hvd.EmbeddingTables] = gba_hvd.EmbeddingTables
) -> gba_hvd.EmbeddingTables:
    return make_tables(config, log.tables, shared_features(log), kind)


def shared_features(log: Log) -> dict[str, str] | None:
    """The table of each feature of a click log in which some share one; None: each has its own, or it has sequences."""
    if isinstance(log, ClickLog) and len(log.features) > len(log.tables):
        return dict(log.features)
    return None


def make_tables(
    config: JobConfig,
    rows: Mapping[str, int],
    shared: Mapping[str, str] | None = None,
    kind: type[gba_hvd.EmbeddingTables] = gba_hvd.EmbeddingTables,
) -> gba_hvd.EmbeddingTables:
    """rows: of each table, padding rows included. shared: see `shared_features`."""
    of_sequences = config.reads_sequences
    looked_up: Mapping[str, gba_hvd.Feature | str] | None = features(config) if of_sequences else None
    if shared is not None:
        looked_up = {name: gba_hvd.Feature(table, config.embedding.pooling) for name, table in shared.items()}
    padding = dict.fromkeys(("item", "category"), PADDING) if of_sequences else {}
    return kind(
        {
            name: gba_hvd.Table(n_rows, columns, padding_idx=padding.get(name))
            for name, (n_rows, columns) in table_shapes(config, rows).items()
        },
        optimizer=row_optimizer(config.embedding),
        features=looked_up,
        seed=config.seed,
        init_std=config.embedding.init_std,
        mode=config.embedding.pooling if looked_up is None else "sum",
    )


def features(config: JobConfig) -> dict[str, gba_hvd.Feature | str]:
    """What a model of sequences looks up: clicks one by one, or for youtube_dnn their mean."""
    pooling = "mean" if config.model.kind == "youtube_dnn" else None
    by_click = ["history", *(["negative"] if config.data.behaviour.negatives else [])]
    return {
        "user": "user",
        "candidate": "item",
        "candidate_category": "category",
        **{name: gba_hvd.Feature("item", pooling) for name in by_click},
        **{f"{name}_category": gba_hvd.Feature("category", pooling) for name in by_click},
    }


def refuse_single_sample(config: JobConfig, n_samples: int) -> None:
    """Batch norm cannot take its statistics from a last micro-batch of one sample."""
    dice = config.model.kind == "din" and config.model.activation == "dice"
    if (config.model.batch_norm or dice) and n_samples % config.train.micro_batch == 1:
        raise BadInput(
            f"the last micro-batch of {n_samples:,} samples would have 1 sample, and "
            f"{'the statistics of Dice need' if dice else 'batch norm needs'} 2: change train.micro_batch "
            f"({config.train.micro_batch}) or set model.{'activation=prelu' if dice else 'batch_norm=false'}"
        )


def build_model(config: JobConfig, tables: gba_hvd.EmbeddingTables, log: Log) -> nn.Module:
    if isinstance(log, SyntheticBehaviourLog | SequenceLog):
        return build_sequence_model(config, tables, log)
    if isinstance(log, ChosenItems):
        of_user = [name for name in log.tables if name != ITEM]
        return YoutubeDNN(tables, log_shares(log), of_user=of_user, of_item=[ITEM], **two_towers(config.model))
    return build_click_model(config, tables, log.n_dense)


def build_click_model(config: JobConfig, tables: gba_hvd.EmbeddingTables, n_dense: int) -> DeepFM | DLRM | DCNv2:
    model = config.model
    shared: dict[str, Any] = {
        "n_dense": n_dense, "hidden": model.hidden, "batch_norm": model.batch_norm, "dropout": model.dropout,
    }  # fmt: skip
    if model.kind == "deepfm":
        return DeepFM(tables, **shared)
    if model.kind == "dlrm":
        return DLRM(tables, bottom=model.bottom, interaction=model.interaction, **shared)
    return DCNv2(tables, cross_layers=model.cross_layers, structure=model.structure, **shared)


def build_sequence_model(
    config: JobConfig, tables: gba_hvd.EmbeddingTables, log: SyntheticBehaviourLog | SequenceLog | None
) -> DIN | DIEN | YoutubeDNN:
    model = config.model
    if model.kind == "din":
        return DIN(
            tables, hidden=model.hidden, attention=model.attention, activation=model.activation, dropout=model.dropout
        )
    shared: dict[str, Any] = {"hidden": model.hidden, "batch_norm": model.batch_norm, "dropout": model.dropout}
    if model.kind == "dien":
        return DIEN(tables, auxiliary=model.auxiliary, **shared)
    assert isinstance(log, SyntheticBehaviourLog)
    return YoutubeDNN(tables, log_shares(log), **two_towers(model))


def two_towers(model: Model) -> dict[str, Any]:
    """Settings of YoutubeDNN."""
    names = ("hidden", "temperature", "batch_norm", "dropout")
    return {name: getattr(model, name) for name in names}


def log_shares(log: SyntheticBehaviourLog | ChosenItems) -> Tensor:
    """float32 [n_items + 1]: the logarithm of each item's share of the clicks; of one that has none, that of 1e-12."""
    return torch.from_numpy(np.log(np.maximum(log.popularity(), 1e-12))).float()


def device_of(config: JobConfig) -> torch.device:
    """Of this worker's dense part. Raises BadInput where there is no such GPU."""
    named = torch.device(config.train.device)
    if named.type == "cpu":
        return named
    own = os.environ.get("HOROVOD_SLOT", os.environ.get("HOROVOD_LOCAL_RANK", "0"))  # (a local rank may change)
    number = int(own) if named.index is None else named.index
    if number >= torch.cuda.device_count():
        raise BadInput(
            f"train.device={config.train.device}: torch finds {torch.cuda.device_count()} GPUs here, and this worker "
            f"wants number {number} (counted from 0); start fewer workers on this host, or train with train.device=cpu"
        )
    return torch.device(named.type, number)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """What is minimised: log loss of clicks, or the loss of a model that has one of its own."""
    if isinstance(model, (DIEN, YoutubeDNN)):
        return model.loss(batch)
    return binary_cross_entropy_with_logits(model(batch), batch.label)
