"""The packages of requirements-models.txt, which `make setup` installs beside the environment."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES, EXAMPLES = ROOT / ".peers" / "models", ROOT / "examples" / "adopt"
NAMES = ("deepctr_torch", "torchfm", "torch_rechub", "torchrec")


def add_to_path(monkeypatch: pytest.MonkeyPatch, *more: Path) -> list[str]:
    """Until the end of the test. Without the packages it fails: a skipped one would say that they train."""
    path = [*map(str, more), str(PACKAGES)]
    monkeypatch.setattr(sys, "path", [*path, *sys.path])
    missing = [name for name in NAMES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.fail(
            f"{', '.join(missing)} not found; `make setup` installs public models for tests, and so does pip install "
            f"--no-deps --target {PACKAGES.relative_to(ROOT)} -r requirements-models.txt"
        )
    return path


def load(name: str) -> ModuleType:
    """Import, whatever the packages warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
