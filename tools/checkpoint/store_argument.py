"""The store that a command line names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recovery.errors import BadInput
from recovery.storage.local_store import LocalStore
from recovery.storage.open import open_store
from recovery.storage.store import Store

from ..folder_argument import existing_folder

_NO_NAME = (
    "Runs and jobs (`gba-hvd report` and `gba-hvd ps` list them) are not looked for; the line [started] of a job's log "
    "has its `url`"
)


def store_of(url: str, options: Sequence[str]) -> Store:
    """options: KEY=VALUE, for the back end. Raises BadInput for no text, and a local folder that does not exist."""
    if not url.strip():
        raise BadInput("the URL is empty: expected a folder or URL, written as the job's `url` is")
    store = open_store(url, **options_of(options))
    behind = getattr(store, "store", store)  # of one that tries again
    if isinstance(behind, LocalStore):
        advice = "is it written as the job's `url` is, and on this host?"
        is_name = "/" not in url
        existing_folder(behind.folder, f"{advice} {_NO_NAME}" if is_name else advice)
    return store


def checkpoints_at(url: str, options: Sequence[str]) -> Store:
    """As `store_of`. Raises BadInput also for a folder without checkpoints that has folders with some."""
    store = store_of(url, options)
    behind = getattr(store, "store", store)
    if isinstance(behind, LocalStore) and not _has_checkpoints(behind.folder):
        inner = sorted(str(one) for one in behind.folder.iterdir() if one.is_dir() and _has_checkpoints(one))
        if inner:
            named = ", ".join(inner[:5]) + f" and {len(inner) - 5} more" * (len(inner) > 5)
            raise BadInput(f"there is no checkpoint in {behind.folder}, but in: {named}")
    return store


def _has_checkpoints(folder: Path) -> bool:
    return any(next((folder / inside).glob("*"), None) for inside in ("manifests", "claims"))


def options_of(options: Sequence[str]) -> dict[str, Any]:
    """Of KEY=VALUE texts; the patience of `open_store` in numbers. Raises BadInput for what is none."""
    if wrong := [option for option in options if "=" not in option]:
        raise BadInput(f"--option {wrong[0]}: expected KEY=VALUE")
    found: dict[str, Any] = dict(option.partition("=")[::2] for option in options)
    for name, kind, words in (("tries", int, "a whole number"), ("timeout_s", float, "a number"),
                              ("least_bytes_s", float, "a number")):  # fmt: skip
        if name in found:
            try:
                found[name] = kind(found[name])
            except ValueError as error:
                raise BadInput(f"--option {name}={found[name]}: expected {words}") from error
    return found
