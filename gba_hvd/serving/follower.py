"""`Follower`: a served model that takes over what a running job learns, from the job's own checkpoints.

An update is what was saved since the one before: partial saves of the chain that the newest checkpoint is on top of.
A chain that does not have the one before is loaded from its base. Whether it has is decided by the manifest, not by its
name: in a folder that was emptied the same names come again. The order of an update:

    1. list    manifests; a new one makes an update visible, since it was written last
    2. stage   rows and dense part are read and verified beside those in use; requests are answered
    3. apply   with the lock alone: rows, vocabulary, dense part; requests wait
    4. note    which checkpoint this is

| it ends | what is left |
|---|---|
| a follower, anywhere (SIGKILL) | nothing: it writes nowhere. The next one loads the newest checkpoint |
| reading, with an error (a damaged object, the store) | the state before, which is served as before |
| the job or a server, before a manifest | blobs that nothing names: no update. The next save has these changes |
| the job, after it | an update like any other |
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from gba_hvd.errors import BadInput
from gba_hvd.serving.followed_rows import FollowedRows, staged
from gba_hvd.serving.load import OpenModel
from gba_hvd.serving.module import check_tables, freeze, padding_rows_in, tables_in, take_padding_rows
from gba_hvd.serving.row_sources import CheckpointRows
from gba_hvd.serving.save import stand_ins
from gba_hvd.serving.shared_lock import SharedLock
from recovery.catalog.chains import Chain, Skipped, chains
from recovery.errors import Damaged, NotFound, StoreError
from recovery.format.manifest import Manifest, from_json
from recovery.restore.inspect import read_state, saved_rows
from recovery.restore.open_checkpoint import OpenCheckpoint
from recovery.storage.open import open_store
from recovery.storage.store import age_of, manifest_names, manifest_sizes

log = logging.getLogger("gba_hvd")

_VERIFIED_FOR_S = 60.0  # then the manifest of what is applied is read again, also where the listing is as before


@dataclass(frozen=True)
class Update:
    """What was applied at once.

    name, step, samples: of the checkpoint that the model has now. n_saves: of the job, that it consists of.
    is_full: loaded from a base; else what was saved since the update before. n_rows, n_bytes: read.
    seconds: for reading and applying; blocked_s: of these, without a request. lag_s: from the save until applied
    """

    name: str
    step: int
    samples: int
    n_saves: int
    is_full: bool
    n_rows: int
    n_bytes: int
    seconds: float
    blocked_s: float
    lag_s: float


class Follower:
    """Keeps a model that was opened for predictions at the newest checkpoint of a job.

        model = gba_hvd.load_for_inference("s3://bucket/ctr")
        with gba_hvd.Follower(model, "s3://bucket/job") as follower:  # the url of the job's CheckpointCallback
            logits = model(batch)                                     # of one whole update
            print(follower.step, follower.lag_s, follower.lag_steps)

    Without the thread that `start` starts, `poll` applies what there is. A call of the model sees one whole update:
    it holds a lock that calls share, and an update waits for the calls before it. Calls of a module inside it do not;
    `reading()` holds the lock for several calls.

    model: of `load_for_inference` or `open_model`, built as the job's model is; its rows are float32 in memory from the
    first update on, also those of a model that was mapped or has another `row_dtype`.
    every_s: between two looks of the thread. on_update: called in the thread that polls.
    clock: seconds since 1970, as the clocks of the job's hosts have them; storage_options: see `recovery.open_store`.

    Owned by one thread, besides `step`, `lag_s`, `lag_steps`, `problem`, `has_ended`, `flaws` and `reading`.
    """

    def __init__(
        self,
        model: nn.Module | OpenModel,
        url: str | Path,
        *,
        every_s: float = 1.0,
        on_update: Callable[[Update], object] = lambda update: None,
        clock: Callable[[], float] = time.time,
        **storage_options: Any,
    ) -> None:
        if not every_s > 0:
            raise BadInput(f"every_s must be positive, got {every_s}")
        self._module = model.module if isinstance(model, OpenModel) else model
        self._tables = tables_in(self._module)
        if not self._tables or not all(tables.is_frozen for tables in self._tables):
            raise BadInput(
                f"{type(self._module).__name__} was not opened for predictions: pass what gba_hvd.load_for_inference "
                "or gba_hvd.open_model returned"
            )
        if hasattr(self._module.forward, "followed_by"):
            raise BadInput("another Follower has this model: close it first, or open the model again")
        self._store = open_store(url, **storage_options)
        self._every_s, self._on_update, self._clock = every_s, on_update, clock
        self._lock = SharedLock()
        self._rows: dict[str, FollowedRows] | None = None
        self._chain: tuple[Manifest, ...] = ()  # what is applied, from its base on
        self._held: tuple[Manifest, ...] = ()  # the same, but empty once it is not what the store has under these names
        self._verified: dict[str, int] = {}  # the listing in which it was found to be
        self._verified_s = 0.0
        self._is_gone = False
        self._newest_step = -1
        self._passed_over: dict[str, str] = {}
        self._damaged: set[str] = set()  # whose rows are: what is on top of them cannot be used either
        self._has_warned = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._died_of: BaseException | None = None
        self._own_forward = self._module.__dict__.get("forward")  # that a builder has replaced
        self._module.forward = self._guarded(self._module.forward)

    # --- what it reports ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Of the job, that the model has; -1: no update was applied yet."""
        return self._chain[-1].step if self._chain else -1

    @property
    def lag_s(self) -> float:
        """Age of what is served: seconds since it was saved, by the clocks of both machines; inf: nothing applied."""
        return max(0.0, self._clock() - self._chain[-1].saved_unix_s) if self._chain else math.inf

    @property
    def lag_steps(self) -> int:
        """Steps from what is served to the newest update that was seen; -1: none was applied yet."""
        return max(0, self._newest_step - self.step) if self._chain else -1

    @property
    def problem(self) -> str:
        """Why the model is not updated, in words: the thread has ended (`has_ended`), or what is served is gone from
        the store. Empty while it is updated."""
        if (error := self._died_of) is not None:
            return f"{type(error).__name__}: {error}"
        return self._gone_words() if self._is_gone else ""

    @property
    def has_ended(self) -> bool:
        """Whether the thread has died of an error: the model is not updated any more. `close` raises it."""
        return self._died_of is not None

    @property
    def flaws(self) -> Mapping[str, str]:
        """Updates that were passed over, and why."""
        return dict(self._passed_over)

    # --- updates -----------------------------------------------------------------------------------------------------

    def poll(self) -> Update | None:
        """Apply what is new, as one update; None: nothing is.

        A checkpoint that is damaged, or on top of one that is, is passed over, logged and in `flaws`; the next base
        loads everything. Raises BadInput where the checkpoints are of another model; StoreError when the store fails.
        The model stays as it is then.
        """
        if self._thread is not None and self._thread is not threading.current_thread():
            raise BadInput("the thread that start() started polls: do one or the other")
        listed = manifest_sizes(self._store)
        if not listed:
            self._on_nothing_there()
            return None
        newest = _age(next(reversed(listed)))
        have, opened = self._compared(listed, newest)
        if newest <= have:
            return None
        is_newest = True
        for found in chains(self._store, lambda epoch, number: (epoch, number) > have, opened=opened):
            if isinstance(found, Skipped):
                if found.name in manifest_names(self._store):  # else the job has deleted it, and has a newer one
                    self._pass_over(found.name, found.why)
                continue
            if is_newest:
                self._newest_step, is_newest = found.newest.step, False
            if flaw := next((one.name for one in found.manifests if one.name in self._damaged), None):
                self._pass_over(found.newest.name, f"it is on top of {flaw}, which is damaged")
                continue
            try:
                return self._apply(found)
            except NotFound as error:
                log.info("%s: %s was deleted while it was read: %s", self._store.url, found.newest.name, error)
                return None
            except Damaged as error:
                self._pass_over(found.newest.name, str(error))
        return None

    def _on_nothing_there(self) -> None:
        self._verified = {}
        if self._chain:
            self._set_gone(True)
        elif not self._has_warned:
            self._has_warned = True
            log.warning("%s has no checkpoints yet: is it the `url` of a job's CheckpointCallback?", self._store.url)

    def _compared(
        self, listed: dict[str, int], newest: tuple[int, int]
    ) -> tuple[tuple[int, int], tuple[Manifest, ...]]:
        """(age up to which nothing is new, manifests that need not be read again).

        Reads the manifest of what is applied again: before an update, and where the listing has changed since that was
        last done or it was long ago. Where it is another one, or all that is there is older, nothing is held any more.
        """
        if not self._held:
            return (-1, -1), ()
        mine, now_s = self._held[-1], time.monotonic()
        have = _age(mine.name)
        if newest > have or listed != self._verified or now_s - self._verified_s >= _VERIFIED_FOR_S:
            self._verified, found = {}, None
            with contextlib.suppress(NotFound, Damaged):
                found = from_json(self._store.get(mine.name), mine.name)
            if found is None and newest >= have:  # the job may have deleted it, and has a newer base
                return have, ()
            if found != mine:
                self._set_gone(True)
                self._held, self._passed_over = (), {}
                self._damaged.clear()
                return (-1, -1), ()
            self._verified, self._verified_s = listed, now_s
            self._set_gone(False)
        return have, self._held

    def _set_gone(self, is_gone: bool) -> None:
        if is_gone and not self._is_gone:
            log.warning("%s", self._gone_words())
        elif self._is_gone and not is_gone:
            log.warning("%s is followed again: serving step %d", self._store.url, self.step)
        self._is_gone = is_gone

    def _gone_words(self) -> str:
        return f"the checkpoints that are served are gone from {self._store.url}; still serving step {self.step}"

    def _apply(self, chain: Chain) -> Update:
        began_s, newest, n_bytes = time.monotonic(), chain.newest, 0

        def count(n: int) -> None:
            nonlocal n_bytes
            n_bytes += n

        opened = OpenCheckpoint(self._store, chain, read_state(self._store, newest), ())
        dense, saves = self._checked(opened), self._since(chain)
        is_full = saves[0].parent is None
        rows, changes = staged(newest.schema, None if is_full else self._rows, self._saved_rows(saves, count))
        count(newest.state.n_bytes if newest.state else 0)
        with self._lock.exclusive():
            blocked_s = time.monotonic()
            for change in changes:
                change.apply()
            if rows is not self._rows:
                freeze(self._module, self._tables, rows)
            self._module.load_state_dict(dense)
            if is_full:
                take_padding_rows(self._module, padding_rows_in(opened))
            self._rows, self._chain, self._held = rows, chain.manifests, chain.manifests
            blocked_s = time.monotonic() - blocked_s
        self._passed_over = {name: why for name, why in self._passed_over.items() if _age(name) > _age(newest.name)}
        self._damaged &= self._passed_over.keys()
        self._set_gone(False)
        update = Update(
            newest.name, newest.step, newest.samples, len(saves), is_full, sum(change.n_rows for change in changes),
            n_bytes, time.monotonic() - began_s, blocked_s, self.lag_s,
        )  # fmt: skip
        self._on_update(update)
        return update

    def _saved_rows(
        self, saves: Sequence[Manifest], count: Callable[[int], None]
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for manifest in saves:
            try:
                yield from saved_rows(self._store, manifest, count)
            except Damaged as error:
                self._damaged.add(manifest.name)
                self._pass_over(manifest.name, str(error))
                raise

    def _since(self, chain: Chain) -> tuple[Manifest, ...]:
        """Saves that the model lacks: those after its own, or all, where it has none of this chain."""
        have = self._held[-1] if self._held else None
        start = chain.manifests.index(have) + 1 if have in chain.manifests else 0
        mine, schema = chain.manifests[start:], chain.newest.schema
        if any(manifest.schema != schema for manifest in chain.manifests):
            raise Damaged(f"{chain.newest.name}: its chain has tables of several sizes")
        return mine

    def _checked(self, opened: OpenCheckpoint) -> dict[str, Tensor]:
        """The dense part. Raises BadInput, naming what does not fit the model."""
        check_tables(self._tables, stand_ins([CheckpointRows(opened, name, None) for name in opened.tables]))
        dense, mine = opened.dense(), self._module.state_dict()
        for name in sorted(dense.keys() | mine.keys()):
            theirs, ours = (list(one[name].shape) if name in one else "not there" for one in (dense, mine))
            if theirs != ours:
                raise BadInput(
                    f"{opened.name} at {opened.url} is of another model: {name} is {theirs} in the checkpoint, and "
                    f"{ours} in the model that follows"
                )
        return dense

    def _pass_over(self, name: str, why: str) -> None:
        if name not in self._passed_over:
            self._passed_over[name] = why
            log.warning("%s: %s is passed over: %s", self._store.url, name, why)

    # --- requests ----------------------------------------------------------------------------------------------------

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Hold the state of the model for several calls: no update is applied within. Do not poll within."""
        return self._lock.shared()

    def _guarded(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self._lock.shared():
                return forward(*args, **kwargs)

        guarded.followed_by = self  # type: ignore[attr-defined]
        return guarded

    # --- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> Follower:
        """Poll in a thread, until `close`. Errors of the store are logged, and tried again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Stop following; the model stays as it is. May be called twice. Raises what the thread died of."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._module.__dict__.pop("forward", None)
        if self._own_forward is not None:
            self._module.forward = self._own_forward
        if self._died_of is not None:
            error, self._died_of = self._died_of, None
            raise error

    def __enter__(self) -> Follower:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        said = ""
        while not self._stop.is_set():
            try:
                self.poll()
                said = ""
            except StoreError as error:
                if said != (said := str(error)):
                    log.warning("%s; tried again every %g s", error, self._every_s)
            except BaseException as error:
                log.exception("the model is not updated any more")
                self._died_of = error
                return
            self._stop.wait(self._every_s)


def _age(name: str) -> tuple[int, int]:
    return age_of(name) or (-1, -1)
