"""The exceptions users may want to catch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType


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


def refuse_unknown(
    what: str, name: object, among: Sequence[str], synonyms: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raises BadInput that suggests the nearest name and has all of them, unless `name` is one of `among`.

    what: the setting. synonyms: what others call them -> our name, which is suggested then; names that begin with
    `name` are all suggested
    """
    if name in among:
        return
    wanted = str(name).lower().replace("-", "_")
    near = [synonyms[wanted]] if synonyms.get(wanted) in among else []
    near = near or [one for one in among if one.startswith(f"{wanted}_")]
    near = near or get_close_matches(wanted, among, n=1)
    hint = f"did you mean {' or '.join(map(repr, near))}? Choose" if near else "choose"
    raise BadInput(f"{what} {name!r} is not known: {hint} one of {', '.join(among)}")
