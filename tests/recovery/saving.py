"""A saving process that is a thread, and the schema of other rows."""

from __future__ import annotations

import multiprocessing
import threading
from functools import partial
from multiprocessing.connection import Connection

from recovery.child.process import Begin, serve
from recovery.process_checkpointer import ProcessCheckpointer
from recovery.rows import Schema


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
