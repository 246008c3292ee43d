"""Why an operator asked for a mode, from the worker of the host that was asked to the chief, which reports it.

A commit carries numbers only. The reason waits in the launcher's key-value store, where it is before the commit that
has the request. Nothing depends on it: without a launcher that answers, the chief says less.
"""

from __future__ import annotations

import contextlib
from urllib.parse import quote, unquote

from gba_hvd.comm.launcher_slot import LauncherStore


def leave(mode: str, reason: str, store: LauncherStore | None) -> None:
    if store is not None:
        with contextlib.suppress(OSError):
            store.ask("PUT", _path(mode), quote(reason).encode())


def found(mode: str, store: LauncherStore | None) -> str:
    """The newest reason for this mode."""
    if store is not None:
        with contextlib.suppress(OSError):
            if reason := store.ask("GET", _path(mode)):
                return unquote(reason)
    return "an operator asked for it, through another host"


def _path(mode: str) -> str:
    return f"/gba_hvd_operator_reasons/{mode}"
