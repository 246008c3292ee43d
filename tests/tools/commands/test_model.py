"""`gba-hvd model`: from a checkpoint to a file of scores, what is damaged, and what differs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gba_hvd_tools.cli import main
from torch import nn

import gba_hvd
from gba_hvd.data.hashing import hash_strings
from gba_hvd.serving.manifest import read_manifest
from gba_hvd.tracking import find_run
from recovery.storage.open import open_store
from tests.unit.conftest import _no_keeper as _no_keeper
from tests.unit.serving import model_code
from tests.unit.serving.conftest import CODE, batch, change_rows, evaluated
from tests.unit.serving.conftest import job_memory as job_memory
from tests.unit.serving.conftest import trained as trained
from tests.unit.serving.test_export import checkpoint

Trained = Callable[..., nn.Module]
EXAMPLE = CODE.replace("make_model", "example")
OF_STRINGS = CODE.replace("make_model", "OfStrings")


def said(capsys: pytest.CaptureFixture[str], *args: object, status: int = 0) -> str:
    assert main(["model", *map(str, args)]) == status
    out, err = capsys.readouterr()
    return out if status == 0 or out else err


def as_json(capsys: pytest.CaptureFixture[str], *args: object, status: int = 0) -> Any:
    return json.loads(said(capsys, *args, "--json", status=status))


@pytest.fixture
def exported(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[nn.Module, Path]:
    model = trained()
    checkpoint(model, model.tables, tmp_path / "c")
    text = said(capsys, "export", tmp_path / "c", tmp_path / "m", "--build", CODE, "--example", EXAMPLE)
    assert "version 1 of manifests/000001-00000001.json (step 5), 64 rows" in text
    return model, tmp_path / "m"


@pytest.mark.slow
def test_an_export_of_the_best_model_is_of_the_checkpoint_that_is_kept_for_it(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, place = trained(), tmp_path / "c"
    checkpoint(model, model.tables, place)
    export = ["export", place, tmp_path / "m", "--build", CODE, "--example", EXAMPLE]
    assert "has no checkpoint of the best model" in said(capsys, *export, "--best", status=1)
    checkpoint(model, model.tables, place, 2, {"best_step": 4})
    text = said(capsys, *export, "--best")
    assert "(step 5)" in text
    ahead = "rows up to 1 step ahead of the measured model"
    assert f"the best model: best of step 4; {ahead}\n" in text
    missed = {"best_unsaved_step": 3, "best_unsaved_value": 0.8, "best_unsaved_why": "no server", "best_metric": "auc"}
    checkpoint(model, model.tables, place, 3, {"best_step": 7, "best_value": 0.7, **missed})
    assert "the best model that is saved: auc 0.7000 of step 7\n" in said(capsys, *export, "--best")
    checkpoint(model, model.tables, tmp_path / "none", 1, missed)
    export[1] = tmp_path / "none"
    refused = said(capsys, *export, "--best", status=1)
    assert "no checkpoint of the best model: the best model, auc 0.8000 of step 3, was not saved: no server" in refused
    export[1] = place
    assert "(step 7)" in said(capsys, *export)


@pytest.mark.slow
def test_an_export_has_the_dense_program_that_is_asked_for(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained()
    checkpoint(model, model.tables, tmp_path / "c")
    how = ["export", tmp_path / "c", tmp_path / "m", "--build", CODE, "--dense-program"]
    assert "--dense-program needs --example" in said(capsys, *how, status=1)
    refused = said(capsys, *how, "--example", EXAMPLE, "--hashed", "user", status=1)
    assert "hashed column 'user': its table 'user' is not hashed" in refused
    assert "version 1" in said(capsys, *how, "--example", EXAMPLE)
    assert len(list((tmp_path / "m").rglob("*.pt2"))) == 1


@pytest.mark.slow
def test_an_export_without_an_example_says_what_refuses_it(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained()
    checkpoint(model, model.tables, tmp_path / "c")
    how = ["model", "export", str(tmp_path / "c"), str(tmp_path / "m"), "--build", CODE]
    assert main(how) == 0
    assert "`gba-hvd model predict` and `serve` refuse this model" in capsys.readouterr().err
    frame_of(batch(3)).to_parquet(tmp_path / "in.parquet")
    predict = ("predict", tmp_path / "m", tmp_path / "in.parquet", "--out", tmp_path / "out.parquet")
    assert "saved without input_example" in said(capsys, *predict, status=1)
    assert main([*how, "--example", EXAMPLE]) == 0
    assert "without --example" not in capsys.readouterr().err


@pytest.mark.slow
def test_an_example_may_import_what_is_beside_its_file(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained()
    checkpoint(model, model.tables, tmp_path / "c")
    monkeypatch.setattr(sys, "path", list(sys.path))
    place, _, name = EXAMPLE.rpartition(":")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_samples.py").write_bytes(Path(place).read_bytes())
    (tmp_path / "own" / "example.py").write_text(
        f"def make():\n    import own_samples\n    return own_samples.{name}()\n"
    )
    how = ["export", tmp_path / "c", tmp_path / "m", "--build", CODE, "--example"]
    assert "version 1" in said(capsys, *how, f"{tmp_path}/own/example.py:make")
    (tmp_path / "own" / "example.py").write_text("import no_such_package\n")
    text = said(capsys, *how, f"{tmp_path}/own/example.py:make", status=1)
    assert "the example is built by make of the example's code file, which needs no_such_package" in text
    assert "example='nowhere.py:make': nowhere.py cannot be read" in said(capsys, *how, "nowhere.py:make", status=1)


@pytest.mark.slow
def test_installed_modules_stay_also_where_the_environment_is_beside_the_example(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained()
    checkpoint(model, model.tables, tmp_path / "c")
    place, _, name = EXAMPLE.rpartition(":")
    site = tmp_path / ".venv" / "site-packages"
    (site / "an_installed_package").mkdir(parents=True)
    (site / "an_installed_package" / "__init__.py").touch()
    (tmp_path / "a_package_beside").mkdir()
    (tmp_path / "a_package_beside" / "__init__.py").write_text("from a_package_beside import part")
    (tmp_path / "a_package_beside" / "part.py").write_bytes(Path(place).read_bytes())
    imports = f"import an_installed_package\nfrom a_package_beside.part import {name}\n"
    (tmp_path / "example.py").write_text(imports)
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    said(capsys, "export", tmp_path / "c", tmp_path / "m", "--build", CODE, f"--example={tmp_path}/example.py:{name}")
    assert sys.modules.pop("an_installed_package")
    assert not [one for one in sys.modules if one.startswith("a_package_beside")]


def test_a_model_may_not_import_what_is_beside_its_example(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained()
    checkpoint(model, model.tables, tmp_path / "c")
    place, _, name = EXAMPLE.rpartition(":")
    (tmp_path / "beside.py").write_bytes(Path(place).read_bytes())
    imports = "def {0}():\n    import beside\n    return beside.{0}()\n"
    (tmp_path / "both.py").write_text(imports.format("make_model") + imports.format(name))
    both = [f"--build={tmp_path}/both.py:make_model", f"--example={tmp_path}/both.py:{name}"]
    text = said(capsys, "export", tmp_path / "c", tmp_path / "m", *both, status=1)
    assert "which needs beside, and that is not installed here" in text
    assert str(tmp_path) not in sys.path and "beside" not in sys.modules


def test_each_store_of_an_export_has_its_own_options(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained()
    checkpoint(model, model.tables, tmp_path / "c")
    how = ["export", tmp_path / "c", f"memory://{tmp_path.name}", "--build", CODE]
    assert "version 1" in said(capsys, *how, "--option", "asynchronous=no")
    assert f"{tmp_path}/c: a local folder takes no storage options" in said(
        capsys, *how, "--source-option", "key=k", status=1
    )


def frame_of(one: gba_hvd.Batch) -> pd.DataFrame:
    history = one.ids["history"]
    cuts = [*history.offsets.tolist(), len(history.values)]
    return pd.DataFrame({
        "user": one.ids["user"].numpy(), "item": one.ids["item"].numpy(), "dense": one.dense.tolist(),
        "history": [history.values[a:b].tolist() for a, b in pairwise(cuts)],
        "request": [f"r{i}" for i in range(len(one))],
    })  # fmt: skip


@pytest.mark.slow
def test_a_file_is_scored(exported: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model, url), one = exported, batch(30)
    frame_of(one).to_parquet(tmp_path / "in.parquet")
    text = said(capsys, "predict", url, tmp_path / "in.parquet", "--out", tmp_path / "out.parquet", "--keep", "request")
    assert text == f"{tmp_path}/out.parquet: scores of 30 samples, by version 1\n"
    found = pd.read_parquet(tmp_path / "out.parquet")
    assert list(found.columns) == ["request", "score"]
    assert np.array_equal(found["score"].to_numpy(), evaluated(model, one).numpy())
    how = ["--out", tmp_path / "out.csv", "--batch", 7, "--mmap", "--version", 1]
    assert as_json(capsys, "predict", url, tmp_path / "in.parquet", *how)["samples"] == 30
    assert np.allclose(pd.read_csv(tmp_path / "out.csv")["score"], found["score"], atol=1e-6)


@pytest.mark.slow
def test_dense_columns_of_a_file_have_the_names_of_the_export(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, one = trained(), batch(30)
    checkpoint(model, model.tables, tmp_path / "c")
    how = ["export", tmp_path / "c", tmp_path / "m", "--build", CODE, "--dense-names", "price", "age"]
    assert "dense_names needs input_example" in said(capsys, *how, status=1)
    said(capsys, *how, "--example", EXAMPLE)
    assert gba_hvd.open_model(tmp_path / "m").example["age"] == [1, 1]
    frame = frame_of(one).drop(columns=["dense"]).assign(age=one.dense[:, 1].numpy(), price=one.dense[:, 0].numpy())
    frame.to_parquet(tmp_path / "in.parquet")
    how = ["predict", tmp_path / "m", tmp_path / "in.parquet", "--out", tmp_path / "out.parquet"]
    said(capsys, *how, "--batch", 7)
    found = pd.read_parquet(tmp_path / "out.parquet")["score"]
    assert np.allclose(found, evaluated(model, one).numpy(), atol=1e-6)
    frame.drop(columns=["price"]).to_parquet(tmp_path / "in.parquet")
    assert "field 'dense': price is missing" in said(capsys, *how, status=1)


@pytest.mark.slow
def test_a_file_is_scored_by_rows_that_stay_in_their_store(
    exported: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model, url), one = exported, batch(30)
    frame_of(one).to_parquet(tmp_path / "in.parquet")
    how = ["predict", url, tmp_path / "in.parquet", "--out", tmp_path / "out.parquet"]
    said(capsys, *how, "--tables", "remote", "--cache-bytes", 1 << 20)
    assert np.array_equal(pd.read_parquet(tmp_path / "out.parquet")["score"].to_numpy(), evaluated(model, one).numpy())
    assert "cache_bytes is of tables='remote'" in said(capsys, *how, "--cache-bytes", 1 << 20, status=1)


@pytest.mark.slow
def test_rows_in_fewer_bits_give_almost_the_same_scores(
    exported: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame_of(batch(30)).to_parquet(tmp_path / "in.parquet")
    scores = {}
    for dtype in ("float32", "int8", "bfloat16"):
        how = ["--out", tmp_path / f"{dtype}.parquet", "--row-dtype", dtype]
        said(capsys, "predict", exported[1], tmp_path / "in.parquet", *how)
        scores[dtype] = pd.read_parquet(tmp_path / f"{dtype}.parquet")["score"]
    for dtype in ("int8", "bfloat16"):
        assert 0 < (scores[dtype] - scores["float32"]).abs().max() < 0.2
    how = ["--out", tmp_path / "o.parquet", "--mmap", "--row-dtype", "int8"]
    assert "row_dtype='int8' needs memory" in said(
        capsys, "predict", exported[1], tmp_path / "in.parquet", *how, status=1
    )


def test_a_csv_file_has_a_column_for_each_number(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, one = trained(), batch(20)
    flat = gba_hvd.Batch({**one.ids, "history": torch.arange(40).view(20, 2) % 9}, one.dense, one.label)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=flat)
    frame = frame_of(one).drop(columns=["dense", "history"])
    for name, values in (("dense", one.dense), ("history", flat.ids["history"])):
        frame[[f"{name}_0", f"{name}_1"]] = values.numpy()
    frame.to_csv(tmp_path / "in.csv", index=False)
    said(capsys, "predict", tmp_path / "m", tmp_path / "in.csv", "--out", tmp_path / "out.parquet")
    found = pd.read_parquet(tmp_path / "out.parquet")["score"]
    assert np.allclose(found, evaluated(model, flat).numpy(), atol=1e-6)


STRINGS = {
    "user": pa.array([f"u{i}" for i in range(20)]),
    "history": pa.array([[f"u{j}" for j in range(i % 4)] for i in range(20)]),
}


@pytest.fixture
def of_strings(job_memory: Any, tmp_path: Path) -> tuple[nn.Module, gba_hvd.Batch, Path]:
    model = model_code.OfStrings()
    job_memory(model.tables)
    known = hash_strings(STRINGS["user"]).view(np.int64)
    change_rows(model, "user", known)
    lengths = np.arange(20) % 4
    flat = hash_strings(pa.array([f"u{j}" for n in lengths for j in range(n)])).view(np.int64)
    history = gba_hvd.Bag(torch.from_numpy(flat), torch.from_numpy(np.cumsum(lengths) - lengths))
    one = gba_hvd.Batch({"user": torch.from_numpy(known), "history": history}, torch.zeros(20, 1), torch.zeros(20))
    gba_hvd.save_model(model, tmp_path / "m", build=OF_STRINGS, input_example=one)
    return model, one, tmp_path


@pytest.mark.slow
def test_strings_are_hashed_as_in_training_where_that_is_said(
    of_strings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, one, folder = of_strings
    frame = pa.table({**STRINGS, "dense_0": np.zeros(20)})
    pq.write_table(frame, folder / "in.parquet")
    how = ["predict", folder / "m", folder / "in.parquet", "--out", folder / "out.parquet"]
    said(capsys, *how, "--hashed", "user", "history", "--batch", 7)
    found = pd.read_parquet(folder / "out.parquet")["score"].to_numpy()
    assert np.array_equal(found, evaluated(model, one).numpy()) and len(set(found)) == 20
    text = said(capsys, *how, "--hashed", "user", status=1)
    assert "field 'history': expected numbers, got list<element: string>. Where they are ids of a hashed table" in text
    assert "say so: --hashed history. Those of a dataset of" in text


def test_ids_of_digits_in_a_csv_file_are_strings_where_that_is_said(
    of_strings: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, one, folder = of_strings
    digits = [str(i) for i in range(20)]
    ids = {"user": torch.from_numpy(hash_strings(pa.array(digits)).view(np.int64)), "history": one.ids["user"]}
    change_rows(model, "user", ids["user"].numpy(), seed=6)
    gba_hvd.save_model(model, folder / "d", build=OF_STRINGS, input_example=gba_hvd.Batch(ids, one.dense, one.label))
    text = {"user": digits, "history": STRINGS["user"].to_pylist(), "dense_0": np.zeros(20)}
    pd.DataFrame(text).to_csv(folder / "in.csv", index=False)
    how = ["predict", folder / "d", folder / "in.csv", "--out", folder / "out.parquet", "--hashed", "user", "history"]
    with caplog.at_level("WARNING", logger="gba_hvd"):
        said(capsys, *how)
    assert "column 'user' holds whole numbers (0, ...), which are hashed as strings" in caplog.text
    assert "'history'" not in caplog.text
    expected = evaluated(model, gba_hvd.Batch(ids, one.dense, one.label)).numpy()
    assert np.array_equal(pd.read_parquet(folder / "out.parquet")["score"].to_numpy(), expected)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("usr", "hashed column 'usr' is no field of ids of the model: these are history, user"),
        ("dense", "hashed column 'dense' is no field of ids"),
        ("user", "hashed column 'user' holds int64, not strings"),
    ],
)
def test_a_column_that_cannot_be_hashed_is_named(
    of_strings: Any, capsys: pytest.CaptureFixture[str], column: str, words: str
) -> None:
    _, _, folder = of_strings
    pq.write_table(pa.table({**STRINGS, "user": np.arange(20), "dense_0": np.zeros(20)}), folder / "in.parquet")
    how = ["predict", folder / "m", folder / "in.parquet", "--out", folder / "o.parquet", "--hashed", column, "history"]
    assert words in said(capsys, *how, status=1)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["import no_such_package", "from gba_hvd import no_such_name"])
@pytest.mark.parametrize("where", ["in the file", "in the callable"])
def test_a_builder_that_needs_what_is_not_installed_is_one_line(
    exported: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, where: str
) -> None:
    builder = tmp_path / "needs.py"
    builder.write_text(f"{code}\ndef make(): ...\n" if where == "in the file" else f"def make():\n    {code}\n")
    text = said(capsys, "export", exported[1].parent / "c", tmp_path / "m", "--build", f"{builder}:make", status=1)
    assert "gba-hvd: the model is built by make of the model's code file, which" in text
    if "package" in code:
        assert f"which needs no_such_package, and that is not installed here: install it for {sys.executable}" in text
        assert f"looked for in {', '.join(sys.path)}" in text
    else:
        assert "imports what is not there: cannot import name 'no_such_name'" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"user": [0.5] * 30}, "samples 0 to 29: field 'user': expected int64, got double|float64"),
        ({"user": [50] * 30}, "table 'user' has rows 0 to 49, got id 50"),
        ({"item": None}, "field 'item' is missing"),
    ],
)
def test_bad_samples_are_named_and_nothing_is_written(
    exported: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    frame = frame_of(batch(30))
    for name, values in change.items():
        frame = frame.drop(columns=[name]) if values is None else frame.assign(**{name: values})
    frame.to_parquet(tmp_path / "in.parquet")
    how = ["predict", exported[1], tmp_path / "in.parquet", "--out", tmp_path / "out.parquet"]
    text = said(capsys, *how, status=1)
    assert any(word in text for word in words.split("|"))
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


@pytest.mark.slow
def test_files_that_cannot_be(exported: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame_of(batch(3)).to_parquet(tmp_path / "in.parquet")
    for source, more, words in (
        ("in.json", [], "expected a name that ends in .parquet, .csv, .tsv or .jsonl"),
        ("none.csv", [], "none.csv"),
        ("in.parquet", ["--keep", "age"], "has no column 'age'; it has user"),
        ("in.parquet", ["--out", tmp_path / "in.parquet"], "is the file that is read"),
    ):
        how = [exported[1], tmp_path / source, "--out", tmp_path / "o.csv", *more]
        assert words in said(capsys, "predict", *how, status=1)


@pytest.mark.slow
def test_verify_names_what_is_damaged(exported: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url = exported[1]
    assert "bytes ok" in said(capsys, "verify", url)
    shard = url / read_manifest(open_store(url)).tables[1].rows.shards[0].name
    shard.write_bytes(shard.read_bytes()[:-1])
    found = as_json(capsys, "verify", url, status=1)
    assert not found["ok"]
    assert len(found["flaws"]) == 1 and "truncated" in found["flaws"][0]
    assert "1 objects are DAMAGED" in said(capsys, "verify", url, status=1)


@pytest.mark.slow
def test_diff_counts_rows_and_names_tensors(exported: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, url = exported
    change_rows(model, "user", np.arange(10, 13), seed=99)
    model.mlp[0].bias.data += 0.5
    gba_hvd.save_model(model, url, build=CODE, input_example=batch(2))
    found = as_json(capsys, "diff", url, 1)
    assert [(t["table"], t["changed"], t["added"], t["removed"], t["new_shards"]) for t in found["tables"]] == [
        ("user", 3, 0, 0, 1), ("item", 0, 0, 0, 0), ("word", 0, 0, 0, 0),
    ]  # fmt: skip
    assert found["tensors"] == {"mlp.0.bias": "changed, by 0.5 at most"}
    assert found["other"] == []
    text = said(capsys, "diff", url, 1, 2)
    assert "version 1 to 2" in text and "mlp.0.bias: changed" in text
    assert "has no version 7" in said(capsys, "diff", url, 7, status=1)


@pytest.mark.slow
def test_diff_says_how_inputs_differ(exported: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, url = exported
    one = batch(2)
    one.dense[0, 0] = float("nan")
    gba_hvd.save_model(model, url, build=CODE, input_example=one, activation="sigmoid")
    found = as_json(capsys, "diff", url, 1)["other"]
    assert found == ["input.dense.has_nan: False before, True now", "activation: 'none' before, 'sigmoid' now"]


@pytest.mark.slow
def test_diff_of_versions_at_two_urls(exported: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, url = exported
    change_rows(model, "user", np.arange(10, 13), seed=99)
    model.mlp[0].bias.data += 0.5
    gba_hvd.save_model(model, tmp_path / "other", build=CODE, input_example=batch(2))
    found = as_json(capsys, "diff", url, 1, "--new-url", tmp_path / "other")
    assert [(t["table"], t["changed"], t["new_shards"]) for t in found["tables"]] == [
        ("user", 3, 1), ("item", 0, 0), ("word", 0, 0),
    ]  # fmt: skip
    assert found["tensors"] == {"mlp.0.bias": "changed, by 0.5 at most"}
    assert f"version 1 to 1 of {tmp_path}/other" in said(capsys, "diff", url, 1, "--new-url", tmp_path / "other")
    assert "--new-url, which is not given" in said(capsys, "diff", url, 1, "--new-option", "key=k", status=1)


@pytest.mark.slow
def test_diff_of_hashed_tables(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = {"build": CODE, "arguments": {"users": 300, "hashed": True}, "tables": "touched"}
    model = trained(users=300, hashed=True)
    gba_hvd.save_model(model, tmp_path / "m", **how)
    change_rows(model, "user", np.array([5, 6]))
    gba_hvd.save_model(model, tmp_path / "m", **how)
    user = as_json(capsys, "diff", tmp_path / "m", 1)["tables"][0]
    assert (user["changed"], user["added"], user["removed"], user["shared"]) == (0, 2, 0, 0)


@pytest.mark.slow
def test_the_checkpoints_of_a_run(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained()
    checkpoint(model, model.tables, tmp_path / "c")
    events = [{"event": "checkpoint", "step": 5, "data": {"url": str(tmp_path / "c"), "manifest": "m"}}]
    monkeypatch.setattr(find_run, "read", lambda run, uri: SimpleNamespace(events=events if run == "ctr-1" else []))
    found = as_json(capsys, "export", "ctr-1", tmp_path / "m", "--build", CODE)
    assert (found["version"], found["step"]) == (1, 5)
    assert "has saved no checkpoint" in said(capsys, "export", "ctr-2", tmp_path / "m", "--build", CODE, status=1)
    how = ["export", tmp_path / "c", tmp_path / "m", "--build", CODE, "--arguments", "[1]"]
    assert "--arguments must be one JSON object" in said(capsys, *how, status=1)
