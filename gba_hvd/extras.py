"""Imports that may fail: packages that only some features need, and modules of users. The error names the way out."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

from gba_hvd.errors import BadInput, MissingPackage


@contextlib.contextmanager
def extra(name: str, package: str, what: str) -> Iterator[None]:
    """Around the import of `package`, which the extra `name` of this project installs.

    what: the feature that needs it, with its verb: "plots need", "gba_hvd.data needs".
    Raises MissingPackage.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        text = f"{what} {package}, which is not installed: pip install 'gba-hvd[{name}]' (or pip install {package})"
        raise MissingPackage(text, name=package) from error


def module_of(what: str, name: str, module_name: str) -> ModuleType:
    """The module of a class or function that goes by its name. what: its kind, in messages. Raises BadInput."""
    try:
        return importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise BadInput(
            f"{what} {name}: module {module_name!r} cannot be imported here ({error}); "
            "install it on every host, or put its folder on PYTHONPATH"
        ) from error
