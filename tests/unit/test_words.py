"""Words that must not come back in names: one word an idea, and it is the field's."""

from __future__ import annotations

import ast
import io
import re
import tokenize
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


# A phrase of docstrings and comments, and what it should say instead.
PROSE = {
    r"whoever|whatever": "name the subject: a worker, a server, an error",
    r"(?:is|are|was|were|as|been|be) told|tells|hears|heard(?![:(])": "programs send, receive, report",
    r"anew|afresh": "a thing that begins again starts over, or is formed again",
    r"hand(?:s|ed|ing)? in": "replicas are submitted",
    r"judg(?:es?|ing)|judged(?!:)": "models are evaluated, or scored",
    r"wish(?:e[sd])?": "modes are requested",
    r"g(?:o|oes|oing) on|went on": "training continues, a job resumes",
    r"(?:a|its|the|each) lead|leads of (?:all )?hosts": "a host has a host leader",
    r"\|rest\||rests": "what compression did not send is a residual",
    r"newcomers?|leftovers?|last gasp|under way": "late joiner, orphaned memory, final checkpoint, in flight",
}


def _prose(source: str) -> list[tuple[int, str]]:
    """(line, text) of all comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            found.append((node.body[0].lineno, text))
    return found


def _phrases(source: str) -> list[str]:
    return [
        f"line {line}: {match.group()!r}: {why}"
        for line, text in _prose(source)
        for phrase, why in PROSE.items()
        for match in re.finditer(rf"(?<!\w)(?:{phrase})(?!\w)", " ".join(text.split()), re.IGNORECASE)
    ]


def test_the_check_finds_phrases_in_docstrings_and_comments_alone() -> None:
    source = '''
def f():
    """The chief's server is
    told; it is prejudged, and the unrest is no phrase."""
    g("handed in")  # formed anew
'''
    assert [found.split(":")[0] for found in _phrases(source)] == ["line 5", "line 3"]


@pytest.mark.parametrize("package", ["gba_hvd", "recovery", "tools"])
def test_docstrings_and_comments_are_plain(package: str) -> None:
    found = {str(path): _phrases(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))}
    assert not {path: phrases for path, phrases in found.items() if phrases}
