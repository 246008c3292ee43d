"""`gba-hvd model predict` of JSON lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import zstandard
from gba_hvd_tools.cli import main
from torch import nn

import gba_hvd
from tests.unit.conftest import _no_keeper as _no_keeper
from tests.unit.serving.conftest import CODE, batch, evaluated
from tests.unit.serving.conftest import job_memory as job_memory
from tests.unit.serving.conftest import trained as trained

N = 30


@pytest.fixture
def saved(trained: Any, tmp_path: Path) -> tuple[nn.Module, Path]:
    model = trained()
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(2), dense_names=["price", "age"])
    return model, tmp_path


def lines_of(one: gba_hvd.Batch) -> list[dict[str, Any]]:
    history = one.ids["history"]
    cuts = [*history.offsets.tolist(), len(history.values)]
    return [
        {
            "user": int(one.ids["user"][i]), "item": int(one.ids["item"][i]), "request": f"r{i}",
            "history": history.values[cuts[i] : cuts[i + 1]].tolist(),
            "price": one.dense[i, 0].item(), "age": one.dense[i, 1].item(), "device": {"os": "x"},
        }
        for i in range(len(one))
    ]  # fmt: skip


def written(path: Path, lines: list[Any]) -> Path:
    text = "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines).encode()
    packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)
    path.write_bytes(packed(text))
    return path


def predicted(folder: Path, source: Path, *more: object) -> int:
    how = ["model", "predict", folder / "m", source, "--out", folder / "out.parquet", "--batch", 7, *more]
    return main([*map(str, how)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst", "in.ndjson"])
def test_the_samples_of_json_lines_have_their_scores(saved: Any, name: str) -> None:
    (model, folder), one = saved, batch(N)
    assert predicted(folder, written(folder / name, lines_of(one)), "--keep", "request", "item") == 0
    found = pd.read_parquet(folder / "out.parquet")
    assert np.allclose(found["score"], evaluated(model, one).numpy(), atol=1e-6)
    assert found["request"].tolist() == [f"r{i}" for i in range(N)] and found["item"].dtype == np.int64


@pytest.mark.slow
def test_a_packed_csv_file_is_read_too(trained: Any, tmp_path: Path) -> None:
    one = batch(N)
    padded = torch.from_numpy(np.random.default_rng(1).integers(0, 9, (N, 2)))
    flat = gba_hvd.Batch({**one.ids, "history": padded}, one.dense, one.label)
    model = trained()
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=flat)
    frame = pd.DataFrame({name: flat.ids[name].numpy() for name in ("user", "item")})
    for name, values in (("dense", one.dense), ("history", padded)):
        frame[[f"{name}_0", f"{name}_1"]] = values.numpy()
    for name in ("in.csv.gz", "in.csv.zst"):
        frame.to_csv(tmp_path / name, index=False)
        assert predicted(tmp_path, tmp_path / name) == 0
        found = pd.read_parquet(tmp_path / "out.parquet")["score"]
        assert np.allclose(found, evaluated(model, flat).numpy(), atol=1e-6)


@pytest.mark.slow
def test_values_by_name_may_be_one_object(saved: Any) -> None:
    (model, folder), one = saved, batch(N)
    lines = [{**line, "dense": {"price": line.pop("price"), "age": line.pop("age")}} for line in lines_of(one)]
    assert predicted(folder, written(folder / "in.jsonl", lines)) == 0
    assert np.allclose(pd.read_parquet(folder / "out.parquet")["score"], evaluated(model, one).numpy(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "line", "words"),
    [
        (17, "{", "line 18: not JSON: "),
        (17, "[1]", "line 18: not a JSON object with names and values"),
        (17, {"user": "u7"}, "line 18: field 'user': expected numbers, got strings"),
        (17, {"user": 7.5}, "line 18: field 'user': expected int64, got float64"),
        (17, {"user": None}, "line 18: field 'user' is missing: expected int64, got null in every sample"),
        (17, {"user": 50}, "line 18: table 'user' has rows 0 to 49, got id 50"),
        (0, {"user": 50}, "line 1: table 'user' has rows 0 to 49, got id 50"),
        (17, {"price": "cheap"}, "line 18: field 'price': expected float32"),
        (17, {"history": 3}, "line 18: field 'history': expected a list of int64"),
        (0, {"user": {"id": 7}}, "column 'user' is an object on line 1: flatten it, for instance jq -c '. + {user"),
        (17, {"request": 5}, "lines 15 to 21: column 'request' cannot be copied: "),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(saved: Any, capsys: pytest.CaptureFixture[str], at: int, line: Any, words: str) -> None:
    _, folder = saved
    lines: list[Any] = lines_of(batch(N))
    lines[at] = {**lines[at], **line} if isinstance(line, dict) else line
    assert predicted(folder, written(folder / "in.jsonl", lines), "--keep", "request") == 1
    text = capsys.readouterr().err
    assert words in text and "--ignore" not in text
    assert not [path for path in folder.iterdir() if "out" in path.name]


@pytest.mark.slow
def test_what_all_lines_lack_is_no_single_line(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = saved
    lines: list[Any] = lines_of(batch(N))
    for line in lines:
        del line["item"]
    assert predicted(folder, written(folder / "in.jsonl", lines)) == 1
    assert "lines 1 to 7: field 'item' is missing" in capsys.readouterr().err
    lines[3] = lines[5] = "no"
    assert predicted(folder, written(folder / "in.jsonl", lines)) == 1
    text = capsys.readouterr().err
    assert "2 lines cannot be read" in text and "line 4: not JSON" in text and "line 6: not JSON" in text
    assert predicted(folder, folder / "none.jsonl") == 1
    assert "none.jsonl: no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_scores_as_json_lines_are_those_of_parquet(
    saved: tuple[nn.Module, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = saved
    lines = [{**line, "request": f"é{i}" if i else None} for i, line in enumerate(lines_of(batch(N)))]
    source = written(folder / "in.jsonl", lines)
    kept = ["--keep", "request", "history"]
    assert predicted(folder, source, *kept, "--out", folder / "out.jsonl") == 0
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text("utf-8").splitlines()]
    assert [{name: row[name] for name in ("request", "history")} for row in found] == [
        {name: line[name] for name in ("request", "history")} for line in lines
    ]
    assert predicted(folder, source) == 0
    assert np.array_equal(np.float32([row["score"] for row in found]), pd.read_parquet(folder / "out.parquet")["score"])
    kinds = {"small": pd.array([0.1] * N, "float32"), "cat": pd.Categorical(["x"] * N), "far": [np.inf] * N}
    pd.DataFrame(lines).assign(**kinds).to_parquet(folder / "in.parquet")
    assert predicted(folder, folder / "in.parquet", "--keep", *kinds, "--out", folder / "kinds.jsonl") == 0
    assert '"small": 0.1, "cat": "x", "far": null' in (folder / "kinds.jsonl").read_text().splitlines()[0]
    pd.DataFrame(lines).assign(at=pd.Timestamp("2024-01-01")).to_parquet(folder / "in.parquet")
    assert predicted(folder, folder / "in.parquet", "--keep", "at", "--out", folder / "other.jsonl") == 1
    assert "column 'at' has timestamp[" in (said := capsys.readouterr().err)
    assert "which JSON does not hold: write Parquet" in said and not (folder / "other.jsonl").exists()
    assert predicted(folder, source, "--out", folder / "out.json") == 1
    assert "a name that ends in .parquet, .csv, .jsonl or .ndjson" in capsys.readouterr().err
