"""Words that must not come back in names: one word an idea, and it is the field's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A part of an identifier (words joined by _), and why it does not say what it means.
WORDS = {
    "far_rows": "rows of another host are remote rows",
    "last_gasp": "a last save of a host's rows is a final checkpoint",
    "rests": "what compression did not send is a residual",
    "judging": "evaluations have their own word; no gerunds as names of classes",
    "wishes": "a mode that is asked for is a requested mode; what a plan aims at is its objectives",
    "local_server": "a host leader's own server is the host server",
    "reformer": "a world formed again is a rejoin",
    "newcomers": "workers that join later are late joiners",
    "stepping": "that which carries out a step is an executor",
    "coordinating": "no gerunds as names of classes: coordinator service",
    "watching": "who finds dead workers is a failure detector",
    "outgoing_push": "that which encodes a push is a push encoder",
    "lineage": "the chain that is in force is the active chain",
    "patient_store": "a store that tries again is a retrying store",
    "world_stands": "hooks say before and after what they run: after_world_forms",
}
ALLOWED = {"last_gasp_s", "is_stepping"}  # an old public argument that still warns; whether an optimizer steps


def _names(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            found.add(node.arg)
    return found


def _offences(names: set[str]) -> list[str]:
    found = []
    for name in sorted(names - ALLOWED):
        snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
        found += [f"{name}: {why}" for word, why in WORDS.items() if re.search(rf"(?:^|_){word}(?:_|$)", snake)]
    return found


def test_the_check_finds_words_in_camel_case_and_snake_case() -> None:
    assert len(_offences({"LastGasp", "_take_last_gasp", "FarRows", "interests", "bests"})) == 3


@pytest.mark.parametrize("package", ["gba_hvd", "recovery", "tools", "examples"])
def test_names_are_the_field_s_words(package: str) -> None:
    found = {str(path): _offences(_names(path)) for path in sorted((ROOT / package).rglob("*.py"))}
    assert not {path: words for path, words in found.items() if words}
