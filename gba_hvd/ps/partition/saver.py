"""Checkpoints, in the server's process: saves the rows of this host in a thread of its own; training does not wait.

Who owns what. Each server saves the shards it holds, as blobs under its own part number, and then one object that lists
them. The one that commits (part 0) waits until the lists of all parts are in the store and writes the manifest, last.
So what each crash leaves behind is blobs and lists that nothing refers to; the checkpoint before stays in force. What a
save that failed has written is deleted: by each part its own, and by part 0 all, unless the manifest may be there.

What was saved is known to the tracker only once the manifest is there. Part 0 knows that at once, the others when the
next save names it as its parent; a part that knows of no such save, or holds other shards now, saves all its rows.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from gba_hvd.errors import GbaError
from gba_hvd.ps.messages import Hold, Save, Saved, SaveState
from gba_hvd.shm.checkpoint_rows import MemoryRows
from gba_hvd.shm.shard_memory import ShardMemory
from recovery.active_chain import Lineage
from recovery.catalog import claims
from recovery.config import Config
from recovery.errors import Damaged, RecoveryError, StoreError
from recovery.format.manifest import Blob, to_json
from recovery.format.row_codec import checksum
from recovery.selection.selector import Selection
from recovery.storage.open import open_store
from recovery.storage.store import Store, blob_prefix, epoch_of
from recovery.write.section_pipeline import Buffers
from recovery.write.writer import Cancelled, Written, commit, save_rows

log = logging.getLogger("gba_hvd.ps")
_LOOK_S, _CLOSE_S = 0.2, 5.0
_SILENT_S = 5.0  # without a word of any worker
_PARTS_LEAST_S, _PARTS_MOST_S = 60.0, 240.0  # other hosts' parts are waited for, by what the own one took

Agreed = tuple[Save, Sequence[int], Callable[[list[bytes]], bytes], bytes]
"""What `Saver.begin` takes: the request, the shards, the state as of all parts' extras, and this part's extra."""


class Saver:
    """One save at a time. `close()` cancels the one under way; it may be called twice.

    Its public methods are called by others, all from one thread.
    """

    def __init__(self, memory: ShardMemory, tracker: Path) -> None:
        self._memory, self._tracker = memory, tracker
        self._meant: list[int] = []
        self._thread: threading.Thread | None = None
        self._cancel = threading.Event()  # of the newest save
        self._report = Saved()
        self._store: Store | None = None
        self._selection: Selection | None = None
        self._lineage: Lineage | None = None
        self._buffers: Buffers | None = None
        self._settings: dict[str, Any] = {}
        self._not_yet_known: str = ""  # the manifest that the last save of this part belongs to
        self._shards: list[int] = []  # of that save
        self._held: Hold | None = None
        self._holder: threading.Thread | None = None
        self._ended = threading.Event()
        self._heard_s = time.monotonic()
        self._workers_gone = False  # none is left to ask other servers for their parts
        self._last_until_s = math.inf  # so long the parts of a last checkpoint are waited for

    @property
    def url(self) -> str:
        """Where this server saves; empty: it was not told yet."""
        known = self._settings or (self._held.settings if self._held is not None else {})
        return str(known.get("url", ""))

    @property
    def held(self) -> Hold | None:
        """What this server was told of the world in allreduce mode."""
        return self._held

    @property
    def n_hosts(self) -> int:
        """Of that world; 0: not known, to a server that was started again."""
        return 0 if self._held is None else self._held.n_parts

    def last_request(self, step: int, samples: int, generation: int = 0) -> Save | None:
        """A save of what is newer than the last one, when nobody is left to ask for it; None: nothing is to be done.

        In allreduce mode its number is one that nothing was saved under, also where the last save failed.
        """
        held, before = self._held, self._report
        if held is None or not held.settings.get("last_gasp_s"):
            return None
        epoch = held.claim["epoch"]
        is_on_top = before.state == "done" and before.epoch == epoch
        if before.epoch == epoch and before.number >= step and (before.state == "done" or generation):
            return None
        number = max(step, before.number + 1) if before.epoch == epoch else step
        policy = held.settings["config"]["policy"]
        return Save(
            epoch=epoch, number=number, part=0, n_parts=1, kind=policy if is_on_top else "full",
            parent=before.facts["manifest"] if is_on_top and policy != "full" else None, step=step, samples=samples,
            settings=held.settings, claim=held.claim, generation=generation, first_epoch=held.first_epoch,
            about={**held.about, "why": "all workers were gone", "last_gasp": True},
        )  # fmt: skip

    @property
    def last_gasp_s(self) -> float:
        """For how long a last save may take; 0: there is to be none, as far as this server knows."""
        known = self._settings or (self._held.settings if self._held is not None else {})
        return float(known.get("last_gasp_s", 0.0))

    def report(self) -> Saved:
        """What became of the newest save."""
        return self._report

    def begin(
        self, request: Save, shards: Sequence[int], state: Callable[[list[bytes]], bytes], extra: bytes = b""
    ) -> None:
        """Save these shards in the background.

        extra: goes with this part's list; state: makes of all parts' extras what the checkpoint has beside rows (asked
        by part 0 only).

        Asked again for the same save, does nothing. Raises GbaError while another one is under way.
        """
        if (request.epoch, request.number) == (self._report.epoch, self._report.number):
            return
        if self._thread is not None and self._thread.is_alive():
            if request.epoch == self._report.epoch and not request.supersedes:
                raise GbaError(f"checkpoint {self._report.number} is still being saved")
            self._cancel.set()  # of a world that is no more, or given up
        self._cancel = threading.Event()
        if self._held is None or self._held.claim["nonce"] != request.claim["nonce"]:  # told of this world just now
            place = (request.part, request.n_parts) if not request.generation else (0, 0)
            if request.part == 0 or not request.generation:
                self.hold(Hold(request.claim, request.settings, request.about, request.first_epoch, *place))
        self._report = Saved(request.epoch, request.number, "running")
        work = (request, list(shards), state, extra, self._cancel, self._thread)
        self._thread = threading.Thread(target=self._run, args=work, name="saver", daemon=True)
        self._thread.start()

    def did_not_begin(self, request: Save, why: str) -> None:
        """Report a save that failed before it began, unless another one is under way."""
        if self._thread is None or not self._thread.is_alive():
            self._report = Saved(request.epoch, request.number, "failed", {"why": why})

    def begin_agreed(self, agree: Callable[[Store, threading.Event], Agreed]) -> None:
        """Have `agree` decide, in the background, what is to be saved, and save it.

        agree: with the store, and an event that is set when it is to give up; what it raises is why nothing is saved.
        Raises GbaError while another save is under way.
        """
        assert self._held is not None
        if self._thread is not None and self._thread.is_alive():
            raise GbaError(f"checkpoint {self._report.number} is still being saved")
        self._cancel = threading.Event()
        self._last_until_s = time.monotonic() + self.last_gasp_s
        self._report = Saved(self._held.claim["epoch"], 0, "running")
        work = (agree, self._held, self._cancel)
        self._thread = threading.Thread(target=self._run_agreed, args=work, name="saver", daemon=True)
        self._thread.start()

    def workers_are_gone(self) -> None:
        """Until `alive`: a save under way does not wait for parts that nobody was left to ask for."""
        self._workers_gone = True

    def hold(self, request: Hold) -> None:
        """Give the signs of life of a claim, in a thread of its own, until another claim comes or `close`.

        And only while somebody calls `alive` every now and then: the signs are of the job, not of this server. A server
        that does not commit (part > 0) only keeps in mind what it was told.
        """
        self.alive()
        told, known = (request.claim["nonce"], request.part, request.n_parts), self._held
        if known is not None and (known.claim["nonce"], known.part, known.n_parts) == told:
            return
        self._held = request
        if self._holder is None and not request.part:
            self._holder = threading.Thread(target=self._give_signs, name="claim", daemon=True)
            self._holder.start()

    def alive(self) -> None:
        """A worker was heard."""
        self._heard_s, self._workers_gone = time.monotonic(), False

    def close(self) -> None:
        self._ended.set()
        self._cancel.set()
        for thread in (self._thread, self._holder):
            if thread is not None:
                thread.join(_CLOSE_S)  # a store that hangs must not keep this process
        if self._selection is not None:
            self._selection.close()
            self._selection = None

    # --- threads -----------------------------------------------------------------------------------------------------

    def _give_signs(self) -> None:
        claim, of = None, None
        while True:
            if of is not self._held and self._held is not None:
                of = self._held
                claim, store = claims.Claim(**of.claim), _open(of.settings)
            assert claim is not None and of is not None
            if self._ended.wait(claim.lease_s / 3):
                return
            if time.monotonic() - self._heard_s > _SILENT_S or of.part:
                continue
            try:
                claim = claims.renew(store, claim)
            except (RecoveryError, OSError):
                log.warning("a sign of life was not written to %s", store.url, exc_info=True)

    def _run_agreed(
        self, agree: Callable[[Store, threading.Event], Agreed], held: Hold, cancel: threading.Event
    ) -> None:
        try:
            request, shards, state, extra = agree(_open(held.settings), cancel)
        except Exception as error:
            log.warning("no last checkpoint is made: %s", error)
            if not cancel.is_set():
                self._report = Saved(held.claim["epoch"], 0, "failed", {"why": f"{type(error).__name__}: {error}"})
            return
        self._report = Saved(request.epoch, request.number, "running")
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
        started, facts = time.monotonic(), {}
        self._meant = shards
        try:
            facts = self._save(request, state, extra, cancel)
            facts["seconds"] = round(time.monotonic() - started, 3)
            became: SaveState = "part" if request.part else "done"
        except Cancelled:
            became, facts = "failed", {"why": "the world was formed anew, or the job ended"}
        except Exception as error:
            log.exception("checkpoint %d was not saved", request.number)
            became, facts = "failed", {"why": f"{type(error).__name__}: {error}"}
        if not cancel.is_set():  # else the report is the next one's by now
            self._report = Saved(request.epoch, request.number, became, facts)

    def _save(
        self, request: Save, state: Callable[[list[bytes]], bytes], extra: bytes, cancel: threading.Event
    ) -> dict[str, Any]:
        started, config = time.monotonic(), Config(**request.settings["config"])
        store, selection, lineage = self._prepared(request, config)
        is_left = bool(request.about.get("last_gasp")) and not request.generation
        rows = MemoryRows(self._memory, lambda: self._meant, left=is_left)
        kind = request.kind if self._knows(selection, request) else "full"
        prefix, name = blob_prefix(request.epoch, request.number), _manifest_name(request)
        choice = selection.begin(kind)
        is_decided = False  # whether the manifest may be there

        def read_all() -> None:
            if not cancel.is_set():
                self._report = Saved(request.epoch, request.number, "running", {"read": True})

        def still_mine() -> None:  # asked last before it is written
            nonlocal is_decided
            claims.check(store, claims.Claim(**request.claim))
            is_decided = True

        try:
            written = save_rows(
                rows, choice, store, f"{prefix}{request.part:04d}-", config, exact=kind == "full", note=selection.note,
                cancel=cancel, buffers=self._buffers, read_all=read_all,
            )  # fmt: skip
            if config.strict and not request.generation:
                _check_strict(written, request.step)
            self._not_yet_known, self._shards = name, rows.shards()
            mine = PartList(list(written.blobs), extra, written.n_torn, written.worst_error)
            if request.part:
                store.put(_list_name(prefix, request.part), [encode_part(mine)])
                return _facts([mine])
            parts = [mine]
            own_s = time.monotonic() - started
            patience_s = max(_PARTS_LEAST_S, min(5 * own_s, _PARTS_MOST_S))
            until_s = self._last_until_s if is_left else time.monotonic() + patience_s
            for part in range(1, request.n_parts):
                was_asked: Callable[[], bool] = partial(self._was_asked, store, request.epoch, part)
                was_asked = (lambda: True) if is_left else was_asked
                parts.append(_part_of(store, prefix, part, cancel, until_s, was_asked))
            manifest = commit(
                store, prefix, epoch=request.epoch, number=request.number, kind=request.kind, parent=request.parent,
                step=request.step, samples=request.samples, schema=rows.schema,
                blobs=[blob for part in parts for blob in part.blobs], state=state([part.extra for part in parts]),
                about={**request.about, "save_s": round(time.monotonic() - started, 3)}, still_mine=still_mine,
                verify=config.verify,
            )  # fmt: skip
        except BaseException as error:
            selection.abandon()
            self._not_yet_known = ""
            if not is_decided or isinstance(error, Damaged):  # then `commit` has removed the manifest
                _delete_all(store, f"{prefix}{request.part:04d}-" if request.part else prefix)
            raise
        selection.commit(name)
        self._not_yet_known = ""
        try:
            store.delete([_list_name(prefix, part) for part in range(1, request.n_parts)])
            lineage.expire(range(request.first_epoch, request.epoch + 1), config.keep)
        except (RecoveryError, OSError):
            log.warning("expired checkpoints were not deleted; that is tried again", exc_info=True)
        facts = _facts(parts)
        facts |= {"n_bytes": manifest.n_bytes, "manifest": name, "kind": request.kind}
        facts["checksum"] = checksum([to_json(manifest)])
        return {**facts, "url": store.url, "saved_step": request.step}

    def _was_asked(self, store: Store, epoch: int, part: int) -> bool:
        """A server says that its workers are gone when it saves nothing any more."""
        gone = f"{last_prefix(epoch)}gone-{part:04d}"
        return not (self._workers_gone and gone in store.names(gone))

    def _prepared(self, request: Save, config: Config) -> tuple[Store, Selection, Lineage]:
        if self._store is None or self._selection is None or request.settings != self._settings:
            if self._selection is not None:
                self._selection.close()
            self._store = _open(request.settings)
            rows = MemoryRows(self._memory, lambda: self._meant)
            counters = str(self._memory.folder.stat().st_ino)
            self._selection = Selection(rows, config, tracker_path=self._tracker, counters=counters)
            self._lineage = Lineage(self._store, self._selection)
            self._buffers = Buffers(rows.schema, config)
            self._settings = request.settings
        assert self._lineage is not None
        return self._store, self._selection, self._lineage

    def _knows(self, selection: Selection, request: Save) -> bool:
        """Whether a partial save on top of the parent would be right for this part.

        Not across a change of the world (another epoch): rows may have come from elsewhere, with other counts.
        """
        parent = request.parent
        if self._not_yet_known:  # the save before belongs to a manifest that may be there or not
            if parent == self._not_yet_known:
                selection.commit(parent)
            else:
                selection.abandon()
                self._forget_blobs(self._not_yet_known, request.part)
            self._not_yet_known = ""
        if parent is None or epoch_of(parent) != request.epoch or self._shards not in ([], self._meant):
            return False
        return selection.is_valid_for(parent)

    def _forget_blobs(self, name: str, part: int) -> None:
        """This part was saved, perhaps too late: of a manifest that is not there."""
        assert self._store is not None
        prefix = name.replace("manifests/", "blobs/").removesuffix(".json") + "/"
        with contextlib.suppress(RecoveryError, OSError):
            if name not in self._store.names(name):
                _delete_all(self._store, f"{prefix}{part:04d}-")
                self._store.delete([_list_name(prefix, part)])


def _delete_all(store: Store, prefix: str) -> None:
    """What a save that failed has written. If that fails, too, it takes space until `gba-hvd checkpoint gc`."""
    with contextlib.suppress(RecoveryError, OSError):
        store.delete(sorted(store.names(prefix)))


def last_prefix(epoch: int) -> str:
    """What the names of all objects begin with, by which servers agree on a last checkpoint (`last_together`)."""
    return f"blobs/{epoch:06d}-last/"


def _part_of(
    store: Store, prefix: str, part: int, cancel: threading.Event, until_s: float, was_asked: Callable[[], bool]
) -> PartList:
    """What another server saved; waits until its list is there. was_asked: False once it is known that it was not."""
    name, began_s = _list_name(prefix, part), time.monotonic()
    while name not in store.names(name):
        if not was_asked() and name not in store.names(name):
            raise StoreError(f"the server of part {part} was not asked for its rows before all workers were gone")
        if (now := time.monotonic()) > until_s:
            raise StoreError(f"the server of part {part} has not saved its rows in {now - began_s:.0f} s")
        if cancel.wait(_LOOK_S):
            raise Cancelled("the save was cancelled")
    return decode_part(store.get(name), name)


def _check_strict(written: Written, step: int) -> None:
    """In asynchronous modes there is no step that all rows could be of."""
    newest = max((section.step for blob in written.blobs for section in blob.sections), default=step)
    if newest > step:
        raise StoreError(
            f"strict: a row was read at step {newest}, after the checkpoint's own, {step}: the workers have not waited "
            "for it; if saving takes minutes, raise busy_timeout_s, or save without strict"
        )


def _open(settings: dict[str, Any]) -> Store:
    return open_store(settings["url"], **settings["storage_options"])


def _manifest_name(request: Save) -> str:
    return f"manifests/{request.epoch:06d}-{request.number:08d}.json"


def _list_name(prefix: str, part: int) -> str:
    return f"{prefix}part-{part:04d}"


def _facts(parts: Sequence[PartList]) -> dict[str, Any]:
    """Of the rows of some parts, together."""
    sections = [section for part in parts for blob in part.blobs for section in blob.sections]
    return {
        "rows": sum(section.n_rows for section in sections),
        "n_bytes": sum(section.n_bytes for section in sections),
        "raw_bytes": sum(section.raw_bytes for section in sections),
        "torn": sum(part.n_torn for part in parts),
        "worst_error": max(part.worst_error for part in parts),  # of a weight, through quantisation
    }


class PartList(msgspec.Struct):
    """What one server saved. extra: what else it adds; n_torn, worst_error: as in `recovery.write.writer.Written`."""

    blobs: list[Blob]
    extra: bytes
    n_torn: int
    worst_error: float = 0.0


def encode_part(part: PartList) -> bytes:
    """With a checksum before it."""
    body = msgspec.msgpack.encode(part)
    return xxhash.xxh3_128_digest(body) + body


def decode_part(data: bytes, name: str) -> PartList:
    """Raises Damaged."""
    if data[:16] != xxhash.xxh3_128_digest(data[16:]):
        raise Damaged(f"{name} is not what a server wrote")
    return msgspec.msgpack.decode(data[16:], type=PartList)
