"""Where checkpoints go: a flat space of immutable objects with names like `blobs/17-3/0004`.

An object is written once, whole, under a fresh name, and never changed: what is half written is never referred to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Store(Protocol):
    """Raises NotFound or StoreError. Thread-safe."""

    url: str

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a new object from consecutive pieces. When this returns, it is durable."""

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        """The bytes from `start` on, at most n_bytes."""

    def names(self, prefix: str) -> dict[str, int]:
        """Name -> size in bytes of the objects that begin so."""

    def delete(self, names: Sequence[str]) -> None:
        """Those that are there; the others are no error."""
