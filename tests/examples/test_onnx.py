"""Which of the example's models have an ONNX form of their dense part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from ctr.build import build_model, build_tables
from ctr.config import load
from ctr.datasets import open_splits
from gba_hvd.errors import BadInput
from gba_hvd.serving.dense_program import exported_dense_part
from tests.unit.conftest import _no_keeper as _no_keeper
from tests.unit.serving.conftest import job_memory as job_memory

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"


def model_of(name: str, job_memory: Callable[..., None], *overrides: str) -> tuple[nn.Module, Any]:
    """An untrained model and an input of four samples."""
    config = load(CONFIGS / f"{name}.yaml", list(overrides))
    splits = open_splits(config.data, config.reads_sequences)
    tables = build_tables(config, splits.train)
    model = build_model(config, tables, splits.train)
    job_memory(tables)
    return model, splits.train.take(np.arange(4))


@pytest.mark.parametrize("kind", ["deepfm", "dlrm", "dcn"])
def test_click_models(kind: str, job_memory: Callable[..., None]) -> None:
    model, example = model_of("synthetic", job_memory, f"model.kind={kind}")
    made = exported_dense_part(model, example, ("torch", "onnx"))
    assert made.torch and made.onnx and set(made.onnx.rows) == {one.feature for one in made.lookups}


def test_a_youtube_dnn(job_memory: Callable[..., None]) -> None:
    made = exported_dense_part(*model_of("youtube_dnn", job_memory), ("torch", "onnx"))
    assert made.torch and made.onnx


@pytest.mark.parametrize("name", ["din", "dien"])
def test_models_whose_attention_depends_on_who_clicked_have_no_program(
    name: str, job_memory: Callable[..., None]
) -> None:
    """`torch.export` traces them for one number of samples only, so they have neither form."""
    with pytest.raises(BadInput, match=f"torch.export cannot trace {name.upper()}"):
        exported_dense_part(*model_of(name, job_memory), ("torch", "onnx"))
