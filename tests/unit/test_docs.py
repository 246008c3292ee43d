"""The documents name programs in one way: bare, for an activated environment."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
ACTIVATE = ". .venv/bin/activate"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_programs_are_named_without_the_folder_they_are_in(path: Path) -> None:
    assert ".venv/bin/" not in path.read_text().replace(ACTIVATE, "")


@pytest.mark.parametrize("name", ["DATA", "RUNNING", "RESULTS"])
def test_where_commands_begin_it_is_said_how_to_activate_the_environment(name: str) -> None:
    path = next(path for path in DOCS if path.stem == name)
    assert ACTIVATE in path.read_text()[:1000]
