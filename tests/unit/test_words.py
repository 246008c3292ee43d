"""Words that must not come back in names: one word an idea, and it is the field's."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.unit.syntax import nodes

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
    "told|tells?|telling": "programs report, send, print; what was reported is a report, metrics, an event",
    "hears?|heard|hearing": "programs receive: on_reply, on_message, last_seen_s",
    "wish": "a mode that somebody asks for is a mode request",
    "judged?": "models are evaluated and have scores; rows, records and errors are checked",
    "leftovers?": "memory of dead jobs is orphaned, and so are objects in a store",
    "newcomers?": "workers that join later are late joiners",
    "under_way": "pushes, steps and saves are in flight",
    "places": "positions of rows and of elements are indices; where records start is record_starts",
    "is_far|far_from": "what another host holds is remote, what this host holds local",
    "goes_on|go_on": "jobs, modes and epochs continue; a job resumes from a checkpoint",
    "given_up|give_up|gave_up": "a worker is evicted, a mode abandoned, an operation cancelled",
    "went_back|gone_back|go_back": "a job that resumes from an older checkpoint while it runs is rolled back",
    "holder": "what has rows to be saved is a row source; who has a lock is its owner",
}
# The same, of some packages: elsewhere the word is plain English.
WORDS_OF = {
    "gba_hvd/compression": {"rest": "what compression did not send is a residual"},
    "gba_hvd/ps": {"rest": "what compression did not send is a residual"},
}
ALLOWED = {
    *("last_gasp_s", "wish", "places"),  # old public names that still warn
    *("is_stepping", "tell"),  # whether an optimizer steps; of a file
}


def _names(source: str) -> set[str]:
    found: set[str] = set()
    for node in nodes(source):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            found.add(node.arg)
    return found


def _offences(names: set[str], words: Mapping[str, str] = WORDS) -> list[str]:
    snake = {name: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in sorted(names - ALLOWED)}
    any_word = re.compile(rf"(?:^|_)(?:{'|'.join(words)})(?:_|$)")
    return [
        f"{name}: {why}"
        for name in snake
        if any_word.search(snake[name])
        for word, why in words.items()
        if re.search(rf"(?:^|_)(?:{word})(?:_|$)", snake[name])
    ]


def test_the_check_finds_words_in_camel_case_and_snake_case() -> None:
    assert len(_offences({"LastGasp", "_take_last_gasp", "FarRows", "is_told", "interests", "bests", "wished"})) == 4


@pytest.mark.parametrize("package", ["gba_hvd", "recovery", "tools", "examples", *WORDS_OF])
def test_names_are_the_field_s_words(package: str) -> None:
    words = {**WORDS, **WORDS_OF.get(package, {})}
    found = {str(path): _offences(_names(path.read_text()), words) for path in sorted((ROOT / package).rglob("*.py"))}
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
    r"nobody|somebody": "name what does not, or does: no process, no worker, another job, a user",
    r"said|spoke|speaks for": "programs report, log, raise; one process reports for a job",
    r"what became of|in vain": "a save has an outcome, a status; without success, for nothing",
    r"given up|gave up": "evicted, abandoned, cancelled, timed out",
}


def _prose(source: str) -> list[tuple[int, str]]:
    """(line, text) of all comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for node in nodes(source):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            found.append((node.body[0].lineno, text))
    return found


def _found(text: str, phrases: Mapping[str, str], beside: str) -> Iterator[tuple[str, str]]:
    """(phrase, why) of each phrase in a text that no character `beside` touches."""
    if re.search(rf"(?<!{beside})(?:{'|'.join(phrases)})(?!{beside})", text, re.IGNORECASE):
        for phrase, why in phrases.items():
            for match in re.finditer(rf"(?<!{beside})(?:{phrase})(?!{beside})", text, re.IGNORECASE):
                yield match.group(), why


def _phrases(source: str) -> list[str]:
    return [
        f"line {line}: {phrase!r}: {why}"
        for line, text in _prose(source)
        for phrase, why in _found(" ".join(text.split()), PROSE, r"\w")
    ]


def test_the_check_finds_phrases_in_docstrings_and_comments_alone() -> None:
    source = '''
def f():
    """The chief's server is
    told; it is prejudged, and the unrest is no phrase."""
    g("handed in")  # formed anew
'''
    assert [found.split(":")[0] for found in _phrases(source)] == ["line 5", "line 3"]


# A phrase of messages, which people read and search for.
MESSAGES = {
    r"under way|hand(?:s|ed|ing)? in": "in flight; submitted",
    r"signs? of life|last gasp|leftovers?|newcomers?": "renewal, heartbeat, final checkpoint, orphaned, late joiner",
    r"(?:is|are|was|were) told|tells|hears|heard|wish(?:e[sd])?|judged?": "report, send, receive, request, evaluate",
    r"anew|whoever|whatever|g(?:o|oes|oing) on|went on": "again, over; name the subject; continue, resume",
}
STORED = {"goes on", "Judged"}  # the name of a collective; the tag of a message


def _messages(source: str) -> list[tuple[int, str]]:
    """(line, text) of all strings that are no docstrings; of an f-string its parts."""
    docstrings = {
        id(node.body[0].value)
        for node in nodes(source)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if node.body and isinstance(node.body[0], ast.Expr)
    }
    return [
        (node.lineno, node.value)
        for node in nodes(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


def _phrases_of_messages(source: str) -> list[str]:
    return [
        f"line {line}: {phrase!r}: {why}"
        for line, text in _messages(source)
        if text not in STORED and " " in text
        for phrase, why in _found(text, MESSAGES, r"[\w-]")
    ]


def test_the_check_finds_phrases_in_messages_alone() -> None:
    source = """
def f(why):
    'It is under way.'
    raise ValueError(f"the save is under way: {why['told']}")  # told
"""
    assert [found.split(":")[0] for found in _phrases_of_messages(source)] == ["line 4"]


@pytest.mark.parametrize("package", ["gba_hvd", "recovery", "tools", "examples"])
def test_messages_are_plain(package: str) -> None:
    found = {str(path): _phrases_of_messages(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))}
    assert not {path: phrases for path, phrases in found.items() if phrases}


@pytest.mark.parametrize("package", ["gba_hvd", "recovery", "tools", "examples"])
def test_docstrings_and_comments_are_plain(package: str) -> None:
    found = {str(path): _phrases(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))}
    assert not {path: phrases for path, phrases in found.items() if phrases}


def _phrases_of_pages(text: str) -> list[str]:
    """Of a page of documentation: outside of `code`, paths of links and the anchors of headings."""
    plain = re.sub(
        r"```.*?```|`[^`]*`|\]\([^)]*\)", lambda match: re.sub(r"[^\n]", " ", match.group()), text, flags=re.S
    )
    return [
        f"line {number}: {phrase!r}: {why}"
        for number, line in enumerate(plain.splitlines(), start=1)
        for phrase, why in _found(line, PROSE, r"\w")
    ]


def test_the_check_finds_phrases_in_pages_outside_of_code() -> None:
    page = "# Rests\n\nIt goes on, see `wish` and [this](going-on.md).\n\n```\nwhatever\n```\nanew\n"
    assert [found.split(": ")[:2] for found in _phrases_of_pages(page)] == [
        ["line 1", "'Rests'"], ["line 3", "'goes on'"], ["line 8", "'anew'"]
    ]  # fmt: skip


@pytest.mark.parametrize("page", ["README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs"])
def test_pages_are_plain(page: str) -> None:
    files = sorted((ROOT / page).rglob("*.md")) if (ROOT / page).is_dir() else [ROOT / page]
    found = {str(path): _phrases_of_pages(path.read_text()) for path in files}
    assert files and not {path: phrases for path, phrases in found.items() if phrases}
