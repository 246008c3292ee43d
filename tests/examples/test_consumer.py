"""The reader that uses nothing of this package finds the rows that the package finds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from tests.unit.conftest import _no_keeper as _no_keeper
from tests.unit.serving.conftest import CODE, batch, evaluated
from tests.unit.serving.conftest import job_memory as job_memory
from tests.unit.serving.conftest import trained as trained

SERVE = Path(__file__).resolve().parents[2] / "examples" / "serve"
CONSUMER = SERVE / "consumer.py"


@pytest.mark.processes
@pytest.mark.parametrize("hashed", [False, True])
def test_a_reader_of_the_format_alone_finds_the_same_rows(
    trained: Callable[..., nn.Module], tmp_path: Path, hashed: bool
) -> None:
    arguments = {"users": 100, "hashed": hashed}
    model = trained(**arguments)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, arguments=arguments, shard_bytes=4096)
    (tmp_path / "m" / "versions" / "000002-0123456789abcdef").write_bytes(b"claimed")  # by another writer
    ids = [*model.tables.vocabulary("user")[:5].tolist(), 7, -8] if hashed else [0, 99, 5]
    command = [sys.executable, "-I", CONSUMER, tmp_path / "m", "user", *map(str, ids)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    found = [line.split() for line in done.stdout.splitlines()]
    assert [int(line[0]) for line in found] == ids
    rows = np.array([[float(number) for number in line[1:]] for line in found], np.float32)
    assert np.array_equal(rows, model.tables.rows("user", ids))


@pytest.mark.processes
@pytest.mark.parametrize("script", ["score.py", "score_onnx.py"])
@pytest.mark.parametrize("hashed", [False, True])
def test_a_program_scores_without_this_package_and_the_class_of_the_model(
    trained: Callable[..., nn.Module], tmp_path: Path, hashed: bool, script: str
) -> None:
    arguments = {"users": 100, "hashed": hashed}
    model, one = trained(**arguments), batch(20, 100)
    formats = ("torch",) if script == "score.py" else ("onnx",)
    example = batch(3)
    gba_hvd.save_model(
        model, tmp_path / "m", build=CODE, arguments=arguments, input_example=example, dense_program=formats
    )
    history = [part.tolist() for part in torch.tensor_split(one.ids["history"].values, one.ids["history"].offsets[1:])]
    request = {"user": one.ids["user"].tolist(), "item": one.ids["item"].tolist(), "history": history}
    (tmp_path / "request.json").write_text(json.dumps({**request, "dense": one.dense.tolist()}))
    absent = ("gba_hvd",) if script == "score.py" else ("gba_hvd", "torch", "onnx")
    blocked = f"import sys; sys.modules.update(dict.fromkeys({absent})); import runpy; sys.argv = sys.argv[1:]; "
    blocked += f"sys.path.insert(0, {str(SERVE)!r}); runpy.run_path(sys.argv[0])"
    command = [sys.executable, "-c", blocked, str(SERVE / script), str(tmp_path / "m"), str(tmp_path / "request.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert torch.allclose(torch.tensor(json.loads(done.stdout)), evaluated(model, one), atol=1e-6)
