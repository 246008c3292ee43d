"""Public names of the release before: accepted for one release, with a warning."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from recovery.errors import BadInput

T = TypeVar("T")
_OURS = ("recovery", "gba_hvd", "dataclasses")


def warn(old: str, new: str) -> None:
    """Warn that `old` goes with the next release, at the line outside these packages that used it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    text = f"{old} is now called {new}; the old name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=level)


def renamed(arguments: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`arguments` under today's names. names: old to new. Raises BadInput where both names are given."""
    values = dict(arguments)
    for old, new in names.items():
        if old in values:
            if new in values:
                raise BadInput(f"{old} is the old name of {new}: give one of them")
            warn(old, new)
            values[new] = values.pop(old)
    return values


def accepts(**names: str) -> Callable[[type[T]], type[T]]:
    """Decorates a class whose arguments and attributes were renamed. names: old to new."""

    def decorate(kind: type[T]) -> type[T]:
        initialise: Callable[..., None] = kind.__init__

        @functools.wraps(initialise)
        def init(self: T, *args: Any, **arguments: Any) -> None:
            initialise(self, *args, **renamed(arguments, names))

        def attribute(old: str, new: str) -> property:
            def read(self: T) -> Any:
                warn(old, new)
                return getattr(self, new)

            return property(read)

        kind.__init__ = init  # type: ignore[method-assign, assignment]
        for old, new in names.items():
            setattr(kind, old, attribute(old, new))
        return kind

    return decorate
