"""The process that saves for another one: a `Checkpointer` on memory that both map, with requests through a pipe.

Messages (-> to this process, <- from it):

    Begin           ->    where, what and how; of the memory, the handles
                    <-    Ready: the location is claimed
    Save, its state ->
                    <-    ReadAll, in strict mode: the last row was read
                    <-    Event, "saved" or "failed": the answer
    Restore         ->
                    <-    Event, "restored": the answer, if rows came back; else
                    <-    Answer: there was nothing, or why not
    Leave           ->    or the pipe ends, or the other process does: the save in flight is finished
                    <-    Ended, last: what was raised, on entering or leaving, too

Other events come whenever something happens, and None, a heartbeat, several times in `silence_s`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

from recovery.catalog.claims import Claim
from recovery.checkpointer import Checkpointer
from recovery.config import Config
from recovery.errors import ProjectError, RecoveryError
from recovery.format.manifest import Manifest
from recovery.restore import TrainingPoint
from recovery.storage.store import Store
from recovery.torch_rows.row_memory import RowMemory

_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process with threads may find locks that are never released
_LOOK_S = 1.0


@dataclass(frozen=True)
class Begin:
    """Arguments of the `Checkpointer`, and of the process. All of it can be pickled."""

    url: str | Path | Store
    rows: RowMemory
    config: Config
    takeover: bool
    after: Claim | None
    tracker_path: Path | None
    counters: str
    rng: np.random.Generator | None
    storage_options: Mapping[str, Any]
    nice: int
    silence_s: float


@dataclass(frozen=True)
class Ready:
    claim: Claim
    newest: Manifest | None


@dataclass(frozen=True)
class ChildSave:
    """number: of the request. with_state: the next message is its bytes, which are not copied for the pipe."""

    number: int
    step: int
    samples: int
    kind: str
    about: Mapping[str, Any]
    with_state: bool


@dataclass(frozen=True)
class ReadAll:
    number: int


@dataclass(frozen=True)
class Restore:
    shards: tuple[int, ...] | None
    now: TrainingPoint | None


@dataclass(frozen=True)
class Answer:
    error: BaseException | None = None


@dataclass(frozen=True)
class EndChild:
    pass


@dataclass(frozen=True)
class Ended:
    error: BaseException | None


def start(begin: Begin) -> tuple[Connection, SpawnProcess]:
    """Start the process; the pipe to it."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_main, args=(theirs, begin), name="recovery-save", daemon=True)
    try:
        process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process


def _main(connection: Connection, begin: Begin) -> None:
    os.setsid()  # Ctrl-C, and what else is sent to the group, is for the process that trains
    os.nice(begin.nice)
    log = logging.getLogger("recovery")  # events are logged where they are reported
    log.addHandler(logging.NullHandler())
    log.propagate = False
    trains = multiprocessing.parent_process()
    assert trains is not None
    serve(connection, begin, lambda: os.getppid() != trains.pid)
    if sys.stderr is not None:  # as where it was closed when Python started
        sys.stderr.flush()
    os._exit(0)  # the other process waits for this one, and a Python with torch takes a second to clear up


def serve(connection: Connection, begin: Begin, is_alone: Callable[[], bool]) -> None:
    """Serve requests until one asks to leave. single_worker: the parent is gone; a fork of it may hold the pipe."""
    say, ended = _Replies(connection), Ended(None)
    with _living(say, begin.silence_s / 6):
        try:
            with _checkpointer(begin, say) as checkpoints:
                assert checkpoints.claim is not None
                begin.rows.map_pages()
                say(Ready(checkpoints.claim, checkpoints.newest))
                for asked in _asked(connection, is_alone):
                    _do(asked, checkpoints, connection, say, begin.config.strict)
        except BaseException as error:
            ended = Ended(_portable(error))
    say(ended)
    connection.close()


def _checkpointer(begin: Begin, say: _Replies) -> Checkpointer:
    return Checkpointer(
        begin.url,
        begin.rows,
        begin.config,
        takeover=begin.takeover,
        after=begin.after,
        tracker_path=begin.tracker_path,
        counters=begin.counters,
        on_event=lambda event: say(replace(event, error=event.error and _portable(event.error))),
        rng=begin.rng,
        **begin.storage_options,
    )


def _asked(connection: Connection, is_alone: Callable[[], bool]) -> Iterator[ChildSave | Restore]:
    with contextlib.suppress(EOFError, OSError):
        while True:
            while not connection.poll(_LOOK_S):
                if is_alone():
                    return
            asked = connection.recv()
            if isinstance(asked, EndChild):
                return
            yield asked


def _do(
    asked: ChildSave | Restore, checkpoints: Checkpointer, connection: Connection, say: _Replies, strict: bool
) -> None:
    if isinstance(asked, ChildSave):
        state = connection.recv_bytes() if asked.with_state else None
        checkpoints.wait()
        checkpoints.save(asked.step, asked.samples, state, kind=asked.kind, about=asked.about)
        if strict:
            say(ReadAll(asked.number))
        return
    try:
        if checkpoints.restore(asked.shards, now=asked.now) is None:
            say(Answer())
    except Exception as error:
        say(Answer(_portable(error)))


class _Replies:
    """The pipe as seen by several threads. When the reader is gone, saving continues."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def __call__(self, message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(message)


@contextlib.contextmanager
def _living(say: _Replies, every_s: float) -> Iterator[None]:
    over = threading.Event()

    def live() -> None:
        while not over.wait(every_s):
            say(None)

    thread = threading.Thread(target=live, name="recovery-pipe", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _portable(error: BaseException) -> BaseException:
    """The error, as far as it can be sent; of one that was not raised on purpose, also where it was raised."""
    try:
        sent: BaseException = pickle.loads(pickle.dumps(error))
        if type(sent) is type(error) and str(sent) == str(error):
            if not isinstance(error, ProjectError):
                sent.add_note("".join(traceback.format_exception(error)))
            return sent
    except Exception:  # of a class that cannot be pickled: its words can
        pass
    return RecoveryError(f"{type(error).__name__}: {error}")
