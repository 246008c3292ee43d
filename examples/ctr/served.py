"""What builds the model of a job of `train_ctr.py` where it is opened: `build="ctr.served:build"`.

Without the job's data: its arguments say what of the data the model depends on. `arguments_of` gives them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

import gba_hvd
from ctr.build import build_click_model, build_sequence_model, make_tables, shared_features
from ctr.config import JobConfig, section_from
from ctr.datasets import Log
from gba_hvd.data import ClickLog
from gba_hvd.errors import BadInput


def arguments_of(config: JobConfig, log: Log) -> dict[str, Any]:
    """Plain JSON, for `build`. log: the training part of the job's data"""
    arguments = {
        "settings": config.as_dict(), "rows": dict(log.tables), "n_dense": log.n_dense, "shared": shared_features(log)
    }  # fmt: skip
    found: dict[str, Any] = json.loads(json.dumps(arguments))
    return found


def logged_model(config: JobConfig, log: Log) -> gba_hvd.LogModel | None:
    """What the settings' `log_model` asks for; None without it. Its example is the log's first samples.

    Of a prepared log its encoder is stored with the model; not of one with histories, which are padded.
    """
    if config.log_model is None:
        return None
    how = dataclasses.asdict(config.log_model)
    example = log.take(np.arange(min(4, len(log))))
    how["dense_names"] = getattr(log, "dense_names", ())  # of a prepared dataset
    if how.pop("raw_values") and isinstance(log, ClickLog):
        how["encoder"] = log.description["path"]
    return gba_hvd.LogModel(input_example=example, build="ctr.served:build", arguments=arguments_of(config, log), **how)


def build(
    settings: Mapping[str, Any], rows: Mapping[str, int], n_dense: int, shared: Mapping[str, str] | None = None
) -> nn.Module:
    """The untrained model. Raises BadInput for YoutubeDNN, whose log-Q correction is made of the training data."""
    config = section_from(JobConfig, settings)
    if config.model.kind == "youtube_dnn":
        raise BadInput("a youtube_dnn is built with the popularity of its items, which is in the training data only")
    tables = make_tables(config, rows, shared)
    if config.reads_sequences:
        return build_sequence_model(config, tables, None)
    return build_click_model(config, tables, n_dense)
