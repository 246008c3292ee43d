"""Addition to mkdocs: the page of the command line, from the argparse parsers of `gba-hvd`.

A section for each command and subcommand: what it does, how it is called, a table of its arguments and options. Old
names of commands, which no help lists, are left out. `docs/COMMAND_LINE.md` has the text around it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from gba_hvd_tools.bench.harness.measure import ShowsDefaults, with_default
from gba_hvd_tools.cli import build_parser
from mkdocs.structure.pages import Page

COMMANDS = "<!-- commands -->"  # in docs/COMMAND_LINE.md: here the sections are written
WIDTH = 100  # of a usage line


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """What mkdocs calls."""
    return markdown.replace(COMMANDS, sections(build_parser())) if COMMANDS in markdown else markdown


def sections(parser: argparse.ArgumentParser) -> str:
    """The sections of all commands below `parser`, in the order in which its help lists them."""
    return "\n".join(line for name, summary, command in commands(parser) for line in section(name, summary, command))


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """(how it is called, its line in the help above it, its parser) of each command; groups before what is in them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                command = action.choices[listed.dest]
                yield command.prog, listed.help or "", command
                yield from commands(command)


def section(name: str, summary: str, command: argparse.ArgumentParser) -> list[str]:
    """Markdown lines. Every command has `--help`, so that is left out, and a group of commands has no table."""
    level = "#" * len(name.split())
    lines = [f"{level} {name}", "", as_markdown(command.description or sentence(summary)), ""]
    if any(isinstance(action, argparse._SubParsersAction) for action in command._actions):
        return lines
    lines += ["```text", usage(command), "```", ""]
    shown = [
        one for one in command._actions if one.help != argparse.SUPPRESS and not isinstance(one, argparse._HelpAction)
    ]
    if not shown:
        return lines
    rows = [row(command, action) for action in shown]
    lines += ["| argument or option | meaning |", "|---|---|", *rows, ""]
    return [*lines, as_markdown(command.epilog), ""] if command.epilog else lines


def usage(command: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(command.prog, width=WIDTH)
    formatter.add_usage(command.usage, command._actions, command._mutually_exclusive_groups, "")
    return formatter.format_help().strip()


def row(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    """A line of the table: how it is written, and its help with the values that argparse puts in."""
    formatter = argparse.HelpFormatter(command.prog, width=WIDTH)
    written = formatter._format_action_invocation(action)
    if issubclass(command.formatter_class, ShowsDefaults):
        action = with_default(action)
    text = formatter._expand_help(action) if action.help else ""
    required = "(required)" if action.required and action.option_strings else ""
    return f"| `{cell(written)}` | {cell(f'{as_markdown(text)} {required}')} |"


def sentence(summary: str) -> str:
    return f"{summary[:1].upper()}{summary[1:]}." if summary and summary[-1] not in ".!?" else summary


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def as_markdown(text: str) -> str:
    """Plain text of a parser: `code` stays code; elsewhere no character has a meaning for Markdown or HTML."""
    parts = re.split(r"(`[^`\n]+`)", text.strip())
    return "".join(
        part if number % 2 else re.sub(r"([\\*_<>\[\]#])", r"\\\1", part) for number, part in enumerate(parts)
    )
