"""Implementations of an interface by name: our own, and those that installed distributions register as entry points.

Decided here: which names there are, and whether what a distribution registers can be used. A name that comes from a
wire, a checkpoint or a settings file only chooses among these; no module is imported by a name from there. All
processes of an environment find the same entry points, so a server and a saving process find what a worker finds.
docs/EXTENDING.md has an example of each interface.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import FunctionType
from typing import Any, Generic, TypeVar

from recovery.errors import BadInput, refuse_unknown

T = TypeVar("T")
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


class Registry(Generic[T]):
    """The implementations of one interface.

    group:     of the entry points; an entry point refers to a class
    what:      what an implementation is called in messages
    interface: a Protocol; every method that it defines is required of a registered class
    own:       ours, by name; these names cannot be registered
    refuses:   what else keeps a registered class from being used; empty: nothing
    arguments: names of what a registered class is constructed with, in order; None: `refuses` checks that
    construct: a class method that constructs; empty: the class is called
    """

    def __init__(
        self,
        group: str,
        what: str,
        interface: type,
        own: Mapping[str, Callable[..., T]],
        refuses: Callable[[type], str] = lambda found: "",
        *,
        arguments: tuple[str, ...] | None = None,
        construct: str = "",
    ) -> None:
        self.group, self._what, self._interface, self._own, self._refuses = group, what, interface, own, refuses
        self._arguments, self._construct = arguments, construct

    def names(self) -> tuple[str, ...]:
        """Ours, then those that are registered. Nothing is loaded."""
        return (*self._own, *sorted({entry.name for entry in self._registered()} - set(self._own)))

    def get(self, name: str) -> Callable[..., T]:
        """The implementation of that name.

        Raises BadInput when there is none, when the name is registered more than once or is one of ours, and when what
        is registered cannot be imported, is no class with the methods of the interface, or takes other arguments.
        """
        entries = [entry for entry in self._registered() if entry.name == name]
        if not entries:
            if name in self._own:
                return self._own[name]
            refuse_unknown(self._what, name, self.names())
        if name in self._own or len(entries) > 1:
            others = "one of that name is built in" if name in self._own else f"{_origin(entries[1])} registers it, too"
            raise BadInput(
                f"{self._what} {name!r}: {_origin(entries[0])} registers this name in {self.group}, but {others}: "
                "rename it in the distribution's entry points, or uninstall the distribution"
            )
        return self._usable(entries[0])

    def name_of(self, kind: type) -> str | None:
        """The name under which a class is registered; None: it is not."""
        place = f"{kind.__module__}:{kind.__qualname__}"
        return next((entry.name for entry in self._registered() if entry.value == place), None)

    def _usable(self, entry: EntryPoint) -> Callable[..., T]:
        what = f"{self._what} {entry.name!r} of {_origin(entry)}"
        if not NAME.fullmatch(entry.name):
            raise BadInput(f"{what}: expected a name of lower-case letters, digits and _, at most 40 characters")
        try:
            found = entry.load()
        except (ImportError, AttributeError) as error:
            raise BadInput(
                f"{what} cannot be loaded: {error}; correct the entry point, or install what it needs on every host"
            ) from error
        if why := self._unusable(found):
            interface = f"{self._interface.__module__}.{self._interface.__qualname__}"
            raise BadInput(f"{what}: expected a class as {interface} describes it, got {why}; correct that class")
        usable: Callable[..., T] = found
        return usable

    def _unusable(self, found: Any) -> str:
        if not isinstance(found, type):
            return f"{found!r}, which is no class"
        members = vars(self._interface).items()
        methods = [name for name, value in members if name[0] != "_" and isinstance(value, FunctionType | classmethod)]
        missing = [name for name in methods if not callable(getattr(found, name, None))]
        if missing:
            return f"{found.__qualname__} without {', '.join(missing)}"
        if self._arguments is not None:
            constructor = getattr(found, self._construct) if self._construct else found
            if why := why_not_constructed(constructor, self._arguments):
                return why
        return self._refuses(found)

    def _registered(self) -> tuple[EntryPoint, ...]:
        return _entry_points(self.group, tuple(sys.path))


@lru_cache(maxsize=64)
def why_not_constructed(
    constructor: Callable[..., Any], arguments: tuple[str, ...], keywords: tuple[str, ...] = ()
) -> str:
    """Why a class, or a class method, cannot be called with these arguments; empty: it can, or shows no signature.

    The arguments are positional, their names are for the sentence. keywords: names of further ones.
    """
    try:
        signature = inspect.signature(constructor)
    except (TypeError, ValueError):  # written in C
        return ""
    if isinstance(constructor, type) and not any(map(_has_constructor, constructor.__mro__)):
        signature = inspect.Signature()  # of a protocol that it extends, which takes anything and then nothing
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        given = ", ".join((*arguments, *(f"{name}=..." for name in keywords)))
        shown = f"{constructor.__qualname__}{signature.replace(return_annotation=inspect.Signature.empty)}"
        return f"{shown}, which cannot be called as {constructor.__name__}({given}): {error}"
    return ""


def _has_constructor(kind: type) -> bool:
    is_ours = kind is not object and not getattr(kind, "_is_protocol", False)
    return is_ours and ("__init__" in vars(kind) or "__new__" in vars(kind))


@lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """path: `sys.path`, on which distributions are found."""
    return tuple(entry_points(group=group))


def _origin(entry: EntryPoint) -> str:
    dist = entry.dist
    return f"{entry.value} ({'an unnamed distribution' if dist is None else f'{dist.name} {dist.version}'})"
