"""The example's models have their dense part as a program of `torch.export` and in ONNX."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from ctr.build import build_model, build_tables
from ctr.config import load
from ctr.datasets import open_splits
from gba_hvd.batch import Batch
from gba_hvd.data.behaviour import PADDING
from gba_hvd.serving.dense_program import exported_dense_part
from tests.unit.conftest import _no_keeper as _no_keeper
from tests.unit.serving.conftest import evaluated
from tests.unit.serving.conftest import job_memory as job_memory

N_POSITIONS = 3  # of a history; a DIEN's program has a step for each
CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"


def model_of(name: str, job_memory: Callable[..., None], *overrides: str) -> tuple[nn.Module, Any]:
    """An untrained model and an input of 64 samples."""
    config = load(CONFIGS / f"{name}.yaml", list(overrides))
    splits = open_splits(config.data, config.reads_sequences)
    tables = build_tables(config, splits.train)
    model = build_model(config, tables, splits.train)
    job_memory(tables)
    return model, splits.train.take(np.arange(64))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepfm", "dlrm", "dcn"])
def test_click_models(kind: str, job_memory: Callable[..., None]) -> None:
    model, example = model_of("synthetic", job_memory, f"model.kind={kind}")
    made = exported_dense_part(model, example, ("torch", "onnx"))
    assert made.torch and made.onnx and set(made.onnx.rows) == {one.feature for one in made.lookups}


@pytest.mark.slow
def test_a_youtube_dnn(job_memory: Callable[..., None]) -> None:
    made = exported_dense_part(*model_of("youtube_dnn", job_memory), ("torch", "onnx"))
    assert made.torch and made.onnx


def part_of(batch: Batch, samples: int, positions: int) -> Batch:
    """The first samples, with the first positions of their histories; padding where there are no more."""
    ids = {}
    for name, one in batch.ids.items():
        assert isinstance(one, torch.Tensor)
        n = min(positions, one.shape[-1])
        ids[name] = one[:samples] if one.ndim == 1 else pad(one[:samples, :n], (0, positions - n), value=PADDING)
    return Batch(ids, batch.dense[:samples], batch.label[:samples])


class Programs:
    """Both forms of the dense part of a model with random values, from an example of 4 samples of `N_POSITIONS`."""

    def __init__(self, name: str, job_memory: Callable[..., None], *overrides: str) -> None:
        torch.manual_seed(7)
        model, self.batch = model_of(name, job_memory, "embedding.init_std=0.5", *overrides)
        self.model: Any = model
        for one in model.state_dict().values():
            if one.is_floating_point() and one.ndim == 1:  # statistics and slopes too
                one.uniform_(0.1, 0.5)
        for ids in (self.batch.ids["history"], self.batch.ids["history_category"]):
            ids[1] = PADDING  # who has not clicked yet
        made = exported_dense_part(model, part_of(self.batch, 4, N_POSITIONS), ("torch", "onnx"))
        assert made.torch is not None and made.onnx is not None
        self.features, self.onnx = [one.feature for one in made.lookups], made.onnx
        self.program: Any = torch.export.load(io.BytesIO(made.torch)).module()
        self.session = onnxruntime.InferenceSession(made.onnx.data)

    def of_torch(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.program(self._rows(batch), dict(batch.ids))
        return found

    def of_onnx(self, batch: Batch) -> torch.Tensor:
        rows = self._rows(batch)
        given: dict[str, Any] = {name: rows[feature].detach().numpy() for feature, name in self.onnx.rows.items()}
        given |= {name: batch.ids[column].numpy() for column, name in self.onnx.fields.items()}  # type: ignore[union-attr]
        return torch.from_numpy(self.session.run(None, given)[0])

    def _rows(self, batch: Batch) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.model.tables({name: batch.ids[name] for name in self.features})
        return found

    def assert_scores(self, given: Batch, expected: torch.Tensor) -> None:
        assert len(expected) == 1 or expected.std() > 1e-3, "scores that say nothing"
        for found in (self.of_torch(given), self.of_onnx(given)):
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["dice", "prelu"])
def test_a_din_takes_any_number_of_samples_and_positions(activation: str, job_memory: Callable[..., None]) -> None:
    programs = Programs("din", job_memory, f"model.activation={activation}")
    for samples, positions in ((1, N_POSITIONS), (2, 1), (5, 7), (64, 33)):
        batch = part_of(programs.batch, samples, positions)
        programs.assert_scores(batch, evaluated(programs.model, batch))


@pytest.mark.slow
def test_a_dien_takes_any_number_of_samples_and_the_positions_of_its_example(job_memory: Callable[..., None]) -> None:
    programs = Programs("dien", job_memory)
    for samples in (1, 2, 5, 64):
        batch = part_of(programs.batch, samples, N_POSITIONS)
        programs.assert_scores(batch, evaluated(programs.model, batch))
    short = part_of(programs.batch, 9, 2)
    with pytest.raises(Exception, match=rf"history.*size\(\)\[1\] == {N_POSITIONS}"):
        programs.of_torch(short)
    with pytest.raises(Exception, match=f"Got: 2 Expected: {N_POSITIONS}"):
        programs.of_onnx(short)
    programs.assert_scores(part_of(short, 9, N_POSITIONS), evaluated(programs.model, short))
