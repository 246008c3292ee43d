"""The commands a new user types, in a folder of the test; nothing of the user's own environment leaks in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "train_ctr.py"
BIN = Path(sys.executable).parent


def environment(folder: Path) -> dict[str, str]:
    (folder / "shards").mkdir(exist_ok=True)
    own = {"GBA_HVD_SHARD_DIR": str(folder / "shards"), "GBA_HVD_GRACE_S": "1", "OMP_NUM_THREADS": "1"}
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("GBA_HVD_", "HOROVOD_", "MLFLOW_"))
    }
    return kept | own


def typed(folder: Path, *words: str | Path, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
    """Run a command to its end: `gba-hvd`, `horovodrun` or `python`, and what follows."""
    return subprocess.run(
        command(*words), check=False, cwd=folder, env=environment(folder), text=True, timeout=timeout_s,
        capture_output=True,
    )  # fmt: skip


def command(*words: str | Path) -> list[str]:
    program, *rest = map(str, words)
    return [sys.executable if program == "python" else str(BIN / program), *rest]


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.05)
