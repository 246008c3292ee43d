"""The syntax trees of source files, which several tests walk: parsed once."""

from __future__ import annotations

import ast
from functools import cache


@cache
def nodes(source: str) -> list[ast.AST]:
    """All nodes of the syntax tree of a source text."""
    return list(ast.walk(ast.parse(source)))
