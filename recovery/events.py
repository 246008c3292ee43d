"""What becomes of a save or a restore, as values and in words: for the caller, for the log, for a tracker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from recovery.errors import RecoveryError
from recovery.format.manifest import Manifest
from recovery.restore import Report
from recovery.write.section_pipeline import PartResult

_LOG = logging.getLogger(__name__)


class StillSaving(RecoveryError):
    """The save before is not over; this one was left out."""


@dataclass(frozen=True)
class Saved:
    """One checkpoint that is in the store.

    why: it is of this kind. seconds: until it was durable. stall_s: of them, how long the caller of `save` was held up.
    """

    url: str
    manifest: Manifest
    why: str
    written: PartResult
    seconds: float
    stall_s: float


@dataclass(frozen=True)
class Event:
    """Something that happened, in words: what is "saved", "failed", "left out", "restored", "expired", or "store"."""

    what: str
    text: str
    saved: Saved | None = None
    report: Report | None = None
    error: BaseException | None = None


class EventReporter:
    """Reports what happens at a URL to the log, and to a listener, which may fail."""

    def __init__(self, url: str, on_event: Callable[[Event], None] | None) -> None:
        self._url, self._on_event = url, on_event

    def __call__(self, event: Event) -> None:
        bad = event.error is not None or (event.report and event.report.skipped)
        _LOG.log(logging.WARNING if bad else logging.INFO, "%s: %s", self._url, event.text)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                _LOG.exception("on_event failed for %r; saving continues", event.text)


class Handle:
    """A save in flight. Its checkpointer sets `future`, and `read_all` when the last row was read."""

    def __init__(self) -> None:
        self.future: Future[Saved] = Future()
        self.read_all = threading.Event()

    def done(self) -> bool:
        """Whether the save is durable, or has failed; `result` does not wait then."""
        return self.future.done()

    def result(self, timeout_s: float | None = None) -> Saved:
        """Wait until the checkpoint is durable. Raises what the save died of, or TimeoutError."""
        try:
            return self.future.result(timeout_s)
        except FutureTimeoutError:
            if self.future.done():
                raise
            raise TimeoutError(f"the save is not over after {timeout_s} s") from None


def describe_save(saved: Saved) -> str:
    manifest, written = saved.manifest, saved.written
    return (
        f"step {manifest.step} saved as {manifest.name} in {saved.seconds:.1f} s: {written.n_rows:,} rows, "
        f"{manifest.n_bytes / 1e6:,.1f} MB ({saved.why})"
    )


def describe_restore(report: Report) -> str:
    lost = f", {report.n_lost:,} rows were never saved" if report.n_lost else ""
    pls = f", {100 * report.pls:.3g} % of all samples lost (PLS)" if report.pls is not None else ""
    passed = "".join(f"; passed over: {one.words}" for one in report.skipped)
    return (
        f"{report.n_rows:,} rows of {report.manifest.name} (step {report.step}) restored in {report.seconds:.1f} s, "
        f"{report.age.least} to {report.age.most} steps old{lost}{pls}{passed}"
    )
