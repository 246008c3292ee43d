"""Additions to mkdocs: the pages at the repository's root, the API reference, docstrings as Markdown.

A page of `docs/reference/` with the mark `NAMES` has the name of its module, and shows its `__all__`, read without
importing it. The pages are in the order of the links in `docs/README.md`, so that list is the only one to keep.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
AT_ROOT = {"README.md": "ABOUT.md", "DESIGN.md": "DESIGN.md", "CONTRIBUTING.md": "CONTRIBUTING.md",
           "CHANGELOG.md": "CHANGELOG.md"}  # fmt: skip
NAMES = "<!-- public names -->"  # in a page of docs/reference/: here mkdocstrings writes
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
# An argument or a field of a docstring: `name: text` or `name, name: text`, continued on indented lines.
ARGUMENT = re.compile(r"^(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*):\s+(?P<text>\S.*)$")


def public_names(module: str) -> dict[str, str]:
    """`__all__` of a module, in its order, and the path of each name. `gba_hvd.batches` is a function and a module."""
    package, *inner = module.split(".")
    found = griffe.load(package, search_paths=[ROOT], resolve_aliases=False)
    for name in inner:
        found = found[name]
    assert isinstance(found, griffe.Module) and found.exports
    names = {str(name): f"{module}.{name}" for name in found.exports}
    hidden = {name: found.imports[name] for name in names if not found[name].is_alias and found[name].is_module}
    return names | hidden


def reference(module: str) -> str:
    """What mkdocstrings renders on the reference page of one module. Names that are modules have pages of their own."""
    pages = {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")}
    return "\n\n".join(
        f"::: {source}\n    options:\n      heading: {module}.{name}\n      toc_label: {name}"
        for name, source in public_names(module).items()
        if source not in pages
    )


def as_markdown(docstring: str) -> str:
    """A docstring with its lists of arguments as Markdown lists; all else as it is."""
    lines: list[str] = []
    in_list = False
    for line in docstring.splitlines():
        argument = ARGUMENT.match(line)
        if argument:
            names = ", ".join(f"`{name}`" for name in argument["names"].split(", "))
            lines += [] if in_list or not lines or not lines[-1] else [""]
            lines.append(f"- {names}: {argument['text']}")
            in_list = True
        elif in_list and line[:1].isspace():
            lines.append(f"    {line.strip()}")
        else:
            lines += [""] if in_list and line else []
            lines.append(line)
            in_list = False
    return "\n".join(lines)


class ArgumentLists(griffe.Extension):
    """Has mkdocstrings read every docstring through `as_markdown`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


# --- what mkdocs calls ----------------------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in `docs/`, and the order of all pages."""
    for path, name in AT_ROOT.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    config.nav = navigation((ROOT / "docs" / "README.md").read_text())
    return files


def navigation(text: str) -> list[Any]:
    """A section for each heading of `docs/README.md` that has links, in its order."""
    pages: list[Any] = ["README.md"]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        links = list(dict.fromkeys(in_site(link, "docs") for link in LINK.findall(body) if link.endswith(".md")))
        if links:
            pages.append({title.strip(): links})
    return pages


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Write the reference; make links between the root and `docs/` those between the pages of the site."""
    if page.file.src_uri.startswith("reference/"):
        return markdown.replace(NAMES, reference(page.file.name)) if NAMES in markdown else markdown
    folder = "" if page.file.src_uri in AT_ROOT.values() else "docs"
    return re.sub(r'(\]\(|src=")([^)"#\s]+)(?=[)"#])', lambda found: found[1] + in_site(found[2], folder), markdown)


def in_site(link: str, folder: str) -> str:
    """Where the site has what a page in `folder` ("" or "docs") links to; other links as they are."""
    if "://" in link:
        return link
    path = link.removeprefix("../") if link.startswith("../") else f"{folder}/{link}".lstrip("/")
    return AT_ROOT.get(path, path.removeprefix("docs/"))
