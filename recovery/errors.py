"""The exceptions users may want to catch."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class GbaError(Exception):
    """Base of all errors that `recovery` and `gba_hvd` raise on purpose."""


ProjectError = GbaError  # its name in `recovery`


class BadInput(GbaError, ValueError):
    """Data or settings that the user can mend; the message says how."""


class RecoveryError(GbaError):
    """A checkpoint could not be saved or restored. Neither `BadInput` nor an error of `gba_hvd` is one."""


class StoreError(RecoveryError, OSError):
    """A store could not be read or written, after all retries."""


class NotFound(StoreError):
    """The store has no object of this name."""


class Damaged(RecoveryError):
    """Bytes are not those that were saved: an object is missing, short, altered, or in another's place."""


class Fenced(RecoveryError):
    """Another writer has taken over this location; what this one writes from now on is ignored."""


def refuse_unknown(what: str, name: object, among: Sequence[str]) -> None:
    """Raises BadInput that suggests the nearest name, unless `name` is one of `among`. what: the setting"""
    if name in among:
        return
    near = get_close_matches(str(name).lower().replace("-", "_"), among, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(among)}"
    raise BadInput(f"{what} {name!r} is not known: {hint}")
