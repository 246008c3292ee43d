"""Checkpoints, in the server's process: saves the rows of this host in a thread of its own; training does not wait.

Who owns what. Each server saves the shards it holds as a part of its own. Part 0 waits for the parts of the others and
commits; in which order that becomes visible, and what a crash leaves, stands in `recovery.write.multipart`.

What was saved is known to the tracker only once the manifest is there. Part 0 knows that at once, the others when the
next save names it as its parent; a part that knows of no such save, or holds other shards now, saves all its rows.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from gba_hvd.errors import GbaError
from gba_hvd.ps.messages import DelegateClaim, Save, SaveFacts, SaveSettings, SaveState, SaveStatus
from gba_hvd.ps.partition.claim_keepalive import ClaimKeepalive
from gba_hvd.shm.checkpoint_rows import ShardRows
from gba_hvd.shm.shard_memory import ShardMemory
from recovery.active_chain import ActiveChain
from recovery.catalog import claims
from recovery.catalog.retention import FIRST_EPOCH
from recovery.errors import BadInput, RecoveryError
from recovery.format.manifest import to_json
from recovery.format.row_codec import checksum
from recovery.policies import is_lossless, lossless_kind
from recovery.selection.selector import Selection
from recovery.storage.open import open_store
from recovery.storage.store import Store, epoch_of
from recovery.write.multipart import SaveTarget, await_part, commit_parts, discard, list_name, save_part
from recovery.write.section_pipeline import Buffers, Cancelled, PartResult

log = logging.getLogger("gba_hvd.ps")
_CLOSE_S = 5.0
_PARTS_LEAST_S, _PARTS_MOST_S = 60.0, 240.0  # other hosts' parts are waited for, by what the own one took

Agreed = tuple[Save, Sequence[int], Callable[[list[bytes]], bytes], bytes]
"""What `Saver.begin` takes: the request, the shards, the state as of all parts' extras, and this part's extra."""


class Saver:
    """One save at a time. `close()` cancels the one in flight; it may be called twice.

    Its public methods are called by others, all from one thread.
    """

    def __init__(self, memory: ShardMemory, tracker: Path) -> None:
        self._memory, self._tracker = memory, tracker
        self._meant: list[int] = []
        self._rows = ShardRows(memory, lambda: self._meant)
        self._thread: threading.Thread | None = None
        self._cancel = threading.Event()  # of the newest save
        self._report = SaveStatus()
        self._store: Store | None = None
        self._selection: Selection | None = None
        self._active_chain: ActiveChain | None = None
        self._buffers: Buffers | None = None
        self._settings: SaveSettings | None = None  # of the newest save
        self._not_yet_known: SaveTarget | None = None  # which the newest save of this part belongs to
        self._shards: list[int] = []  # of the newest save
        self._keepalive = ClaimKeepalive()
        self._workers_gone = False  # none is left to ask other servers for their parts
        self._last_until_s = math.inf  # so long the parts of a last checkpoint are waited for

    @property
    def url(self) -> str:
        """Where this server saves; empty: not known yet."""
        return "" if self._known_settings is None else self._known_settings.url

    @property
    def _known_settings(self) -> SaveSettings | None:
        return self._settings or (None if self.held is None else self.held.settings)

    @property
    def held(self) -> DelegateClaim | None:
        """What the host leader reported of the world in allreduce mode."""
        return self._keepalive.held

    @property
    def n_hosts(self) -> int:
        """Number of hosts in that world; 0: not known, to a server that was started again."""
        return 0 if self.held is None else self.held.n_parts

    def last_request(self, step: int, samples: int, generation: int = 0) -> Save | None:
        """A save of what is newer than the last one, when no worker is left to ask for it; None: nothing is to be done.

        In allreduce mode its number is one that nothing was saved under, also where the newest save failed.
        """
        held, before = self.held, self._report
        if held is None or not held.settings.final_checkpoint_s:
            return None
        epoch = held.claim.epoch
        is_on_top = before.state == "done" and before.epoch == epoch
        is_complete = before.state == "done" and is_lossless(before.facts.kind)
        has_it = is_complete and before.facts.saved_step >= step
        has_failed = bool(generation) and before.state != "done" and before.number >= step
        if before.epoch == epoch and (has_it or has_failed):
            return None
        number = max(step, before.number + 1) if before.epoch == epoch else step
        kind = lossless_kind(held.settings.config.policy)
        return Save(
            epoch=epoch, number=number, part=0, n_parts=1, kind=kind if is_on_top else "full",
            parent=before.facts.manifest if is_on_top and kind != "full" else None, step=step, samples=samples,
            settings=held.settings, claim=held.claim, generation=generation, first_epoch=held.first_epoch,
            about=msgspec.structs.replace(held.about, why="all workers were gone", is_final=True, position=None),
        )  # fmt: skip

    @property
    def final_checkpoint_s(self) -> float:
        """For how long a final save may take; 0: there is to be none, as far as this server knows."""
        return 0.0 if self._known_settings is None else self._known_settings.final_checkpoint_s

    def report(self) -> SaveStatus:
        """Status of the newest save; while it runs, with what its store meets, if that is to be tried again."""
        report, trouble = self._report, "" if self._store is None else getattr(self._store, "trouble", "")
        if report.state != "running" or not trouble:
            return report
        return msgspec.structs.replace(report, facts=msgspec.structs.replace(report.facts, why=trouble))

    def begin(
        self, request: Save, shards: Sequence[int], state: Callable[[list[bytes]], bytes], extra: bytes = b""
    ) -> None:
        """Save these shards in the background.

        extra: goes with this part's list; state: makes of all parts' extras what the checkpoint has beside rows (asked
        by part 0 only).

        Asked again for the same save, does nothing. Raises GbaError while another one is in flight.
        """
        if (request.epoch, request.number) == (self._report.epoch, self._report.number):
            return
        if self._thread is not None and self._thread.is_alive():
            if request.epoch == self._report.epoch and not request.supersedes:
                raise GbaError(f"checkpoint {self._report.number} is still being saved")
            self._cancel.set()  # of a world that is gone, or abandoned
        self._cancel = threading.Event()
        if self.held is None or self.held.claim.nonce != request.claim.nonce:  # this world was reported just now
            part_of = (request.part, request.n_parts) if not request.generation else (0, 0)
            if request.part == 0 or not request.generation:
                self.hold(DelegateClaim(request.claim, request.settings, request.about, request.first_epoch, *part_of))
        self._report = SaveStatus(request.epoch, request.number, "running")
        work = (request, list(shards), state, extra, self._cancel, self._thread)
        self._thread = threading.Thread(target=self._run, args=work, name="saver", daemon=True)
        self._thread.start()

    def did_not_begin(self, request: Save, why: str) -> None:
        """Report a save that failed before it began, unless another one is in flight."""
        if self._thread is None or not self._thread.is_alive():
            self._report = SaveStatus(request.epoch, request.number, "failed", SaveFacts(why=why))

    def begin_agreed(self, agree: Callable[[Store, threading.Event], Agreed]) -> None:
        """Have `agree` decide, in the background, what is to be saved, and save it.

        agree: with the store, and an event that is set when it is to give up; what it raises is why nothing is saved.
        Raises GbaError while another save is in flight.
        """
        held = self.held
        assert held is not None
        if self._thread is not None and self._thread.is_alive():
            raise GbaError(f"checkpoint {self._report.number} is still being saved")
        self._cancel = threading.Event()
        self._last_until_s = time.monotonic() + self.final_checkpoint_s
        self._report = SaveStatus(held.claim.epoch, 0, "running")
        work = (agree, held, self._cancel)
        self._thread = threading.Thread(target=self._run_agreed, args=work, name="saver", daemon=True)
        self._thread.start()

    def workers_are_gone(self) -> None:
        """Until `alive`: a save in flight does not wait for parts that no worker was left to ask for."""
        self._workers_gone = True

    def hold(self, request: DelegateClaim) -> None:
        """Renew this claim, until another one comes or `close`, while `alive` is called every now and then."""
        self.alive()
        self._keepalive.hold(request)

    def alive(self) -> None:
        """A worker sent a heartbeat."""
        self._keepalive.worker_seen()
        self._workers_gone = False

    def close(self) -> None:
        self._cancel.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)  # a store that hangs must not keep this process
        self._keepalive.close(_CLOSE_S)
        if self._selection is not None:
            self._selection.close()
            self._selection = None

    # --- the thread that saves ---------------------------------------------------------------------------------------

    def _run_agreed(
        self, agree: Callable[[Store, threading.Event], Agreed], held: DelegateClaim, cancel: threading.Event
    ) -> None:
        try:
            request, shards, state, extra = agree(_open(held.settings), cancel)
        except Exception as error:
            log.warning("no last checkpoint is made: %s", error)
            if not cancel.is_set():
                self._report = SaveStatus(
                    held.claim.epoch, 0, "failed", SaveFacts(why=f"{type(error).__name__}: {error}")
                )
            return
        self._report = SaveStatus(request.epoch, request.number, "running")
        self._run(request, list(shards), state, extra, cancel, None)

    def _run(
        self,
        request: Save,
        shards: list[int],
        state: Callable[[list[bytes]], bytes],
        extra: bytes,
        cancel: threading.Event,
        before: threading.Thread | None,
    ) -> None:
        if before is not None:
            before.join()  # it was cancelled, or is over
        started = time.monotonic()
        self._meant = shards
        try:
            facts = self._save(request, state, extra, cancel)
            facts.seconds = round(time.monotonic() - started, 3)
            became: SaveState = "part" if request.part else "done"
        except Cancelled:
            became, facts = "failed", SaveFacts(why="the world was formed again, or the job ended")
        except Exception as error:
            log.exception("checkpoint %d was not saved", request.number)
            became, facts = "failed", SaveFacts(why=f"{type(error).__name__}: {error}")
        if not cancel.is_set():  # else the report is the next one's by now
            self._report = SaveStatus(request.epoch, request.number, became, facts)

    def _save(
        self, request: Save, state: Callable[[list[bytes]], bytes], extra: bytes, cancel: threading.Event
    ) -> SaveFacts:
        store, selection, active_chain = self._prepared(request.settings)
        rows = self._rows
        rows.left = _is_left(request)
        about = {**msgspec.to_builtins(request.about), FIRST_EPOCH: request.first_epoch}
        asked = (request.epoch, request.number, request.kind, request.parent, request.step, request.samples)
        target, config = SaveTarget(*asked, rows.schema, about), request.settings.config

        def on_read() -> None:
            if not cancel.is_set():
                self._report = SaveStatus(request.epoch, request.number, "running", SaveFacts(read=True))

        own = save_part(
            rows,
            selection,
            store,
            target,
            # In asynchronous modes there is no step that all rows could be of.
            replace(config, strict=config.strict and not request.generation),
            part=request.part,
            kind=None if self._knows(selection, request) else "full",
            extra=extra,
            newest_step=request.step,
            cancel=cancel,
            on_read=on_read,
            buffers=self._buffers,
        )
        self._shards = rows.shards()
        if request.part:
            self._not_yet_known = target
            facts = _facts(own)
            facts.kind, facts.saved_step = request.kind, request.step
            return facts
        manifest, whole = commit_parts(
            store,
            selection,
            target,
            self._parts(store, target, request, own, cancel),
            lambda parts: state([part.extra for part in parts]),
            lambda: claims.check(store, request.claim),
            verify=config.verify,
        )
        try:
            store.delete([list_name(target.prefix, part) for part in range(1, request.n_parts)])
            active_chain.expire(range(request.first_epoch, request.epoch + 1), config.keep, request.about.job)
        except (BadInput, RecoveryError, OSError):
            log.warning("expired checkpoints were not deleted; that is tried again", exc_info=True)
        facts = _facts(whole)
        facts.n_bytes, facts.manifest, facts.kind = manifest.n_bytes, manifest.name, request.kind
        facts.checksum, facts.url, facts.saved_step = checksum([to_json(manifest)]), store.url, request.step
        return facts

    def _parts(
        self, store: Store, target: SaveTarget, request: Save, own: PartResult, cancel: threading.Event
    ) -> Iterator[PartResult]:
        """This part and those of the other servers, which are waited for."""
        yield own
        patience_s = max(_PARTS_LEAST_S, min(5 * own.seconds, _PARTS_MOST_S))
        until_s = self._last_until_s if _is_left(request) else time.monotonic() + patience_s
        for part in range(1, request.n_parts):
            why = (lambda: "") if _is_left(request) else partial(self._why_not_committed, store, request.epoch, part)
            yield await_part(store, target.prefix, part, until_s=until_s, cancel=cancel, why_not=why)

    def _why_not_committed(self, store: Store, epoch: int, part: int) -> str:
        """A server reports that its workers are gone when it saves nothing any more."""
        gone = f"{last_prefix(epoch)}gone-{part:04d}"
        if self._workers_gone and gone in store.names(gone):
            return f"the server of part {part} was not asked for its rows before all workers were gone"
        return ""

    def _prepared(self, settings: SaveSettings) -> tuple[Store, Selection, ActiveChain]:
        if self._store is None or self._selection is None or settings != self._settings:
            if self._selection is not None:
                self._selection.close()
            self._store = _open(settings)
            rows = self._rows
            counters = str(self._memory.folder.stat().st_ino)
            self._selection = Selection(rows, settings.config, tracker_path=self._tracker, counters=counters)
            self._active_chain = ActiveChain(self._store, self._selection)
            self._buffers = Buffers(rows.schema, settings.config)
            self._settings = settings
        assert self._active_chain is not None
        return self._store, self._selection, self._active_chain

    def _knows(self, selection: Selection, request: Save) -> bool:
        """Whether a partial save on top of the parent would be right for this part.

        Not across a change of the world (another epoch): rows may have come from elsewhere, with other counts.
        """
        parent, last = request.parent, self._not_yet_known
        if last is not None:  # its manifest may be there or not
            if parent == last.manifest_name:
                selection.commit(parent)
            else:
                selection.abandon()
                self._discard_if_failed(last, request.part)
            self._not_yet_known = None
        if parent is None or epoch_of(parent) != request.epoch or self._shards not in ([], self._meant):
            return False
        return selection.is_valid_for(parent)

    def _discard_if_failed(self, last: SaveTarget, part: int) -> None:
        """Delete what this part has saved, perhaps too late, of a manifest that is not there."""
        assert self._store is not None
        with contextlib.suppress(BadInput, RecoveryError, OSError):
            if last.manifest_name not in self._store.names(last.manifest_name):
                discard(self._store, f"{last.prefix}{part:04d}-")
                self._store.delete([list_name(last.prefix, part)])


def last_prefix(epoch: int) -> str:
    """Prefix of the names of all objects by which hosts agree on a final checkpoint (`final_checkpoint_hosts`)."""
    return f"blobs/{epoch:06d}-last/"


def _is_left(request: Save) -> bool:
    """Whether it is the last checkpoint of allreduce mode, of rows whose workers are gone."""
    return request.about.is_final and not request.generation


def _open(settings: SaveSettings) -> Store:
    return open_store(settings.url, **settings.storage_options)


def _facts(whole: PartResult) -> SaveFacts:
    return SaveFacts(
        rows=whole.n_rows,
        n_bytes=whole.n_bytes,
        raw_bytes=whole.raw_bytes,
        torn=whole.n_torn,
        worst_error=whole.worst_error,
    )
