"""The one object that users hold: saves in the background while training continues, and restores.

Puts the parts together and owns their threads; what a save takes, how it is written and what is kept is decided
elsewhere. A save that fails is reported and leaves the last good checkpoint in force; the next one tries again.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recovery.active_chain import ActiveChain
from recovery.catalog import claims
from recovery.catalog.claims import Claim
from recovery.config import Config
from recovery.errors import BadInput, StoreError
from recovery.events import Event, EventReporter, Handle, Saved, StillSaving, describe_restore
from recovery.format.manifest import Manifest
from recovery.restore import Report, TrainingPoint, restore
from recovery.rows import RowSource
from recovery.save_requests import SaveRequest, SaveRequests
from recovery.selection.selector import Selection
from recovery.storage.open import open_store, refuse_inside
from recovery.storage.store import Store, check
from recovery.write.multipart import SaveTarget, commit_parts, save_part
from recovery.write.section_pipeline import Buffers

__all__ = ["Checkpointer", "Event", "Handle", "Saved", "StillSaving"]


class Checkpointer:
    """Checkpoints of a row source's rows, and of the states given to `save`, at a URL.

        with Checkpointer("s3://bucket/job", rows, Config(job="job", policy="mfu")) as checkpoints:
            report = checkpoints.restore()
            ...
            handle = checkpoints.save(step, samples, {"model": dense, "optimizer": slots})   # returns at once

    Entering claims the location and starts two threads: one that saves, and one that renews the claim. Leaving waits
    for the save in flight, stops them, and raises what a thread died of, if one did.

    One thread calls save and restore. `on_event` is called in the thread in which something happens.
    """

    def __init__(
        self,
        url: str | Path | Store,
        rows: RowSource,
        config: Config | None = None,
        *,
        takeover: bool = False,
        after: Claim | None = None,
        tracker_path: Path | None = None,
        counters: str = "",
        on_event: Callable[[Event], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        rng: np.random.Generator | None = None,
        **storage_options: Any,
    ) -> None:
        """takeover: from another job that writes there. after: see `claims.claim`. tracker_path, counters: see
        `Tracker`. storage_options: see `open_store`."""
        self._config = config or Config()
        if isinstance(url, str | Path):
            refuse_inside(url, **storage_options)
        self._store = open_store(url, **storage_options) if isinstance(url, str | Path) else url
        self._rows, self._takeover, self._after = rows, takeover, after
        self._report = EventReporter(self._store.url, on_event)
        self._buffers: Buffers | None = None
        self._selection = Selection(rows, self._config, tracker_path=tracker_path, counters=counters, rng=rng)
        self._clock, self._unix_clock = clock, unix_clock
        self._tracker_path = tracker_path
        self._claim: Claim | None = None
        self._active_chain = ActiveChain(self._store, self._selection)
        self._number = 0
        self._queue: queue.SimpleQueue[SaveRequest | None] = queue.SimpleQueue()
        self._requests = SaveRequests(self._config, self._report, clock, self._queue.put)
        self._died: BaseException | None = None
        self._cancel, self._leaving = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        """Where checkpoints are saved, without credentials."""
        return self._store.url

    @property
    def claim(self) -> Claim | None:
        """The claim on the location; None before entering."""
        return self._claim

    @property
    def newest(self) -> Manifest | None:
        """The checkpoint in force, as far as this process made or restored it."""
        return self._active_chain.chain.newest if self._active_chain.chain else None

    @property
    def kept_bytes(self) -> int:
        """The buffers of saves, while the checkpointer is entered; within `budget_bytes`."""
        return 0 if self._buffers is None else self._buffers.n_bytes

    def __enter__(self) -> Checkpointer:
        self._buffers = Buffers(self._rows.schema, self._config)
        check(self._store)
        job = self._config.job or f"run-{secrets.token_hex(6)}"
        self._claim = claims.claim(
            self._store, job, takeover=self._takeover, after=self._after, lease_s=self._config.lease_s
        )
        if self._tracker_path is not None:
            self._active_chain.find()
        for run, name in ((self._save_all, "recovery-save"), (self._live, "recovery-live")):
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._claim is None or self._leaving.is_set():
            return
        if (last := self._requests.last) is not None:
            with contextlib.suppress(BaseException):  # reported when it happened
                self._requests.wait(self._config.close_timeout_s)
            if not last.done():
                self._report(
                    Event("failed", f"the save was cancelled: not over after {self._config.close_timeout_s:g} s")
                )
        self._cancel.set()
        self._leaving.set()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._selection.close()
        with contextlib.suppress(StoreError):  # then the next writer waits a little
            claims.release(self._store, self._claim)
        if self._died is not None:
            raise self._died

    def save(
        self,
        step: int,
        samples: int,
        state: Any = None,
        *,
        kind: str | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> Handle:
        """Start to save, and return; in strict mode, when the last row was read.

        step, samples: where training is. state: bytes, or what `state_codec` can encode; copied before this returns.
        kind: "full", or None: what the configured policy and the chain so far ask for. about: plain JSON, for people.

        When the save before is still in flight this one is left out, and its handle raises StillSaving. Raises BadInput
        for a state that cannot be encoded, and Fenced when another writer has taken over.
        """
        if self._claim is None or self._leaving.is_set():
            raise BadInput("a checkpointer saves between `with` and its end only")
        if self._died is not None:
            raise self._died
        return self._requests.begin(step, samples, state, kind, about)

    def restore(self, shards: Sequence[int] | None = None, *, now: TrainingPoint | None = None) -> Report | None:
        """Fill the rows of these shards, or of all that are here, from the newest good checkpoint; None: there is none.

        Waits for the save in flight. Raises what `restore.restore` raises.
        """
        self.wait()
        report = restore(
            self._store, self._rows, shards, config=self._config, now=now, with_state=shards is None, clock=self._clock
        )
        if report is None:
            return None
        if report.n_lost:
            self._active_chain.chain = None  # the chain lacks rows, so nothing can be saved on top of it
        else:
            self._selection.restored(report.manifest.name, None if shards is None else tuple(shards))
            if shards is None:
                self._active_chain.chain = report.chain
        self._report(Event("restored", describe_restore(report), report=report))
        return report

    def wait(self) -> None:
        """Until the save in flight is over, however it ends."""
        self._requests.wait()

    # --- the thread that saves ---------------------------------------------------------------------------------------

    def _save_all(self) -> None:
        try:
            while (request := self._queue.get()) is not None:
                self._carry_out(request)
        except BaseException as error:  # a death, or a mistake of ours: raised to who leaves, or saves next
            self._died = error

    def _carry_out(self, request: SaveRequest) -> None:
        try:
            saved = self._save(request)
        except BaseException as error:
            self._requests.failed(request, error, self.newest)
            if not isinstance(error, Exception):
                raise
        else:
            self._requests.done(request, saved)
            self._expire()

    def _save(self, request: SaveRequest) -> Saved:
        assert self._claim is not None
        kind, why = "full", "full: asked for"
        if request.kind != "full":
            kind, why = self._active_chain.next_kind(request.kind)
        parent = None if kind == "full" or self.newest is None else self.newest.name
        self._number += 1  # a save that is tried again takes another number, so its blobs other names
        what = (kind, parent, request.step, request.samples, self._rows.schema, request.about)
        target = SaveTarget(self._claim.epoch, self._number, *what)
        written = save_part(
            self._rows,
            self._selection,
            self._store,
            target,
            self._config,
            cancel=self._cancel,
            on_read=lambda: self._requests.all_read(request),
            buffers=self._buffers,
            clock=self._clock,
        )
        manifest, _ = commit_parts(
            self._store,
            self._selection,
            target,
            [written],
            lambda parts: request.state,
            self._still_mine,
            verify=self._config.verify,
            unix_clock=self._unix_clock,
        )
        self._active_chain.add(manifest)
        return Saved(self.url, manifest, why, written, self._clock() - request.asked_s, request.stall_s)

    def _still_mine(self) -> None:
        assert self._claim is not None
        claims.check(self._store, self._claim)

    def _expire(self) -> None:
        """A failure costs space only."""
        assert self._claim is not None
        try:
            gone = self._active_chain.expire(range(self._claim.epoch, self._claim.epoch + 1), self._config.keep)
        except StoreError as error:
            text = f"old checkpoints could not be deleted, and take space: {error}"
            self._report(Event("store", text, error=error))
        else:
            if gone.manifests:
                self._report(Event("expired", gone.reason))

    # --- the thread that renews the claim ----------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._leaving.wait(self._config.lease_s / 3):
            assert self._claim is not None
            try:
                self._claim = claims.renew(self._store, self._claim)
            except StoreError as error:
                text = f"the claim could not be renewed; another job may take over: {error}"
                self._report(Event("store", text, error=error))
