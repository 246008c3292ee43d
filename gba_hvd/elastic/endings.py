"""How a job ends: the status and the cause reported to callbacks, from the error that ended this worker's loop.

What is decided here: whether an error is the cause or follows from another worker's end, and whether the job's memory
was taken away. Without an elastic launcher the end of one worker ends all: the others' collectives break, and
the launcher sends SIGTERM, SIGKILL 5 s later. So each worker that ends otherwise than well leaves a note in the job's
folder, first of all; a worker that ends after it on the same host reads it, and ends with the same status and that
cause. With an elastic launcher those of its host that continue report its error to the callbacks.

What a crash leaves: no note. A neighbour that is gone without one was killed: the job failed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import recovery
from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.errors import (
    BadInput,
    LastCheckpointFailed,
    NonFiniteGradient,
    ShardMemoryError,
    StateMismatch,
    WorldLost,
)
from gba_hvd.shm import host_identity, retained_state
from gba_hvd.shm.process_state import is_alive
from recovery.errors import Damaged, StoreError
from recovery.storage.rename import replace_file

if TYPE_CHECKING:
    from gba_hvd.training.engine import Engine

log = logging.getLogger("gba_hvd")

_FIRST_S = 40.0  # as long as its callbacks may take, MLflow's 30 s among them
_IS_OURS = "by_gba_hvd"  # an attribute of the excepthook
_WAS_SHOWN = "was_shown_by_gba_hvd"  # an attribute of an error whose traceback has been printed
_OF_A_PLACE = (StoreError, ShardMemoryError)  # their sentence has the place, and what is wrong there
_TO_REPAIR = (
    BadInput,
    StateMismatch,
    NonFiniteGradient,
    Damaged,
)  # of data, settings and files, which stay as they are
SIGTERM = "SIGTERM"  # the text of the KeyboardInterrupt that stands for it begins so


def status_of(error: BaseException) -> str:
    """The report to callbacks for a job that ends with this error."""
    if isinstance(error, SystemExit) and error.code in (0, None, False):
        return "FINISHED"
    if isinstance(error, WorldLost):
        return error.status
    if isinstance(error, LastCheckpointFailed):
        return "NOT_SAVED"
    return "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"


def is_to_repair(error: BaseException | None) -> bool:
    """Whether the same command meets this error again, unless a person changes something first."""
    return isinstance(error, _TO_REPAIR) or (isinstance(error, WorldLost) and error.to_repair)


def is_elastic() -> bool:
    """Whether the launcher replaces workers."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def is_interactive() -> bool:
    """Whether a person works in this process: a notebook, or an interactive Python. It outlives the job."""
    return hasattr(sys, "ps1") and "HOROVOD_RANK" not in os.environ


def explained(engine: Engine, error: BaseException) -> BaseException:
    """The error that says why this worker's loop ends: `error` itself, or one with the cause behind it."""
    if isinstance(error, KeyError) and (why := engine.model.tables.why_missing(next(iter(error.args), None))):
        error.add_note(why)
    memory = engine.model.tables.memory  # None before the world has formed: no worker has left a note
    is_own_end = isinstance(error, SystemExit | KeyboardInterrupt | WorldLost)
    if memory is not None and not is_own_end and (trouble := memory.trouble()) and str(error) != trouble:
        return ShardMemoryError(trouble)
    is_sigterm = isinstance(error, KeyboardInterrupt) and str(error) == SIGTERM
    if is_sigterm and memory is not None and not is_elastic():
        cause = cause_elsewhere(engine)
        return error if cause is None or cause.status == "KILLED" else cause
    if (
        isinstance(error, WorldLost) and error.status == "KILLED"
    ):  # all workers are interrupted, this one a moment later
        return KeyboardInterrupt(SIGTERM)
    if isinstance(error, WorldLost) and error.pid is None and error.rank is not None:
        error.pid = engine.host.neighbours.get(error.rank)
    return error


def world_lost(engine: Engine) -> WorldLost:
    """A collective failed where no launcher forms the world again, and no worker of this host is the cause."""
    killed = engine.host.killed_for_memory()
    return WorldLost(
        f"a worker of this world of {engine.world.size} was lost, and without an elastic launcher it is not replaced: "
        f"this worker ends after step {engine.progress.step}. "
        f"{killed or 'The log of the worker that ended first says why'}. {_what_to_do(engine)}"
    )


def _what_to_do(engine: Engine, to_repair: bool = False) -> str:
    begins = where_it_begins(engine)
    if kept := kept_in_memory(engine):
        begins = f"it {kept}, else {begins}"
    if to_repair:
        return f"When that is repaired, start the job again: {begins}"
    return (
        f"Start the job again: {begins}. In an elastic job (`gba-hvd run -np 1:2`, or `horovodrun "
        "--min-np 1` with a discovery script) the others continue without the lost worker"
    )


def where_it_begins(engine: Engine) -> str:
    """The job that is started again. Only the chief knows what was saved."""
    if why := why_at_step_0(engine):
        return f"it begins at step 0, since {why}{may_yet_be_saved(engine)}"
    checkpoints = checkpoints_of(engine)
    if checkpoints is not None and checkpoints.schedule.saved_step >= 0:
        return f"it resumes from its newest checkpoint, of step {checkpoints.schedule.saved_step:,}"
    return "it resumes from its newest checkpoint, or begins at step 0 if none has been saved yet"


def why_at_step_0(engine: Engine) -> str:
    """Why there is no checkpoint that the job, started again, resumes from; empty: there is one, or may be one."""
    checkpoints = checkpoints_of(engine)
    if checkpoints is None:
        return "it has no CheckpointCallback"
    if not checkpoints.callback.resume:
        return "CheckpointCallback(resume=False) reads no checkpoints"
    is_known = engine.world.rank == 0
    return "no checkpoint has been saved yet" if is_known and checkpoints.schedule.saved_step < 0 else ""


def may_yet_be_saved(engine: Engine) -> str:
    """That servers may save a checkpoint where there is none; empty: they do not."""
    checkpoints = checkpoints_of(engine)
    if engine.host.server is None or checkpoints is None or not checkpoints.callback.resume:
        return ""
    is_possible = checkpoints.callback.final_checkpoint_s > 0
    return ", unless its servers save a last one when all workers have ended" if is_possible else ""


def kept_in_memory(engine: Engine) -> str:
    """How long the job, started again, resumes from this step; empty where it does not find the memory: that goes by
    the job's id, which is given to the job or stands in its newest checkpoint."""
    checkpoints, memory = checkpoints_of(engine), engine.model.tables.memory  # no memory: the world had not formed
    if checkpoints is None or not checkpoints.callback.resume or memory is None:
        return ""
    config = engine.model.tables.config
    if not (config.job_id or checkpoints.schedule.saved_step >= 0) or not retained_state.is_there(memory.folder):
        return ""
    kept = (
        f"resumes from step {engine.progress.step:,} if it comes within {config.grace_s:g} s of the end, while that is "
        "kept in memory"
    )
    if host_identity.is_of_a_container(os.getpid()):
        kept += (
            " (a container that ends with this job takes the memory with it, unless a volume has that: let a shell "
            "that outlives the launcher start the command again)"
        )
    return kept


def cause_elsewhere(engine: Engine, within_s: float = 0.0) -> WorldLost | None:
    """Why a worker of this host ended before this one, if one has.

    within_s: a process that is killed closes its connections a moment before it is gone: look again for so long.
    """
    deadline = time.monotonic() + within_s
    while (cause := _ended_first(engine)) is None and engine.host.neighbours and time.monotonic() < deadline:
        time.sleep(0.02)
    return cause


def _ended_first(engine: Engine) -> WorldLost | None:
    killed = None
    for rank, pid in sorted(engine.host.neighbours.items()):
        note = _note_of(engine, pid)
        if note is None and is_alive(pid):
            continue
        ended = "was killed, or died without a word" if note is None else f"ended first ({note['why']})"
        text = (
            f"rank {rank} (process {pid}) {ended}, and without an elastic launcher it is not replaced: "
            f"this worker ends after step {engine.progress.step}"
        )
        if note is None and (by_kernel := engine.host.killed_for_memory()):
            text += f". {by_kernel}"
        if note is None or note["status"] != "KILLED":
            to_repair = note is not None and bool(note.get("to_repair"))
            return WorldLost(f"{text}. {_what_to_do(engine, to_repair)}", pid=pid, to_repair=to_repair)
        killed = killed or WorldLost(text, "KILLED")
    return killed


def failed_neighbours(engine: Engine, before: Mapping[int, int]) -> list[Event]:
    """The errors, as far as noted, of workers of this host that were in the world before this one.

    before: their processes, by the rank that they had. A worker that was killed, or preempted, left no error.
    """
    events, still = [], set(engine.host.neighbours.values())
    for rank, pid in sorted(before.items()):
        note = None if pid in still else _note_of(engine, pid)
        if note is None or note["status"] == "KILLED":
            continue
        host, why = engine.world.host, str(note["why"])
        text = f"rank {rank} of the world before, on {host} (process {pid}), ended with {why}; the others continue"
        facts = {"rank": rank, "host": host, "pid": pid, "why": why}
        events.append(Event("worker_failed", engine.progress.step, text, facts, level="warning"))
    return events


def _note_of(engine: Engine, pid: int) -> dict[str, Any] | None:
    memory = engine.model.tables.memory
    if memory is None:
        return None
    try:
        note: dict[str, Any] = json.loads((memory.folder / f"ended-{pid}.json").read_text())
    except (OSError, ValueError):
        return None
    return note


def leave_note_of_left_epoch(engine: Engine) -> None:
    """As `leave_note`, of a worker whose training function returns within an epoch whose steps the others make with
    it.
    """
    if (left := engine.progress.left.newest) is not None and left.steps_together:
        leave_note(engine, "FINISHED", SystemExit(0))


def leave_note(engine: Engine, status: str, error: BaseException) -> None:
    """For the other workers of the host, which end because this one does, or continue without it and report why.

    Before anything that takes time.
    """
    memory = engine.model.tables.memory
    if memory is None or memory.is_closed or not engine.host.neighbours:
        return
    if status == "FINISHED" and engine.progress.left.newest is not None:
        cause = f"it {engine.progress.left.newest.words_alone}"
    else:
        cause = str(error.args[0]) if isinstance(error, WorldLost) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # the folder is gone, or full: then the others know less
        path = memory.folder / f"ended-{os.getpid()}.json"
        replace_file(path, json.dumps({"status": status, "why": cause[:2000], "to_repair": is_to_repair(error)}))


def show_at_once(engine: Engine, error: BaseException, behind: BaseException) -> None:
    """Show the traceback before callbacks report the end, where the launcher kills this worker while they do.

    That is 5 s after another worker has ended. behind: the error that `error` explains, or `error` itself.
    """
    if is_elastic() or engine.world.size == 1 or not isinstance(error, Exception):
        return
    if not getattr(sys.excepthook, _IS_OURS, False):  # another one may show it at the end, too
        log.error("%s: %s", type(error).__name__, error)
        return
    if error is not behind:
        error.__cause__ = behind
    sys.excepthook(type(error), error, error.__traceback__)
    setattr(error, _WAS_SHOWN, True)


def await_first(error: BaseException, is_over: Callable[[], bool]) -> None:
    """Let the worker go first because of which this one ends: the launcher names the first one that exits as the cause,
    and kills the others 5 s later.
    """
    deadline = time.monotonic() + _FIRST_S
    while isinstance(error, WorldLost) and error.pid is not None and is_alive(error.pid):
        if is_over() or time.monotonic() > deadline:
            return
        time.sleep(0.02)


class ExitWatch:
    """What a script without `elastic.run` ends with: Python does not pass `sys.exit` to exit functions.

    Enter once; `leave()` may be called twice.
    """

    def __init__(self) -> None:
        self._code: object = None
        self._exit: Callable[..., object] | None = None

    def enter(self) -> None:
        if self._exit is None:
            self._exit, sys.exit = sys.exit, self._noted  # type: ignore[assignment]

    def leave(self) -> None:
        if self._exit is not None and sys.exit == self._noted:
            sys.exit = self._exit  # type: ignore[assignment]
        self._exit = None

    def error(self) -> BaseException | None:
        """What the interpreter is ending with."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            return error
        return None if self._code in (0, None, False) else SystemExit(self._code)

    def _noted(self, code: object = None) -> object:
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends the thread only
            self._code = code
        raise SystemExit(code)


def show_ends_briefly(reported_by_others: Callable[[], bool]) -> None:
    """Ctrl-C and SIGTERM are no errors: Python shows no traceback of them, but one line, unless others say it.

    Of a refused input, a store and shard memory it shows one traceback, which ends with the sentence, and not that of
    the error behind it: the sentence has its text. One line where the traceback has no line of the script, or none but
    the call of its function: of a store and shard memory, and of an input that is refused while the world forms. One
    line it shows of a worker that ends because of another one, too. Belongs to the process: the first caller's question
    decides.
    """
    shown_before = sys.excepthook
    if getattr(shown_before, _IS_OURS, False):
        return

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if getattr(error, _WAS_SHOWN, False):
            return
        is_brief = isinstance(error, BadInput) and _is_of_the_packages(trace)
        is_brief |= isinstance(error, _OF_A_PLACE) and _is_before_the_function(trace)
        is_brief |= isinstance(error, BadInput) and _is_before_the_function(trace) and _is_of_the_world(trace)
        if isinstance(error, WorldLost) or is_brief:
            print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)
            return
        if isinstance(error, (BadInput, *_OF_A_PLACE)):
            error.__suppress_context__, error.__cause__ = True, None
        if not issubclass(kind, KeyboardInterrupt):
            shown_before(kind, error, trace)
        elif not reported_by_others():
            print(f"interrupted by {error or 'Ctrl-C'}", file=sys.stderr, flush=True)

    setattr(show, _IS_OURS, True)
    sys.excepthook = show


def _is_of_the_packages(trace: Any) -> bool:
    """Whether a traceback has only lines of the packages, of Python, or of Horovod's loop around the function."""
    return not any(_frames_of_the_script(trace))


def _is_before_the_function(trace: Any) -> bool:
    """Whether none but the first lines of a traceback are of the script: those that called its function."""
    of_the_script = _frames_of_the_script(trace)
    return not any(of_the_script[of_the_script.index(False) :]) if False in of_the_script else False


def _is_of_the_world(trace: Any) -> bool:
    """Whether the world was forming, which no line of the script is about."""
    here = str(Path(__file__).with_name("torch_state.py"))
    return any((frame.filename, frame.name) == (here, "_sync") for frame in traceback.extract_tb(trace))


def _frames_of_the_script(trace: Any) -> list[bool]:
    own = (f"{Path(__file__).parents[1]}/", f"{Path(recovery.__file__).parent}/")

    def is_known(name: str) -> bool:
        is_of_python = name.startswith(f"{sysconfig.get_path('stdlib')}/") and "-packages/" not in name
        return is_of_python or name.startswith(own) or "/horovod/common/" in name

    return [not is_known(frame.filename) for frame in traceback.extract_tb(trace)]
