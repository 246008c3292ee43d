"""Addition to mkdocs: the page of all files, each with the first sentences of its docstring.

Needs nothing but Python: `python docs/files.py switching` prints the lines of the files whose path has that word.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("gba_hvd", "recovery", "tools")
FILES = "<!-- files -->"  # in docs/reference/files.md: here the tables are written


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What mkdocs calls."""
    return markdown.replace(FILES, tables()) if FILES in markdown else markdown


def files() -> Iterator[tuple[str, str]]:
    """(path, first paragraph of its docstring) of each file; a package before its files."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py"), key=lambda path: (path.parent, path.name)):
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            yield str(path.relative_to(ROOT)), " ".join(docstring.split("\n\n")[0].split())


def tables() -> str:
    """Markdown: a heading and a table for each package."""
    lines: list[str] = []
    folder = ""
    for path, about in files():
        parent, _, name = path.rpartition("/")
        if parent != folder:
            lines += ["", f"## {parent}", "", "| file | about |", "|---|---|"]
            folder = parent
        lines.append(f"| `{name}` | {as_cell(about)} |")
    return "\n".join(lines)


def as_cell(text: str) -> str:
    """Code stays code; elsewhere no character opens a tag or a link."""
    parts = re.split(r"(`[^`]+`)", text)
    parts[::2] = [re.sub(r"([|\[])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    for path, about in files():
        if all(word in path for word in sys.argv[1:]):
            print(f"{path}\n    {about}")
