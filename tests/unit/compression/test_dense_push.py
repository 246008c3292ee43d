"""Pushes to servers of other hosts and the values that come back: decoded as they were meant, whatever is repeated."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gba_hvd import Compression
from gba_hvd.compression import dense_push, row_push, sparse_message
from gba_hvd.compression import row_codec as coding
from gba_hvd.compression.bypass import BypassDecision
from gba_hvd.compression.dense_deltas import DenseDeltas
from gba_hvd.compression.dense_push import DensePush, Frame
from gba_hvd.compression.error_feedback import Feedback, spans_of
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.compression.sparse_message import BadMessage
from gba_hvd.embedding.row_gradients import RowGrad, unpack
from gba_hvd.errors import NonFiniteGradient
from gba_hvd.ps.messages import Compressor, ProtocolError, PullDense, Push
from gba_hvd.ps.partition import compressed_frames
from gba_hvd.shm.layout import Layout

SIZES = [300, 5, 400, 2, 256]
NAMES = [f"t{i}" for i in range(len(SIZES))]
ENDS = np.cumsum([0, *SIZES])
PARTS = [[0, 3], [1, 2, 4]]  # by server
LAYOUT = Layout.of({"a": (1000, 8), "b": (50, 6)}, (), 4, 0, 0.01)
SPECS = [
    Compression.dct(0.1),
    Compression.topk(0.1).then(Compression.int8),
    Compression.int8,
    Compression.fp16,
    Compression.dct(1.0),
]


def feedback(spec: Any) -> Feedback:
    return Feedback(spec.always(), NAMES, SIZES, np.dtype(np.float32))


def arrived(frames: list[Frame]) -> np.ndarray:
    """What the servers make of the frames, in the place of each tensor."""
    out = np.zeros(sum(SIZES), np.float32)
    for frame, part in zip(frames, PARTS, strict=True):
        dense = dense_push.read(frame.data, [SIZES[t] for t in part], frame.whole) if frame.coded else frame.data
        at = 0
        for t in part:
            out[ENDS[t] : ENDS[t + 1]] = dense[at : at + SIZES[t]]
            at += SIZES[t]
    return out


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("is_remote", [[True, True], [False, True], [False, False]])
def test_all_pushes_and_the_rest_are_all_gradients(spec: Any, is_remote: list[bool]) -> None:
    worker, rng = feedback(spec), np.random.default_rng(0)
    coder = DensePush(worker, PARTS, is_remote, [])
    gradients, sent = np.zeros(sum(SIZES)), np.zeros(sum(SIZES))
    for _ in range(20):
        grad = rng.normal(size=sum(SIZES)).astype(np.float32)
        gradients += grad
        frames = coder.frames(grad.copy())
        assert [frame.coded for frame in frames] == is_remote
        sent += arrived(frames)
    np.testing.assert_allclose(sent + worker.residual, gradients, rtol=1e-4, atol=1e-4)
    local = [t for part, remote in zip(PARTS, is_remote, strict=True) for t in part if not remote or SIZES[t] < 256]
    for t in local:
        assert not worker.residual[ENDS[t] : ENDS[t + 1]].any()


def test_a_push_that_is_not_sent_takes_nothing() -> None:
    worker, grad = feedback(Compression.topk(0.1)), np.ones(sum(SIZES), np.float32)
    coder = DensePush(worker, PARTS, [True, True], [])
    coder.frames(np.random.default_rng(0).normal(size=sum(SIZES)).astype(np.float32))
    residual = worker.residual.copy()
    grad[ENDS[2]] = np.inf
    with pytest.raises(NonFiniteGradient, match="t2"):
        coder.frames(grad)
    assert np.array_equal(worker.residual, residual)


@pytest.mark.parametrize("network_s_per_mb", [0.0, 1e6])  # the coding is measured: nothing, or all, against it
def test_each_tensor_of_a_push_goes_the_way_that_pays(network_s_per_mb: float) -> None:
    worker, rng, ways = (
        Feedback(Compression.topk(0.1), NAMES, SIZES, np.dtype(np.float32)),
        np.random.default_rng(0),
        [],
    )
    decisions: list[BypassDecision] = []
    coder = DensePush(worker, PARTS, [False, True], decisions)
    gradients, sent = np.zeros(sum(SIZES)), np.zeros(sum(SIZES))
    for _ in range(40):
        grad = rng.normal(size=sum(SIZES)).astype(np.float32)
        gradients += grad
        frames = coder.frames(grad.copy())
        ways.append(frames[1].coded)
        sent += arrived(frames)
        n_bytes = len(memoryview(frames[1].data).cast("B"))
        coder.answered(1, frames[1], 0.001 + network_s_per_mb * n_bytes / 1e6)
    np.testing.assert_allclose(sent + worker.residual, gradients, rtol=1e-4, atol=1e-4)
    (decision,) = decisions
    assert set(ways[:12]) == {True, False} and ways[13] is decision.compress is bool(network_s_per_mb)
    assert "dense gradients for server 1 go" in decision.reason and "a push takes" in decision.reason


def test_a_push_to_each_server_takes_as_long_as_from_one_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers answer one after the other; that says nothing about how often there is a push."""
    now = [100.0]
    monkeypatch.setattr("gba_hvd.compression.dense_push.time.perf_counter", lambda: now[0])
    worker = Feedback(Compression.topk(0.1), NAMES, SIZES, np.dtype(np.float32))
    coder = DensePush(worker, PARTS, [True, True], [])
    for _ in range(6):
        frames = coder.frames(np.ones(sum(SIZES), np.float32))
        for server, frame in enumerate(frames):
            now[0] += 0.001
            coder.answered(server, frame, 0.001)
        now[0] += 0.998
    coder.frames(np.ones(sum(SIZES), np.float32))
    for bypass in coder._bypass:
        np.testing.assert_allclose(bypass._step_s, 1.0)


def test_a_push_says_which_tensors_go_whole() -> None:
    worker, grad = feedback(Compression.topk(0.1)), np.arange(sum(SIZES), dtype=np.float32)
    coder = DensePush(worker, [list(range(len(SIZES)))], [True], [])
    coder._bypass[0]._chosen = (True, False, True)  # of those that can be compressed
    (frame,) = coder.frames(grad.copy())
    assert frame.coded and frame.whole == (2,)
    request = Push(1, 7, 0, 0, compressed=True, whole=frame.whole)
    dense, _ = compressed_frames.decompress_push(part(), LAYOUT, request, [frame.data, b""])
    got = np.frombuffer(dense, np.float32)
    assert np.array_equal(got[ENDS[2] : ENDS[3]], grad[ENDS[2] : ENDS[3]])
    assert 0 < np.count_nonzero(got[: ENDS[1]]) < SIZES[0]
    with pytest.raises(ProtocolError, match="plain"):
        compressed_frames.decompress_push(part(), LAYOUT, Push(1, 7, 0, 0, compressed=True), [frame.data, b""])


# --- the way back -----------------------------------------------------------------------------------------------------


class Worker:
    """One that pulls from a server, as `gba` does."""

    def __init__(self, number: int) -> None:
        self.number, self.step = number, -1
        self.values = np.empty(0, np.float32)

    def take(self, base: int, frame: Any, step: int) -> None:
        if base == -1:
            self.values = frame.copy()
        else:
            assert base == self.step
            dense_push.add_(self.values, frame, SIZES)
        self.step = step


class Server:
    def __init__(self, spec: Any) -> None:
        self.rng, self.step = np.random.default_rng(0), 0
        self.values = self.rng.normal(size=sum(SIZES)).astype(np.float32)
        self.mirrors = DenseDeltas(spec, NAMES, SIZES)

    def train(self) -> None:
        self.step += 1
        self.values += (0.01 * self.rng.standard_t(3, sum(SIZES))).astype(np.float32)

    def answer(self, worker: Worker) -> tuple[int, Any, int]:
        base, frame = self.mirrors.answer(worker.number, worker.step, self.values, self.step)
        return base, frame, self.mirrors.step_of(worker.number)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_mirror_and_worker_stay_equal_and_near_the_server(spec: Any) -> None:
    server, workers = Server(spec), [Worker(1), Worker(2)]
    first = server.values.copy()
    for i in range(100):
        server.train()
        for worker in workers[: 1 + i % 2]:
            worker.take(*server.answer(worker))
            assert np.array_equal(worker.values, server.mirrors._mirrors[worker.number].values)
            if spec == Compression.dct(1.0):  # no compressor
                assert np.array_equal(worker.values, server.values)
    moved = np.abs(server.values - first).mean()
    for worker in workers:
        assert np.abs(worker.values - server.values).mean() < 0.5 * moved
    for t in (1, 3):  # those that are not compressed
        at = slice(ENDS[t], ENDS[t + 1])
        assert np.array_equal(workers[0].values[at], server.values[at]) or server.step > workers[0].step


@pytest.mark.parametrize("spec", [Compression.dct(1.0), Compression.topk(1.0)], ids=str)
def test_keeping_everything_is_no_compressor_on_the_way_back(spec: Any) -> None:
    """The difference to 1 of 1e-9 is no float32 that could be added to it."""
    server, worker = Server(spec), Worker(1)
    for value in (1.0, 1e-9, 3e8, 1.0):
        server.step += 1
        server.values[:] = value
        worker.take(*server.answer(worker))
        assert np.array_equal(worker.values, server.values) and worker.step == server.step


def test_each_worker_has_thresholds_of_its_own() -> None:
    """A slow worker's differences are larger: with a fast one's threshold nearly all of them would be sent."""
    server, (fast, slow) = Server(Compression.dct(0.1, refresh_every=1000, drift=math.inf)), (Worker(1), Worker(2))
    slow.take(*server.answer(slow))
    fast.take(*server.answer(fast))
    for _ in range(20):
        server.train()
        fast.take(*server.answer(fast))
    base, frame, _ = server.answer(slow)
    found = sparse_message.read(frame, spans_of(SIZES, range(len(SIZES)))[1], 7)
    assert base == 0 and found.indices is not None and len(found.indices) == 30 + 40 + 25


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_have_diverged_are_seen_to_have(bad: float) -> None:
    server, worker = Server(Compression.topk(0.1).then(Compression.int8)), Worker(1)
    worker.take(*server.answer(worker))
    server.train()
    server.values[3] = bad
    worker.take(*server.answer(worker))
    assert np.array_equal(worker.values, server.values, equal_nan=True)


def test_when_training_stands_still_the_worker_arrives() -> None:
    server, worker = Server(Compression.topk(0.2)), Worker(1)
    worker.take(*server.answer(worker))
    server.train()
    for _ in range(6):
        worker.take(*server.answer(worker))
        server.step += 1
    np.testing.assert_allclose(worker.values, server.values, atol=1e-6)


def test_an_answer_that_was_lost_comes_again() -> None:
    server, worker = Server(Compression.topk(0.2).then(Compression.int8)), Worker(1)
    worker.take(*server.answer(worker))
    server.train()
    lost = server.answer(worker)
    server.train()
    again = server.answer(worker)
    assert again == lost
    worker.take(*again)
    worker.take(*server.answer(worker))
    assert worker.step == server.step
    assert np.array_equal(worker.values, server.mirrors._mirrors[1].values)


def test_a_request_that_comes_late_leaves_the_mirror_as_it_is() -> None:
    """One that was repeated may come once more, when its worker has long gone on."""
    server, worker = Server(Compression.topk(0.2)), Worker(1)
    for _ in range(4):
        worker.take(*server.answer(worker))
        server.train()
    worker.take(*server.answer(worker))
    late = server.mirrors.answer(worker.number, worker.step - 3, server.values, server.step)
    assert late[0] != -1
    server.train()
    worker.take(*server.answer(worker))
    assert np.array_equal(worker.values, server.mirrors._mirrors[1].values)


def test_a_server_that_restarts_begins_with_all_values() -> None:
    server, worker = Server(Compression.dct(0.1)), Worker(1)
    worker.take(*server.answer(worker))
    server.train()
    worker.take(*server.answer(worker))
    server.mirrors = DenseDeltas(Compression.dct(0.1), NAMES, SIZES)
    server.train()
    base, frame, step = server.answer(worker)
    assert base == -1
    worker.take(base, frame, step)
    assert np.array_equal(worker.values, server.values)


def test_a_worker_that_was_forgotten_gets_all_values() -> None:
    server, workers = Server(Compression.topk(0.1)), [Worker(1), Worker(2)]
    for worker in workers:
        worker.take(*server.answer(worker))
    server.mirrors.forget(1)
    server.mirrors.forget(3)
    server.train()
    assert [server.answer(worker)[0] for worker in workers] == [-1, 0]


def test_a_difference_that_is_none_changes_nothing() -> None:
    values = np.zeros(sum(SIZES), np.float32)
    with pytest.raises(BadMessage):
        dense_push.add_(values, b"nonsense" * 20, SIZES)
    assert not values.any()


# --- at the server ----------------------------------------------------------------------------------------------------


def part() -> Any:
    dense = SimpleNamespace(step=3, shown=np.ones(sum(SIZES), np.float32))
    tensors = [(name, [size], 0) for name, size in zip(NAMES, SIZES, strict=True)]
    return SimpleNamespace(enter=SimpleNamespace(tensors=tensors), dense=dense, mirrors=None)


def test_a_compressed_push_is_opened_before_anything_is_stored() -> None:
    grad = np.random.default_rng(0).normal(size=sum(SIZES)).astype(np.float32)
    coder = DensePush(feedback(Compression.dct(1.0)), [list(range(len(SIZES)))], [True], [])
    frame = coder.frames(grad.copy())[0].data
    dense, rows = compressed_frames.decompress_push(part(), LAYOUT, Push(1, 7, 0, 0, compressed=True), [frame, b"rows"])
    assert np.array_equal(np.frombuffer(dense, np.float32), grad) and rows == b"rows"
    for bad in ([b"nonsense", b"rows"], [frame[:-1], b"rows"], [frame]):
        with pytest.raises(ProtocolError):
            compressed_frames.decompress_push(part(), LAYOUT, Push(1, 7, 0, 0, compressed=True), bad)


def test_a_pull_is_answered_whole_or_as_a_difference() -> None:
    server, compressor = part(), Compressor("topk", 0.5, 1, 2.0, "none")
    assert compressed_frames.answer_pull(server, PullDense(7, 3)) == (compressed_frames.Dense(3), ())
    reported, (frame,) = compressed_frames.answer_pull(server, PullDense(7, -1, 1, compressor))
    assert (reported.step, reported.base) == (3, -1) and len(frame) == sum(SIZES)
    server.dense.step = 4
    reported, (frame,) = compressed_frames.answer_pull(server, PullDense(7, 3, 1, compressor))
    assert (reported.step, reported.base) == (4, 3) and isinstance(frame, bytes)
    reported, (frame,) = compressed_frames.answer_pull(server, PullDense(7, 3))
    assert reported.base == -1


@pytest.mark.parametrize(
    "compressor",
    [
        Compressor("zip", 0.5, 1, 2.0, "none"),
        Compressor("topk", 0.5, 1, 2.0, "int4"),
        Compressor("topk", 0.0, 1, 2.0, "none"),
        Compressor("dct", 0.5, 0, 2.0, "none"),
    ],
)
def test_a_compressor_that_is_none_is_refused(compressor: Compressor) -> None:
    with pytest.raises(ProtocolError, match="no compressor"):
        compressed_frames.answer_pull(part(), PullDense(7, -1, 1, compressor))


def test_a_row_push_that_would_grow_beyond_the_limit_is_refused_before_it_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key of one byte stands for a row of 8 numbers."""
    keys, none = np.arange(900), np.empty(0, np.int64)
    grads = [RowGrad(keys, np.ones((900, 8), np.float32)), RowGrad(none, np.empty((0, 6), np.float32))]
    frame = row_push.pack(grads, RowCoder(Compression.topk(0.1).then(Compression.int8), [8, 6]))
    opened = 4 * (2 + 900 * 10 + 2)
    assert len(frame) < opened / 2
    enter = SimpleNamespace(row_average="global", accesses=False)
    request = Push(1, 7, 0, 0, rows_compressed=True)
    part: Any = SimpleNamespace(enter=enter, most_bytes=opened)
    assert len(compressed_frames.decompress_push(part, LAYOUT, request, [b"", frame])[1]) == opened
    monkeypatch.setattr(row_push.coding, "read_keys", lambda *_: pytest.fail("it was opened"))
    part.most_bytes = opened - 1
    with pytest.raises(ProtocolError, match="when opened"):
        compressed_frames.decompress_push(part, LAYOUT, request, [b"", frame])


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("spec", [Compression.ternary_ef(0.3), Compression.fp16, Compression.int8], ids=str)
def test_row_gradients_arrive_and_what_does_not_waits(spec: Any, extra: int) -> None:
    rng, coder = np.random.default_rng(0), RowCoder(spec, [8, 6])
    asked = [np.sort(rng.choice(200, 30, replace=False)).astype(np.int64), np.empty(0, np.int64)]
    rows = [rng.normal(size=(len(k), g.dim)).astype(np.float32) for k, g in zip(asked, LAYOUT.groups, strict=True)]
    pulled = row_push.take([coding.encode_rows(one, coder.spec) for one in rows], asked, LAYOUT)
    assert [one.shape for one in pulled] == [(30, 8), (0, 6)] and (pulled[0] * rows[0] >= 0).all()
    used = rng.permutation(asked[0])[:20]
    grad = RowGrad(used, np.hstack([rng.normal(size=(20, 8)), np.ones((20, extra))]).astype(np.float32))
    none = RowGrad(np.empty(0, np.int64), np.empty((0, 6 + extra), np.float32))
    coder.begin()
    words = row_push.unpack(row_push.pack([grad, none], coder), LAYOUT, extra, 1 << 20)
    coder.settle()
    got, nothing = unpack(words, [8 + extra, 6 + extra])
    order = np.argsort(used)
    assert np.array_equal(got.keys, used[order]) and not len(nothing.keys)
    waits = coder._residuals.plus(0, used[order], np.zeros((20, 8), np.float32))
    got.values[:, :8] += waits
    np.testing.assert_allclose(got.values, grad.values[order], rtol=1e-3, atol=0.02)
    if spec.selector:
        assert 0.2 < np.count_nonzero(waits == 0) / waits.size < 0.4


def test_a_row_push_that_is_none_is_refused() -> None:
    part = SimpleNamespace(enter=SimpleNamespace(row_average="global", accesses=False), most_bytes=1 << 20)
    for bad in (b"", b"nonsense" * 9):
        with pytest.raises(ProtocolError, match="a compressed push"):
            compressed_frames.decompress_push(part, LAYOUT, Push(1, 7, 0, 0, rows_compressed=True), [b"", bad])  # type: ignore[arg-type]
    with pytest.raises(BadMessage, match="rows of 2 groups were asked for"):
        row_push.take([b""], [np.empty(0, np.int64)] * 2, LAYOUT)
