"""A checkpoint store that lies: a folder behind `chaos://`, with a fault while a control file says so.

The control file (GBA_HVD_CHAOS_STORE) holds {"kind": ..., "until": unix seconds}; each call that was falsified adds a
byte to `<control>.hits`, so that a fault that no access met does not count as fired.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

SLOW_S = 0.5
VARIABLE = "GBA_HVD_CHAOS_STORE"


class ChaosFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The calls that the fsspec store makes. `find` remembers: a stale listing is the one before the fault."""

    protocol = "chaos"
    cachable = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._local = LocalFileSystem()
        self._control = Path(os.environ.get(VARIABLE, "/nonexistent"))
        self._listed: dict[str, dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("chaos://").rstrip("/")

    def _fault(self, *kinds: str) -> str:
        """The fault that is on now, if it is one of these, and note that it was met."""
        try:
            now = json.loads(self._control.read_text())
        except (OSError, json.JSONDecodeError):
            return ""
        if now["kind"] not in kinds or time.time() > now["until"]:
            return ""
        with open(f"{self._control}.hits", "ab") as hits:
            hits.write(b".")
        if now["kind"] == "store_503":
            raise OSError("503 Service Unavailable")
        if now["kind"] == "store_slow":
            time.sleep(SLOW_S)
        return str(now["kind"])

    def pipe_file(self, path: str, value: bytes, **more: Any) -> None:
        if self._fault("store_503", "store_slow", "store_loses") == "store_loses":
            return
        self._local.makedirs(os.path.dirname(path), exist_ok=True)
        fresh = f"{path}.{os.getpid()}-{time.monotonic_ns()}.part"
        self._local.pipe_file(fresh, value)
        os.replace(fresh, path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        self._fault("store_503", "store_slow")
        found: bytes = self._local.cat_file(path, start=start, end=end)
        return found

    def find(self, path: str, *args: Any, **more: Any) -> dict[str, Any]:
        fault = self._fault("store_503", "store_slow", "store_stale")
        if fault == "store_stale":
            return self._listed.get(path, {})
        found: dict[str, Any] = self._local.find(path, detail=True)
        self._listed[path] = {name: about for name, about in found.items() if not name.endswith(".part")}
        return self._listed[path]

    def size(self, path: str) -> int:
        self._fault("store_503", "store_slow")
        return int(self._local.size(path))

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._local.info(path)
        return found

    def rm_file(self, path: str) -> None:
        self._fault("store_503", "store_slow")
        self._local.rm_file(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        pass
