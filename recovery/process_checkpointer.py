"""Checkpoints made by a process of their own, so that saving takes nothing from the thread that trains.

Threads of one process take Python's lock from each other, in all they do; a process beside it costs training next to
nothing. So a complete `Checkpointer` lives in a child process (`child.process`), and here is the other end of the pipe.

Who owns what. Rows, slots, counts and marks lie in memory that both map (`row_memory`). This process writes it, except
while it waits in `restore`. The child reads it as any thread would (`consistent_read`), and alone has the claim, the
store, the tracker and the chain. This process has the handles, and reports events; of claim and chain it knows what
the child sends.

In which order things become visible. The training thread marks a step begun, writes rows, marks it finished; the child
relies on the order of these stores, see `consistent_read`. A state is encoded before `save` returns, then sent; the
child begins to read rows when it has it completely. A handle is done when the child reports it, which is after the
manifest is in the store. A request is answered before the next one is sent, so the child never has two.

What a crash leaves.

 - The child, before the manifest is written: the last checkpoint stays in force, beside blobs that nothing refers to.
   After it: the new checkpoint, although its handle failed. The next save starts another child. It takes the place of
   the dead one's claim, or is Fenced if another writer has claimed since; it does not know what changed, so it saves a
   base, unless a `tracker_path` kept that. While it restores: the rows are worth nothing, and `restore` raises.
 - This process: the pipe ends. The child finishes the save in flight, gives back its claim and ends. If a step was
   in flight as well, rows are half written: the save finds no moment to read them in, and fails after `busy_timeout_s`.
 - Both: what a crash of the child leaves. Shared memory has no name; it goes with the last of the two.
 - The child hangs (stopped, or without a processor): it sends no heartbeat for `silence_s`, is killed, and all is as
   if it had died. So a thread that waits here waits for an answer, for the end of the child, or for that.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from recovery.child import process
from recovery.child.handle import Child, ChildDied, Start
from recovery.child.process import Answer, Begin, ChildSave, ReadAll, Restore
from recovery.config import Config
from recovery.errors import BadInput
from recovery.events import Event, EventReporter, Handle
from recovery.format.manifest import Manifest
from recovery.restore import Report, TrainingPoint
from recovery.save_requests import SaveRequest, SaveRequests
from recovery.selection.importance import list_capacities
from recovery.storage.open import open_store
from recovery.storage.store import Store
from recovery.torch_rows.tensor_rows import TensorRows

_LEAVE_S = 120.0  # beyond close_timeout_s, for what cannot be cancelled: an object that is being written


@dataclass
class _Asked:
    """What is to be done next, or in flight. child: whom it was sent to."""

    message: ChildSave | Restore
    future: Future[Any]
    request: SaveRequest | None = None  # of a save
    child: Child | None = None


class ProcessCheckpointer:
    """A `Checkpointer` whose work is done in a child process, on rows that were made with `shared=True`.

        rows = of_optimizer(model, optimizer, shared=True)
        with ProcessCheckpointer("s3://bucket/job", rows, Config(job="job")) as checkpoints:
            ...                                              # as with a Checkpointer

    The child imports the script it belongs to: all that the script does must be under `if __name__ == "__main__":`.
    Entering starts the child and waits until it has claimed the location, which takes some seconds; after that
    everything is as the `Checkpointer` says. `on_event` is called in a thread of this process.
    """

    def __init__(
        self,
        url: str | Path | Store,
        rows: TensorRows,
        config: Config | None = None,
        *,
        nice: int = 10,
        silence_s: float = 60.0,
        takeover: bool = False,
        tracker_path: Path | None = None,
        counters: str = "",
        on_event: Callable[[Event], None] | None = None,
        rng: np.random.Generator | None = None,
        start: Start = process.start,
        **storage_options: Any,
    ) -> None:
        """nice: how much the child stands back for others, 0 to 19. silence_s: without a heartbeat for so long, it
        is killed. The others, and a store, which must be one that can be pickled, as in `Checkpointer`."""
        config = config or Config()
        if not rows.is_shared:
            raise BadInput(
                "these rows lie in memory of this process alone: make them with of_optimizer(..., shared=True) or "
                "TensorRows(..., shared=True), or use a Checkpointer"
            )
        if not 0 <= nice <= 19 or not silence_s > 0:
            raise BadInput(f"nice must be within 0 and 19, and silence_s positive, got {nice} and {silence_s}")
        if config.policy == "ssu":  # before the child maps the memory that the lists are part of
            rows.sampled_accesses(list_capacities(rows.schema, config.row_fraction), config.ssu_period, rng)
        # The name is given here, so that a child that takes the place of another is of the same job.
        config = replace(config, job=config.job or f"run-{secrets.token_hex(6)}")
        self._begin = Begin(
            url, rows, config, takeover, None, tracker_path, counters, rng, storage_options, nice, silence_s
        )
        self.url = (open_store(url, **storage_options) if isinstance(url, str | Path) else url).url
        self._report, self._config = EventReporter(self.url, on_event), config
        self._start = start
        self._newest: Manifest | None = None
        self._requests = SaveRequests(config, self._report, time.monotonic, self._begin_save)
        self._entered = self._left = False
        self._number = 0
        self._lock = threading.Lock()  # of the two below: threads send to, read from, and end a child
        self._child: Child | None = None
        self._asked: _Asked | None = None
        self._sending: threading.Thread | None = None

    @property
    def newest(self) -> Manifest | None:
        """The checkpoint in force, as far as this process made or restored it."""
        return self._newest

    @property
    def pid(self) -> int | None:
        """Process id of the child that saves; None: there is none now."""
        child = self._child
        return child.pid if child is not None else None

    def __enter__(self) -> ProcessCheckpointer:
        self._started()
        self._entered = True
        return self

    def __exit__(self, *failure: object) -> None:
        if not self._entered or self._left:
            return
        self._left = True
        if self._sending is not None:
            self._sending.join()
        if (child := self._child) is None:
            return
        if not child.end(within_s := self._config.close_timeout_s + _LEAVE_S):
            self._report(Event("failed", f"the process that saves was killed: it had not left after {within_s:g} s"))
        if child.ended is not None:
            raise child.ended

    def save(
        self,
        step: int,
        samples: int,
        state: Any = None,
        *,
        kind: str | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> Handle:
        """Start to save, and return; in strict mode, when the last row was read. See `Checkpointer.save`."""
        self._require_inside()
        return self._requests.begin(step, samples, state, kind, about)

    def _begin_save(self, request: SaveRequest) -> None:
        self._number += 1
        what = (request.step, request.samples, request.kind, request.about, request.state is not None)
        self._ask(_Asked(ChildSave(self._number, *what), request.handle.future, request))

    def restore(self, shards: Sequence[int] | None = None, *, now: TrainingPoint | None = None) -> Report | None:
        """As `Checkpointer.restore`. No other thread may use the rows until this returns."""
        self._require_inside()
        self._requests.wait()
        asked = _Asked(Restore(None if shards is None else tuple(shards), now), Future())
        self._ask(asked)
        report: Report | None = asked.future.result()
        return report

    def _require_inside(self) -> None:
        if not self._entered or self._left:
            raise BadInput("a checkpointer saves between `with` and its end only")

    # --- the thread that sends: one request, and a child to send it to ------------------------------------------------

    def _ask(self, asked: _Asked) -> None:
        """In a thread: the child may have to be started first, and a pipe is slow for much state."""
        if self._sending is not None:
            self._sending.join()  # it has ended, or is about to: its request was answered
        self._asked = asked
        self._sending = threading.Thread(target=self._send, args=(asked,), name="recovery-send", daemon=True)
        self._sending.start()

    def _send(self, asked: _Asked) -> None:
        try:
            child = self._hand_over(asked) or self._started()
            if asked.child is None and self._hand_over(asked) is None:
                raise ChildDied("the process that saves ended as soon as it was started; the next save starts another")
            child.send(asked.message, None if asked.request is None else asked.request.state)
            if asked.request is not None:
                asked.request.state = None
        except BaseException as error:
            # A pipe that broke is the end of the child, which its reading thread reports.
            if asked.child is None or not isinstance(error, OSError):
                self._failed(asked, error)

    def _hand_over(self, asked: _Asked) -> Child | None:
        """The child that is to do it. From now on, its end is the end of this request."""
        with self._lock:
            asked.child = self._child
        return asked.child

    def _started(self) -> Child:
        """Start a child, and wait until it has claimed the location. Raises what keeps it from that."""
        self._child = child = Child(self._start, self._begin, self._on_message, self._over)
        try:
            ready = child.ready.result()
        except BaseException:  # also of who waits: Ctrl-C
            self._child = None
            child.end()
            raise
        self._begin = replace(self._begin, after=ready.claim, takeover=False)
        self._newest = ready.newest or self._newest
        return child

    # --- the thread that reads from a child ---------------------------------------------------------------------------

    def _over(self, child: Child, died: BaseException) -> None:
        with self._lock:
            if self._child is child:
                self._child = None
            asked = self._asked if self._asked is not None and self._asked.child is child else None
        if asked is not None and not asked.future.done():
            self._failed(asked, died)
        elif not self._left:
            self._report(Event("failed", f"{died}; the next save starts another one", error=died))

    def _on_message(self, message: Any) -> None:
        asked = self._asked
        if isinstance(message, Event):
            if asked is None or not self._answers(message, asked):
                self._report(message)
        elif isinstance(message, ReadAll):
            # It also comes after a save that failed, when another one may have been asked for.
            request = None if asked is None else asked.request
            if request is not None and self._number == message.number:
                self._requests.all_read(request)
        elif isinstance(message, Answer) and asked is not None:
            if message.error is None:
                asked.future.set_result(None)
            else:
                asked.future.set_exception(message.error)

    def _answers(self, event: Event, asked: _Asked) -> bool:
        """Whether this event was the end of what was asked for; then it is reported here."""
        if asked.future.done():
            return False
        if event.saved is not None and (request := asked.request) is not None:
            seconds = time.monotonic() - request.asked_s
            self._newest = event.saved.manifest
            self._requests.done(request, replace(event.saved, seconds=seconds, stall_s=request.stall_s))
        elif event.report is not None and isinstance(asked.message, Restore):
            if event.report.n_lost:
                self._newest = None
            elif asked.message.shards is None:
                self._newest = event.report.manifest
            self._report(event)
            asked.future.set_result(event.report)
        elif event.what == "failed" and event.error is not None and asked.request is not None:
            self._failed(asked, event.error)
        else:
            return False
        return True

    def _failed(self, asked: _Asked, error: BaseException) -> None:
        if asked.request is not None:
            self._requests.failed(asked.request, error, self.newest)
        else:
            asked.future.set_exception(error)
