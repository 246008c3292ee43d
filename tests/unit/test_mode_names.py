"""The records of the modes, what must follow them, and that documents name every mode."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

from gba_hvd import GBACallback
from gba_hvd.mode_names import BY_NAME, MODE_NUMBERS, MODES, RECORDS, REPLICA_MODES, SERVER_MODES, Mode, any_of
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.tracking.plots import MODE_COLOURS

ROOT = Path(__file__).parents[2]
OF_DISCIPLINES = {setting.name for setting in fields(Discipline)} - {"name"}


def test_the_number_of_a_mode_stays() -> None:
    stored = "allreduce", "gba", "bsp", "async", "hop_bs", "hop_bw", "shadow", "easgd", "ma", "bmuf"
    assert MODES[: len(stored)] == stored
    assert all(MODES[number] == mode for mode, number in MODE_NUMBERS.items())


def test_a_step_is_of_what_the_modes_are_known_for() -> None:
    assert {name: BY_NAME[name].step_of for name in MODES[:6]} == {
        "allreduce": None, "gba": "batch", "bsp": "batch", "async": "push", "hop_bs": "push", "hop_bw": "round",
    }  # fmt: skip
    assert {BY_NAME[name].step_of for name in REPLICA_MODES} == {"push"} and set(REPLICA_MODES) < set(SERVER_MODES)


@pytest.mark.parametrize("mode", RECORDS, ids=lambda mode: mode.name)
def test_the_options_of_a_mode_are_arguments_of_the_callback(mode: Mode) -> None:
    assert mode.options <= set(signature(GBACallback).parameters)


def test_every_setting_of_disciplines_is_an_argument_that_reaches_them_and_an_option_of_some_mode() -> None:
    assert set(signature(GBACallback).parameters) >= OF_DISCIPLINES
    assert set(GBACallback().describe()) >= OF_DISCIPLINES
    assert frozenset[str]().union(*(mode.options for mode in RECORDS)) >= OF_DISCIPLINES


def test_every_mode_has_a_colour_of_its_own() -> None:
    assert list(MODE_COLOURS) == list(MODES) and len(set(MODE_COLOURS.values())) == len(MODES)


def test_names_are_listed_as_in_a_sentence() -> None:
    assert (any_of(["a"]), any_of(["a", "b"]), any_of(["a", "b", "c"])) == ("a", "a or b", "a, b or c")


@pytest.mark.parametrize("page", ["docs/MODES.md", "DESIGN.md"])
def test_documents_name_every_mode(page: str) -> None:
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    assert set(MODES) <= set(re.findall(r"`(\w+)`", "\n".join(rows)))


def test_the_documents_of_running_have_the_number_of_every_mode() -> None:
    (line,) = re.findall(r"^The metric `mode` is .*$", (ROOT / "docs/RUNNING.md").read_text(), re.MULTILINE)
    assert re.findall(r"(\d+) `(\w+)`", line) == [(str(number), mode) for mode, number in MODE_NUMBERS.items()]


def test_docstrings_name_every_mode() -> None:
    assert set(MODES) <= set(re.findall(r'"(\w+)"', str(GBACallback.__doc__)))
    assert set(SERVER_MODES) <= set(re.findall(r"\w+", str(Discipline.__doc__)))
