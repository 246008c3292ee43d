"""Figures of simulated training as JSON and as text."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def silent_servers() -> Iterator[None]:
    """Steps that are not finite are figures here: the servers' warnings of them are not shown."""
    log = logging.getLogger("gba_hvd.ps")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def json_values(value: Any) -> Any:
    """JSON has no infinity: a loss that diverged is null."""
    if isinstance(value, dict):
        return {key: json_values(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(v) for v in value]
    return None if isinstance(value, float) and value == float("inf") else value


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a command, as JSON."""
    return {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items() if key != "run"}


def write(path: Path | None, document: Any) -> None:
    """JSON, where a file is named."""
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n")
        print(f"written to {path}")


def loss_text(loss: float) -> str:
    return "diverged" if loss == float("inf") else f"{loss:.4g}"
