"""The documents: links lead somewhere, names in backticks exist, programs are named in one way, README stays short."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ACTIVATE = ". .venv/bin/activate"
PACKAGES = {"gba_hvd": "gba_hvd", "recovery": "recovery", "gba_hvd_tools": "tools", "tools": "tools"}

LINK = re.compile(r'\]\(([^)\s]+)\)|src="([^"]+)"')
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"^[\w.-]+(/[\w.-]+)*(/|\.(py|md|yaml|toml|cfg|txt))$")
MODULE = re.compile(r"^(gba_hvd|recovery|gba_hvd_tools|tools)(\.\w+)+$")
# Written by a job or a user, or only an example of a name: not in the repository.
NOT_OURS = {"train.py", "my_data.py", "jobs/SEED/", "DIR/HOST.SLOT/"}
# The change log speaks of names as they were.
TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_programs_are_named_without_the_folder_they_are_in(path: Path) -> None:
    assert ".venv/bin/" not in path.read_text().replace(ACTIVATE, "")


@pytest.mark.parametrize("name", ["DATA", "RUNNING", "RESULTS"])
def test_where_commands_begin_it_is_said_how_to_activate_the_environment(name: str) -> None:
    path = next(path for path in DOCS if path.stem == name)
    assert ACTIVATE in path.read_text()[:1000]


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    results = lines[lines.index("## Results") : lines.index("## Not done")]
    assert len(lines) <= 150
    assert len([line for line in results if line.startswith("|")]) <= 12 + 2


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs" / "img").iterdir())
    assert {path.suffix for path in pictures} == {".svg", ".png"}
    assert all(path.stat().st_size < 200_000 for path in pictures)


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """What `#...` may follow a link to the page: its headings, as GitHub and mkdocs write them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    wrong = []
    for found in LINK.finditer(FENCED.sub("", page.read_text())):
        path, _, anchor = unquote(found[1] or found[2]).partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            wrong.append(found[0])
    assert not wrong


def test_the_map_has_every_page() -> None:
    links = {(ROOT / "docs" / found[1]).resolve() for found in LINK.finditer((ROOT / "docs" / "README.md").read_text())}
    assert {page for page in PAGES if page.name != "README.md"} <= links


# --- names in backticks -----------------------------------------------------------------------------------------------


@cache
def files() -> frozenset[str]:
    """Every file and folder of the repository that a document may name."""
    tops = ("gba_hvd", "recovery", "tools", "examples", "tests", "docs", ".ci")
    inner = [path for top in tops for path in (ROOT / top).rglob("*") if "__pycache__" not in path.parts]
    return frozenset(name(path) + "/" * path.is_dir() for path in [*ROOT.iterdir(), *inner])


def exists(path: str) -> bool:
    """Whether a file is there: from the root, or, as a document about one package writes it, from that package."""
    return any(f"{top}{path}" in files() for top in ("", "gba_hvd/", "recovery/", "tests/unit/", "examples/", "docs/"))


def names_what_exists(dotted: str) -> bool:
    """`package.module.Class.attribute`: modules by the tree, the rest by the source of the last module."""
    top, *inner = dotted.split(".")
    folder, rest = PACKAGES[top], inner
    while rest and (f"{folder}/{rest[0]}/" in files() or f"{folder}/{rest[0]}.py" in files()):
        folder, rest = f"{folder}/{rest[0]}", rest[1:]
    if not rest:
        return True
    source = ROOT / (f"{folder}.py" if f"{folder}.py" in files() else f"{folder}/__init__.py")
    tree = ast.parse(source.read_text())
    known = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    known |= {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    known |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return rest[0] in known


def in_backticks(page: Path) -> Iterator[str]:
    yield from CODE.findall(FENCED.sub("", page.read_text()))


@pytest.mark.parametrize("page", TODAY, ids=name)
def test_files_in_backticks_exist(page: Path) -> None:
    named = {text for text in in_backticks(page) if PATH.match(text) and text not in NOT_OURS}
    named = {path for path in named if not path.startswith("horovod/") and path != "CMakeLists.txt"}  # in its source
    assert not {path for path in named if not exists(path)}


@pytest.mark.parametrize("page", TODAY, ids=name)
def test_modules_in_backticks_exist(page: Path) -> None:
    named = {text.split("(")[0] for text in in_backticks(page) if MODULE.match(text.split("(")[0])}
    named -= entry_point_groups()
    assert not {dotted for dotted in named if not names_what_exists(dotted)}


def entry_point_groups() -> set[str]:
    """Names like a module's, under which other distributions register classes."""
    sources = [path.read_text() for top in ("gba_hvd", "recovery") for path in (ROOT / top).rglob("*.py")]
    return {group for source in sources for group in re.findall(r"Registry\(\s*\"([\w.]+)\"", source)}


LAYOUT_COLUMN = 38  # of the layout in DESIGN.md: names stand left of it, what they are right of it


def layout() -> dict[str, set[str]]:
    """For each top folder of the layout in DESIGN.md the names in it; folders with a slash."""
    block = (ROOT / "DESIGN.md").read_text().split("## Layout")[1].split("```")[1]
    found: dict[str, set[str]] = {}
    for part in re.split(r"^(?=\w)", block.strip("\n"), flags=re.MULTILINE)[1:]:
        top, *lines = part.splitlines()
        found[top.split("/")[0]] = {word for line in lines for word in line[:LAYOUT_COLUMN].split()}
    return found


@pytest.mark.parametrize("top", ["gba_hvd", "recovery", "tools"])
def test_the_layout_names_what_is_there(top: str) -> None:
    modules = [path for path in (ROOT / top).rglob("*.py") if path.stem != "__init__"]
    packages = {path.parent for path in (ROOT / top).rglob("__init__.py")} - {ROOT / top}
    there = {path.stem for path in modules} | {f"{path.name}/" for path in packages}
    first = {path.stem for path in modules if path.parent == ROOT / top}
    first |= {f"{path.name}/" for path in packages if path.parent == ROOT / top}
    assert first <= layout()[top] <= there


# --- the reference ----------------------------------------------------------------------------------------------------


MODULE_PAGES = [
    page for page in (ROOT / "docs" / "reference").glob("*.md") if "<!-- public names -->" in page.read_text()
]


@pytest.mark.parametrize("module", sorted(page.stem for page in MODULE_PAGES))
def test_every_public_name_has_a_docstring(module: str) -> None:
    loaded = importlib.import_module(module)
    public = {name: getattr(loaded, name) for name in loaded.__all__}
    assert not [name for name, value in public.items() if not (value.__doc__ or "").strip()]


# --- metrics and events -----------------------------------------------------------------------------------------------


def test_every_kind_of_event_is_explained() -> None:
    from gba_hvd.switching import drops

    sources = "".join(path.read_text() for top in ("gba_hvd", "examples") for path in (ROOT / top).rglob("*.py"))
    kinds = set(re.findall(r"\bEvent\(\s*\"(\w+)\"", sources))
    kinds |= {drops.BEGIN, drops.OVER, drops.WORKER_BEGIN, drops.WORKER_OVER}
    events = (ROOT / "docs" / "METRICS_AND_EVENTS.md").read_text().split("## Events")[1].split("## Keys")[0]
    named = {kind for row in events.splitlines() if row.startswith("| `") for kind in CODE.findall(row.split("|")[1])}
    assert kinds <= named
    assert not {kind for kind in named if f'"{kind}"' not in sources and not kind.endswith("_unused")}


def test_every_metric_is_explained() -> None:
    from gba_hvd.tracking import gauges, plots, recovery_records, run_summary

    page = (ROOT / "docs" / "METRICS_AND_EVENTS.md").read_text()
    names = {value for found in (gauges._COUNTS, gauges.ROUNDS) for value in found.values()}
    names |= {plots.LOSS, plots.GRAD_NORM, plots.THROUGHPUT, plots.WORKERS, plots.MODE, plots.DENSE_LR}
    names |= {gauges.STALENESS_MEAN, gauges.STALENESS_MAX, gauges.DENSE_AGE_MEAN, gauges.DENSE_AGE_MAX}
    names |= {run_summary.MEAN_RATE, run_summary.TRAINING, run_summary.LAUNCHES, recovery_records.APPLIED}
    names |= {recovery_records.RESUMED_FROM, recovery_records.FULL_RECOVERY, recovery_records.PAUSED}
    names |= {*recovery_records._OF_CHECKPOINT.values(), *recovery_records._OF_PLAN.values()}
    names |= {*recovery_records._OF_RECOVERY, *recovery_records._OF_CHOICE.values(), *recovery_records._PAUSES.values()}
    assert len(names) > 40 and not {name for name in names if f"`{name}`" not in page}
