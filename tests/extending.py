"""The examples of docs/EXTENDING.md: taken out of the page, installed, or put into a copy of the project."""

from __future__ import annotations

import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.distributions import install

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "EXTENDING.md"
_BLOCK = re.compile(r"^```(python|toml|diff)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """files: name -> text. edits: (file of the project, a part of it, what it becomes)."""

    title: str
    files: dict[str, str]
    edits: tuple[tuple[str, str, str], ...]

    @property
    def modules(self) -> dict[str, str]:
        return {name: text for name, text in self.files.items() if name not in ("pyproject.toml", "try_it.py")}

    def install(self, folder: Path) -> Path:
        """What pip would leave in this folder; returns the script that tries it."""
        project = tomllib.loads(self.files["pyproject.toml"])["project"]
        install(folder, project["name"], project["entry-points"], self.modules)
        return self.script(folder)

    def script(self, folder: Path) -> Path:
        path = folder / "try_it.py"
        path.write_text(self.files["try_it.py"])
        return path

    def edit_copy(self, folder: Path) -> None:
        """A copy of the project in this folder, to be found on PYTHONPATH, with the change made to it."""
        for package, name in (("gba_hvd", "gba_hvd"), ("recovery", "recovery"), ("tools", "gba_hvd_tools")):
            shutil.copytree(ROOT / package, folder / name)  # also the kernels that are compiled already
        for name, text in self.modules.items():
            _in_copy(folder, name).write_text(text)
        for name, old, new in self.edits:
            path = _in_copy(folder, name)
            before = path.read_text()
            assert before.count(old) == 1, f"{name} has {before.count(old)} times what the page changes:\n{old}"
            path.write_text(before.replace(old, new))


def examples() -> dict[str, Example]:
    """By the title of their section."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        blocks = _BLOCK.findall(body)
        files = {name: text for language, name, text in blocks if language != "diff"}
        edits = tuple((name, *_sides(text)) for language, name, text in blocks if language == "diff")
        found[title] = Example(title, files, edits)
    return found


def _sides(diff: str) -> tuple[str, str]:
    """Before and after; both without the last line's end, so that a line may go on."""
    lines = diff.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-")
    return before, after


def _in_copy(folder: Path, name: str) -> Path:
    return folder / re.sub("^tools/", "gba_hvd_tools/", name)
