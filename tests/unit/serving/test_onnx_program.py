"""The dense part as ONNX: that it computes what the model does, and which models have none."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.errors import MissingPackage
from gba_hvd.serving import onnx_program
from gba_hvd.serving.compare import verify_model
from gba_hvd.serving.manifest import read_manifest
from recovery.storage.open import open_store
from tests.unit.serving.conftest import CODE, batch, evaluated, objects
from tests.unit.serving.test_dense_program import EXAMPLE, Stacked
from tests.unit.serving.test_export import checkpoint
from tests.unit.serving.test_save_and_load import Trained


def run(folder: Path, rows: Any, fields: Any) -> list[np.ndarray]:
    onnx = read_manifest(open_store(folder)).onnx
    assert onnx is not None
    session = onnxruntime.InferenceSession(folder / onnx.file.name)
    given = {name: rows[feature].detach().numpy() for feature, name in onnx.rows.items()}
    given |= {name: fields[column].numpy() for column, name in onnx.fields.items()}
    found: list[np.ndarray] = session.run(list(onnx.outputs), given)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("formats", ["onnx", ("torch", "onnx")])
def test_an_onnx_file_computes_what_the_model_does_for_any_number_of_samples(
    trained: Trained, tmp_path: Path, formats: Any
) -> None:
    model = trained()
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(3), dense_program=formats)
    store = open_store(tmp_path / "m")
    manifest = read_manifest(store)
    assert manifest.onnx is not None
    assert (manifest.program is not None) == ("torch" in formats)
    assert manifest.onnx.rows == {"user": "user", "item": "item", "history": "history"}
    assert (manifest.onnx.fields, manifest.onnx.outputs) == ({"dense": "dense"}, ("score",))
    assert [one.feature for one in manifest.onnx.lookups] == ["user", "item", "history"]
    assert verify_model(store, manifest) == []
    for n in (1, 3, 50):
        one = batch(n)
        (found,) = run(tmp_path / "m", model.tables(one.ids), {"dense": one.dense})
        assert np.allclose(found, evaluated(model, one).numpy(), rtol=1e-4, atol=1e-5)
        assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), evaluated(model, one))


class NamedAsOperators(nn.Module):
    """Its features have the names that the converter gives to results of operators, and to parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 1)

    def forward(self, rows: dict[str, torch.Tensor], fields: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(torch.cat(list(rows.values()), 1)).squeeze(1) * fields["linear"]


@pytest.mark.slow
def test_features_may_be_named_as_operators_and_parameters_are() -> None:
    model, samples = NamedAsOperators(), torch.export.Dim("samples")
    rows, fields = {name: torch.rand(3, 4) for name in ("cat", "head.weight", "score")}, {"linear": torch.rand(3)}
    shapes = ({name: {0: samples} for name in rows}, {name: {0: samples} for name in fields})
    exported = torch.export.export(model, (rows, fields), dynamic_shapes=shapes)
    made = onnx_program.onnx_of(exported, rows, fields, model(rows, fields))
    assert made.rows == {"cat": "cat", "head.weight": "head.weight", "score": "score.rows"}
    assert made.fields == {"linear": "linear"}


@pytest.mark.slow
def test_a_checkpoint_gives_the_same_file_as_the_job(trained: Trained, tmp_path: Path) -> None:
    model, one = trained(), batch(10)
    checkpoint(model, model.tables, tmp_path / "c")
    gba_hvd.export_model(tmp_path / "c", tmp_path / "m", build=CODE, input_example=one, dense_program="onnx")
    (found,) = run(tmp_path / "m", model.tables(one.ids), {"dense": one.dense})
    assert np.allclose(found, evaluated(model, one).numpy(), rtol=1e-4, atol=1e-5)


class TwoOutputs(Stacked):
    def forward(self, ids: dict[str, torch.Tensor]) -> Any:
        out = super().forward(ids)
        return {"click": out, "buy": out * 2}


@pytest.mark.slow
def test_ids_that_the_dense_part_uses_are_an_input_and_outputs_keep_their_names(
    job_memory: Callable[..., None], tmp_path: Path
) -> None:
    model = TwoOutputs()
    job_memory(model.tables)
    gba_hvd.save_model(model, tmp_path / "m", input_example=EXAMPLE, dense_program="onnx")
    onnx = read_manifest(open_store(tmp_path / "m")).onnx
    assert onnx is not None
    assert (onnx.rows, onnx.fields, onnx.outputs) == ({"a": "a", "b": "b"}, {"a": "a.ids"}, ("click", "buy"))
    ids = {"a": torch.tensor([0, 5, 8]), "b": torch.tensor([6, 1, 0])}
    click, buy = run(tmp_path / "m", model.tables(ids), ids)
    expected: Any = evaluated(model, ids)
    assert np.allclose(click, expected["click"].numpy(), atol=1e-5)
    assert np.allclose(buy, expected["buy"].numpy(), atol=1e-5)


class Spectrum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.i1(x)


class Unusual(Stacked):
    """An operator that no ONNX operator set has."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = Spectrum()

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.spectrum(super().forward(ids))


@pytest.mark.slow
def test_a_model_without_an_onnx_form_is_refused_and_nothing_written(
    job_memory: Callable[..., None], tmp_path: Path
) -> None:
    model = Unusual()
    job_memory(model.tables)
    words = r"no ONNX form: prims.bessel_i1 \(in spectrum: Spectrum\) cannot be converted. Nothing was written"
    with pytest.raises(BadInput, match=words):
        gba_hvd.save_model(model, tmp_path / "m", input_example=EXAMPLE, dense_program=("torch", "onnx"))
    assert not (tmp_path / "m").exists()
    gba_hvd.save_model(model, tmp_path / "m", input_example=EXAMPLE, dense_program="torch")
    assert len([name for name in objects(tmp_path / "m") if name.endswith(".pt2")]) == 1


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_refused(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = onnx_program._converted

    def other(exported: Any) -> Any:
        program = real(exported)
        for value in program.model.graph.initializers.values():
            if value.const_value.dtype.is_floating_point() and value.const_value.size > 1:
                import onnx_ir

                value.const_value = onnx_ir.tensor(value.const_value.numpy() + 0.5, name=value.name)
        return program

    monkeypatch.setattr(onnx_program, "_converted", other)
    with pytest.raises(BadInput, match=r"output 'score' of the ONNX file is off by .* nothing was written"):
        gba_hvd.save_model(trained(), tmp_path / "m", build=CODE, input_example=batch(3), dense_program="onnx")
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_without_the_runtime_the_form_is_checked_and_the_log_says_so(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with caplog.at_level(logging.WARNING, "gba_hvd"):
        gba_hvd.save_model(trained(), tmp_path / "m", build=CODE, input_example=batch(3), dense_program="onnx")
    assert "not compared with the model: onnxruntime is not installed" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_without_the_extra_the_command_that_installs_it_is_said(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    model = trained()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingPackage, match=rf"needs {package}, which is not installed: pip install 'gba-hvd\[onnx\]'"
    ):
        gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(3), dense_program="onnx")
    assert not (tmp_path / "m").exists()
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(3), dense_program=True)


@pytest.mark.parametrize("formats", ["tflite", ("torch", "tflite")])
def test_another_format(trained: Trained, tmp_path: Path, formats: Any) -> None:
    with pytest.raises(BadInput, match="dense_program 'tflite' is not known"):
        gba_hvd.save_model(trained(), tmp_path / "m", build=CODE, input_example=batch(3), dense_program=formats)
