"""A store for `bench serving`: a folder, of which every read takes a time, as one of an object store does."""

from __future__ import annotations

import time
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

READ_S = 0.02


class SlowFileSystem(LocalFileSystem):  # type: ignore[misc]
    protocol = "slow"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        time.sleep(READ_S)
        found: bytes = super().cat_file(path, start=start, end=end, **more)
        return found

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("slow://").rstrip("/")


def url_of(folder: Any) -> str:
    fsspec.register_implementation("slow", f"{__name__}.{SlowFileSystem.__name__}", clobber=True)
    return f"slow://{folder}"
