"""Rows between hosts: what is asked for comes, gradients go back and nothing of them is lost, bad ones are refused."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd import Compression
from gba_hvd.comm.groups import Group
from gba_hvd.compression import row_codec as coding
from gba_hvd.compression import row_exchange
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.compression.row_exchange import RowExchange
from gba_hvd.compression.row_residuals import RowResiduals
from gba_hvd.compression.sparse_message import BadMessage
from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.modes.allreduce_exchange import AllreduceExchange
from tests.unit.thread_world import EventLog, Workers, miss_a_result, rows_of

SPECS = [
    Compression.none,
    Compression.fp16,
    Compression.bf16,
    Compression.int8,
    Compression.ternary_ef(0.25),
    Compression.topk(0.25).then(Compression.int8),
    Compression.ternary_ef(1.0),
]


def some_rows(n: int, dim: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    keys = np.sort(rng.choice(10_000, n, replace=False)).astype(np.int64)
    return keys, rng.normal(size=(n, dim)).astype(np.float32)


@given(st.sets(st.integers(0, 2**62), max_size=80), st.integers(0, 3))
def test_keys_come_back(keys: set[int], near: int) -> None:
    wanted = np.array(sorted(key >> (20 * near) for key in keys), dtype=np.int64)
    wanted = np.unique(wanted)
    assert np.array_equal(coding.read_keys(coding.write_keys(wanted), 2**62 + 1), wanted)


def test_near_keys_take_a_byte_or_two() -> None:
    keys = np.sort(np.random.default_rng(0).choice(1_000_000, 20_000, replace=False)).astype(np.int64)
    assert len(coding.write_keys(keys)) < 1.2 * len(keys)


@given(st.sets(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5000), max_size=80), st.booleans())
def test_rows_of_a_gradient_are_put_in_the_order_of_their_keys(keys: set[int], are_sorted: bool) -> None:
    expected = sorted(keys, key=lambda key: key % 2**64)
    given_keys = np.array(expected if are_sorted else list(keys), np.int64)
    grad = RowGrad(given_keys, given_keys.astype(np.float32)[:, None] * np.ones(3, np.float32), given_keys.view("u8"))
    found = coding.in_order(grad)
    assert found.keys.tolist() == expected
    assert np.array_equal(found.values[:, 1], found.keys.astype(np.float32))
    assert found.accesses is not None
    assert np.array_equal(found.accesses, found.keys.view("u8"))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("n", "dim"), [(0, 8), (1, 8), (50, 8), (33, 6)])
def test_rows_arrive_whole_or_as_three_levels(spec: Any, n: int, dim: int) -> None:
    _, rows = some_rows(n, dim)
    got = coding.decode_rows(coding.encode_rows(rows, spec), n, dim)
    if spec.selector and spec.keep < 1:
        for row, seen in zip(rows, got, strict=True):
            assert len(set(np.abs(seen[seen != 0]))) <= 1
            assert np.square(row - seen).mean() < 0.6 * np.square(row).mean()
            assert (seen * row >= 0).all()
    else:
        np.testing.assert_allclose(got, rows, rtol=4e-3, atol=np.abs(rows).max(initial=0) / 250)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e4])
def test_three_levels_have_the_size_of_each_row(size: float) -> None:
    rows = np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)
    rows[50], rows[60, 3] = 0, np.nan
    rows *= np.float32(size)
    got = coding.decode_rows(coding.encode_rows(rows, Compression.ternary_ef(0.1)), 200, 16)
    assert not got[50].any() and np.isnan(got[60]).all()
    good = np.arange(200) != 60
    if size > 1e-12:  # below 2^-48 a level is no smaller
        assert np.square(got[good] - rows[good]).mean() < 0.22 * np.square(rows[good]).mean()


@pytest.mark.parametrize("spec", [Compression.none, Compression.fp16, Compression.bf16, Compression.int8], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_has_diverged_does_not_arrive_as_numbers(spec: Any, bad: float) -> None:
    rows = np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)
    rows[60, 3] = bad
    got = coding.decode_rows(coding.encode_rows(rows, spec), 200, 16)
    if spec.values == "int8":  # its elements share a scale
        assert np.isnan(got[60]).all()
    else:
        assert np.array_equal(got[60, 3], bad, equal_nan=True) and np.isfinite(got[60]).sum() == 15
    good = np.arange(200) != 60
    np.testing.assert_allclose(got[good], rows[good], rtol=4e-3, atol=0.02)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_gradients_go_back_and_what_does_not_waits(spec: Any, extra: int, share: float) -> None:
    lent, _ = some_rows(40, 8)
    worker, rng = RowCoder(spec, [8]), np.random.default_rng(1)
    gradients, arrived = np.zeros((40, 8)), np.zeros((40, 8))
    for step in range(6):
        used = rng.permutation(np.flatnonzero(rng.random(40) < share))
        keys = np.concatenate([lent[used], [20_000]])  # and a row of another owner
        values = rng.normal(size=(len(keys), 8 + extra)).astype(np.float32)
        values[:, 8:] = 1 + rng.integers(0, 5, (len(keys), extra))
        worker.begin()
        sent = worker.give_back(0, lent, RowGrad(keys, values))
        back = coding.decode_row_gradients(sent, lent, 8, extra)
        assert np.array_equal(back.keys, np.sort(lent[used]))
        assert np.array_equal(back.values[:, 8:], values[:-1, 8:][np.argsort(lent[used])])
        if step == 3:
            continue  # not decided: as if it had not been
        worker.settle()
        gradients[used] += values[:-1, :8]
        arrived[np.isin(lent, back.keys)] += back.values[:, :8]
    waits = worker._residuals.plus(0, lent, np.zeros((40, 8), np.float32))
    selects = spec.selector and spec.keep < 1
    assert bool(waits.any()) is bool(selects and share)
    tolerance = 1e-5 if selects or spec.values == "none" else 0.1
    np.testing.assert_allclose(arrived + waits, gradients, atol=tolerance)


def test_what_waits_is_forgotten_where_another_row_takes_the_place() -> None:
    residuals, keys, ones = RowResiduals([4], budget_bytes=4 * 24), np.arange(100), np.ones((100, 4), np.float32)
    residuals.keep(0, keys, ones)
    assert np.array_equal(residuals.plus(0, keys, ones), ones), "it is pending"
    residuals.settle()
    there = residuals.plus(0, keys, ones)[:, 0] == 2
    assert 1 <= there.sum() <= 4 and residuals.lost == 4 * (100 - there.sum())
    residuals.keep(0, keys[there], 0 * ones[there])
    residuals.settle()
    assert np.array_equal(residuals.plus(0, keys, ones), ones) and residuals.lost == 4 * (100 - there.sum())


def test_rows_and_gradients_take_a_twentieth_of_the_bytes() -> None:
    n, dim = 5_000, 16
    rng = np.random.default_rng(0)
    keys = np.sort(rng.choice(500_000, n, replace=False)).astype(np.int64)
    coder = RowCoder(Compression.ternary_ef(0.03).then(Compression.int8), [dim])
    sent = coding.encode_rows(rng.normal(size=(n, dim)).astype(np.float32), coder.spec)
    back = coder.give_back(0, keys, RowGrad(keys, rng.normal(size=(n, dim)).astype(np.float32)))
    plain = 2 * n * (8 + 4 * dim)
    assert plain / (len(coding.write_keys(keys)) + len(sent) + len(back)) > 20


@pytest.mark.parametrize(
    ("keys", "words"),
    [(b"\xff" * 20, "no ascending keys"), (b"\x05\x80", "no ascending keys"), (b"\x05" * 30, "no ascending keys")],
)
def test_keys_that_are_none_are_refused(keys: bytes, words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        coding.read_keys(keys, 100)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda m: m.clear(), "a head of"),
        (lambda m: m.pop(), "bytes came"),
        (lambda m: m.__setitem__(0, 9), "bytes came"),
        (lambda m: m.__setitem__(slice(8, 12), struct.pack("<I", 10**6)), "bytes came"),
        (lambda m: m.__setitem__(slice(8, 12), struct.pack("<I", 3)), "there are more than announced"),
    ],
)
def test_gradients_that_do_not_fit_what_was_lent_are_refused(damage: Callable[[bytearray], object], words: str) -> None:
    coder, (lent, rows) = RowCoder(Compression.ternary_ef(0.25), [8]), some_rows(40, 8)
    message = bytearray(coder.give_back(0, lent, RowGrad(lent[::2], rows[::2])))
    damage(message)
    with pytest.raises(BadMessage, match=words):
        coding.decode_row_gradients(message, lent, 8)


def test_messages_in_one_come_apart_again() -> None:
    parts = [b"", b"one", b"and two"]
    assert [bytes(part) for part in coding.split(coding.sections(parts), 3)] == parts
    for bad in (b"\x01", struct.pack("<II", 4, 2**31) + bytes(8)):
        with pytest.raises(BadMessage):
            coding.split(bad, 2)


# --- in a job --------------------------------------------------------------------------------------------------------


def train(job: Any, dataset: Any, epochs: int) -> None:
    for job.state.epoch in range(job.state.epoch, epochs):
        job.epoch(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("row_average", ["global", "contributors"])
@pytest.mark.parametrize("hosts", ["ab", "aba", "abc"])
@pytest.mark.parametrize(
    "spec",
    [Compression.ternary_ef(1.0).always(), Compression.topk(1.0), Compression.fp16.always(), Compression.int8.always()],
    ids=lambda spec: spec.exactly,
)
def test_rows_that_travel_whole_train_the_same_model(
    workers: Workers, on_host: Any, clicks: Any, hosts: str, spec: Any, row_average: str
) -> None:
    jobs = [on_host(host, row_compression=spec, row_average=row_average) for host in hosts]
    plain = [on_host(host.upper(), row_average=row_average) for host in hosts]
    for some in (jobs, plain):
        workers.together(some, lambda job: train(job, clicks(50), 2))
    tolerance = 1e-6 if spec.values == "none" else 0.02
    for name, rows in rows_of(jobs).items():
        np.testing.assert_allclose(rows, rows_of(plain)[name], atol=tolerance, rtol=tolerance, err_msg=name)


@pytest.mark.slow
def test_a_step_that_is_computed_again_finds_what_waited_for_its_rows(
    workers: Workers, on_host: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was sent and what waits are all gradients of rows of other hosts."""
    spec = Compression.topk(0.3).always()
    jobs = [on_host(host, row_compression=spec) for host in "aab"]
    books: dict[Any, dict[int, tuple[float, float]]] = {}
    send = RowExchange.send

    def noting(self: RowExchange, grads: Any, extra: int) -> Any:
        remote = sum(
            float(g.values[np.isin(g.keys, lent)].sum())
            for borrowed in self._borrowed.values()
            for g, lent in zip(grads, borrowed, strict=True)
        )
        received = send(self, grads, extra)
        arrived = sum(float(g.values.sum()) for part in received.values() for g in part)
        job = next(job for job in jobs if job.state.engine.model.row_coder is self.coder)
        books.setdefault(job, {})[job.state.step] = remote, arrived  # of the last attempt
        return received

    monkeypatch.setattr(RowExchange, "send", noting)
    miss_a_result(workers, jobs, 0, 2, lambda job: train(job, clicks(50), 2))
    workers.together(jobs, lambda job: train(job, clicks(50), 2))
    steps = [both for of_job in books.values() for both in of_job.values()]
    assert len(steps) == 8 * len(jobs)
    waits = sum(
        float(residuals.sum()) for job in jobs for residuals in job.state.engine.model.row_coder._residuals._residuals
    )
    assert waits and not any(job.state.engine.model.row_coder.lost for job in jobs)
    np.testing.assert_allclose(sum(a for _, a in steps) + waits, sum(g for g, _ in steps), rtol=1e-4, atol=1e-5)
    assert all(0 < density < 1 for density in jobs[0].state.engine.model.row_coder.density)


class Clock(threading.local):
    """Of each worker, a thread here: it passes by only where something is slow, whatever else the machine does."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.slow
@pytest.mark.parametrize("pays", [True, False])
def test_all_workers_send_rows_the_way_that_pays_and_lose_nothing(
    workers: Workers, on_host: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    """Every gradient of a row of another host arrived, or waits."""
    spec, ways = Compression.topk(0.3), dict[Any, list[bool]]()
    gone, arrived = dict[Any, float](), dict[Any, float]()
    alltoall, exchange, read_timings, lend = (
        Group.alltoall,
        AllreduceExchange.exchange,
        RowExchange.read_timings,
        coding.encode_rows,
    )

    clock = Clock()

    def slow_link(self: Group, name: str, words: Any, splits: Any, expected: Any = None) -> Any:
        clock.pass_by(0.06 * (name == "pull.rows" and expected is not None))  # of whole rows it is known how many come
        return alltoall(self, name, words, splits, expected)

    def slow_coder(rows: np.ndarray, of: Any) -> bytes:
        clock.pass_by(0.03)
        return lend(rows, of)

    def noting(self: AllreduceExchange, step: int, parts: Any, scale: float, lr: float, n_skipped: int) -> None:
        assert self.row_exchange is not None
        coder, is_remote = self.row_exchange.coder, ~self._is_local
        for by_group in parts:
            for grad, weight in by_group:
                remote = grad.values[is_remote[grad.keys % len(is_remote)]]
                gone[coder] = gone.get(coder, 0.0) + weight * float(remote.sum(dtype=np.float64))
        exchange(self, step, parts, scale, lr, n_skipped)
        assert self.held is not None
        for part in self.held.remote.values():
            sums = sum(float(grad.values.sum(dtype=np.float64)) for grad in part)
            arrived[coder] = arrived.get(coder, 0.0) + sums

    def noting_way(self: RowExchange, numbers: Any) -> None:
        ways.setdefault(self.coder, []).append(self.compresses)
        read_timings(self, numbers)

    if pays:
        monkeypatch.setattr(Group, "alltoall", slow_link)
    else:
        monkeypatch.setattr(coding, "encode_rows", slow_coder)
    monkeypatch.setattr(row_exchange, "time", clock)
    monkeypatch.setattr(RowExchange, "read_timings", noting_way)
    monkeypatch.setattr(AllreduceExchange, "exchange", noting)
    jobs, received = [on_host(host, row_compression=spec) for host in "aab"], EventLog()
    jobs[0].state.register_callbacks([received])
    workers.together(jobs, lambda job: train(job, clicks(50), 6))
    first, *others = ways.values()
    assert len(first) == 24 and len(others) == 2 and all(other == first for other in others)
    assert set(first[:12]) == {True, False} and set(first[12:]) == {pays}
    (decision,) = received.of("compression")
    assert ("rows of other hosts go compressed" in decision.message) is pays, decision.message
    waits = sum(
        float(residuals[keys >= 0].sum(dtype=np.float64))
        for job in jobs
        for keys, residuals in zip(
            job.state.engine.model.row_coder._residuals._keys,
            job.state.engine.model.row_coder._residuals._residuals,
            strict=True,
        )
    )
    assert waits and not any(job.state.engine.model.row_coder.lost for job in jobs)
    np.testing.assert_allclose(sum(arrived.values()) + waits, sum(gone.values()), rtol=1e-4, atol=1e-5)


def test_rows_that_go_as_they_are_take_along_what_waits() -> None:
    coder, rng, keys = RowCoder(Compression.topk(0.2), [4]), np.random.default_rng(0), np.arange(30)
    first, second = (rng.normal(size=(30, 5)).astype(np.float32) for _ in range(2))
    coder.begin()
    coder.write(0, RowGrad(keys, first))
    coder.settle()
    waited = coder._residuals.plus(0, keys, np.zeros((30, 4), np.float32))
    for is_decided in (False, True):
        coder.begin()
        (whole,) = coder.whole([RowGrad(keys[:20], second[:20])])
        np.testing.assert_array_equal(whole.values[:, :4], second[:20, :4] + waited[:20])
        np.testing.assert_array_equal(whole.values[:, 4:], second[:20, 4:])
        if is_decided:
            coder.settle()
    waits = coder._residuals.plus(0, keys, np.zeros((30, 4), np.float32))
    assert waited[:20].any() and not waits[:20].any() and np.array_equal(waits[20:], waited[20:])


def test_a_row_that_takes_the_place_of_one_that_went_along_loses_nothing() -> None:
    """One push to two servers, compressed for one of them, whatever comes first."""
    residuals, ones = RowResiduals([4], budget_bytes=2 * 24), np.ones((1, 4), np.float32)
    first, second = next(
        np.array(pair).reshape(2, 1)
        for pair in combinations(range(100), 2)
        if len(set(residuals._slots(0, np.array(pair)).tolist())) == 1
    )
    residuals.keep(0, second, ones)
    residuals.settle()
    residuals.keep(0, first, 3 * ones)
    assert np.array_equal(residuals.taken(0, second, 0 * ones), ones)
    residuals.settle()
    assert np.array_equal(residuals.plus(0, first, 0 * ones), 3 * ones)
    assert not residuals.plus(0, second, 0 * ones).any() and residuals.lost == 0


def test_what_waits_is_counted_as_lost_where_it_is_forgotten() -> None:
    residuals, keys = RowResiduals([4]), np.arange(10)
    residuals.keep(0, keys, np.ones((10, 4), np.float32))
    residuals.settle()
    residuals.lose(0, keys[:2])
    residuals.begin()  # that step was not decided
    assert residuals.lost == 0
    residuals.clear()
    assert residuals.lost == 40 and not residuals.plus(0, keys, np.zeros((10, 4), np.float32)).any()


@pytest.mark.slow
def test_rows_of_a_job_that_shrank_to_one_host_take_along_what_waited(
    workers: Workers, on_host: Any, clicks: Any
) -> None:
    jobs = [on_host(host, row_compression=Compression.topk(0.2).always()) for host in "ab"]
    workers.together(jobs, lambda job: train(job, clicks(50), 1))
    coder = jobs[0].state.engine.model.row_coder
    before = sum(int((keys >= 0).sum()) for keys in coder._residuals._keys)
    jobs[0].state.on_reset()
    workers.together(jobs[:1], lambda job: train(job, clicks(50), 2))
    assert before and sum(int((keys >= 0).sum()) for keys in coder._residuals._keys) < before


@pytest.mark.slow
def test_rows_that_come_home_take_along_what_waited(workers: Workers, on_host: Any, clicks: Any) -> None:
    """A host goes, others take its shards over, and still compress what goes between them."""
    jobs = [on_host(host, row_compression=Compression.topk(0.2).always()) for host in "abc"]
    workers.together(jobs, lambda job: train(job, clicks(50), 1))
    before = [is_local(job) for job in jobs[:2]]
    for job in jobs[:2]:
        job.state.on_reset()
    workers.together(jobs[:2], lambda job: job.state.sync())
    came = [is_local(job) & ~was for job, was in zip(jobs, before, strict=False)]
    waited = [
        job.state.engine.model.row_coder.has_residuals_for(shards) for job, shards in zip(jobs, came, strict=False)
    ]
    assert any(waited), "nothing of rows that came home waited"
    workers.together(jobs[:2], lambda job: train(job, clicks(50), 4))
    for job, shards in zip(jobs, came, strict=False):
        assert not job.state.engine.model.row_coder.has_residuals_for(shards)
        assert job.state.engine.model.row_coder.has_residuals_for(~is_local(job))


def is_local(job: Any) -> np.ndarray:
    return np.asarray(job.state.engine.mode.exchange._is_local)


@pytest.mark.parametrize("selector", [Compression.topk(0.3), Compression.ternary_ef(0.3)], ids=str)
def test_elements_that_are_zero_do_not_travel(selector: Any) -> None:
    coder, rng, keys = RowCoder(selector, [8]), np.random.default_rng(0), np.arange(100)
    grad = np.where(rng.random((100, 8)) < 0.1, rng.normal(size=(100, 8)), 0).astype(np.float32)
    coder.begin()
    sent = coder.write(0, RowGrad(keys, grad))
    coder.settle()
    assert np.array_equal(coding.read(sent, keys, 8, 0).values, grad) and coder.density[0] <= 0.15


def test_thresholds_age_by_steps_however_many_hosts_there_are() -> None:
    coder = RowCoder(Compression.ternary_ef(0.25, refresh_every=3), [8])
    rng, keys = np.random.default_rng(0), np.arange(40)
    found = []
    for _ in range(7):
        coder.begin()
        for _host in range(5):
            coder.write(0, RowGrad(keys, rng.normal(size=(40, 8)).astype(np.float32)))
        coder.settle()
        found.append(coder._thresholds.n_found)
    assert found == [1, 1, 1, 2, 2, 2, 3]


def test_a_row_gradient_that_overflows_with_what_waited_is_seen_where_it_arrives() -> None:
    coder, keys = RowCoder(Compression.topk(0.25), [4]), np.arange(2)
    coder.begin()
    coder.write(0, RowGrad(keys, np.arange(8, dtype=np.float32).reshape(2, 4)))
    coder.settle()
    waited = float(np.abs(coder._residuals.plus(0, keys, np.zeros((2, 4), np.float32))).sum())
    coder.begin()
    sent = coder.write(0, RowGrad(keys, np.full((2, 4), np.inf, np.float32)))
    assert not np.isfinite(coding.read(sent, keys, 4, 0).values).all()
    assert waited and coder.lost == 0, "the step is not decided"
    coder.settle()
    assert coder.lost == pytest.approx(waited)


@pytest.mark.slow
def test_bytes_of_rows_are_fewer(workers: Workers, on_host: Any, clicks: Any) -> None:
    n_bytes = {}
    for spec, hosts in ((Compression.none, "ab"), (Compression.fp16.always(), "cd")):
        jobs = [on_host(host, row_compression=spec) for host in hosts]
        workers.together(jobs, lambda job: train(job, clicks(50), 1))
        n_bytes[spec] = jobs[0].state.engine.traffic.so_far()
    plain, half = n_bytes.values()
    assert half["sent", "allreduce", "header"] < plain["sent", "allreduce", "header"]
