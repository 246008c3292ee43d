"""The store that a command line names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recovery.errors import BadInput
from recovery.storage.local_store import LocalStore
from recovery.storage.open import open_store
from recovery.storage.store import Store

from ..folder_argument import existing_folder


def store_of(url: str, options: Sequence[str]) -> Store:
    """options: KEY=VALUE, for the back end. Raises BadInput for a local folder that does not exist."""
    store = open_store(url, **options_of(options))
    behind = getattr(store, "store", store)  # of one that tries again
    if isinstance(behind, LocalStore):
        existing_folder(behind.folder, "is it written as the job's `url` is, and on this host?")
    return store


def options_of(options: Sequence[str]) -> dict[str, Any]:
    """Of KEY=VALUE texts."""
    if wrong := [option for option in options if "=" not in option]:
        raise BadInput(f"--option {wrong[0]}: expected KEY=VALUE")
    return dict(option.partition("=")[::2] for option in options)
