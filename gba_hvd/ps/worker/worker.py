"""`PsWorker`: one worker in an asynchronous mode, its requests and pushes. See the package for the flow."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from gba_hvd.comm.collectives import World, worker_lost
from gba_hvd.comm.wait_notices import AGAIN_S, Patience
from gba_hvd.compression.dense_exchange import DenseExchange
from gba_hvd.compression.dense_push import Frame
from gba_hvd.compression.error_feedback import Feedback, NonFiniteResidual
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.embedding.bags import BagLookups
from gba_hvd.embedding.passes import PulledRows
from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import GbaError, NonFiniteGradient
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.metrics.accumulators import Frames, Part
from gba_hvd.ps import messages
from gba_hvd.ps.client import Client, Reply
from gba_hvd.ps.worker import dense_export
from gba_hvd.ps.worker.dense_values import DenseValues
from gba_hvd.ps.worker.heartbeat import Heartbeat
from gba_hvd.ps.worker.push_encoder import PushEncoder
from gba_hvd.ps.worker.push_window import PushOnTheWay, PushWindow
from gba_hvd.ps.worker.remote_rows import RemoteRows
from gba_hvd.ps.worker.replies import Disagreement, request, wait_reply
from gba_hvd.ps.worker.session import DenseParts, DenseState, PsSession
from gba_hvd.ps.worker.source_names import SourceNames

_ANSWER_S, _POLL_S = 2.0, 0.05  # at the end of training, of the coordinator

log = logging.getLogger("gba_hvd")


class PsWorker:
    """One worker's asynchronous mode. Start with `start()`; `close()` may be called twice.

    Owns the client and what goes through it; uses, but does not own, the tables and the dense gradients.

    model_step: the oldest step among the dense values in the model; -1: none came from servers yet
    """

    def __init__(
        self, session: PsSession, worker: int, rank: int, host: int, pid: int, tables: EmbeddingTables,
        dense: DenseGradients, timeout_s: float, compression: DenseExchange | None = None,
        row_coder: RowCoder | None = None,
    ) -> None:  # fmt: skip
        assert tables.memory is not None
        tables.on_device.applies = False
        self.session, self.name, self.worker, self.host = session, session.mode, worker, host
        self._tables, self._dense, self._timeout_s, self._folder = tables, dense, timeout_s, tables.memory.folder
        self.contact = Heartbeat(worker, rank, host, pid, session.generation)
        self.client = Client(session.job, session.key, session.servers, host, self._folder, timeout_s)
        self.source_names = SourceNames(self.client, self.contact, worker, session.generation)
        self.client.beat, self.client.on_position = self.contact.message, self._on_heartbeat_reply
        self.saved_residual: Feedback | None = None  # where checkpoints are made: what this worker has not sent
        # For pushes: a step, and this worker's learning rates and changed settings since.
        self.rates: tuple[int, list[float], list[dict[str, messages.GroupSetting]]] = (-1, [], [])
        self._request, self.model_step = 0, -1
        if not any(session.remote_servers(host)):
            compression = None
        self._parts = DenseParts(len(session.servers), session.dense_servers, dense.sizes)
        self._remote_rows = RemoteRows(session, host, tables, self.client, row_coder)
        self._values = DenseValues(session, worker, self._parts, dense, self.client, compression)
        self.outgoing = PushEncoder(
            session, host, self._parts, tables.layout, compression, row_coder, self._remote_rows.are_coded
        )
        self._rows_are_masked = row_coder is not None and row_coder.spec.pools
        self._push_window = PushWindow(self.client, timeout_s, self.contact.on_reply)

    def _on_heartbeat_reply(self, position: messages.JobPosition) -> None:
        self.contact.on_reply(position)
        self.source_names.on_reply(position)

    def start(self) -> None:
        self.client.start()
        self._values.open(self.host, self._folder)

    def save_residual(self, feedback: Feedback) -> None:
        """From here on the server of this host, if it has one, knows what this worker has not sent. Before the first
        lease.
        """
        if self.own_server is None:  # checkpoints count the worker as one whose residual is missing
            return
        self.saved_residual = feedback
        residual = feedback.residual.copy() if feedback.residual.any() else feedback.residual[:0]
        pending = self.client.send(self.own_server, messages.Residual(self.worker, self.session.generation), [residual])
        pending.add_done_callback(_log_refusal)

    def close(self, finished: bool = True) -> None:
        """finished: training or the mode is over; otherwise this worker alone leaves, to be replaced."""
        self._tables.while_saved = contextlib.nullcontext
        self.client.finished = finished
        self.client.close()
        self._values.close()

    def all_left_together(self, world: World) -> bool:
        """Whether all workers resume in this world of Horovod's. A collective, which fails where one has left it."""
        return bool(world.gather("mode left", np.array([True], dtype=np.int64)).all())

    def leave_together(self, patience_s: float) -> None:
        """Training is over for this worker: return when it is for all, or after a while.

        This host's server goes with its last worker, and workers of other hosts may still fetch from it what they end
        with.
        """
        if not any(self.session.remote_servers(self.host)):
            return
        worker, self.client.beat = self.contact.message().worker, None  # a heartbeat would report that it is back
        deadline, notices = time.monotonic() + patience_s, Patience()
        with contextlib.suppress(Exception):  # the coordinator is gone, and with it the wait for the others
            wait_reply(self.client.send(0, messages.Leave(worker, finished=True), timeout_s=_ANSWER_S))
            while time.monotonic() < deadline:
                reply = wait_reply(self.client.send(0, messages.Status(), timeout_s=_ANSWER_S)).body
                others = reply.report.get("by_worker") if isinstance(reply, messages.StatusReport) else None
                if not others:
                    time.sleep(2 * _POLL_S)  # others must receive it, too
                    return
                if (waited_s := notices.word(True, time.monotonic())) is not None:
                    log.log(
                        logging.INFO if waited_s < AGAIN_S else logging.WARNING,
                        "training is over for this worker, which has waited %.0f s for rank %s: the server of its host "
                        "ends with it, and others may still fetch rows there. Nothing need be done: it ends with the "
                        "last of them, or after %.0f s more",
                        waited_s, ", ".join(str(one["rank"]) for one in others), deadline - time.monotonic(),
                    )  # fmt: skip
                time.sleep(_POLL_S)

    def drain_metrics(self) -> tuple[dict[str, float], list[str]]:
        """Gauges of what this mode does in the background, and what went wrong there, since this was asked last."""
        return {}, []

    def before_world_leaves(self) -> None:
        """From another thread: Horovod's world is about to be left."""

    def after_world_forms(self, world: World) -> None:
        """From another thread: a new world was formed."""

    @property
    def position(self) -> messages.JobPosition:
        """Where the job stands, as last received by this worker."""
        return self.contact.position

    # --- leases ------------------------------------------------------------------------------------------------------

    def ask(
        self, epoch: int, segment: int, order: int, n_samples: int, lrs: Sequence[float], lrs_step: int,
        stop: Callable[[], bool], settings: Sequence[dict[str, messages.GroupSetting]] = (),
    ) -> messages.LeaseReply:  # fmt: skip
        """A lease, or "finished" or "drained". Waits while there is nothing to do but the epoch is not over.

        order: the digest of the samples in their order, the same on all workers.
        lrs: learning rates of the dense groups and of the rows, as this worker has them since step `lrs_step`.
        stop: asked now and then; true gives up waiting ("wait").
        settings: of the dense groups, changed since the mode began, as of the same step.
        """
        self._raise_failure()
        self._request += 1
        body = messages.LeaseRequest(
            self.worker, self.session.generation, self._request, epoch, n_samples, list(lrs), lrs_step,
            segment, order, list(settings),
        )  # fmt: skip
        while True:
            try:
                reply = request(self.client, 0, body)
            except Disagreement as error:
                raise self.source_names.explained(error) from None
            assert isinstance(reply.body, messages.LeaseReply)
            self.contact.on_reply(reply.body.position)
            if reply.body.status != "wait" or stop():
                return reply.body
            self._raise_failure()  # the thread that waits here asks no other server

    def refresh_dense_(self) -> int:
        """Bring the model's dense parameters to the newest values; returns the oldest step among them."""
        self.model_step = self._values.refresh_()
        return self.model_step

    @property
    def dense_steps(self) -> list[int]:
        """By server, the step of the dense values that are in the model."""
        return list(self._values.steps)

    @property
    def several_hosts(self) -> bool:
        """Some rows are on another host."""
        return self._remote_rows.are_there

    def fetch_rows(
        self, keys: Sequence[np.ndarray], whole: bool = False, bags: BagLookups | None = None
    ) -> list[PulledRows | None]:
        """Rows of other hosts, per group the keys that will be used next. For `use_rows`.

        whole: uncompressed, even where rows are compressed otherwise; no gradients follow. bags: see `EpochRun.bags`
        """
        return self._remote_rows.fetch(keys, whole, bags)

    def use_rows(self, rows: list[PulledRows | None]) -> None:
        self._tables.remote = rows

    def pull(self, keys: Sequence[np.ndarray]) -> None:
        """For an evaluation: as in allreduce mode, but no collective."""
        self.use_rows(self.fetch_rows(keys, whole=True))

    # --- pushes ------------------------------------------------------------------------------------------------------

    def push(
        self, lease: messages.LeaseGrant, rows: Sequence[Sequence[RowGrad]], loss: float | None, seconds: float,
        refused: str, drop: bool = False,
    ) -> str:  # fmt: skip
        """Send the gradients of one micro-batch (dense ones from `dense.flat`) to the servers, and return.

        refused: what was not finite; then nothing is sent but that. drop: lose it, as a fault would.
        Waits only while `MAX_IN_FLIGHT` earlier pushes are on the way.

        Returns what is not finite with the residual added, and still to be reported, or nothing. Raises
        NonFiniteResidual when the residual itself is not finite: every push of this worker would be refused. After this
        or any other exception, such as Ctrl-C, the push is on its way, or as if it had never begun: see `push_window`.
        """
        self._raise_failure()
        push = PushOnTheWay()
        try:
            if not self._push_window.enter(push):
                self._raise_failure()
                raise self._took_nothing()
            if drop:
                self._push_window.abort(push)
                return ""
            step, lrs, settings = self.rates
            done = messages.PushDone(
                self.worker, self.session.generation, lease.micro, lease.serial, loss, seconds, refused, lrs, step,
                min(self._values.steps), settings=settings,
            )  # fmt: skip
            if refused:
                self._push_window.report(push, done)
                return ""
            return self._send_push(push, rows, done)
        except BaseException:
            self._push_window.abort(push)
            raise

    def _send_push(self, push: PushOnTheWay, rows: Sequence[Sequence[RowGrad]], done: messages.PushDone) -> str:
        """Returns and raises as `push`."""
        try:
            dense = self._dense_frames()
            row_messages = self.outgoing.rows(rows, self._tables.remote)
            frames = [[d.data, message] for d, (message, _) in zip(dense, row_messages, strict=True)]
        except NonFiniteGradient as error:  # with its residual, which stays
            why = f"worker of rank {self.contact.rank}, micro-batch {done.micro}: {error}"
            if isinstance(error, NonFiniteResidual):
                raise NonFiniteResidual(why) from error
            log.warning("%s; nothing of it is sent, and the residual stays", why)
            what = str(error).removesuffix(" is not finite")
            self._push_window.report(push, msgspec.structs.replace(done, refused=what))
            return what
        if self.saved_residual is not None and self.own_server is not None and self.outgoing.has_residual:
            frames[self.own_server].append(self.saved_residual.residual.copy())
        answered = self._push_window.answers(push, len(frames), done)
        for s, (sent, part) in enumerate(zip(dense, frames, strict=True)):
            body = messages.Push(
                self.worker, done.generation, done.micro, done.serial, self._values.steps[s], sent.coded,
                row_messages[s][1], sent.whole, row_messages[s][1] and self._rows_are_masked,
            )  # fmt: skip
            self.client.send(s, body, part, on_reply=self.outgoing.timed(s, sent, answered))
        return ""

    def _dense_frames(self) -> list[Frame]:
        """For each server its dense slice. Raises NonFiniteGradient."""
        return self.outgoing.dense(self._dense.flat.detach().cpu().numpy(), max(self._values.steps))

    def abandon(self, why: str) -> None:
        """From another thread: the next request of the training thread raises this."""
        self._push_window.fail(GbaError(why))

    def quiesce(self) -> None:
        """Return when no thread of this worker computes a micro-batch, but for the one that asks."""

    def flush(self) -> None:
        """Return when nothing of this worker is on the way."""
        if not self._push_window.drain():
            raise self._took_nothing()
        self._raise_failure()

    def _took_nothing(self) -> Exception:
        return worker_lost(f"the servers took no gradient for {self._timeout_s:.0f} s")

    def _raise_failure(self) -> None:
        failure = self._push_window.failure
        if failure is not None:
            raise worker_lost(str(failure)) from failure

    def evaluation_values(self) -> contextlib.AbstractContextManager[None]:
        """While this lasts the model has the values for an evaluation."""
        return contextlib.nullcontext()

    # --- evaluations -------------------------------------------------------------------------------------------------

    def request_evaluation(
        self, epoch: int, ordinal: int, n_samples: int, batch: int, parts: Sequence[Part], buffers: bytes
    ) -> tuple[messages.EvaluationReply, list[Any]]:
        """A lease on some samples, or the result, or neither. Frame: the buffers to score with."""
        self._request += 1
        body = messages.Evaluate(
            self.worker, self.session.generation, self._request, epoch, ordinal, n_samples, batch, list(parts)
        )
        reply = wait_reply(self.client.send(0, body, [buffers]))
        assert isinstance(reply.body, messages.EvaluationReply)
        return reply.body, reply.frames

    def send_scores(self, epoch: int, ordinal: int, lease: messages.LeaseGrant, parts: Sequence[Frames]) -> None:
        """What was measured on the samples of a lease, of each part its frames."""
        body = messages.Score(self.worker, self.session.generation, epoch, ordinal, lease.micro, lease.serial)
        frames = [np.ascontiguousarray(frame) for some in parts for frame in some]
        wait_reply(self.client.send(0, body, frames))

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def before_save(self) -> None:
        """On the chief: what the servers need to know before they save."""

    @property
    def own_server(self) -> int | None:
        """The first server of this host; None where it has none: it came while the mode was on."""
        return next((s for s, server in enumerate(self.session.servers) if server.host == self.host), None)

    def saved_here(self) -> messages.SaveStatus | None:
        """Status of this host's part of the newest checkpoint. Only where `own_server` is one."""
        assert self.own_server is not None
        reply = request(self.client, self.own_server, self.contact.question())
        assert isinstance(reply.body, messages.Ok)
        return None if reply.body.position is None else reply.body.position.saved

    # --- the dense state ---------------------------------------------------------------------------------------------

    def export(self, leaving: bool, ended: bool = True) -> dict[int, DenseState]:
        """Every dense tensor by its number in the model, bit-exact.

        leaving: the servers go idle; ended: all workers are at the epoch's end, or about to leave; else this one alone
        has left the epoch's loop, and returns its leases
        """
        if not ended:
            reply = request(self.client, 0, messages.ReturnLeases(self.worker, self.session.generation))
            assert isinstance(reply.body, messages.Ok) and reply.body.position is not None
            self.contact.on_reply(reply.body.position)
        return self._exported(messages.Export(self.session.generation, leaving))

    def _exported(self, request: messages.Export) -> dict[int, DenseState]:
        self._values.forget()  # what workers compute with may be other values than the model's
        self.model_step, found = dense_export.export_dense(self.client, request, self._parts)
        return found

    def rescue(self, timeout_s: float) -> dict[int, DenseState]:
        """As `export`, what the servers that still answer have, and what those of this host have published before they
        fell silent. Brings the position up to date, too.
        """
        generation = self.session.generation
        found, position = dense_export.export_from_reachable(
            self.client, generation, self.contact.message(), self._parts, timeout_s
        )
        if len(found) < len(self._parts.sizes):
            servers = self.session.servers
            left, stands = dense_export.left_in_files(self._folder, self.host, servers, self._parts, generation)
            found, position = left | found, position or stands
        if position is not None:
            self.contact.on_reply(position)
        return found


def _log_refusal(pending: Future[Reply]) -> None:
    if pending.exception() is None and isinstance(body := pending.result().body, messages.Refused):
        log.warning("a server does not know what this worker has not sent: %s", body.why)
