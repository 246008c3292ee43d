"""DCT-MP: activations above a threshold travel, their gradients by the same mask; bags are pooled by their hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gba_hvd
from gba_hvd import BadInput, Bag, Compression
from gba_hvd.compression import activation_codec as coding
from gba_hvd.compression.activation_codec import ActivationThresholds
from gba_hvd.compression.activation_exchange import ActivationExchange
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.compression.sparse_message import BadMessage
from gba_hvd.compression.spec import Spec
from gba_hvd.embedding import bags as pooling
from gba_hvd.embedding.bags import Borrowed, FieldBags, PoolRequest
from gba_hvd.embedding.joined_tables import keys_by_group
from gba_hvd.embedding.row_gradients import RowGrad, unpack
from gba_hvd.ps.client import Reply
from gba_hvd.ps.messages import Endpoint, ProtocolError, PullRows, Push, Rows
from gba_hvd.ps.partition import compressed_frames
from gba_hvd.ps.worker.push_encoder import PushEncoder
from gba_hvd.ps.worker.remote_rows import RemoteRows
from gba_hvd.ps.worker.session import DenseParts, PsSession, compressor_of
from gba_hvd.shm.layout import Layout
from tests.unit.compression.test_row_exchange import rows_of, train
from tests.unit.conftest import Clicks
from tests.unit.embedding.test_accesses import counted
from tests.unit.thread_world import Workers

S, DIM, FIRST = 3, 4, 300  # shards; of rows; the first key of an activation
OWNER = np.array([-1, 0, 1])  # of each shard: this worker, and two others


def a_field(seed: int, n_samples: int, weights: bool = False, mean: bool = False) -> FieldBags:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, n_samples)
    keys, offsets = rng.integers(0, 60, lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])
    factors = rng.normal(size=len(keys)).astype(np.float32) if weights else None
    if mean:
        share = np.repeat(np.float32(1) / np.maximum(lengths, 1).astype(np.float32), lengths)
        factors = share if factors is None else factors * share
    bag = Bag(torch.from_numpy(keys), torch.from_numpy(offsets[:-1]))
    return FieldBags("user", bag, keys.astype(np.int64), offsets.astype(np.int64), factors)


def pooled(
    keys: np.ndarray, offsets: np.ndarray, factors: np.ndarray | None, rows: dict[int, np.ndarray]
) -> np.ndarray:
    """By hand."""
    out = np.zeros((len(offsets) - 1, DIM))
    for b in range(len(out)):
        for i in range(offsets[b], offsets[b + 1]):
            out[b] += (1 if factors is None else factors[i]) * rows[int(keys[i])]
    return out


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_what_the_owners_pool_and_what_is_left_make_the_same_sums(weights: bool, mean: bool) -> None:
    fields = [(0, a_field(0, 7, weights, mean)), (0, a_field(1, 7)), (1, a_field(2, 5, weights, mean))]
    table = np.random.default_rng(3).normal(size=(60, DIM)).astype(np.float32)
    rows = {key: table[key] for key in range(60)}
    left, requests, activations = pooling.split(fields, OWNER, 2, FIRST)
    for who, (request, keys) in enumerate(zip(requests, activations, strict=True)):
        again, read = coding.read_request(coding.write_request(np.arange(3), request), FIRST)
        assert again.tolist() == [0, 1, 2]
        for field in dataclasses.fields(PoolRequest):
            assert np.array_equal(getattr(read, field.name), getattr(request, field.name)), field.name
        assert (OWNER[request.distinct % S] == who).all() and (OWNER[keys % S] == who).all()
        assert len(keys) == request.n_bags and (keys >= FIRST).all()
        rows |= dict(zip(keys.tolist(), request.pool(table[request.distinct]), strict=True))
    for (_, field), one in zip(fields, left, strict=True):
        assert (OWNER[one.keys[one.keys < FIRST] % S] < 0).all(), "rows of others stay there"
        np.testing.assert_allclose(
            pooled(one.keys, one.offsets, one.factors, rows),
            pooled(field.keys, field.offsets, field.factors, rows), rtol=1e-5, atol=1e-5,
        )  # fmt: skip


def test_an_activation_s_gradient_reaches_each_row_of_its_bag_and_a_micro_batch_counts_once() -> None:
    """Two samples of one micro-batch have row 4, one of another; the last column counts contributors."""
    offsets, number = np.array([0, 2, 3, 5]), np.array([0, 1, 0, 0, 2], np.int32)
    factors = np.array([1, 2, 3, 4, 5], np.float32)
    request = PoolRequest(np.array([4, 7, 10]), number, offsets, factors, np.array([0, 0, 1], np.int32))
    grads = np.array([[1, 10, 1], [2, 20, 1], [3, 30, 1]], np.float32)
    found = request.spread(np.arange(3), grads, extra=1)
    assert found.keys.tolist() == [4, 7, 10]
    assert found.values.tolist() == [[1 + 6 + 12, 190, 2], [2, 20, 1], [15, 150, 1]]
    some = request.spread(np.array([1]), grads[1:2], extra=1)
    assert (some.keys.tolist(), some.values.tolist()) == ([4], [[6, 60, 1]])


@pytest.mark.parametrize("extra", [0, 1])
def test_activations_above_the_threshold_travel_and_gradients_come_back_by_the_same_mask(extra: int) -> None:
    """The rule by hand: K-th largest |a|; nothing is added of what an earlier step did not send."""
    rng, spec = np.random.default_rng(0), Compression.dct_mp(0.25, refresh_every=2)
    keys, thresholds = np.arange(0, 60, 3), ActivationThresholds(spec, 1)
    for step in range(4):
        activations = (1 + step) * rng.normal(size=(20, DIM)).astype(np.float32)
        if step % 2 == 0:  # L = 2
            least = np.sort(np.abs(activations).ravel())[-20]
        (places,) = thresholds.masks(0, [activations])
        mask = np.abs(activations) >= least
        seen, received = coding.decode(coding.encode(activations, places, spec), 20, DIM)
        assert np.array_equal(seen, np.where(mask, activations, 0)) and np.array_equal(received, places)
        grads = rng.normal(size=(20, DIM + extra)).astype(np.float32)
        shuffled = rng.permutation(20)[:15]
        sent = coding.write_back(
            Borrowed(keys, pooling.NOTHING, places), RowGrad(keys[shuffled], grads[shuffled]), spec, DIM
        )
        back = coding.read_back(sent, coding.lent(keys, pooling.NOTHING, places), DIM, extra)
        used = np.sort(shuffled)
        assert np.array_equal(back.keys, keys[used])
        expected = np.hstack([np.where(mask, grads[:, :DIM], 0), grads[:, DIM:]])[used]
        assert np.array_equal(back.values, expected)


def test_with_everything_kept_zeros_and_what_is_not_finite_travel_too() -> None:
    activations = np.array([[0, 1, np.nan, np.inf]], np.float32)
    for spec in (Compression.dct_mp(1.0), Compression.dct_mp(0.5)):
        (places,) = ActivationThresholds(spec, 1).masks(0, [activations])
        assert {2, 3} <= set(places.tolist())
        assert spec.keep < 1 or places.tolist() == [0, 1, 2, 3]


def three_tables() -> Layout:
    return Layout.of({"user": (20, DIM), "item": (7, DIM), "wide": (5, 2 * DIM)}, (), 3, seed=0, init_std=0.1)


def test_a_table_s_own_threshold_is_of_its_rows_and_its_bags() -> None:
    """By hand: the K-th largest |a| of each table, of two askers together; one of all takes the table of large rows."""
    layout, rng = three_tables(), np.random.default_rng(4)
    first_item = layout.groups[0].first[1] * layout.n_shards
    users, items = np.arange(8), first_item + np.arange(4)
    of_items = PoolRequest(
        items[:2], np.array([0, 1, 1], np.int32), np.array([0, 2, 3]), np.empty(0, np.float32), np.zeros(2, np.int32)
    )
    asked = [(np.concatenate([users, items]), of_items), (users[:3], pooling.NOTHING)]
    of_table = [np.array([0] * 8 + [1] * 6), np.zeros(3, int)]
    parts = [np.where(t == 0, 100, 1)[:, None] * rng.normal(size=(len(t), DIM)).astype(np.float32) for t in of_table]
    spec = Compression.dct_mp(0.25, per_table=True)
    found = ActivationThresholds(spec, len(layout.tables)).masks_of(layout, 0, asked, parts)
    for table, kept in ((0, 11), (1, 6)):  # a quarter of 11 and of 6 rows
        least = np.sort(np.abs(np.concatenate([p[t == table] for p, t in zip(parts, of_table, strict=True)])).ravel())
        for part, tables, places in zip(parts, of_table, found, strict=True):
            mask = np.zeros(part.size, bool)
            mask[places] = True
            mask = mask.reshape(part.shape)
            assert np.array_equal(mask[tables == table], np.abs(part[tables == table]) >= least[-kept])
            assert places.dtype == np.int32 and (np.diff(places) > 0).all()
    together = Compression.dct_mp(0.25)
    shared = ActivationThresholds(together, len(layout.tables)).masks_of(layout, 0, asked, parts)
    assert sum((of_table[0][places // DIM] == 1).sum() for places in shared[:1]) == 0, "nothing of the small rows"


def test_thresholds_of_tables_age_apart() -> None:
    layout, spec = three_tables(), Compression.dct_mp(0.5, 2, per_table=True)
    thresholds, users = ActivationThresholds(spec, len(layout.tables)), np.arange(2)
    items = layout.groups[0].first[1] * layout.n_shards + users
    ones = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)

    def sent(keys: np.ndarray, activations: np.ndarray) -> int:
        return len(thresholds.masks_of(layout, 0, [(keys, pooling.NOTHING)], [activations])[0])

    assert [sent(users, ones), sent(users, 10 * ones)] == [4, 8]  # the second by the first's threshold
    assert [sent(items, ones), sent(users, 10 * ones), sent(items, 10 * ones)] == [4, 4, 8]
    assert thresholds.masks_of(layout, 0, [], []) == []
    (none,) = thresholds.masks_of(layout, 1, [(users[:0], pooling.NOTHING)], [np.empty((0, 2 * DIM), np.float32)])
    assert len(none) == 0


def test_a_bag_without_a_value_is_refused() -> None:
    _, (request, _), _ = pooling.split([(0, a_field(0, 9))], OWNER, 2, FIRST)
    offsets = np.append(request.offsets, request.offsets[-1])
    empty = dataclasses.replace(request, offsets=offsets, micro=np.append(request.micro, request.micro[-1]))
    with pytest.raises(BadMessage, match="do not fit"):
        coding.read_request(coding.write_request(np.arange(3), empty), FIRST)


def test_masked_gradients_take_few_bytes() -> None:
    """No positions come back: the mask is known."""
    rng, spec = np.random.default_rng(0), Compression.dct_mp(0.05).then(Compression.int8)
    keys, activations = np.arange(0, 60_000, 3), rng.normal(size=(20_000, DIM)).astype(np.float32)
    (places,) = ActivationThresholds(spec, 1).masks(0, [activations])
    back = coding.write_back(Borrowed(keys, pooling.NOTHING, places), RowGrad(keys, activations), spec, DIM)
    assert len(places) == 4_000 and len(back) < 1.1 * 4_000


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda m: m.clear(), "head of|messages in one"),
        (lambda m: m.__delitem__(slice(-5, None)), "bytes"),
        (lambda m: m.extend(b"\0\0\0\0\0\0"), "bytes"),
    ],
)
def test_a_request_that_is_none_is_refused(damage: Callable[[bytearray], object], words: str) -> None:
    _, (request, _), _ = pooling.split([(0, a_field(0, 9))], OWNER, 2, FIRST)
    message = bytearray(coding.write_request(np.arange(3), request))
    damage(message)
    with pytest.raises(BadMessage, match=words):
        coding.read_request(message, FIRST)


def test_bags_that_do_not_fit_their_rows_are_refused() -> None:
    _, (request, _), _ = pooling.split([(0, a_field(0, 9))], OWNER, 2, FIRST)
    far = dataclasses.replace(request, number=request.number + len(request.distinct))
    late = dataclasses.replace(request, micro=np.arange(request.n_bags, 0, -1, dtype=np.int32))
    for bad in (far, late):
        with pytest.raises(BadMessage, match="do not fit"):
            coding.read_request(coding.write_request(np.arange(3), bad), FIRST)


# --- what a user writes ----------------------------------------------------------------------------------------------


def test_the_published_rule_goes_by_the_paper_unless_asked_otherwise() -> None:
    assert str(Compression.dct_mp(0.05)) == "dct_mp(keep=0.05, refresh_every=1000)"
    assert str(Compression.dct_mp(0.05, drift=2.0)) == "dct_mp(keep=0.05, refresh_every=1000, drift=2)"
    assert Compression.by_name("dct_mp", eta=0.95, refresh_every=100) == Compression.dct_mp(0.05, 100)
    by_table = Compression.by_name("dct_mp", per_table=True)
    assert str(by_table) == "dct_mp(keep=0.05, refresh_every=1000, per_table)" and by_table != Compression.dct_mp()
    assert compressed_frames._spec_of(compressor_of(by_table)) == by_table, "as servers of other hosts get it"


def test_a_threshold_of_each_table_is_of_dct_mp_only() -> None:
    with pytest.raises(BadInput, match="'ternary_ef' has no setting 'per_table'"):
        Compression.by_name("ternary_ef", per_table=True)
    for selector, given in (("dct", True), ("dct_mp", 1)):
        with pytest.raises(BadInput, match="per_table is true or false, and true of dct_mp only"):
            Spec(selector, per_table=given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"row_compression": Compression.dct(0.02)}, r"dct_mp for the published.*ternary_ef\(keep=0.02\)"),
        ({"row_compression": "dct"}, "dct_mp for the published"),
        ({"row_compression": Compression.dct_mp}, r"row_compression=dct_mp lacks its settings"),
        ({"compression": Compression.dct_mp(0.1)}, "a rule for rows: write it as row_compression="),
        ({"compression": "ternary_ef"}, "a rule for rows"),
    ],
)
def test_a_name_that_is_another_rule_s_is_refused(training: Any, arguments: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        training(**arguments)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eta": 0.9, "keep": 0.1}, "one of them"),
        ({"eta": 1.0}, "eta is the share"),
        ({"eta": -0.1}, "eta is the share"),
    ],
)
def test_eta_is_the_share_that_is_not_sent(settings: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Compression.by_name("dct", **settings)


@pytest.mark.parametrize(
    "make", [Compression.topk, Compression.dct, Compression.dct_mp, Compression.ternary_ef], ids=lambda m: m.__name__
)
def test_each_rule_takes_the_paper_s_eta_in_place_of_keep_and_refuses_both(make: Any) -> None:
    assert make(eta=0.75) == make(keep=0.25) == make(0.25)
    with pytest.raises(BadInput, match=r"eta=0\.9 and keep=0\.05: give one of them, keep is 1 - eta"):
        make(0.05, eta=0.9)
    with pytest.raises(BadInput, match="eta is the share"):
        make(eta=1.5)


def test_weights_that_ask_for_a_gradient_are_refused(make_tables: Any) -> None:
    tables, weights = make_tables({"user": (20, 4)}), torch.ones(2, requires_grad=True)
    bag = Bag(torch.tensor([3, 4]), torch.tensor([0, 1]), weights)
    tables({"user": bag})
    tables.pools_bags = True
    with pytest.raises(BadInput, match="row_compression=dct_mp pools rows"):
        tables({"user": bag})


# --- in a job --------------------------------------------------------------------------------------------------------


class BagClicks(Clicks):
    """`Clicks` whose users are bags of none to three, with weights."""

    def __init__(self, n: int, weighted: bool) -> None:
        super().__init__(n)
        rng = np.random.default_rng(5)
        self.users = [rng.integers(0, 20, rng.integers(0, 4)) for _ in range(n)]
        self.weights = [rng.random(len(some)).astype(np.float32) for some in self.users]
        self.weighted = weighted

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        batch = super().take(rows)
        offsets = np.concatenate([[0], np.cumsum([len(self.users[row]) for row in rows])[:-1]])
        weights = torch.from_numpy(np.concatenate([self.weights[row] for row in rows])) if self.weighted else None
        values = torch.from_numpy(np.concatenate([self.users[row] for row in rows]).astype(np.int64))
        ids: dict[str, Tensor | Bag] = {**batch.ids, "user": Bag(values, torch.from_numpy(offsets), weights)}
        return dataclasses.replace(batch, ids=ids)


def same_model(jobs: list[Any], others: list[Any], atol: float) -> None:
    for name, rows in rows_of(jobs).items():
        np.testing.assert_allclose(rows, rows_of(others)[name], atol=atol, rtol=atol, err_msg=name)
    for name, values in jobs[0].all_dense().items():
        np.testing.assert_allclose(values, others[0].all_dense()[name], atol=atol, rtol=atol, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("row_average", ["global", "contributors"])
@pytest.mark.parametrize("data", ["single", "bags", "weighted bags"])
@pytest.mark.parametrize("hosts", ["ab", "abc", "aba"])
def test_with_everything_kept_it_trains_the_same_model(
    workers: Workers, on_host: Any, clicks: Any, hosts: str, data: str, row_average: str
) -> None:
    spec = Compression.dct_mp(1.0).always()
    jobs = [on_host(host, row_compression=spec, row_average=row_average) for host in hosts]
    plain = [on_host(host.upper(), row_average=row_average) for host in hosts]
    dataset = clicks(50) if data == "single" else BagClicks(50, data == "weighted bags")
    for some in (jobs, plain):
        workers.together(some, lambda job: train(job, dataset, 2))
    same_model(jobs, plain, 1e-5)


@pytest.mark.slow
def test_equal_bags_of_several_micro_batches_are_trained_and_counted_each(workers: Workers, on_host: Any) -> None:
    """A worker takes them for one: what is pooled for the first is looked up for all."""
    dataset = BagClicks(50, False)
    dataset.users = [np.array([3, 4, 5, 4])] * 50
    jobs = [
        on_host(host, row_compression=Compression.dct_mp(1.0).always(), row_average="contributors") for host in "ab"
    ]
    plain = [on_host(host, row_average="contributors") for host in "AB"]
    for some in (jobs, plain):
        for job in some:
            job.tables.counts_accesses = True
        workers.together(some, lambda job: train(job, dataset, 1))
    same_model(jobs, plain, 1e-5)
    for job, other in zip(jobs, plain, strict=True):
        assert counted(job)["user"].tolist() == counted(other)["user"].tolist()


@pytest.mark.slow
def test_a_step_may_have_more_bags_than_the_tables_have_rows(workers: Workers, on_host: Any) -> None:
    """What the memory between the workers of a host has room for follows from the rows."""
    sizes: Any = {"global_batch": 1200, "micro_batch": 400}
    jobs = [on_host(host, row_compression=Compression.dct_mp(1.0).always(), **sizes) for host in "aab"]
    plain = [on_host(host.upper(), **sizes) for host in "aab"]
    for some in (jobs, plain):
        workers.together(some, lambda job: train(job, BagClicks(1200, False), 1))
    same_model(jobs, plain, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["single", "bags"])
@pytest.mark.parametrize("per_table", [False, True])
def test_rows_of_the_other_host_get_the_masked_gradient_and_no_more(
    workers: Workers, on_host: Any, clicks: Any, per_table: bool, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An element below the threshold is trained by its own host only; what is sent is what the mask has."""
    jobs = [on_host(host, row_compression=Compression.dct_mp(0.3, 4, per_table=per_table).always()) for host in "ab"]
    seen: list[tuple[int, int, int]] = []
    pull = ActivationExchange.pull

    def noting(self: ActivationExchange, keys: Any, bags: Any) -> None:
        pull(self, keys, bags)
        for taken in self._taken.values():
            for number, borrowed in enumerate(taken):
                rows = self._tables.remote[number]
                assert rows is not None
                mask = np.zeros(len(borrowed.keys) * rows.values.shape[1], bool)
                mask[borrowed.indices] = True
                at = np.isin(rows.keys, borrowed.keys)
                assert not rows.values[at].ravel()[~mask].any() and rows.values[at].ravel()[mask].all()
                seen.append((number, borrowed.request.n_bags, len(borrowed.indices)))

    monkeypatch.setattr(ActivationExchange, "pull", noting)
    workers.together(jobs, lambda job: train(job, clicks(50) if data == "single" else BagClicks(50, False), 2))
    assert any(n for _, _, n in seen) and any(n for _, n, _ in seen) is (data == "bags")
    density = jobs[0].state.engine.model.row_coder.density
    assert all(0 <= share < 1 for share in density) and any(density), density


def test_a_bag_that_the_model_changes_is_refused(workers: Workers, on_host: Any) -> None:
    jobs = [on_host(host, row_compression=Compression.dct_mp(1.0).always()) for host in "ab"]

    def other_bags(job: Any) -> None:
        for batch in gba_hvd.batches(BagClicks(50, False), job.state):
            bag = batch.ids["user"]
            job.model(dataclasses.replace(batch, ids={**batch.ids, "user": Bag(bag.values.flip(0), bag.offsets)}))

    with pytest.raises(Exception, match="bags unchanged: with row_compression=dct_mp"):
        workers.together(jobs, other_bags)


# --- servers ---------------------------------------------------------------------------------------------------------


class Servers:
    """Answers what a worker's client sends, from the memory of some tables."""

    def __init__(self, tables: gba_hvd.EmbeddingTables, shard_servers: np.ndarray) -> None:
        self.tables, self.shard_servers = tables, shard_servers
        self.pulls = [compressed_frames.RowPulls() for _ in range(int(shard_servers.max()) + 1)]

    def send(self, server: int, request: PullRows, frames: list[Any], pull: bool) -> Future[Reply]:
        assert pull and self.tables.memory is not None
        mine = self.shard_servers == server
        reported = compressed_frames.encode_rows(
            self.tables.memory, mine, request, [bytearray(one) for one in frames], self.pulls[server]
        )
        future: Future[Reply] = Future()
        future.set_result(Reply(Rows(), list(reported)))
        return future


@pytest.mark.parametrize("row_average", ["global", "contributors"])
@pytest.mark.parametrize("keep", [1.0, 0.4])
@pytest.mark.parametrize("data", ["single", "bags", "weighted bags"])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("per_table", [False, True])
def test_servers_pool_and_their_pushes_reach_the_rows(
    make_tables: Any,
    per_table: bool,
    counted: bool,
    data: str,
    keep: float,
    row_average: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One server on this host, two on others, of which one is bypassed: what the servers get is the gradient."""
    sizes, shard_servers = {"user": (20, 4), "item": (7, 3)}, np.array([0, 1, 2, 1])
    tables, whole = (make_tables(sizes, n_shards=4, mode={"user": "mean"}) for _ in range(2))
    places = tuple(Endpoint(host, 0, "", 0, 0) for host in range(3))
    session = PsSession(
        1, "gba", "job", b"", places, tuple(shard_servers.tolist()), (0,), row_average, accesses=counted
    )
    tables.counts_accesses = whole.counts_accesses = counted
    tables.pools_bags, coder = True, RowCoder(Compression.dct_mp(keep, per_table=per_table).always(), [4, 3])
    fetcher = RemoteRows(session, 0, tables, Servers(whole, shard_servers), coder)  # type: ignore[arg-type]
    monkeypatch.setattr(fetcher, "are_coded", lambda server: server == 2)
    dataset = Clicks(12) if data == "single" else BagClicks(12, data == "weighted bags")
    ids = dataset.take(np.arange(12)).ids
    tables.remote = fetcher.fetch(keys_by_group(tables, [ids]), False, tables.bag_lookups([ids]))
    scale = {name: torch.randn(12, dim) for name, (_, dim) in sizes.items()}
    outs = tables(ids), whole(ids)
    for name, values in outs[0].items():
        assert torch.allclose(values, outs[1][name], atol=1e-6) is (keep == 1), name
    for out in outs:
        torch.cat([(out[name] * scale[name]).flatten() for name in sizes]).sum().backward()
    grads, expected = tables.take_gradients(), whole.take_gradients()
    parts = DenseParts(len(session.servers), session.dense_servers, [1])
    out_of = PushEncoder(session, 0, parts, tables.layout, None, coder, lambda server: server == 2)
    messages = out_of.rows(grads, tables.remote)
    assert [is_coded for _, is_coded in messages] == [False, False, True]
    extra = int(row_average == "contributors")
    dims = [group.dim + extra for group in tables.layout.groups]
    for server, (message, is_coded) in enumerate(messages):
        words = np.asarray(message)
        if is_coded:
            part: Any = SimpleNamespace(
                enter=SimpleNamespace(row_average=row_average, accesses=counted), most_bytes=1 << 20
            )
            request = Push(1, 7, 0, 0, rows_compressed=True, rows_masked=True)
            frame = compressed_frames.decompress_push(part, tables.layout, request, [b"", message])[1]
            words = np.frombuffer(frame, np.float32)
            part.most_bytes = 20
            with pytest.raises(ProtocolError, match="when opened"):
                compressed_frames.decompress_push(part, tables.layout, request, [b"", message])
        for number, got in enumerate(unpack(words, dims, counted)):
            (plain,) = expected[number]
            of_server = np.flatnonzero(shard_servers[plain.keys % 4] == server)
            assert sorted(got.keys) == sorted(plain.keys[of_server])
            if counted:
                assert got.accesses is not None and plain.accesses is not None
                lookups = dict(zip(plain.keys.tolist(), plain.accesses.tolist(), strict=True))
                assert got.accesses.tolist() == [lookups[key] for key in got.keys.tolist()]
            if extra:
                assert (got.values[:, -1] == 1).all(), "one micro-batch"
            wanted = plain.values[of_server[np.argsort(plain.keys[of_server])]]
            values = got.values[np.argsort(got.keys), : wanted.shape[1]]
            if keep == 1 or not is_coded:
                np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)
            elif data == "single":
                assert ((values == 0) | np.isclose(values, wanted)).all() and (values == 0).any()
            else:
                assert not np.allclose(values, wanted)
