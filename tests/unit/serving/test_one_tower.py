"""Parts of a converted model, by the example of docs/SERVING.md."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.serving.http_server import app_of
from gba_hvd.serving.manifest import read_manifest
from recovery.storage.open import open_store
from tests.unit.serving.conftest import batch, model_code
from tests.unit.serving.test_export import checkpoint
from tests.unit.serving.test_http_server import answered

DOCS = Path(__file__).parents[3] / "docs"
SIZES = {"n_items": 1000, "n_countries": 9, "n_kinds": 5}


def blocks() -> list[str]:
    """towers.py, what the job does, what reads the models."""
    page = (DOCS / "SERVING.md").read_text()
    section = page.partition("\n### One tower of a model\n")[2].partition("\n### ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)


@pytest.fixture
def job(job_memory: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the example has in its job: the model, trained, and inputs of both towers."""
    monkeypatch.chdir(tmp_path)
    Path("towers.py").write_text(blocks()[0])
    torch.manual_seed(1)
    model = runpy.run_path("towers.py")["TwoTower"](**SIZES)
    tables = gba_hvd.convert(model, gba_hvd.SGD(lr=0.1))
    job_memory(tables)
    one = {"history": torch.tensor([[3, 5], [8, 1]]), "country": torch.tensor([2, 0])}
    one |= {"item": torch.tensor([7, 3]), "kind": torch.tensor([4, 1])}
    return {"gba_hvd": gba_hvd, "model": model, "tables": tables, **one}


@torch.no_grad()
def vectors(tower: nn.Module, *inputs: torch.Tensor) -> np.ndarray:
    return tower(*inputs).numpy()  # type: ignore[no-any-return]


def tables_at(url: str, version: int | str = "newest") -> set[str]:
    return {table.name for table in read_manifest(open_store(url), version).tables}


def test_each_tower_is_saved_with_the_tables_that_it_looks_up(job: dict[str, Any]) -> None:
    of_job, of_reader = blocks()[1:]
    exec(of_job, job)
    assert tables_at("models/user") == {"user.items", "user.country"}
    assert tables_at("models/item") == {"user.items", "item.kind"}
    kinds = torch.arange(1000) % 5
    found: dict[str, Any] = {"kinds": kinds}
    exec(of_reader, found)
    model = job["model"]
    users, items = vectors(model.user, job["history"], job["country"]), vectors(model.item, torch.arange(1000), kinds)
    assert np.array_equal(found["vectors"].numpy(), users)
    assert np.allclose(found["index"].numpy(), items, atol=1e-6)
    assert found["best"].tolist() == (found["vectors"] @ torch.from_numpy(items).T).topk(10).indices.tolist()


@pytest.mark.slow
def test_a_tower_answers_requests(job: dict[str, Any]) -> None:
    exec(blocks()[1], job)
    inputs = {"user": ("history", "country"), "item": ("item", "kind")}
    for tower, names in inputs.items():
        app = app_of(gba_hvd.open_model(f"models/{tower}"))
        rows = [dict(zip(names, row, strict=True)) for row in zip(*(job[name].tolist() for name in names), strict=True)]
        status, text, _ = answered(app, [json.dumps({"dataframe_records": rows}).encode()])
        assert status == 200, text
        expected = vectors(getattr(job["model"], tower), *(job[name] for name in names))
        got = [[row[f"score_{i}"] for i in range(16)] for row in json.loads(text)["predictions"]]
        assert np.allclose(got, expected)


@pytest.mark.slow
def test_two_towers_are_versions_at_one_url(job: dict[str, Any]) -> None:
    code = re.sub(r"models/(user|item)", "models/both", blocks()[1])
    exec(code, job)
    assert [len(tables_at("models/both", version)) for version in (1, 2)] == [2, 2]
    model, opened = job["model"], [gba_hvd.load_for_inference("models/both", version=one) for one in (1, 2)]
    assert np.array_equal(vectors(opened[0], job["history"], job["country"]),
                          vectors(model.user, job["history"], job["country"]))  # fmt: skip
    assert np.array_equal(vectors(opened[1], job["item"], job["kind"]), vectors(model.item, job["item"], job["kind"]))
    again = gba_hvd.save_model(model, "models/both", build="towers.py:TwoTower", arguments=SIZES)
    assert (again.version, again.new_shards) == (3, 0)


def test_a_part_without_an_example_is_refused(job: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"UserTower is a part .* looks up table 'item\.kind'. Give input_example"):
        gba_hvd.save_model(job["model"].user, "m", build="towers.py:make_user", arguments=SIZES)
    assert not Path("m").exists()


class Hides(nn.Module):
    """A part that looks rows up in a module that is none of its own."""

    def __init__(self, items: nn.Embedding | None = None) -> None:
        super().__init__()
        self.own, self.items = nn.Embedding(4, 3), [items or nn.Embedding(9, 3)]

    def forward(self, item: torch.Tensor) -> torch.Tensor:
        return self.items[0](item) + self.own(item)


def test_a_lookup_of_a_module_elsewhere_is_found_on_the_example(
    job_memory: Callable[..., None], tmp_path: Path
) -> None:
    model = nn.Module()
    model.items = nn.Embedding(9, 3)
    model.part = Hides(model.items)
    job_memory(gba_hvd.convert(model, gba_hvd.SGD(lr=0.1)))
    with pytest.raises(BadInput, match="differs from the model's on input_example"):
        gba_hvd.save_model(model.part, tmp_path / "m", build=f"{__name__}:Hides", input_example=(torch.tensor([1, 2]),))
    assert not (tmp_path / "m" / "versions").exists()


class Users(nn.Module):
    """A part that calls `EmbeddingTables`, which have more tables."""

    def __init__(self, tables: gba_hvd.EmbeddingTables) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, one: gba_hvd.Batch) -> torch.Tensor:
        return self.tables({"user": one.ids["user"]})["user"]


def users_of_all_tables() -> Users:
    return Users(model_code.tables())


def users_of_one_table() -> Users:
    return Users(gba_hvd.EmbeddingTables({"user": (50, 4)}, gba_hvd.SGD(lr=0.1)))


@pytest.mark.slow
def test_a_part_that_calls_embedding_tables_is_built_with_all_of_them(
    trained: Callable[..., Any], tmp_path: Path
) -> None:
    part, one = Users(trained().tables), batch(5)
    with pytest.raises(BadInput, match="a table 'item', the built module has user: build EmbeddingTables with all"):
        gba_hvd.save_model(part, tmp_path / "m", build=f"{__name__}:users_of_one_table", input_example=one)
    gba_hvd.save_model(part, tmp_path / "m", build=f"{__name__}:users_of_all_tables", input_example=one)
    assert np.array_equal(vectors(gba_hvd.load_for_inference(tmp_path / "m"), one), vectors(part, one))


@pytest.mark.slow
@pytest.mark.parametrize("tower", ["make_user", "make_item"])
def test_a_checkpoint_is_exported_as_the_complete_model_with_the_forward_of_a_tower(
    job: dict[str, Any], tower: str
) -> None:
    model, inputs = job["model"], (job["history"], job["country"])
    checkpoint(model, job["tables"], Path("job").absolute())
    how: Mapping[str, Any] = {"arguments": SIZES, "input_example": inputs}
    with pytest.raises(
        BadInput, match=rf"no such tensor.*{tower} builds a part of .* complete model, with a `forward`"
    ):
        gba_hvd.export_model("job", "models/user", build=f"towers.py:{tower}", **how)
    gba_hvd.export_model("job", "models/user", build="towers.py:UserOfBoth", **how)
    opened = gba_hvd.load_for_inference("models/user")
    opened.forward = own = opened.forward  # of the instance, as a builder may set it
    assert np.array_equal(vectors(opened, *inputs), vectors(model.user, *inputs))
    with torch.no_grad():
        model.user.out.bias += 1
    checkpoint(model, job["tables"], Path("job").absolute(), 2)
    follower = gba_hvd.Follower(opened, "job")
    assert follower.poll()
    follower.close()
    assert opened.forward is own
    assert np.array_equal(vectors(opened, *inputs), vectors(model.user, *inputs))


@pytest.mark.slow
def test_a_tower_alone_does_not_follow_a_checkpoint(job: dict[str, Any]) -> None:
    exec(blocks()[1], job)
    checkpoint(job["model"], job["tables"], Path("job").absolute())
    with pytest.raises(
        BadInput, match=r"built module has user\.items, user\.country: .* or the complete model, with a"
    ):
        gba_hvd.Follower(gba_hvd.load_for_inference("models/user"), "job").poll()
