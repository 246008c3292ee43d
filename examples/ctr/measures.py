"""By what a job is evaluated: AUC and log loss of clicks, or recall and NDCG of a retrieval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import gba_hvd
from ctr.chosen_items import ChosenItems
from ctr.config import JobConfig
from ctr.datasets import RECALL_AT, Log
from ctr.youtube_dnn import YoutubeDNN
from gba_hvd.data import SyntheticBehaviourLog

_TITLES = {"auc": "AUC", "logloss": "log loss", "auc_exact": "AUC of all pairs"}


@dataclass(frozen=True)
class Measured:
    """What an evaluation found. values: by name; the first one selects the best epoch, higher is better.

    exact: the AUC is that of all pairs, not of a histogram; None: there is no AUC
    """

    values: Mapping[str, float]
    note: str = ""
    exact: bool | None = None


def selects(config: JobConfig) -> str:
    """The name of what selects the best epoch: higher is better."""
    return f"recall_at_{RECALL_AT}" if config.model.kind == "youtube_dnn" else "auc"


def title_of(name: str) -> str:
    """As a person reads it."""
    return _TITLES.get(name, name.replace("_at_", "@"))


def evaluate_part(
    model: nn.Module, part: Log, state: Any, device: torch.device, reading: Mapping[str, Any]
) -> Measured:
    """The measures of a part of the data; the same result on every rank.

    device: the model's; reading: how batches are read
    """
    if isinstance(model, YoutubeDNN):
        assert isinstance(part, SyntheticBehaviourLog | ChosenItems)
        found = gba_hvd.evaluate_retrieval(
            model, part, part.items(), state, query_vectors=model.users, item_vectors=model.items,
            relevant=model.item_ids, item_ids=model.item_ids, k=RECALL_AT,
            **reading,
        )  # fmt: skip
        return Measured(found.values, found.note)
    forward = None if device.type == "cpu" else lambda batch: model(batch.to(device))
    scores = gba_hvd.evaluate(model, part, state, activation="sigmoid", forward=forward, **reading)
    return Measured({"auc": scores.auc, "logloss": scores.logloss}, scores.note, scores.exact)
