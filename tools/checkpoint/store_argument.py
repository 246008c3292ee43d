"""The store that a command line names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recovery.storage.store import Store


def store_of(url: str, options: Sequence[str]) -> Store:
    """options: KEY=VALUE, for the back end."""
    from recovery.errors import BadInput
    from recovery.storage.open import open_store

    if wrong := [option for option in options if "=" not in option]:
        raise BadInput(f"--option {wrong[0]}: expected KEY=VALUE")
    values: dict[str, Any] = dict(option.partition("=")[::2] for option in options)
    return open_store(url, **values)
