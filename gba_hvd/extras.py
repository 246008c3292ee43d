"""Packages that only some features need: an error for a missing one names the command that installs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gba_hvd.errors import MissingPackage


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
