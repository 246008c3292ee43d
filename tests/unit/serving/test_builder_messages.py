"""What is said of a builder that cannot work where the model is opened."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gba_hvd import BadInput
from gba_hvd.serving import builder
from gba_hvd.serving.builder import Builder
from recovery.storage.open import open_store


def a_file(folder: Path, text: str) -> str:
    (folder / "model.py").write_text(text)
    return f"{folder / 'model.py'}:make"


def test_arguments_that_do_not_fit_are_named(tmp_path: Path) -> None:
    build = a_file(tmp_path, "def make(tables, dim=1): ...")
    words = (
        r"make of the model's code file cannot be called with arguments= of dim: missing a required argument: 'tables'"
    )
    with pytest.raises(BadInput, match=words):
        Builder.of(build, {"dim": 2}, None).checked()
    with pytest.raises(BadInput, match="arguments= of none: missing a required argument"):
        Builder.of(build, {}, None).call()


@pytest.mark.slow
def test_a_module_beside_the_file_is_named_when_it_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = "import json, torch\nimport shop_of_mine.nets\nfrom gba_hvd import Batch\n\ndef make(): ..."
    with caplog.at_level(logging.WARNING, logger="gba_hvd"):
        Builder.of(a_file(tmp_path, code), {}, None).put(open_store(tmp_path / "m"))
    assert "make of the model's code file imports shop_of_mine, of no installed package" in caplog.text
    caplog.clear()
    Builder.of(a_file(tmp_path, "import json, torch, gba_hvd, recovery\n\ndef make(): ..."), {}, None).put(
        open_store(tmp_path / "m")
    )
    assert not caplog.text


def test_the_lists_of_all_packages_are_not_read_for_one_that_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "packages_distributions", None)  # (they take most of a second)
    store = open_store(tmp_path / "m")
    Builder.of("torch.nn:Linear", {"in_features": 1, "out_features": 1}, None).put(store)
    Builder.of(a_file(tmp_path, "import json, torch\nfrom gba_hvd import Batch\n\ndef make(): ..."), {}, None).put(
        store
    )


def test_a_file_that_imports_horovod_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for code, is_one in (
        ("import horovod.torch as hvd\n\ndef make(): ...", True),
        ("from horovod import torch\n\ndef make(): ...", True),
        ("def make(): ...\n\ndef train():\n    import horovod.torch", False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="gba_hvd"):
            Builder.of(a_file(tmp_path, code), {}, None).put(open_store(tmp_path / "m"))
        assert ("imports horovod, which a machine that opens the model needs then, too" in caplog.text) is is_one
