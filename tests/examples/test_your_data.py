"""The examples of docs/YOUR_DATA.md and docs/DATA.md are run as they stand there, and count each sample once."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

DOCS = Path(__file__).parents[2] / "docs"
TOOL = [sys.executable, "-m", "gba_hvd_tools.cli"]
WRITTEN = sum(2000 - shard for shard in range(10))  # by clicks.py


def files_of(section: str) -> dict[str, str]:
    """The files that a section of the page writes out, by name."""
    (text,) = re.findall(rf"^## {section}$(.*?)(?=^## |\Z)", (DOCS / "YOUR_DATA.md").read_text(), re.M | re.S)
    return dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", text, re.M | re.S))


def run(folder: Path, *command: str) -> str:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("GBA_HVD", "HOROVOD", "MLFLOW"))}
    environ |= {"OMP_NUM_THREADS": "1", "GBA_HVD_SHARD_DIR": str(folder / "shm"), "GBA_HVD_GRACE_S": "2"}
    (folder / "shm").mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("section", "n_samples"),
    [
        ("A map-style dataset", 20_000),
        ("Parquet files at a URL", WRITTEN),
        ("Shards that are read in sequence", WRITTEN),
    ],
)
def test_the_examples_train_each_sample_once_an_epoch(tmp_path: Path, section: str, n_samples: int) -> None:
    for name, text in (files_of("The script") | files_of(section)).items():
        (tmp_path / name).write_text(text)
    run(tmp_path, sys.executable, "clicks.py")
    printed = run(tmp_path, *TOOL, "run", "-np", "2", "train.py")
    assert f"{2 * n_samples:,} applied + 0 dropped + 0 lost = {2 * n_samples:,}" in printed


@pytest.mark.processes
def test_lists_and_several_labels_are_prepared_as_the_page_has_it(tmp_path: Path) -> None:
    rng, n = np.random.default_rng(1), 2000
    columns = {
        "user": [f"u{number}" for number in rng.integers(0, 50, n)],
        "item": rng.integers(0, 30, n),
        "words": [[f"w{number}" for number in rng.integers(0, 9, rng.integers(0, 4))] for _ in range(n)],
        "price": rng.random(n),
        "click": rng.integers(0, 2, n),
        "buy": rng.integers(0, 2, n) == 1,
        "stars": rng.integers(1, 6, n) / 2,
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    (section,) = re.findall(r"^### Lists, and several labels$(.*?)^### ", (DOCS / "DATA.md").read_text(), re.M | re.S)
    command, script = re.findall(r"^```(?:python)?\n(.*?)^```$", section, re.M | re.S)
    assert command.startswith("gba-hvd data prepare")
    run(tmp_path, *TOOL, *shlex.split(command.replace("\\\n", " "))[1:])
    (tmp_path / "read.py").write_text(script + "print(batch.ids['user'].shape, stars.unique().tolist())\n")
    assert run(tmp_path, sys.executable, "read.py").strip() == "torch.Size([256]) [0.5, 1.0, 1.5, 2.0, 2.5]"
