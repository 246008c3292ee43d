"""Checkpoints made by hand, one after the other, for tests of restoring them; and a saving process that is a thread."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from recovery.child.process import Begin, serve
from recovery.config import Config
from recovery.format.manifest import Manifest
from recovery.process_checkpointer import ProcessCheckpointer
from recovery.rows import Schema
from recovery.selection.selector import Selection
from recovery.storage.store import Store
from recovery.torch_rows.tensor_rows import TensorRows
from recovery.write.multipart import SaveTarget, commit_parts, save_part

SMALL = Config(section_bytes=8 << 10, blob_bytes=32 << 10, level=0)


@dataclass
class Saver:
    """Saves rows as the checkpointer does, in the calling thread and without claims.

    made: every manifest so far
    """

    rows: TensorRows
    store: Store
    config: Config = SMALL
    epoch: int = 1
    made: list[Manifest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.selection = Selection(self.rows, self.config, rng=np.random.default_rng(0))

    def save(
        self, kind: str | None = None, state: bytes | None = None, about: dict[str, Any] | None = None, ahead: int = 0
    ) -> Manifest:
        """The first one is full, the others are of the configured policy; the state says the step by default.

        ahead: steps that the rows have and the state has not
        """
        kind = kind or (self.config.policy if self.made else "full")
        number, step = len(self.made) + 1, self.rows.last_step - ahead
        parent = None if kind == "full" else self.made[-1].name
        target = SaveTarget(self.epoch, number, kind, parent, step, 10 * step, self.rows.schema, about or {})
        written = save_part(self.rows, self.selection, self.store, target, self.config)
        state = b"state of step %d" % step if state is None else state
        manifest, _ = commit_parts(
            self.store, self.selection, target, [written], lambda parts: state, unix_clock=lambda: 0.0
        )
        self.made.append(manifest)
        return manifest


class InAThread:
    """The process that saves, as a thread of this one: it starts at once, and any store can be given to it."""

    pid = exitcode = None

    def __init__(self, connection: Connection, begin: Begin) -> None:
        self._thread = threading.Thread(target=serve, args=(connection, begin, lambda: False), name="recovery-child")
        self._thread.start()
        self.join = self._thread.join

    def kill(self) -> None:
        raise AssertionError("a thread cannot be killed")

    def close(self) -> None:
        pass


def start_in_a_thread(begin: Begin) -> tuple[Connection, InAThread]:
    ours, theirs = multiprocessing.Pipe()
    return ours, InAThread(theirs, begin)


ThroughAPipe = partial(ProcessCheckpointer, start=start_in_a_thread)
"""A ProcessCheckpointer without its process: all that is said goes through the pipe."""


def other_schema(schema: Schema) -> Schema:
    """The same tables, in the other order."""
    return Schema(schema.tables[::-1], schema.n_shards)
