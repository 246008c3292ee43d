"""A push of a worker in an asynchronous mode: what is refused before it is sent, and what is left as it was then."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from gba_hvd import Compression, NonFiniteGradient
from gba_hvd.averaging.algorithms import Averaging
from gba_hvd.compression.dense_exchange import DenseExchange
from gba_hvd.compression.error_feedback import NonFiniteResidual
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.embedding.row_gradients import RowGrad, unpack
from gba_hvd.errors import GbaError
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.ps import wire
from gba_hvd.ps.client import Reply
from gba_hvd.ps.messages import Endpoint, JobPosition, LeaseGrant, LeaseReply, Ok, Push, PushDone
from gba_hvd.ps.worker.push_encoder import PushEncoder
from gba_hvd.ps.worker.push_window import PushWindow
from gba_hvd.ps.worker.replica_worker import ReplicaWorker
from gba_hvd.ps.worker.session import DenseParts, PsSession
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.update_rules.dana_slim import SlimWorker
from gba_hvd.update_rules.sgd_momentum import Sgd

HERE, THERE, N = 11, 12, 300
LEASE = LeaseGrant(5, 6, 0, 4)


class Worker:
    """One of rank 3, whose dense tensor `w` is held by the server of another host. Servers take whatever they get."""

    def __init__(self, tables: Any, **replica: Any) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(N))
        self.dense = DenseGradients([self.parameter], 0)
        servers = tuple(Endpoint(host, 0, "", 0, 0) for host in (HERE, THERE))
        name = "shadow" if replica else "gba"
        session = PsSession(1, name, "job", b"", servers, (0,) * tables.layout.n_shards, (1,), "global")
        self.reported: list[Any] = []
        parts = session, 7, 3, HERE, 1, tables, self.dense, 0.05
        self.mode: PsWorker
        if replica:
            self.mode = ReplicaWorker(*parts, is_elastic=False, **replica)
        else:
            self.exchange = DenseExchange(Compression.topk(0.1).always(), ["w"], self.dense)
            self.mode = PsWorker(*parts, self.exchange)
        self.client_send = self.mode.client.send
        self.mode.client.send = self._send  # type: ignore[method-assign]

    def _send(self, server: int, body: Any, frames: Any = (), on_reply: Any = None, **_: Any) -> Future[Reply]:
        self.reported.append(body)
        future: Future[Reply] = Future()
        future.set_result(Reply(Ok(), []))
        if on_reply is not None:
            on_reply(future)
        return future

    def push(self, first: float, **how: Any) -> str:
        """A gradient of ones, but for the first element."""
        self.dense.flat.fill_(1.0)[0] = first
        none: list[Any] = [[] for _ in self.mode._tables.layout.groups]
        return self.mode.push(LEASE, none, 0.5, 0.1, "", **how)


@pytest.fixture
def worker(make_tables: Any) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(**replica: Any) -> Worker:
        made.append(Worker(make_tables({"user": (20, 4)}), **replica))
        return made[-1]

    yield make
    for one in made:
        one.mode.close()


def test_a_gradient_that_overflows_with_its_residual_is_refused_and_named(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    one = worker()
    one.push(2.0)
    assert [type(body) for body in one.reported] == [Push, Push, PushDone]
    rest = one.exchange.feedback.residual
    rest[0] = 3e38
    before = rest.copy()
    with caplog.at_level(logging.WARNING, "gba_hvd"):
        what = one.push(3e38)
    assert what == "the sum of the gradient of w and its residual"
    (done,) = one.reported[3:]
    assert isinstance(done, PushDone) and (done.micro, done.refused) == (5, what), "the coordinator learns of it"
    assert f"worker of rank 3, micro-batch 5: {what} is not finite" in caplog.text
    assert np.array_equal(one.exchange.feedback.residual, before)
    assert one.push(0.0) == "", "the next one takes it along"
    one.mode.flush()


def test_a_worker_of_a_host_without_a_server_pushes_and_leaves_its_residual_out(worker: Callable[..., Worker]) -> None:
    """The host came back while the mode was on."""
    one = worker()
    assert one.mode.own_server == 0
    one.mode.host = 13
    assert one.mode.own_server is None
    one.mode.save_residual(one.exchange.feedback)
    for _ in range(2):
        assert one.push(2.0) == ""
    assert [type(body) for body in one.reported] == [Push, Push, PushDone] * 2, "no Residual"


def test_a_residual_that_is_not_finite_ends_the_worker(worker: Callable[..., Worker]) -> None:
    one = worker()
    one.exchange.feedback.residual[9] = np.nan
    words = "worker of rank 3, micro-batch 5: the residual of w is not finite, .* newest checkpoint"
    with pytest.raises(NonFiniteResidual, match=words):
        one.push(1.0)
    assert not one.reported
    one.mode.flush()  # nothing is on the way


def test_a_momentum_has_no_gradient_that_was_never_sent(worker: Callable[..., Worker]) -> None:
    one = worker()
    sgd = Sgd.of(spec_of(torch.optim.SGD([one.parameter], lr=0.1, momentum=0.9)), np.zeros(N, np.int32))
    one.mode.outgoing.slim = SlimWorker(sgd, np.zeros(N, np.float32), by_step=False)
    one.push(2.0)
    assert one.mode.outgoing.slim._v[0] == 2
    one.exchange.feedback.residual[0] = 3e38
    assert one.push(1e38)
    assert one.mode.outgoing.slim._v[0] == 2
    one.exchange.feedback.residual[0] = np.nan
    with pytest.raises(NonFiniteGradient):
        one.push(1.0)
    assert one.mode.outgoing.slim._v[0] == 2


@pytest.mark.parametrize("drop", [False, True])
def test_a_replica_steps_with_what_is_pushed_only(worker: Callable[..., Worker], drop: bool) -> None:
    """A lost push is of a micro-batch that is computed again: it would count twice."""
    steps: list[float] = []
    one: Worker = worker(
        averaging=Averaging(), world=None, optimizer=None, step_dense=lambda: steps.append(float(one.dense.flat[0]))
    )
    assert one.push(2.0, drop=drop) == ""
    assert steps == ([] if drop else [2.0])
    assert any(isinstance(body, Push) for body in one.reported) is not drop
    assert isinstance(one.mode, ReplicaWorker) and one.mode.replica.n_steps == len(steps)


def test_what_waited_for_rows_that_came_home_goes_along(make_tables: Any) -> None:
    """Compressed once, for the host that held them before."""
    layout = make_tables({"user": (100, 8)}).layout
    session = PsSession(1, "gba", "job", b"", (Endpoint(HERE, 0, "", 0, 0),), (0,) * layout.n_shards, (0,), "global")
    dims = [group.dim for group in layout.groups]
    coder = RowCoder(Compression.topk(0.25), dims)
    keys, gradient = np.arange(3), np.arange(1, 3 * dims[0] + 1, dtype=np.float32).reshape(3, dims[0])
    coder.begin()
    coder.write(0, RowGrad(keys, gradient))
    coder.settle()
    waits = coder._residuals.plus(0, keys, 0 * gradient)
    out = PushEncoder(
        session,
        HERE,
        DenseParts(len(session.servers), session.dense_servers, [N]),
        layout,
        None,
        coder,
        lambda server: False,
    )
    rows: list[list[RowGrad]] = [[RowGrad(keys, gradient)], *([] for _ in dims[1:])]
    for more in (waits, 0 * waits):
        ((message, is_coded),) = out.rows(rows)
        assert not is_coded and np.array_equal(unpack(message, dims)[0].values, gradient + more)
    assert waits.any()


def test_whoever_waits_for_a_lease_learns_that_the_mode_is_given_up(worker: Callable[..., Worker]) -> None:
    """The server that says "wait" waits itself, for one that is gone."""
    one = worker()

    def wait(server: int, body: Any, frames: Any = (), **_: Any) -> Future[Reply]:
        one.mode.abandon("a host came back without the shards it held")
        future: Future[Reply] = Future()
        future.set_result(Reply(LeaseReply(JobPosition(), status="wait"), []))
        return future

    one.mode.client.send = wait  # type: ignore[method-assign]
    with pytest.raises((GbaError, RuntimeError), match="without the shards"):
        one.mode.ask(0, 0, 0, 64, [0.1], 0, lambda: False)


# --- an exception within a push ---------------------------------------------------------------------------------------


class _Servers:
    """Answers what a client that was not started has queued; on a thread of its own, or when asked to."""

    def __init__(self, one: Worker, at_once: bool) -> None:
        one.mode.client.send = one.client_send  # type: ignore[method-assign]
        self._queue, self._at_once, self.asked = one.mode.client._new, at_once, list[tuple[int, Any]]()
        self._nothing: Any = None
        self._thread, self._reached = threading.Thread(target=self._run), threading.Semaphore(0)

    def _answer(self, pending: Any) -> None:
        body = wire.decode_request(wire.open_envelope(pending.message[0], "job"))
        self.asked.append((pending.server, body))
        pending.answer(Reply(Ok(), []))

    def _run(self) -> None:
        while (number := (taken := self._queue.get())[0]) >= 0:
            if number:
                self._answer(taken[1])
            else:
                self._reached.release()

    def __enter__(self) -> _Servers:
        if self._at_once:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._at_once:
            self._queue.put((-1, self._nothing))
            self._thread.join()

    def since_last(self, window: PushWindow) -> list[tuple[int, Any]]:
        """What they were asked, when all of it is answered."""
        while not self._at_once and not self._queue.empty():
            self._answer(self._queue.get()[1])
        assert window.drain()
        if self._at_once:  # parts of a push that was aborted do not count for the window
            self._queue.put((0, self._nothing))
            self._reached.acquire()
        asked, self.asked = self.asked, []
        return asked


def _interrupted(act: Callable[[], object], at: int) -> bool:
    """Raise KeyboardInterrupt where a signal can do it: as the n-th call begins, or when it returns from C."""
    left = at

    def count(frame: object, event: str, of: object) -> None:
        nonlocal left
        left -= event in ("call", "c_return")
        if not left:
            sys.setprofile(None)
            raise KeyboardInterrupt

    try:
        sys.setprofile(count)
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True], ids=["answered afterwards", "answered meanwhile"])
def test_a_push_that_is_interrupted_anywhere_is_reported_once_or_never_and_frees_its_place(
    worker: Callable[..., Worker], at_once: bool
) -> None:
    one, found = worker(), set[tuple[str, ...]]()
    with _Servers(one, at_once) as servers:
        for at in itertools.count(1):
            interrupted = _interrupted(lambda: one.push(2.0), at)
            asked = [type(body).__name__ for _, body in servers.since_last(one.mode._push_window)]
            if not interrupted:
                break
            found.add(tuple(asked))
    assert asked == ["Push", "Push", "PushDone"] and at > 100
    assert found - {("Push", "Push", "PushDone")} <= {(), ("Push",), ("Push", "Push")}
    assert found >= {(), ("Push",)}, "before the first request, and between the two"
    assert one.mode._push_window.failure is None
