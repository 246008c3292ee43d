"""A worker's part in the asynchronous modes: lease, pull, push. It waits for no other worker.

    lease -> (rows of other hosts are pulled) -> newest dense values -> the user's forward and backward -> push

The rows of this host are read straight from shared memory, which the server writes. A push goes to every server and,
once all have it, is reported to the coordinator; at most `MAX_UNDER_WAY` of them are on the way. Which pushes make a
step, with what weight, and who applies it, is decided by the coordinator (`ps.coordinator`) and done by the servers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import torch

from gba_hvd.collectives import World, worker_lost
from gba_hvd.compression import mirror, row_push
from gba_hvd.compression.bypass import Bypass, Took
from gba_hvd.compression.exchange import DenseExchange
from gba_hvd.compression.feedback import Feedback
from gba_hvd.compression.message import BadMessage
from gba_hvd.compression.push import DensePush, Frame
from gba_hvd.compression.rows import RowCoder, write_keys
from gba_hvd.compression.spec import Spec
from gba_hvd.errors import GbaError, NonFiniteGradient, StateMismatch
from gba_hvd.gradients import DenseGradients, RowGrad, distinct, merge, pack_by_owner, unpack, with_contributors
from gba_hvd.ps.client import Client, Reply, ServerLost
from gba_hvd.ps.dense import DenseReader
from gba_hvd.ps.protocol import (
    Ask,
    Beat,
    Compressor,
    Dense,
    Done,
    Endpoint,
    Evaluate,
    Export,
    Exported,
    Given,
    GivenLease,
    Judged,
    Ok,
    Position,
    PullDense,
    PullRows,
    Push,
    Refused,
    Residual,
    Saved,
    Score,
)  # fmt: skip
from gba_hvd.rules.dana_slim import SlimWorker
from gba_hvd.tables import EmbeddingTables, RemoteRows
from recovery import state_codec

log = logging.getLogger("gba_hvd")
MAX_UNDER_WAY = 2
_Item = TypeVar("_Item")


class Session(msgspec.Struct, frozen=True):
    """What all workers agree on when an asynchronous mode is entered, and what a newcomer is told.

    shard_servers: server of each shard; dense_servers: server of each dense tensor (indices into `servers`)
    """

    generation: int
    mode: str
    job: str
    key: bytes
    servers: tuple[Endpoint, ...]
    shard_servers: tuple[int, ...]
    dense_servers: tuple[int, ...]
    row_average: str
    rule: str = "none"


@dataclass(frozen=True)
class DenseState:
    """One dense tensor as a server has it: values float32 [n], and the optimizer's state of it."""

    values: np.ndarray
    state: dict[str, Any]


class GbaMode:
    """One worker's asynchronous mode. Start with `start()`; `close()` may be called twice.

    Owns the client and the reader of dense values; uses, but does not own, the tables and the dense gradients.
    """

    def __init__(
        self, session: Session, worker: int, rank: int, host: int, pid: int, tables: EmbeddingTables,
        dense: DenseGradients, timeout_s: float, compression: DenseExchange | None = None,
        row_coder: RowCoder | None = None,
    ) -> None:  # fmt: skip
        assert tables.memory is not None
        self.session, self.name, self.worker, self.rank = session, session.mode, worker, rank
        self._tables, self._memory, self._dense, self._timeout_s = tables, tables.memory, dense, timeout_s
        self.host, self._pid = host, pid
        self._shard_server = np.array(session.shard_servers, dtype=np.int32)
        at_home = np.array([server.host == host for server in session.servers])
        self.several_hosts = not bool(at_home[self._shard_server].all())
        tables.local = at_home[self._shard_server] if self.several_hosts else None
        tables.remote = [None] * len(tables.layout.groups)
        self.client = Client(session.job, session.key, session.servers, host, tables.memory.folder, timeout_s)
        self.client.beat = self._beat
        self.client.on_position = self._take_position
        self.position = Position()
        self.saved: Saved | None = None  # what became of the newest checkpoint
        self.hosts_updated = False  # Horovod told this worker; the coordinator is told with the next heartbeat
        self._world_told: int | None = None
        self.somebody_leaves = False
        self.leaving = False  # this worker was told to leave; the chief is to have a checkpoint made first
        self.stands_for = 0  # the change of membership that this worker had heard of when it last formed a world
        self._request = 0
        self._under_way = threading.BoundedSemaphore(MAX_UNDER_WAY)
        self._failure: Exception | None = None
        self._parts = [
            [t for t, server in enumerate(session.dense_servers) if server == s] for s in range(len(session.servers))
        ]
        sizes = dense.sizes
        ends = np.cumsum([0, *sizes])
        self._slices = [[slice(int(ends[t]), int(ends[t + 1])) for t in part] for part in self._parts]
        is_far = [server.host != host for server in session.servers]
        self._coded: DensePush | None = None
        self.saved_residual: Feedback | None = None  # where checkpoints are made: what this worker has not sent
        self._compressor: Compressor | None = None
        self._compression = compression
        self._pulls: list[Bypass] = []  # by server: whether its values come compressed
        self._pulled_s = time.perf_counter()
        self._is_far = np.array(is_far)
        self._row_coder, self._row_coding = row_coder if self.several_hosts else None, threading.Lock()
        if compression is not None and any(is_far):
            self._coded = DensePush(compression.feedback, self._parts, is_far)
            self._compressor = _told(compression.spec)
            self._pulls = [
                Bypass(["values"], compression.spec.is_forced, f"dense values from server {s}", "a pull takes")
                for s in range(len(is_far))
            ]
        self._values = [np.empty(sum(sizes[t] for t in part), dtype=np.float32) for part in self._parts]
        self._dense_step = [-1] * len(self._parts)
        self.slim: SlimWorker | None = None  # what rule "dana_slim" does to gradients before they are sent
        self._readers: list[DenseReader | None] = [None] * len(self._parts)
        self.lock = threading.Lock()

    def start(self) -> None:
        self.client.start()
        for s, server in enumerate(self.session.servers):
            if server.host == self.host:
                self._readers[s] = DenseReader(self._memory.folder / f"ps-{server.index}.dense")

    def save_residual(self, feedback: Feedback) -> None:
        """From here on the server of this host knows what this worker has not sent. Before the first lease."""
        self.saved_residual = feedback
        rest = feedback.rest.copy() if feedback.rest.any() else feedback.rest[:0]
        told = self.client.send(self.own_server, Residual(self.worker, self.session.generation), [rest])
        told.add_done_callback(_log_refusal)

    def close(self, finished: bool = True) -> None:
        """finished: training or the mode is over; otherwise this worker alone leaves, to be replaced."""
        self.client.finished = finished
        self.client.close()
        for reader in self._readers:
            if reader is not None:
                reader.close()
        self._readers = [None] * len(self._readers)

    def told(self) -> tuple[dict[str, float], list[str]]:
        """Gauges of what this mode does in the background, and what went wrong there, since this was asked last."""
        return {}, []

    def world_ends(self) -> None:
        """From another thread: Horovod's world is about to be left."""

    def world_stands(self, world: World) -> None:
        """From another thread: a new world was formed."""

    # --- leases ------------------------------------------------------------------------------------------------------

    def ask(self, epoch: int, n_samples: int, lrs: Sequence[float], lrs_step: int, stop: Callable[[], bool]) -> Given:
        """A lease, or "finished" or "drained". Waits while there is nothing to do but the epoch is not over.

        lrs: learning rates of the dense groups and of the rows, as this worker has them since step `lrs_step`.
        stop: asked now and then; true gives up waiting ("wait").
        """
        self._raise_failure()
        self._request += 1
        body = Ask(self.worker, self.session.generation, self._request, epoch, n_samples, list(lrs), lrs_step)
        while True:
            reply = self._call(0, body)
            assert isinstance(reply.body, Given)
            self._take_position(reply.body.position)
            if reply.body.instead != "wait" or stop():
                return reply.body

    def refresh_dense_(self) -> int:
        """Bring the model's dense parameters to the newest values; returns the oldest step among them."""
        for s, part in enumerate(self._parts):
            if not part:
                self._dense_step[s] = max(self._dense_step)
                continue
            reader, before = self._readers[s], self._dense_step[s]
            if reader is not None:
                self._dense_step[s] = reader.read(self._values[s], before)
            else:
                self._pull_values(s)
            if self._dense_step[s] > before:
                self._dense.set_parameters_(part, torch.from_numpy(self._values[s]))
        return min(self._dense_step)

    def _pull_values(self, server: int) -> None:
        """The newest values of a server of another host, whole or as a difference, whichever was faster."""
        compress = bool(self._pulls) and any(self._pulls[server].tensors_next())
        compressor, asked_s = self._compressor if compress else None, time.perf_counter()
        body = PullDense(self.session.generation, self._dense_step[server], self.worker, compressor)
        reply = self._call(server, body)
        assert isinstance(reply.body, Dense)
        if not reply.frames:
            return
        self._take_values(server, reply.body, reply.frames[0])
        if self._compression is not None and self._pulls and compress == (reply.body.base != -1):
            now = time.perf_counter()  # a difference that was asked for may come whole: that says nothing
            took, self._pulled_s = Took(now - asked_s, 0.0, now - self._pulled_s), now
            decision = self._pulls[server].saw(compress, [took])
            if decision is not None and decision.changed:
                self._compression.decisions.append(decision)

    def _take_values(self, server: int, dense: Dense, frame: Any) -> None:
        if dense.base == -1:
            self._values[server] = np.frombuffer(frame, dtype=np.float32).copy()
        elif dense.base == self._dense_step[server]:
            try:
                mirror.follow_(self._values[server], frame, [self._dense.sizes[t] for t in self._parts[server]])
            except BadMessage as error:
                raise worker_lost(f"server {server} sent dense values that are none: {error}") from error
        else:
            raise worker_lost(
                f"server {server} sent the difference to step {dense.base}, this worker has {self._dense_step[server]}"
            )
        self._dense_step[server] = dense.step

    def fetch_rows(self, keys: Sequence[np.ndarray], whole: bool = False) -> list[RemoteRows | None]:
        """Rows of other hosts, per group the keys that will be used next. For `use_rows`.

        whole: as they are, whatever compresses rows otherwise; no gradients follow.
        """
        if not self.several_hosts:
            return [None] * len(keys)
        assert self._tables.local is not None
        layout, local = self._tables.layout, self._tables.local
        far = [distinct(k[~local[k % layout.n_shards]]) for k in keys]
        if self._row_coder is not None and not whole:
            return self._fetch_compressed([np.sort(wanted) for wanted, _, _ in far], self._row_coder)
        owners = [self._shard_server[wanted % layout.n_shards] for wanted, _, _ in far]
        replies = {}
        for s in range(len(self.session.servers)):
            asked = [np.ascontiguousarray(w[o == s]) for (w, _, _), o in zip(far, owners, strict=True)]
            if any(map(len, asked)):
                replies[s] = self.client.send(s, PullRows(self.session.generation), asked, pull=True)
        rows = [np.empty((len(w), g.dim), np.float32) for (w, _, _), g in zip(far, layout.groups, strict=True)]
        for s, future in replies.items():
            frames = self._result(future.result).frames
            for number, group in enumerate(layout.groups):
                rows[number][owners[number] == s] = np.frombuffer(frames[number], np.float32).reshape(-1, group.dim)
        return [RemoteRows(wanted, slots, values) for (wanted, _, slots), values in zip(far, rows, strict=True)]

    def _fetch_compressed(self, wanted: list[np.ndarray], coder: RowCoder) -> list[RemoteRows | None]:
        layout = self._tables.layout
        owners = [self._shard_server[w % layout.n_shards] for w in wanted]
        replies = {}
        for s in range(len(self.session.servers)):
            asked = [w[o == s] for w, o in zip(wanted, owners, strict=True)]
            if any(map(len, asked)):
                body = PullRows(self.session.generation, _told(coder.spec))
                replies[s] = asked, self.client.send(s, body, list(map(write_keys, asked)), pull=True)
        rows = [np.zeros((len(w), g.dim), np.float32) for w, g in zip(wanted, layout.groups, strict=True)]
        for s, (asked, future) in replies.items():
            try:
                found = row_push.take(self._result(future.result).frames, asked, coder, layout)
            except BadMessage as error:
                raise worker_lost(f"server {s} sent rows that are none: {error}") from error
            for number, part in enumerate(found):
                rows[number][owners[number] == s] = part
        return [RemoteRows(w, distinct(w)[2], r) for w, r in zip(wanted, rows, strict=True)]

    def use_rows(self, rows: list[RemoteRows | None]) -> None:
        self._tables.remote = rows

    def pull(self, keys: Sequence[np.ndarray]) -> None:
        """To judge with: as in allreduce mode, but no collective."""
        self.use_rows(self.fetch_rows(keys, whole=True))

    def await_rows(self, step: int) -> None:
        """Rows are the newest there are; nobody waits."""

    # --- pushes ------------------------------------------------------------------------------------------------------

    def push(
        self, lease: GivenLease, rows: Sequence[Sequence[RowGrad]], loss: float | None, seconds: float, refused: str,
        drop: bool = False,
    ) -> None:  # fmt: skip
        """Send the gradients of one micro-batch (dense ones from `dense.flat`) to the servers, and go on.

        refused: what was not finite; then nothing is sent but that. drop: lose it, as a fault would.
        Waits only while `MAX_UNDER_WAY` earlier pushes are on the way.
        """
        self._raise_failure()
        if not self._under_way.acquire(timeout=self._timeout_s):
            self._raise_failure()
            raise worker_lost(f"the servers took no gradient for {self._timeout_s:.0f} s")
        if drop:
            self._under_way.release()
            return
        done = Done(self.worker, self.session.generation, lease.micro, lease.serial, loss, seconds, refused)
        if refused:
            self._report(done)
            return
        try:
            dense = self._dense_frames()
            frames = [[d.data, m] for d, m in zip(dense, self._row_messages(rows), strict=True)]
        except NonFiniteGradient as error:  # with its residual, which stays
            self._report(Done(self.worker, done.generation, done.micro, done.serial, loss, seconds, str(error)))
            return
        if self.saved_residual is not None and self._coded is not None:
            frames[self.own_server].append(self.saved_residual.rest.copy())
        waiting = [len(frames)]
        for s, (sent, part) in enumerate(zip(dense, frames, strict=True)):
            rows_coded = self._row_coder is not None and bool(self._is_far[s])
            body = Push(
                self.worker, done.generation, done.micro, done.serial, self._dense_step[s], sent.coded, rows_coded,
                sent.whole,
            )  # fmt: skip
            if self._coded is not None:
                self._note_answer(future := self.client.send(s, body, part), s, sent, self._coded)
            else:
                future = self.client.send(s, body, part)
            future.add_done_callback(lambda f: self._pushed(f.result, waiting, done))

    def _note_answer(self, future: Future[Reply], server: int, frame: Frame, coded: DensePush) -> None:
        """How long it takes until the server has this frame, if it takes it."""
        sent_s = time.perf_counter()

        def answered(told: Future[Reply]) -> None:
            if told.exception() is None and isinstance(told.result().body, Ok):
                coded.answered(server, frame, time.perf_counter() - sent_s)

        future.add_done_callback(answered)

    def _dense_frames(self) -> list[Frame]:
        """For each server its dense slice. Raises NonFiniteGradient."""
        flat = self._dense.flat.detach().cpu().numpy()
        if self.slim is not None:
            flat = self.slim.outgoing(flat, max(self._dense_step))
        if self._coded is None:
            return [Frame(np.concatenate([flat[at] for at in s]) if s else flat[:0].copy()) for s in self._slices]
        dense = self._coded.frames(flat.copy())
        if self._compression is not None:
            self._compression.decisions += self._coded.decisions
            self._coded.decisions.clear()
        return dense

    def _row_messages(self, rows: Sequence[Sequence[RowGrad]]) -> list[Any]:
        """For each server its row message."""
        contributors = self.session.row_average == "contributors"
        grads = []
        for group, parts in zip(self._tables.layout.groups, rows, strict=True):
            none = RowGrad(np.empty(0, np.int64), np.empty((0, group.dim), np.float32))
            grad = merge([(part, 1.0) for part in parts]) if parts else none
            grads.append(with_contributors(grad) if contributors else grad)
        n_servers = len(self.session.servers)
        message, words = pack_by_owner(grads, self._shard_server, n_servers)
        messages: list[Any] = np.split(message, np.cumsum(words)[:-1])
        if self._row_coder is not None:
            with self._row_coding:  # threads that share a replica share its residuals
                self._row_coder.begin()
                for s in np.flatnonzero(self._is_far):
                    own = unpack(messages[s], [g.values.shape[1] for g in grads])
                    messages[s] = row_push.pack(own, self._row_coder)
                self._row_coder.settle()  # as with dense gradients: what is sent is final, whatever becomes of the push
        return messages

    def _pushed(self, result: Callable[[], Reply], waiting: list[int], done: Done) -> None:
        """One server answered (on the client's thread); after the last one the coordinator hears of it."""
        if waiting[0] < 0:
            return  # another server settled it
        try:
            body = result().body
        except ServerLost as error:
            waiting[0] = -1
            self._fail(error)
            return
        if isinstance(body, Refused):
            if body.kind != "NotFinite":
                waiting[0] = -1
                self._fail(GbaError(f"a server refused a gradient: {body.why}"))
                return
            done = Done(done.worker, done.generation, done.micro, done.serial, done.loss, done.seconds, body.why)
        waiting[0] -= 1
        if waiting[0] == 0 or done.refused:
            waiting[0] = -1
            self._report(done)

    def _report(self, done: Done) -> None:
        def reported(result: Callable[[], Reply]) -> None:
            try:
                body = result().body
                if isinstance(body, Ok) and body.position is not None:
                    self._take_position(body.position)
                elif isinstance(body, Refused):
                    self._failure = self._failure or GbaError(body.why)
            except ServerLost as error:
                self._failure = self._failure or error
            self._under_way.release()

        self.client.send(0, done).add_done_callback(lambda f: reported(f.result))

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._under_way.release()

    def give_up(self, why: str) -> None:
        """From another thread: the next request of the training thread raises this."""
        self._failure = self._failure or GbaError(why)

    def rest(self) -> None:
        """Return when no thread of this worker computes a micro-batch, but for the one that asks."""

    def flush(self) -> None:
        """Return when nothing of this worker is on the way."""
        for _ in range(MAX_UNDER_WAY):
            if not self._under_way.acquire(timeout=self._timeout_s):
                raise worker_lost(f"the servers took no gradient for {self._timeout_s:.0f} s")
        for _ in range(MAX_UNDER_WAY):
            self._under_way.release()
        self._raise_failure()

    def judged(self) -> contextlib.AbstractContextManager[None]:
        """While this lasts the model has the values that an evaluation judges."""
        return contextlib.nullcontext()

    # --- evaluations -------------------------------------------------------------------------------------------------

    def ask_to_judge(
        self, epoch: int, ordinal: int, n_samples: int, batch: int, exact_limit: int, buffers: bytes
    ) -> tuple[Judged, list[Any]]:
        """A lease on some samples, or the result, or neither. Frame: the buffers to score with."""
        self._request += 1
        body = Evaluate(
            self.worker, self.session.generation, self._request, epoch, ordinal, n_samples, batch, exact_limit
        )
        reply = self._result(self.client.send(0, body, [buffers]).result)
        assert isinstance(reply.body, Judged)
        return reply.body, reply.frames

    def send_scores(self, epoch: int, ordinal: int, lease: GivenLease, logits: np.ndarray, labels: np.ndarray) -> None:
        body = Score(self.worker, self.session.generation, epoch, ordinal, lease.micro, lease.serial)
        self._result(self.client.send(0, body, [np.ascontiguousarray(logits), labels]).result)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def before_save(self) -> None:
        """On the chief: what the servers need to know before they save."""

    @property
    def own_server(self) -> int:
        """The first server of this host."""
        return next(s for s, server in enumerate(self.session.servers) if server.host == self.host)

    def saved_here(self) -> Saved | None:
        """What became of this host's part of the newest checkpoint."""
        reply = self._call(self.own_server, Beat(self.worker, self.rank, self.host, self._pid, 0))
        assert isinstance(reply.body, Ok)
        return None if reply.body.position is None else reply.body.position.saved

    # --- the dense state ---------------------------------------------------------------------------------------------

    def export(self, leaving: bool, ended: bool = True) -> dict[int, DenseState]:
        """Every dense tensor by its number in the model, bit-exact.

        leaving: the servers go idle; ended: all workers are at the epoch's end, or about to leave
        """
        return self._exported(Export(self.session.generation, leaving))

    def _exported(self, request: Export) -> dict[int, DenseState]:
        self._dense_step = [-1] * len(self._parts)  # what workers compute with may be other values than the model's
        futures = [self.client.send(s, request) for s in range(len(self._parts))]
        replies = [self._result(future.result) for future in futures]
        return {t: state for s, reply in enumerate(replies) for t, state in self._unpack(s, reply)}

    def rescue(self, timeout_s: float) -> dict[int, DenseState]:
        """As `export`, what the servers that still answer have. Brings the position up to date, too."""
        asked = [
            self.client.send(s, Export(self.session.generation, False), timeout_s=timeout_s)
            for s in range(len(self._parts))
        ]
        word = self.client.send(0, self._beat(), timeout_s=timeout_s)
        found: dict[int, DenseState] = {}
        for s, future in enumerate((*asked, word)):
            try:
                reply = future.result()
            except ServerLost:
                continue
            if isinstance(reply.body, Exported):
                found |= dict(self._unpack(s, reply))
            elif isinstance(reply.body, Ok) and reply.body.position is not None:
                self._take_position(reply.body.position)
        return found

    def _unpack(self, server: int, reply: Reply) -> Iterator[tuple[int, DenseState]]:
        flat, at = np.frombuffer(reply.frames[0], dtype=np.float32), 0
        for t, state in zip(self._parts[server], state_codec.decode(bytes(reply.frames[1])), strict=True):
            size = self._dense.sizes[t]
            yield t, DenseState(flat[at : at + size], state)
            at += size

    # -----------------------------------------------------------------------------------------------------------------

    def _beat(self) -> Beat:
        if self.hosts_updated and self._world_told is None:
            self._world_told = self.position.world
        elif self._world_told is not None and self.position.world > self._world_told:
            self.hosts_updated, self._world_told = False, None  # heartbeats are not repeated: said until it was heard
        hosts_updated = self.hosts_updated
        generation = self.session.generation
        return Beat(self.worker, self.rank, self.host, self._pid, generation, hosts_updated, leaving=self.leaving)

    def _take_position(self, position: Position) -> None:
        if position.saved is not None:  # the answer to a heartbeat
            self.somebody_leaves = position.leaving
            if position.saved.number:
                self.saved = position.saved
        with self.lock:
            now = self.position
            if (position.epoch, position.step, position.world) >= (now.epoch, now.step, now.world):
                self.position = position

    def _call(self, server: int, body: Any, *, pull: bool = False) -> Reply:
        return self._result(self.client.send(server, body, pull=pull).result)

    def _result(self, result: Callable[[], Reply]) -> Reply:
        try:
            reply = result()
        except ServerLost as error:
            raise worker_lost(str(error)) from error
        if isinstance(reply.body, Refused):
            if reply.body.kind in ("mismatch", "failed"):  # forming the world anew would not mend it
                raise StateMismatch(reply.body.why)
            raise worker_lost(f"a server refused: {reply.body.why}")
        return reply

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise worker_lost(str(self._failure)) from self._failure


class Ahead(Generic[_Item]):
    """Fetches the next item while this one is computed, and no earlier than needed.

    A lease that waits in a worker's hands grows stale, most of all in a slow worker's. So the next one is asked for
    when the current one should soon be done, going by how long the last ones took.
    """

    def __init__(self, fetch: Callable[[], _Item], clock: Callable[[], float] = time.monotonic) -> None:
        self._fetch, self._clock = fetch, clock
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._item: _Item | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._computing_s = self._fetching_s = 0.0
        self._handed_s: float | None = None
        self._thread: threading.Thread | None = None

    def next(self) -> _Item:
        """The next item; waits for it. Raises what fetching it raised."""
        now = self._clock()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gba-hvd leases", daemon=True)
            self._thread.start()
        with self._changed:
            if self._handed_s is not None:
                took = now - self._handed_s
                self._computing_s = took if not self._computing_s else 0.7 * self._computing_s + 0.3 * took
            self._due_s = now
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._item is not None or self._error is not None)
            if self._error is not None:
                raise self._error
            item, self._item = self._item, None
            assert item is not None
            self._handed_s = self._clock()
            margin = 2 * self._fetching_s + 0.1 * self._computing_s
            self._due_s = self._handed_s + max(0.0, self._computing_s - margin) if self._computing_s else None
            self._changed.notify_all()
            return item

    def fail(self, error: BaseException) -> None:
        """From another thread: nothing more is fetched, and `next` raises this, also if it waits already."""
        with self._changed:
            self._error, self._closed = self._error or error, True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait_until_due():
                started = self._clock()
                item = self._fetch()
                with self._changed:
                    took = self._clock() - started
                    self._fetching_s = took if not self._fetching_s else 0.7 * self._fetching_s + 0.3 * took
                    self._item, self._due_s = item, None
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _wait_until_due(self) -> bool:
        with self._changed:
            while not self._closed:
                if self._item is None and self._due_s is not None:
                    left = self._due_s - self._clock()
                    if left <= 0:
                        return True
                    self._changed.wait(left)
                else:
                    self._changed.wait()
            return False


def _log_refusal(told: Future[Reply]) -> None:
    if told.exception() is None and isinstance(body := told.result().body, Refused):
        log.warning("a server does not know what this worker has not sent: %s", body.why)


def _told(spec: Spec) -> Compressor:
    """How a worker tells a server of its compressor."""
    return Compressor(spec.selector, spec.keep, spec.refresh_every, spec.drift, spec.values)
