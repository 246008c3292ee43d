"""All settings of `train_ctr.py` as YAML with their defaults, made from the dataclasses of `ctr.config` themselves."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from ctr.config import Compressor, JobConfig, kind_name

_WIDTH, _MEANINGS_AT = 130, 36
_FIXED_SPACE = "\u00a0"  # no line is broken here


class ShowSettings(argparse.Action):
    """Prints the list and ends, as --help does."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(nargs=0, **keywords)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(settings_list())
        parser.exit()


def settings_list() -> str:
    """A YAML file of the defaults. Sections that a job does not have by default are comments, ready to be taken in."""
    head = (
        "# All settings with their defaults. In the file of --config, or behind it as key.path=value.\n"
        "# `off:` is the value that switches something off.\n"
        "# name: JOB                         # text; default: the name of the file\n"
    )
    return head + "\n".join(_lines(JobConfig, ""))


def _lines(section: type, indent: str) -> Iterator[str]:
    hints = get_type_hints(section)
    for one in dataclasses.fields(section):
        kind = hints[one.name]
        parts = [part for part in (kind, *get_args(kind)) if isinstance(part, type)]
        inner = next((part for part in parts if dataclasses.is_dataclass(part)), None)
        default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        if default is dataclasses.MISSING:  # the name, which stands at the top
            continue
        notes = [
            one.metadata.get("meaning", ""),
            f"off:{_FIXED_SPACE}{off}" if (off := one.metadata.get("off")) is not None else "",
        ]
        if inner is None:
            yield _line(f"{indent}{one.name}: {_as_yaml(default)}", [_kind_text(kind), *notes])
        elif default is None:
            yield _line(f"# {one.name}:", ["a section, off by default", *notes[:1]])
            yield from (f"# {line}" for line in _lines(inner, indent + "  "))
        else:
            yield _line(f"{indent}{one.name}:", ["short: the name alone" if inner is Compressor else "", *notes])
            yield from _lines(inner, indent + "  ")


def _line(text: str, notes: list[str]) -> str:
    comment = "; ".join(part for part in notes if part)
    if not comment:
        return text
    at = max(_MEANINGS_AT, len(text) + 1)
    first, *more = textwrap.wrap(comment, max(40, _WIDTH - at), break_on_hyphens=False)
    lead = "#" if text.startswith("#") else ""
    lines = [f"{text:{at - 1}} # {first}", *(f"{lead:{at - 1}} # {line}" for line in more)]
    return "\n".join(lines).replace(_FIXED_SPACE, " ")


def _kind_text(kind: Any) -> str:
    options = [part for part in get_args(kind) if part is not type(None)] if type(None) in get_args(kind) else [kind]
    name = ", ".join(get_args(kind)) if get_origin(kind) is Literal else kind_name(options[0])
    return name + (" or null" if type(None) in get_args(kind) else "")


def _as_yaml(value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("...\n").strip()
