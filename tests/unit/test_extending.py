"""The examples of docs/EXTENDING.md that need no change of the package: they work, and keep what interfaces promise.

Those that change the package are in tests/processes/test_extending.py.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gba_hvd.errors import BadInput
from gba_hvd.ps.coordinator import staleness
from gba_hvd.ps.coordinator.staleness import Weighting
from gba_hvd.testing import (
    CoderContract,
    PolicyContract,
    RowOptimizerContract,
    RuleContract,
    StoreContract,
    WeightingContract,
)
from recovery.storage.open import open_store
from recovery.storage.store import Store
from tests.extending import examples

EXAMPLES = examples()
REGISTERED = ("A staleness weighting", "An update rule", "A compressor", "A checkpoint store", "A row optimizer",
              "A save policy")  # fmt: skip


def test_the_page_has_the_ten_examples() -> None:
    changes = ("An asynchronous mode", "A command", "A data preset")
    assert list(EXAMPLES) == [*REGISTERED, *changes, "A callback"]
    assert [title for title, example in EXAMPLES.items() if example.edits] == list(changes)
    assert [title for title, example in EXAMPLES.items() if "pyproject.toml" in example.files] == list(REGISTERED)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Installs an example and returns its script; nothing of it is left at the end."""
    folder = tmp_path / "site-packages"
    before = set(sys.modules)

    def install(title: str) -> Path:
        script = EXAMPLES[title].install(folder)
        monkeypatch.syspath_prepend(str(folder))
        return script

    yield install
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.mark.parametrize("title", REGISTERED)
def test_an_example_works_once_it_is_installed_and_not_before(
    title: str, installed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone").mkdir()
    with pytest.raises((BadInput, ModuleNotFoundError)):
        runpy.run_path(str(EXAMPLES[title].script(tmp_path / "alone")))
    runpy.run_path(str(installed(title)))


def test_the_callback_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = EXAMPLES["A callback"]
    for name, text in example.modules.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        runpy.run_path(str(example.script(tmp_path)))
    finally:
        sys.modules.pop("loss_file", None)


class TestWeighting(WeightingContract):
    @pytest.fixture
    def make_weighting(self, installed: Callable[[str], Path]) -> Callable[[int], Weighting]:
        installed("A staleness weighting")
        return lambda tolerance: staleness.weighting("exponential", tolerance)


class TestRule(RuleContract):
    @pytest.fixture
    def rule_name(self, installed: Callable[[str], Path]) -> str:
        installed("An update rule")
        return "age_damped"


class TestCoder(CoderContract):
    @pytest.fixture
    def kind(self, installed: Callable[[str], Path]) -> str:
        installed("A compressor")
        return "float8"


class TestStore(StoreContract):
    @pytest.fixture
    def store(self, installed: Callable[[str], Path], tmp_path: Path) -> Store:
        installed("A checkpoint store")
        return open_store(f"sqlite://{tmp_path}/checkpoints.db")

    def test_a_name_is_used_once(self, store: Store) -> None:
        store.put("blobs/000001-00000002/0003", [b"one"])
        with pytest.raises(OSError, match="names are used once"):
            store.put("blobs/000001-00000002/0003", [b"other"])


class TestRowOptimizer(RowOptimizerContract):
    @pytest.fixture
    def row_optimizer(self, installed: Callable[[str], Path]) -> Any:
        installed("A row optimizer")
        return importlib.import_module("row_momentum").RowMomentum(lr=0.1)


class TestPolicy(PolicyContract):
    @pytest.fixture
    def policy(self, installed: Callable[[str], Path]) -> str:
        installed("A save policy")
        return "busiest"
