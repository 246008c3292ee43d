"""The dense part as a program: which models can be split, and that the saved model stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.serving.compare import verify_model
from gba_hvd.serving.manifest import StoredLookup, read_manifest
from recovery.storage.open import open_store
from tests.unit.serving.conftest import CODE, batch, evaluated
from tests.unit.serving.test_export import checkpoint
from tests.unit.serving.test_save_and_load import Converted, Trained, converted_batch, raw_users


@pytest.mark.slow
def test_a_program_is_kept_with_what_its_rows_are(trained: Trained, tmp_path: Path) -> None:
    model, one = trained(), batch(30)
    expected = evaluated(model, one)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(3), dense_program=True)
    assert torch.equal(evaluated(model, one), expected), "the model looks rows up as before"
    store = open_store(tmp_path / "m")
    manifest = read_manifest(store)
    assert manifest.program is not None
    assert manifest.program.lookups == (
        StoredLookup("user", "user", "user", "sum"), StoredLookup("item", "item", "item", "sum", 0),
        StoredLookup("history", "history", "item", "mean", 0),
    )  # fmt: skip
    assert verify_model(store, manifest) == []
    file = tmp_path / "m" / manifest.program.file.name
    program: Any = torch.export.load(file).module()
    rows = model.tables(one.ids)
    fields = {"user": one.ids["user"], "item": one.ids["item"], "dense": one.dense}
    assert torch.allclose(program(rows, fields), expected, atol=1e-6)
    file.write_bytes(file.read_bytes()[:-1])
    assert len(verify_model(store, manifest)) == 1
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), expected)


@pytest.mark.slow
@pytest.mark.parametrize("hashed", [False, True])
def test_a_checkpoint_gives_the_same_program_as_the_job(trained: Trained, tmp_path: Path, hashed: bool) -> None:
    arguments = {"users": 100, "hashed": hashed}
    model = trained(**arguments)
    one = raw_users(batch(30), model) if hashed else batch(30, 100)
    checkpoint(model, model.tables, tmp_path / "c")
    how: dict[str, Any] = {"build": CODE, "arguments": arguments, "input_example": one, "dense_program": True}
    gba_hvd.save_model(model, tmp_path / "live", **how)
    gba_hvd.export_model(tmp_path / "c", tmp_path / "exported", **how)
    rows, fields = model.tables(one.ids), {"user": one.ids["user"], "item": one.ids["item"], "dense": one.dense}
    found = []
    for name in ("live", "exported"):
        store = open_store(tmp_path / name)
        program = read_manifest(store).program
        assert program is not None and len(program.lookups) == 3
        dense_part: Any = torch.export.load(tmp_path / name / program.file.name).module()
        found.append((program.lookups, dense_part(rows, fields)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "exported")(one), evaluated(model, one))


def test_an_export_without_an_example_is_refused(trained: Trained, tmp_path: Path) -> None:
    model = trained()
    checkpoint(model, model.tables, tmp_path / "c")
    with pytest.raises(BadInput, match="dense_program=True needs input_example"):
        gba_hvd.export_model(tmp_path / "c", tmp_path / "m", build=CODE, dense_program=True)
    assert not (tmp_path / "m").exists()


class Stacked(nn.Module):
    """Rows of all fields at once; ids are used beside their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = gba_hvd.EmbeddingTables({"a": (9, 4), "b": (7, 4)}, gba_hvd.SGD(lr=0.1))
        self.out = nn.Linear(8, 1)

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        known = (ids["a"] > 0).float().unsqueeze(1)
        return self.out(self.tables.stacked(ids).flatten(1)) * known


@pytest.mark.slow
def test_stacked_rows_and_ids_that_are_used_otherwise(job_memory: Callable[..., None], tmp_path: Path) -> None:
    model = Stacked()
    job_memory(model.tables)
    example = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])}
    gba_hvd.save_model(model, tmp_path / "m", input_example=example, dense_program=True)
    manifest = read_manifest(open_store(tmp_path / "m"))
    assert manifest.program is not None
    program: Any = torch.export.load(tmp_path / "m" / manifest.program.file.name).module()
    ids = {"a": torch.tensor([0, 5, 8]), "b": torch.tensor([6, 1, 0])}
    assert torch.allclose(program(model.tables(ids), ids), evaluated(model, ids), atol=1e-6)
    assert evaluated(model, ids)[0] == 0


class OfHistory(nn.Module):
    """A row for each position of a history."""

    def __init__(self) -> None:
        super().__init__()
        tables = {"item": gba_hvd.Table(9, 4, padding_idx=0)}
        features = {"history": gba_hvd.Feature("item", None)}
        self.tables = gba_hvd.EmbeddingTables(tables, gba_hvd.SGD(lr=0.1), features=features)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.out(self.tables(ids)["history"]).sum(1) + ids["history"].ne(0).sum(1, keepdim=True)


class Flattened(OfHistory):
    """Takes three positions only."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(12, 1)

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.out(self.tables(ids)["history"].flatten(1))


class ByLength(OfHistory):
    """Cannot be traced with a free number of positions: it asks a mapping for it."""

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(ids) * {3: 0.5}[ids["history"].shape[1]]


class Halves(OfHistory):
    """Takes numbers of positions of one kind, odd or even, as the example's."""

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        found = super().forward(ids)
        return found * 2 if ids["history"].shape[1] % 2 else found


class Positions(OfHistory):
    """Takes up to five positions; a graph has no form for that, so that its ONNX takes the example's only."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.rand(5, 4))

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = self.tables(ids)["history"]
        return self.out((rows * self.position[: rows.shape[1]]).sum(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "taken", "of_onnx"),
    [
        (OfHistory, (1, 2, 3, 4, 5, 11), (1, 2, 3, 4, 5, 11)),
        (Flattened, (3,), (3,)),
        (ByLength, (3,), (3,)),
        (Halves, (1, 3, 5, 11), (3,)),
        (Positions, (1, 2, 3, 4, 5), (3,)),
    ],
)
def test_the_positions_of_ids_are_free_where_the_model_allows_it(
    job_memory: Callable[..., None],
    tmp_path: Path,
    kind: type[OfHistory],
    taken: tuple[int, ...],
    of_onnx: tuple[int, ...],
) -> None:
    model = kind()
    job_memory(model.tables)
    example = {"history": torch.tensor([[1, 2, 0], [3, 4, 5]])}
    gba_hvd.save_model(model, tmp_path / "m", input_example=example, dense_program=("torch", "onnx"))
    manifest = read_manifest(open_store(tmp_path / "m"))
    assert manifest.program is not None and manifest.onnx is not None
    program: Any = torch.export.load(tmp_path / "m" / manifest.program.file.name).module()
    session = onnxruntime.InferenceSession(tmp_path / "m" / manifest.onnx.file.name)
    for n in (1, 2, 3, 4, 5, 11):
        ids = {"history": torch.randint(0, 9, (5, n))}
        rows = model.tables(ids)
        given = {name: rows[feature].detach().numpy() for feature, name in manifest.onnx.rows.items()}
        given |= {name: ids[column].numpy() for column, name in manifest.onnx.fields.items()}
        if n in taken:
            assert torch.allclose(program(rows, ids), evaluated(model, ids), atol=1e-5)
        else:
            with pytest.raises((AssertionError, RuntimeError)):
                program(rows, ids)
        if n in of_onnx:
            assert torch.allclose(torch.from_numpy(session.run(None, given)[0]), evaluated(model, ids), atol=1e-5)
        else:
            with pytest.raises(Exception, match=r"Got: \d+ Expected: 3"):
                session.run(None, given)


class Shifted(Stacked):
    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward({name: (one + 1) % 7 for name, one in ids.items()})


class Branching(Stacked):
    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        out = super().forward(ids)
        return out if out.sum() > 0 else -out


EXAMPLE = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "example", "words"),
    [
        (Shifted, EXAMPLE, "the ids of feature 'a' are no field of input_example as it is"),
        (Branching, EXAMPLE, "torch.export cannot trace Branching"),
        (Stacked, {name: one[:1] for name, one in EXAMPLE.items()}, "input_example has 1 samples, at least 2"),
        (Stacked, None, "dense_program=True needs input_example"),
    ],
)
def test_what_cannot_be_split_is_refused_and_nothing_is_written(
    job_memory: Callable[..., None], tmp_path: Path, kind: type[Stacked], example: Any, words: str
) -> None:
    model = kind()
    job_memory(model.tables)
    with pytest.raises(BadInput, match=words):
        gba_hvd.save_model(model, tmp_path / "m", input_example=example, dense_program=True)
    assert not (tmp_path / "m").exists()


def test_a_converted_model_is_refused(job_memory: Callable[..., None], tmp_path: Path) -> None:
    model = Converted()
    job_memory(gba_hvd.convert(model, gba_hvd.SGD(lr=0.1), keep=["kept"]))
    with pytest.raises(BadInput, match="a converted model looks rows up inside its modules"):
        gba_hvd.save_model(model, tmp_path / "m", input_example=converted_batch(3), dense_program=True)
