"""The list of files has every file of the packages, and no docstring turns into markup."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def listed(*words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-IS", str(ROOT / "docs" / "files.py"), *words], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_every_file_is_listed_with_what_it_decides() -> None:
    lines = listed()
    paths, abouts = lines[::2], lines[1::2]
    there = [path for package in ("gba_hvd", "recovery", "tools") for path in (ROOT / package).rglob("*.py")]
    assert sorted(paths) == sorted(str(path.relative_to(ROOT)) for path in there)
    assert all(about.strip() for about in abouts)


def test_words_choose_among_the_paths() -> None:
    assert [line for line in listed("coordinator", "staleness") if not line.startswith(" ")] == [
        "gba_hvd/ps/coordinator/staleness.py"
    ]
