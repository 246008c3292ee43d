"""The suites as another package has them: installed, without this repository's tests and settings."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gba_hvd.errors import MissingPackage
from tests.extending import PAGE, ROOT, examples

MODULE = re.compile(r"^```python\n# (test_row_momentum.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("has_bug", [False, True])
def test_the_command_of_the_page_runs_a_suite_and_finds_a_bug(tmp_path: Path, has_bug: bool) -> None:
    """Markers and warnings are errors; an assertion that fails shows its values."""
    site, outside = tmp_path / "site", tmp_path / "outside"
    examples()["A row optimizer"].install(site)
    for package in ("gba_hvd", "recovery"):
        (site / package).symlink_to(ROOT / package)
    if has_bug:
        module = site / "row_momentum.py"
        module.write_text(module.read_text().replace("-= lr", "+= lr"))
    outside.mkdir()
    ((name, text),) = MODULE.findall(PAGE.read_text())
    (outside / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "--strict-markers", "-p", "no:cacheprovider", name]
    environ = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run(command, cwd=outside, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == has_bug, run.stdout + run.stderr
    shows_values = (
        "test_the_first_step_of_a_row_goes_against_its_gradient" in run.stdout and "assert np.False_" in run.stdout
    )
    assert shows_values == has_bug


def test_without_pytest_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.delitem(sys.modules, "gba_hvd.testing", raising=False)
    with pytest.raises(MissingPackage, match=r"gba_hvd\.testing needs pytest.*: pip install pytest"):
        importlib.import_module("gba_hvd.testing")
