"""Compiled kernels have a folder also where numba finds none, and never one of another user."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from gba_hvd import kernel_cache, kernels


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in a package that cannot be written, of a user without a home."""
    tmp_path.joinpath("package").mkdir()
    monkeypatch.setenv("HOME", "~")
    for name in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "is_writable", lambda folder: tmp_path / "package" not in folder.parents)
    kernel_cache.private_folder.cache_clear()
    yield tmp_path / "package" / "kernels.py"
    kernel_cache.private_folder.cache_clear()


def test_a_user_without_a_home_has_a_private_folder_which_children_inherit(module, monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    config = SimpleNamespace(CACHE_DIR="")
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(config=config))
    assert kernel_cache.ensure(module)
    made = tmp_path / f"gba-hvd-kernels-{os.geteuid()}"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert os.environ["NUMBA_CACHE_DIR"] == config.CACHE_DIR == str(made)
    assert kernel_cache.ensure(module)
    assert caplog.text.count(str(made)) == 1


def test_a_home_that_can_be_written_stays_numbas_folder(module, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_cache.ensure(module)
    assert not os.environ["NUMBA_CACHE_DIR"]


@pytest.mark.parametrize("spoil", [lambda folder: folder.chmod(0o770), lambda folder: os.chown(folder, 12345, -1)])
def test_a_folder_that_others_can_write_is_not_used(module, tmp_path, caplog, spoil):
    made = tmp_path / f"gba-hvd-kernels-{os.geteuid()}"
    made.mkdir(mode=0o700)
    try:
        spoil(made)
    except PermissionError:
        pytest.skip("only root can give a folder away")
    assert not kernel_cache.ensure(module)
    assert not os.environ["NUMBA_CACHE_DIR"]
    assert "set NUMBA_CACHE_DIR" in caplog.text


def test_a_link_in_its_place_is_not_used(module, tmp_path):
    (tmp_path / f"gba-hvd-kernels-{os.geteuid()}").symlink_to(tmp_path)
    assert not kernel_cache.ensure(module)


@pytest.mark.parametrize("there", [True, False])
def test_kernels_are_kept_where_there_is_a_folder(monkeypatch, there):
    asked = []

    def njit(signatures, **options):
        asked.append(options["cache"])
        return lambda function: function

    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(njit=njit))
    monkeypatch.setattr(kernels, "_import_numba_without_scipy", lambda: None)
    monkeypatch.setattr(kernel_cache, "ensure", lambda module: there)
    names = {"__file__": __file__}
    file = kernels.KernelFile(names)
    file.add("int64(int64)")(lambda x: x)
    file.load()
    assert asked == [there]


def test_a_folder_that_can_be_madeis_writable(tmp_path):
    assert kernel_cache.is_writable(tmp_path / "a" / "b")
    assert not kernel_cache.is_writable(Path("/proc/a/b"))
