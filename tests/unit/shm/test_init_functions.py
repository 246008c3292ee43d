"""Functions that give ids of hashed tables their initial rows: by a name that another process imports."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gba_hvd.errors import BadInput
from gba_hvd.shm import init_functions


def rows(ids: np.ndarray) -> np.ndarray:
    return np.zeros((len(ids), 4), np.float32)


class Rows:
    def of(self, ids: np.ndarray) -> np.ndarray:
        return rows(ids)


def test_a_function_of_a_module_is_found_by_its_name() -> None:
    name = init_functions.name_of(rows)
    assert name.endswith("test_init_functions:rows")
    assert init_functions.resolve(name) is rows


@pytest.mark.parametrize("function", [lambda ids: ids, functools.partial(rows), Rows().of, Rows.of])
def test_what_no_other_process_can_import_has_no_name(function: Any) -> None:
    assert init_functions.name_of(function) == ""


def test_a_function_of_the_script_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "rows", rows, raising=False)
    monkeypatch.setattr(rows, "__module__", "__main__")
    assert init_functions.name_of(rows) == ""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:rows", "'no_such_module' cannot be imported here .* PYTHONPATH"),
        ("os:system", "belongs to Python"),
        ("os.path:join", "belongs to Python"),
        ("here_rows:gone", "module 'here_rows' has none of this name on this host"),
    ],
)
def test_a_name_that_is_no_function_here_is_refused(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here_rows.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match=why):
        init_functions.resolve(name)
