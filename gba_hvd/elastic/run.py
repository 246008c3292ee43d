"""`run`: Horovod's elastic loop around the user's function, and what SIGTERM and the end of the process mean for it."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.comm.collectives import initialise_again
from gba_hvd.elastic import endings
from gba_hvd.elastic.torch_state import TorchState, checked_state

_WORLD_TIMEOUT_S = 600.0  # so long the launcher waits for workers, too


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """`horovod.torch.elastic.run`, and callbacks receive how the job ended; SIGTERM interrupts.

    A first SIGTERM that comes when training is over does not: the worker closes, and its exit status is that of the
    script, 0 unless that fails. Nothing is lost by it. The function has returned, so each of its steps is committed,
    and the last checkpoint is saved, or its error has been raised. What remains is to report the end and to serve other
    workers until theirs, which the signal would cut short; an error in it is raised as without a signal. Each of these
    waits has a limit of its own, and a second signal interrupts them. Between the return of this and the exit of the
    interpreter the script works, and SIGTERM has the effect that the script gives it.

    Works without `horovodrun`, and without Horovod, as a world of one.
    """

    @functools.wraps(function)
    def wrapper(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        checked_state(state, "a function with @gba_hvd.elastic.run")
        ending = _Ending()
        restore_sigterm = _leave_on_sigterm(state, ending)
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)  # a shard file that was cut short: SIGBUS, with where it happened
        try:
            result, left = _returned_or_left(function, state, *args, **kwargs)
            endings.leave_note_of_left_epoch(state.engine)
            state.saving.end()
            ending.has_begun = True
        except BaseException as error:
            ending.has_begun = True
            cause = endings.explained(state.engine, error)
            status = endings.status_of(cause)
            endings.show_at_once(state.engine, cause, error)
            endings.leave_note(state.engine, status, cause)
            state.close(status, None if status == "FINISHED" else cause)
            endings.await_first(cause, lambda: ending.is_asked_for)
            if cause is error:
                raise
            raise cause from error
        else:
            state.close()
            atexit.unregister(_outlive_sigterm)
            atexit.register(_outlive_sigterm)  # last, so it runs before Horovod's shutdown
            if left is not None:
                raise left
            return result
        finally:
            restore_sigterm()

    return wrapper


def _returned_or_left(
    function: Callable[..., Any], state: TorchState, *args: Any, **kwargs: Any
) -> tuple[Any, SystemExit | None]:
    """What it returned; or `sys.exit(0)`, which ends the training as a return does.

    Not within an epoch whose steps others make with it: these would wait for this worker's gradients, and this one for
    them, to save the last checkpoint.
    """
    try:
        return _elastic(function, state)(state, *args, **kwargs), None
    except SystemExit as left:
        traceback.clear_frames(left.__traceback__)  # the loop over batches is left now, as by a return
        newest = state.engine.progress.left.newest
        is_needed = newest is not None and newest.steps_together and state.engine.world.size > 1
        if left.code not in (None, 0) or is_needed:
            raise
        return None, left


def _elastic(function: Callable[..., Any], state: TorchState) -> Callable[..., Any]:
    if "horovod.torch" not in sys.modules or not sys.modules["horovod.torch"].is_initialized():

        def alone(state: TorchState, *args: Any, **kwargs: Any) -> Any:
            state.sync()
            return function(state, *args, **kwargs)

        return alone
    from horovod.common.elastic import run_fn

    def reset() -> None:
        state.report_pause()
        initialise_again(state.engine.forming, _WORLD_TIMEOUT_S)

    wrapped: Callable[..., Any] = run_fn(function, reset)
    return wrapped


def _outlive_sigterm() -> None:
    """When the interpreter exits after a job that has finished: only Horovod's shutdown and the like remain.

    No process that is started from here on inherits this, as it would inherit SIG_IGN.
    """
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: None)


@dataclass
class _Ending:
    """Of this worker, well or with an error. Not `threading.Event`: a second signal within its `set` waits for ever.

    is_asked_for: by a signal
    """

    has_begun: bool = False
    is_asked_for: bool = False


def _leave_on_sigterm(state: TorchState, ending: _Ending) -> Callable[[], None]:
    """At once; or, if time for a checkpoint is given, after it: the first signal is a request, a second one is not.

    The launcher signals all workers, and another one may have left before: a first signal then does not interrupt how
    the end is reported.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    previous: dict[int, Any] = {}
    n_signals = 0

    def interrupt(signum: int, frame: Any) -> None:
        nonlocal n_signals
        n_signals += 1
        ending.is_asked_for = True
        if ending.has_begun and n_signals == 1:
            return
        engine = state.engine
        checkpoints = checkpoints_of(engine)
        allowed_s = None if checkpoints is None else checkpoints.callback.preemption_s
        if signum == signal.SIGTERM and allowed_s is not None and engine.signals.preempt_deadline_s is None:
            engine.signals.preempt_deadline_s = time.monotonic() + allowed_s
            previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, allowed_s)  # no matter what this worker waits for then
            return
        raise KeyboardInterrupt(endings.SIGTERM)

    previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, interrupt)

    def restore() -> None:
        if signal.SIGALRM in previous:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in previous.items():
            signal.signal(number, handler)

    return restore
