"""The requests of a checkpointer's caller: one save at a time, each with a handle, whichever process does the work.

Shared by `Checkpointer` and `ProcessCheckpointer`. How a request is carried out is decided there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recovery import state_codec
from recovery.config import Config
from recovery.errors import BadInput, Fenced
from recovery.events import Event, EventReporter, Handle, Saved, StillSaving, describe_save
from recovery.format.manifest import Manifest


@dataclass
class SaveRequest:
    """asked_s: on the checkpointer's clock. stall_s: for how long the caller has been held up."""

    handle: Handle
    step: int
    samples: int
    state: bytes | None
    kind: str
    about: Mapping[str, Any]
    asked_s: float
    stall_s: float


class SaveRequests:
    """last: handle of the newest request that was begun. fenced: raised by every later request."""

    def __init__(
        self,
        config: Config,
        report: EventReporter,
        clock: Callable[[], float],
        carry_out: Callable[[SaveRequest], None],
    ) -> None:
        """carry_out: called with each request, and returns at once."""
        self._config, self._report, self._clock, self._carry_out = config, report, clock, carry_out
        self.last: Handle | None = None
        self.fenced: Fenced | None = None

    def begin(self, step: int, samples: int, state: Any, kind: str | None, about: Mapping[str, Any] | None) -> Handle:
        """As `Checkpointer.save`."""
        if self.fenced is not None:
            raise self.fenced
        if kind not in (None, "full", self._config.policy):
            raise BadInput(f"kind must be 'full' or {self._config.policy!r} (the policy), got {kind!r}")
        asked_s, handle = self._clock(), Handle()
        if self.last is not None and not self.last.done():
            late = StillSaving(f"step {step} is not saved: the save before is still in flight")
            handle.future.set_exception(late)
            self._report(Event("left out", str(late), error=late))
            return handle
        encoded = None if state is None else state if isinstance(state, bytes) else state_codec.encode(state)
        self.last, kind = handle, kind or self._config.policy
        stall_s = self._clock() - asked_s
        self._carry_out(SaveRequest(handle, step, samples, encoded, kind, dict(about or {}), asked_s, stall_s))
        if self._config.strict:
            handle.read_all.wait()
        return handle

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the newest request is over, however it ends. Raises TimeoutError."""
        if self.last is not None:
            self.last.future.exception(timeout_s)

    def all_read(self, request: SaveRequest) -> None:
        """The last row of this save was read: a strict caller may continue."""
        if self._config.strict and not request.handle.read_all.is_set():
            request.stall_s = self._clock() - request.asked_s
        request.handle.read_all.set()

    def done(self, request: SaveRequest, saved: Saved) -> None:
        request.handle.future.set_result(saved)
        request.handle.read_all.set()
        self._report(Event("saved", describe_save(saved), saved=saved))

    def failed(self, request: SaveRequest, error: BaseException, newest: Manifest | None) -> None:
        """newest: the checkpoint that stays in force."""
        if isinstance(error, Fenced):
            self.fenced = error
        kept = newest.name if newest else "none yet"
        text = f"step {request.step} could not be saved; the last checkpoint is {kept}: {error}"
        self._report(Event("failed", text, error=error))
        request.handle.future.set_exception(error)
        request.handle.read_all.set()
