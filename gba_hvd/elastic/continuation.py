"""Training that continues in a process after its end: a function of `run` is called again, or a loop asks for batches.

The end has reported the job, closed its mode and servers, and removed its memory's folder; the rows are in the pages
that this process still has mapped. A sync then forms the world again and makes a memory of them
(`membership.shard_transfer`). Decided here: where that is possible, and what the end and the new beginning do for it.
"""

from __future__ import annotations

import contextlib
import time

from gba_hvd.elastic import endings
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.training.engine import Engine


def refuse_in_elastic_job() -> None:
    """Raises BadInput under an elastic launcher."""
    if endings.is_elastic():
        raise BadInput(
            "the training of this state has ended in this process, and an elastic job cannot train it again: a worker "
            "that the launcher starts later runs the script from its top, so it would be in the first training while "
            "the others are in the second. Nothing has changed. Put both in one function with @gba_hvd.elastic.run, or "
            "start a second job that resumes from the checkpoint of the first one"
        )


def keep_state_of_servers(engine: Engine) -> None:
    """At the end, in a mode with servers, which end with the job: take over where they stand."""
    mode = engine.mode
    if mode is None or engine.world.size > 1 or endings.is_elastic():
        return
    with contextlib.suppress(GbaError, OSError):  # the end is reported all the same
        mode.take_over_from_servers()


def begin(engine: Engine, ended_unix_s: float) -> None:
    """Before the world forms again. ended_unix_s: when the end was reported; what is since then is no training."""
    engine.abandon_step()
    engine.signals.clear_interrupt()
    engine.signals.preempt_deadline_s = engine.signals.requested_mode = None
    if engine.mode is not None and engine.mode.servers is not None:
        engine.mode = None
    if engine.progress.launched_unix_s is not None:
        engine.progress.launched_unix_s += time.time() - ended_unix_s
