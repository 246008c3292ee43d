"""A log of facts from which the same training can be computed again. Off unless GBA_HVD_TRACE names a folder.

Each process appends JSON lines to a file of its own there. A line is one write, so a kill leaves complete lines, and at
most one that has no newline. What is written:

    epoch       a worker begins the batches of an epoch: seed, samples, sizes, tables, optimizers; before the first
                step the dense values, too
    attempt     allreduce: a worker brings these micro-batches to a step, in this world
    commit      allreduce: the step was decided in this world, with these learning rates
    push        asynchronous: a lease's gradient, with the dense step and the very rows it was computed with
    decided     asynchronous: the members of a step that are dropped, of all its servers
    apply       asynchronous: a server begins to apply a decided step: the members it has, weights, learning rates, what
                the rows of all members are multiplied by, the update rule
    applied     and has ended, or missed it
    event       what the callbacks received: switches, membership, what was lost

Nothing here decides anything; where tracing is off, each place costs one comparison with None.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gba_hvd.errors import BadInput
from gba_hvd.shm.layout import ids_of

if TYPE_CHECKING:
    from gba_hvd.embedding.tables import EmbeddingTables

VARIABLE = "GBA_HVD_TRACE"


class Trace:
    """One process's file. Raises BadInput when the folder cannot be written."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BadInput(f"{VARIABLE}={folder}: {error}; name a folder that can be written, or unset it") from error

    def write(self, what: str, **facts: Any) -> None:
        line = {"is": what, "at": time.time(), **facts}
        os.write(self._fd, json.dumps(line, default=_plain).encode() + b"\n")

    def rows_used(self, tables: EmbeddingTables) -> dict[str, Any]:
        """By table, the distinct rows of the forward passes since gradients were taken last: numbers, and values."""
        used: dict[str, Any] = {}
        for captured in tables.captured:
            group = tables.layout.groups[captured.group]
            indices, values = captured.keys // tables.layout.n_shards, captured.values
            if group.hashed is not None:
                used[group.tables[0].name] = {"rows": ids_of(captured.keys), "values": values}
                continue
            for table, first in zip(group.tables, group.first, strict=True):
                rows = captured.keys - first * tables.layout.n_shards
                mine = (indices >= first) & (rows < table.n_rows)
                if mine.any():
                    used[table.name] = {"rows": rows[mine], "values": values[mine]}
        return used


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return str(value)


def _of_environment() -> Trace | None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    os.environ[VARIABLE] = os.path.abspath(folder)  # servers are started in another working directory
    return Trace(Path(folder))


TRACE = _of_environment()
