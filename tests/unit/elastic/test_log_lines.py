"""Log lines have the time of day where nobody has set up logging; where somebody has, they are his."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from gba_hvd.elastic import log_lines

ALONE = """
import logging, sys
{load}
log = logging.getLogger("gba_hvd")
{before}
show_log_lines()
show_log_lines()
{after}
log.info("began"), log.warning("was slow"), logging.getLogger("recovery").info("read"), log.debug("detail")
"""
PACKAGE = "from gba_hvd.elastic.log_lines import show_log_lines"
FILE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("log_lines", {log_lines.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
show_log_lines = module.show_log_lines
"""  # without the package, which imports torch for two seconds
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
OWN = 'logging.basicConfig(format="mine %(message)s", level={level})'


def said(before: str = "", after: str = "", load: str = FILE) -> str:
    script = ALONE.format(before=before, after=after, load=load)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


@pytest.mark.slow
def test_without_logging_of_its_own_a_script_gets_lines_with_the_time() -> None:
    lines = said(load=PACKAGE).splitlines()
    assert len(lines) == 2
    for line, text in zip(lines, ("INFO began", "WARNING was slow"), strict=True):
        assert re.fullmatch(TIME + text, line)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lines_go_where_the_script_sends_them_and_nowhere_else(when: str) -> None:
    assert said(**{when: OWN.format(level="logging.DEBUG")}).splitlines() == [
        "mine began", "mine was slow", "mine read", "mine detail"
    ]  # fmt: skip


def test_the_level_of_the_script_counts_from_the_first_line_that_it_gets() -> None:
    after = OWN.format(level="logging.WARNING") + '; log.warning("first")'
    assert said(before=OWN.format(level="logging.WARNING")).splitlines() == ["mine was slow"]
    assert said(after=after).splitlines() == ["mine first", "mine was slow"]


def test_a_handler_of_our_logger_is_enough() -> None:
    own = (
        'h = logging.StreamHandler(sys.stderr); h.setFormatter(logging.Formatter("own %(message)s")); log.addHandler(h)'
    )
    assert said(before=own).splitlines() == ["own was slow"]
    assert said(after=own).splitlines()[-1] == "own was slow"


def test_a_level_that_the_script_has_chosen_stays() -> None:
    assert said(before="log.setLevel(logging.ERROR)") == ""
