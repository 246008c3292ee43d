"""The file by which `gba-hvd run` learns that a worker of its host has started: it says nothing of a quick start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path


def remove(environ: Mapping[str, str] = os.environ) -> None:
    """This worker has started. Does nothing without such a launcher, or where another worker came first."""
    if name := environ.get("GBA_HVD_START_FILE"):
        with contextlib.suppress(OSError):
            Path(name).unlink(missing_ok=True)
