"""The reader that uses nothing of this package finds the rows that the package finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import gba_hvd
from tests.unit.conftest import _no_keeper as _no_keeper
from tests.unit.serving.conftest import CODE
from tests.unit.serving.conftest import job_memory as job_memory
from tests.unit.serving.conftest import trained as trained

CONSUMER = Path(__file__).resolve().parents[2] / "examples" / "serve" / "consumer.py"


@pytest.mark.processes
@pytest.mark.parametrize("hashed", [False, True])
def test_a_reader_of_the_format_alone_finds_the_same_rows(
    trained: Callable[..., nn.Module], tmp_path: Path, hashed: bool
) -> None:
    arguments = {"users": 100, "hashed": hashed}
    model = trained(**arguments)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, arguments=arguments, shard_bytes=4096)
    ids = [*model.tables.vocabulary("user")[:5].tolist(), 7, -8] if hashed else [0, 99, 5]
    command = [sys.executable, "-I", CONSUMER, tmp_path / "m", "user", *map(str, ids)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    found = [line.split() for line in done.stdout.splitlines()]
    assert [int(line[0]) for line in found] == ids
    rows = np.array([[float(number) for number in line[1:]] for line in found], np.float32)
    assert np.array_equal(rows, model.tables.rows("user", ids))
