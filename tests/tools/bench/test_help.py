"""`gba-hvd bench X --help` shows the default of every option."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import pytest
from gba_hvd_tools import bench
from gba_hvd_tools.bench.harness import measure
from gba_hvd_tools.cli import build_parser


@pytest.fixture(scope="module")
def benchmarks() -> dict[str, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for module in bench.BENCHMARKS:
        module.add_parser(subparsers)
    return dict(subparsers.choices)


def test_every_default_of_every_benchmark_is_shown(benchmarks: dict[str, argparse.ArgumentParser]) -> None:
    assert len(benchmarks) == len(bench.BENCHMARKS)
    for name, parser in benchmarks.items():
        shown = " ".join(parser.format_help().split())
        for action in parser._actions:
            if isinstance(action.default, (int, float)) and not isinstance(action.default, bool):
                value = "no limit" if action.default == math.inf else str(action.default)
                line = shown[shown.index(action.option_strings[0] + " ", shown.index("options:")) :]
                assert f"(default: {value})" in line, f"{name} {action.option_strings[0]}"


def test_lists_are_words_and_everything_there_is_is_all() -> None:
    parser = argparse.ArgumentParser(formatter_class=measure.ShowsDefaults)
    parser.add_argument("--sizes", nargs="+", default=[1, 2])
    parser.add_argument("--some", nargs="+", default=["a"], choices=("a", "b"), help="take")
    parser.add_argument("--every", nargs="+", default=["a", "b"], choices=("a", "b"))
    parser.add_argument("--limit", type=float, default=math.inf)
    parser.add_argument("--flag", action="store_true", help="a flag")
    parser.add_argument("--none", help="nothing")
    lines = [line.split() for line in parser.format_help().splitlines()]
    ends = [" ".join(line[-3:]) for line in lines if line]
    assert "(default: 1 2)" in ends and "take (default: a)" in ends and "(default: no limit)" in ends
    assert any(end.endswith("(default: all)") for end in ends) and any(end.endswith("flag") for end in ends)
    assert any(end.endswith("nothing") for end in ends)


def test_paragraphs_are_filled_and_lists_of_terms_stay_as_they_are() -> None:
    text = "What it\nmeasures.\n\nlag    of a row\ncost   of the job\n"
    parser = argparse.ArgumentParser(description=text, formatter_class=measure.ShowsDefaults)
    assert "What it measures.\n\nlag    of a row\ncost   of the job\n\n" in parser.format_help()


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def test_every_command_shows_its_defaults_in_one_form() -> None:
    for parser in parsers(build_parser()):
        for action in parser._actions:
            shown = measure.with_default(action) if parser.formatter_class is measure.ShowsDefaults else action
            text, where = shown.help or "", f"{parser.prog} {'/'.join(action.option_strings)}"
            if action.option_strings and str(action.default) not in (
                "None",
                "False",
                "",
                "[]",
                "[None]",
                "==SUPPRESS==",
            ):
                assert "default" in text, where
            assert "; default" not in text and "(default " not in text, where
