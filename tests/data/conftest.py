"""Small inputs to prepare, and where the real ones are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gba_hvd.data import Recipe, SplitFiles, prepare

from .colours import COLOURS

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The public data sets, as $GBA_HVD_DATA or ../shared/data."""
    folder = Path(os.environ.get("GBA_HVD_DATA", REPOSITORY / "../shared/data"))
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set GBA_HVD_DATA to its folder")
    return folder.resolve()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Write a file below the test's folder."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def prepared(tmp_path: Path, write: Callable[[str, str | bytes], Path]) -> Callable[..., dict[str, Any]]:
    """Prepare text of each split by `COLOURS` (or another recipe) into `tmp_path / "out"`; returns the manifest."""

    def run(
        train: str | bytes, valid: str | bytes | None = None, recipe: Recipe = COLOURS, **options: Any
    ) -> dict[str, Any]:
        suffix = "tsv" if recipe.format == "tsv" else "csv"
        files = {"train": [write(f"in/train.{suffix}", train)]}
        if valid is not None:
            files["valid"] = [write(f"in/valid.{suffix}", valid)]
        return prepare(recipe, SplitFiles(files), tmp_path / "out", **options)

    return run
