"""Two towers on a click log without histories: what is chosen is found by the user and the moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr.chosen_items import ITEM, ChosenItems
from ctr.config import Data, load
from ctr.datasets import as_read_by, open_splits
from ctr.measures import selects
from gba_hvd.data import ClickLog
from gba_hvd.data.presets import FRAPPE_FIELDS
from train_ctr import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CONFIG = EXAMPLES / "configs" / "frappe_youtube_dnn.yaml"
N_APPS = 80


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As Frappe comes, much smaller: each user chooses among 8 of 80 apps."""
    made, rng = tmp_path / "frappe", np.random.default_rng(3)
    made.mkdir()
    for split, n in (("train", 6000), ("valid", 500), ("test", 500)):
        rows = []
        for _ in range(n):
            values = dict.fromkeys(FRAPPE_FIELDS, 0) | {"user": rng.integers(20), "daytime": rng.integers(7)}
            chosen = rng.random() < 0.4
            group = values["user"] % (N_APPS // 8)
            values["item"] = group * 8 + rng.integers(8) if chosen else rng.integers(N_APPS)
            rows.append(",".join(map(str, [int(chosen), *values.values()])))
        (made / f"{split}.csv").write_text("\n".join(["label," + ",".join(FRAPPE_FIELDS), *rows, ""]))
    return made


def test_the_samples_in_which_an_item_was_chosen_are_read(folder: Path, tmp_path: Path) -> None:
    data = Data(preset="frappe", dir=str(folder), cache=str(tmp_path / "cache"))
    splits = open_splits(data)
    assert as_read_by("deepfm", splits) is splits
    read = as_read_by("youtube_dnn", splits)
    for all_samples, chosen in ((splits.train, read.train), (splits.test, read.test)):
        assert isinstance(all_samples, ClickLog) and isinstance(chosen, ChosenItems)
        label = all_samples.take(np.arange(len(all_samples))).label.numpy()
        batch, every = chosen.take(np.arange(len(chosen))), all_samples.take(np.flatnonzero(label == 1))
        assert len(chosen) == label.sum() and bool((batch.label == 1).all())
        assert all((batch.ids[name] == every.ids[name]).all() for name in all_samples.tables)  # type: ignore[union-attr]
    train: Any = read.train
    items = train.items()
    assert train.n_items == len(items) == N_APPS
    assert items.take(np.array([0, N_APPS - 1])).ids[ITEM].tolist() == [1, N_APPS]  # row 0: of no item
    assert train.popularity().sum() == pytest.approx(1.0) and train.popularity()[0] == 0.0
    with pytest.raises(IndexError):
        items.take(np.array([N_APPS]))


@pytest.mark.slow
def test_the_plan_says_what_is_read(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--data", str(folder), f"data.cache={tmp_path / 'cache'}"]
    open_splits(load(CONFIG, [f"data.dir={folder}", settings[-1]]).data)
    assert main(["--config", str(CONFIG), "--dry-run", *settings]) == 0
    shown = capsys.readouterr().out
    assert "samples with label 1 only; the item is found by all other fields" in shown
    assert selects(load(CONFIG)) == "recall_at_50" and "when validation recall@50 stops improving" in shown


@pytest.mark.processes
def test_items_are_found_by_their_user(folder: Path, tmp_path: Path) -> None:
    own = {"GBA_HVD_SHARD_DIR": str(tmp_path), "GBA_HVD_GRACE_S": "1", "OMP_NUM_THREADS": "1"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GBA_HVD_")} | own
    out = tmp_path / "out"
    command = [sys.executable, EXAMPLES / "train_ctr.py", "--config", CONFIG, "--data", folder, "--out", out]
    command += ["mlflow=false", f"data.cache={tmp_path / 'cache'}", "train.epochs=4", "train.micro_batch=128"]
    command += ["train.global_batch=128"]
    done = subprocess.run(
        [str(word) for word in command], env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "FINISHED" and "auc" not in summary
    assert summary["recall_at_50"] > 0.9  # of any 50 of the 80 apps: .63
