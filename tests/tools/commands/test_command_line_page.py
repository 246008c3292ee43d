"""The page of the command line has every command with every option, and no text of a parser turns into markup."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from gba_hvd_tools.cli import build_parser

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("command_line", DOCS / "command_line.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_listed_command_has_a_section_and_every_option_a_line(page: ModuleType) -> None:
    text = page.on_page_markdown((DOCS / "COMMAND_LINE.md").read_text(), None)
    sections = {part.partition("\n")[0]: part for part in text.split("# gba-hvd")}
    found = dict.fromkeys(name for name, _, _ in page.commands(build_parser()))
    assert {"gba-hvd run", "gba-hvd bench allreduce", "gba-hvd checkpoint gc"} <= set(found)
    for name, _, command in page.commands(build_parser()):
        lines = [line for line in sections[name.removeprefix("gba-hvd")].splitlines() if line.startswith("| `")]
        written = {word for line in lines for word in line.split("` |")[0].strip("|` ").replace(",", "").split()}
        options = {option for action in command._actions for option in action.option_strings} - {"-h", "--help"}
        if any(isinstance(action, argparse._SubParsersAction) for action in command._actions):
            assert not lines, f"{name} is a group"
        else:
            assert options <= written, name


def test_help_is_text_and_not_markup(page: ModuleType) -> None:
    command = argparse.ArgumentParser(prog="gba-hvd try", description="Asks <b>, `a_b` and a_b_c.")
    command.add_argument("--what", choices=("one", "two"), default="one", required=True, help="one|two of %(choices)s")
    command.add_argument("--secret", help=argparse.SUPPRESS)
    text = "\n".join(page.section("gba-hvd try", "", command))
    assert "Asks \\<b\\>, `a_b` and a\\_b\\_c." in text
    assert "| `--what {one,two}` | one\\|two of one, two (required) |" in text
    assert "secret" not in text and "show this help" not in text
