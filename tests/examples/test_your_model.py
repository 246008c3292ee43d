"""The script of docs/YOUR_MODEL.md is run as it stands there, and its model comes out as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "YOUR_MODEL.md"


@pytest.mark.processes
def test_the_script_of_the_page_trains_and_its_model_can_be_exported(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "train.py").write_text(found[1])
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("GBA_HVD", "HOROVOD", "MLFLOW"))}
    environ |= {"OMP_NUM_THREADS": "1", "GBA_HVD_SHARD_DIR": str(tmp_path / "shm"), "GBA_HVD_GRACE_S": "2"}
    (tmp_path / "shm").mkdir()

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run(sys.executable, "train.py")
    aucs = re.findall(r"^epoch (\d): step (\d+), AUC (0\.\d+)$", said, re.MULTILINE)
    assert [(epoch, step) for epoch, step, _ in aucs] == [("0", "20"), ("1", "40")], said
    assert float(aucs[-1][2]) > 0.9, said
    assert "40,000 applied + 0 dropped + 0 lost = 40,000" in said

    said = run(sys.executable, "train.py")
    again = re.findall(r"^epoch (\d): step (\d+), AUC (0\.\d+)$", said, re.MULTILINE)
    assert again == aucs[-1:] and "[nothing trained]" in said, said

    tool = [sys.executable, "-m", "gba_hvd_tools.cli", "checkpoint", "export"]
    run(*tool, "checkpoints", "--out", "model.pt", "--weights-only")
    tensors = torch.load(tmp_path / "model.pt", weights_only=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert {(1000, 16), (200, 16), (20, 16), (16, 17), (16, 32)} <= set(shapes.values()), shapes
