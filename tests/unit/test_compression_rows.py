"""Rows between hosts: what is asked for comes, gradients go back under the same mask, and bad messages are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd import Compression
from gba_hvd.compression import rows as coding
from gba_hvd.compression.message import BadMessage
from gba_hvd.compression.rows import Lent, RowCoder
from gba_hvd.errors import BadInput
from gba_hvd.gradients import RowGrad
from tests.unit.thread_world import Workers

SPECS = [
    Compression.none,
    Compression.fp16,
    Compression.bf16,
    Compression.int8,
    Compression.dct(0.25),
    Compression.topk(0.25).then(Compression.int8),
    Compression.dct(1.0),
]


def lend_and_borrow(spec: Any, n: int, dim: int, seed: int = 0) -> tuple[RowCoder, np.ndarray, np.ndarray, Lent, Lent]:
    rng = np.random.default_rng(seed)
    keys = np.sort(rng.choice(10_000, n, replace=False)).astype(np.int64)
    rows = rng.normal(size=(n, dim)).astype(np.float32)
    owner, asker = RowCoder(spec, [dim]), RowCoder(spec, [dim])
    sent, lent = owner.lend(0, keys, rows)
    got, borrowed = asker.borrow(sent, keys, dim)
    return asker, rows, got, lent, borrowed


@given(st.sets(st.integers(0, 2**62), max_size=80), st.integers(0, 3))
def test_keys_come_back(keys: set[int], near: int) -> None:
    wanted = np.array(sorted(key >> (20 * near) for key in keys), dtype=np.int64)
    wanted = np.unique(wanted)
    assert np.array_equal(coding.read_keys(coding.write_keys(wanted), 2**62 + 1), wanted)


def test_near_keys_take_a_byte_or_two() -> None:
    keys = np.sort(np.random.default_rng(0).choice(1_000_000, 20_000, replace=False)).astype(np.int64)
    assert len(coding.write_keys(keys)) < 1.2 * len(keys)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("n", "dim"), [(0, 8), (1, 8), (50, 8), (33, 6)])
def test_rows_arrive_and_both_sides_know_which_elements_did(spec: Any, n: int, dim: int) -> None:
    _, rows, got, lent, borrowed = lend_and_borrow(spec, n, dim)
    sent = np.ones(rows.size, bool) if lent.places is None else np.isin(np.arange(rows.size), lent.places)
    assert not got.reshape(-1)[~sent].any()
    largest = np.abs(rows).max(initial=0)
    np.testing.assert_allclose(got.reshape(-1)[sent], rows.reshape(-1)[sent], rtol=4e-3, atol=largest / 250)
    if lent.places is not None and n:
        assert np.abs(rows.reshape(-1)[sent]).min() >= np.abs(rows.reshape(-1)[~sent]).max(initial=0)
    if lent.places is not None and borrowed.places is not None:
        assert np.array_equal(lent.places, borrowed.places)
    assert lent.n_elements == borrowed.n_elements


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_gradients_go_back_for_the_elements_that_were_lent(spec: Any, extra: int, share: float) -> None:
    asker, rows, _, lent, borrowed = lend_and_borrow(spec, 40, 8)
    rng = np.random.default_rng(1)
    used = rng.permutation(np.flatnonzero(rng.random(40) < share))
    keys = np.concatenate([lent.keys[used], [20_000]])  # and a row of another owner
    values = rng.normal(size=(len(keys), 8 + extra)).astype(np.float32)
    values[:, 8:] = 1 + rng.integers(0, 5, (len(keys), extra))
    back = RowCoder(spec, [8]).take_back(asker.give_back(borrowed, RowGrad(keys, values)), lent, extra)
    order = np.argsort(lent.keys[used])
    assert np.array_equal(back.keys, lent.keys[used][order])
    sent = np.ones(rows.size, bool) if lent.places is None else np.isin(np.arange(rows.size), lent.places)
    expected = values[:-1][order]
    expected[:, :8] *= sent.reshape(40, 8)[used][order]
    np.testing.assert_allclose(back.values, expected, rtol=4e-3, atol=np.abs(values[:, :8]).max() / 250)
    assert np.array_equal(back.values[:, 8:], expected[:, 8:])


def test_rows_and_gradients_take_a_twentieth_of_the_bytes() -> None:
    n, dim = 5_000, 16
    rng = np.random.default_rng(0)
    keys = np.sort(rng.choice(500_000, n, replace=False)).astype(np.int64)
    coder = RowCoder(Compression.dct(0.1).then(Compression.int8), [dim])
    sent, lent = coder.lend(0, keys, rng.normal(size=(n, dim)).astype(np.float32))
    back = coder.give_back(lent, RowGrad(keys, rng.normal(size=(n, dim)).astype(np.float32)))
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
    asker, rows, _, lent, borrowed = lend_and_borrow(Compression.dct(0.25), 40, 8)
    message = bytearray(asker.give_back(borrowed, RowGrad(lent.keys[::2], rows[::2])))
    damage(message)
    with pytest.raises(BadMessage, match=words):
        asker.take_back(message, lent)


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


def rows_of(jobs: list[Any]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for job in jobs:
        ready = job.tables.memory.marks().ready
        for name, rows in job.all_rows().items():
            here = ready[np.arange(len(rows)) % len(ready)] == 1
            found.setdefault(name, np.full_like(rows, np.nan))[here] = rows[here]
    return found


@pytest.mark.parametrize("row_average", ["global", "contributors"])
@pytest.mark.parametrize("hosts", ["ab", "aba", "abc"])
@pytest.mark.parametrize("spec", [Compression.dct(1.0), Compression.fp16, Compression.int8], ids=str)
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


def test_only_elements_that_travelled_are_trained(workers: Workers, on_host: Any, clicks: Any) -> None:
    spec = Compression.dct(0.3, refresh_every=10**6, drift=10**6)
    jobs = [on_host(host, row_compression=spec) for host in "ab"]
    workers.together(jobs, lambda job: job.state.sync())
    before = rows_of(jobs)
    workers.together(jobs, lambda job: train(job, clicks(50), 1))
    after, sent = rows_of(jobs), jobs[0].state.engine.traffic.so_far()
    assert any((after[name] != before[name]).any() for name in before)
    assert sent["sent", "allreduce", "rows"] > 0 and sent["received", "allreduce", "header"] > 0
    assert all(0 < density < 1 for density in jobs[0].state.engine.mode.row_exchange.coder.density)


def test_rows_are_never_bypassed_so_always_is_refused(on_host: Any) -> None:
    with pytest.raises(BadInput, match="is never bypassed"):
        on_host("a", row_compression=Compression.int8.always())


def test_bytes_of_rows_are_fewer(workers: Workers, on_host: Any, clicks: Any) -> None:
    n_bytes = {}
    for spec, hosts in ((Compression.none, "ab"), (Compression.fp16, "cd")):
        jobs = [on_host(host, row_compression=spec) for host in hosts]
        workers.together(jobs, lambda job: train(job, clicks(50), 1))
        n_bytes[spec] = jobs[0].state.engine.traffic.so_far()
    plain, half = n_bytes.values()
    assert half["sent", "allreduce", "header"] < plain["sent", "allreduce", "header"]
