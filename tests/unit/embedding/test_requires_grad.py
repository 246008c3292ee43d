"""`tables.requires_grad_(False)`, and rates of 0: rows stay as they are, what is around them trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gba_hvd
from gba_hvd.embedding.joined_tables import join_tables
from gba_hvd.errors import BadInput
from tests.unit.thread_world import Workers

DECAYS = gba_hvd.RowAdagrad(lr=0.1, weight_decay=0.1)


def moved(job: Any, dataset: Any) -> set[str]:
    """Tables whose rows an epoch moves."""
    job.state.sync()
    before = job.all_rows()
    job.epoch(dataset)
    return {name for name, rows in job.all_rows().items() if not np.array_equal(rows, before[name])}


def test_frozen_tables_stay_as_they_are_until_they_are_thawed(training: Any, clicks: Any) -> None:
    job, dataset = training(rows=DECAYS, epoch=0), clicks()
    dense = {name: value.clone() for name, value in job.model.state_dict().items()}
    assert job.tables.requires_grad_(False) is job.tables
    assert moved(job, dataset) == set()
    assert all(not torch.equal(value, dense[name]) for name, value in job.model.state_dict().items())
    job.tables.requires_grad_()
    job.state.epoch = 1
    assert moved(job, dataset) == {"user", "item"}


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_frozen_tables_of_several_workers(on_host: Any, workers: Workers, clicks: Any, hosts: str) -> None:
    jobs = [on_host(host, rows=DECAYS) for host in hosts]

    def run(job: Any) -> dict[str, np.ndarray]:
        job.state.sync()
        ids, local = np.arange(20), job.tables.local
        mine = ids if local is None else ids[local[ids % job.tables.layout.n_shards]]
        before = job.tables.rows("user", mine)
        job.tables.requires_grad_(False)
        job.epoch(clicks())
        assert np.array_equal(job.tables.rows("user", mine), before)
        job.tables.requires_grad_()
        job.state.epoch = 1
        job.epoch(clicks())
        assert not np.array_equal(job.tables.rows("user", mine), before)
        return job.all_dense()  # type: ignore[no-any-return]

    one, other = workers.together(jobs, run)
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_workers_of_which_one_has_frozen_tables_are_stopped(on_host: Any, workers: Workers, clicks: Any) -> None:
    jobs = [on_host("a"), on_host("a")]
    jobs[1].tables.requires_grad_(False)
    for result in workers.outcomes(jobs, lambda job: job.epoch(clicks(50))):
        assert isinstance(result, gba_hvd.StateMismatch) and "some workers have tables.requires_grad_(False)" in str(
            result
        )
    assert {job.state.step for job in jobs} == {0}


@pytest.mark.parametrize("how", ["group", "table"])
def test_a_rate_of_0_freezes_rows_that_have_weight_decay(training: Any, clicks: Any, how: str) -> None:
    frozen = gba_hvd.Table(7, 3, optimizer=gba_hvd.RowAdagrad(lr=0.0, weight_decay=0.1))
    job = training(rows=DECAYS, tables={"user": (20, 4), "item": frozen} if how == "table" else None)
    if how == "group":
        job.optimizer.param_groups[-1]["lr"] = 0.0
    assert moved(job, clicks()) == ({"user"} if how == "table" else set())


def lookups(tables: gba_hvd.EmbeddingTables) -> list[Tensor]:
    ids = torch.tensor([1, 2])
    bag = gba_hvd.Bag(torch.tensor([1, 2, 3]), torch.tensor([0, 1]))
    return [tables({"user": ids})["user"], tables({"user": bag})["user"], tables.stacked({"user": ids}),
            tables.stacked({"user": bag})]  # fmt: skip


def test_no_way_to_look_up_frozen_rows_asks_for_a_gradient(make_tables: Any) -> None:
    tables = make_tables({"user": (20, 4)})
    expected = [rows.detach() for rows in lookups(tables)]
    assert all(rows.requires_grad for rows in lookups(tables))
    tables.requires_grad_(False)
    tables.take_gradients()
    found = lookups(tables)
    assert not any(rows.requires_grad for rows in found)
    assert not tables.captured
    assert all(torch.equal(rows, other) for rows, other in zip(found, expected, strict=True))


def weighted(tables: gba_hvd.EmbeddingTables, weights: Tensor) -> Tensor:
    out: Tensor = tables({"user": gba_hvd.Bag(torch.tensor([1, 2, 3]), torch.tensor([0, 1]), weights)})["user"].sum()
    return out


def test_weights_of_bags_train_beside_frozen_rows(make_tables: Any) -> None:
    tables, weights = make_tables({"user": (20, 4)}), nn.Parameter(torch.ones(3))
    weighted(tables, weights).backward()
    expected, weights.grad = weights.grad, None
    tables.drop_gradients()
    tables.requires_grad_(False)
    weighted(tables, weights).backward()
    assert expected is not None and expected.abs().min() > 0
    assert weights.grad is not None
    assert torch.equal(weights.grad, expected)
    with pytest.raises(BadInput, match=r"requires_grad_\(False\), under torch\.compile"):
        tables.compiled_pass({"user": torch.tensor([1])}, train=False, weights_train=True)


def test_one_of_several_tables_is_frozen_by_itself(tmp_path: Any, make_tables: Any) -> None:
    parts = [gba_hvd.EmbeddingTables({name: (20, 4)}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path) for name in "ab"]
    parts[0].requires_grad_(False)
    whole = join_tables(parts)
    whole.memory = make_tables({"a": (20, 4), "b": (20, 4)}).memory
    ids = torch.tensor([1])
    asks = [[part({name: ids})[name].requires_grad, part.stacked({name: ids}).requires_grad] for part, name in zip(
        parts, "ab", strict=True)]  # fmt: skip
    assert asks == [[False, False], [True, True]]


@pytest.mark.slow
def test_a_compiled_model_follows(make_tables: Any) -> None:
    tables, ids = make_tables({"user": (20, 4)}), {"user": torch.tensor([1, 2])}
    scale = nn.Parameter(torch.ones(()))
    compiled = torch.compile(lambda ids: (tables(ids)["user"] * scale).sum(), backend="aot_eager")
    for trains in (True, False, True):
        tables.requires_grad_(trains)
        compiled(ids).backward()
        assert sum(len(grads) for grads in tables.take_gradients()) == trains
    assert scale.grad is not None


def test_a_converted_module_is_not_frozen_by_itself() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1))
    tables = gba_hvd.convert(model, gba_hvd.SGD(lr=0.1))
    text = (
        r"0: a converted module cannot be frozen by itself.*requires_grad_\(False\) on.* call convert twice, first with"
    )
    with pytest.raises(BadInput, match=text):
        model[0].requires_grad_(False)
    model[0].requires_grad_(True)
    assert tables.requires_grad_(False) is tables


def test_a_table_of_a_convert_of_its_own_is_frozen_for_an_epoch(tmp_path: Any) -> None:
    model = nn.ModuleDict({"user": nn.Embedding(10, 4), "item": nn.Embedding(10, 4)})
    users, items = (
        gba_hvd.convert(model, gba_hvd.SGD(lr=0.1), keep=keep, shard_dir=tmp_path) for keep in (["item"], [])
    )
    optimizer = gba_hvd.DistributedOptimizer(None, [users, items], global_batch=4, micro_batch=4)
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    changed = []
    for state.epoch in range(2):
        items.requires_grad_(state.epoch > 0)
        for rows in gba_hvd.batches(list(range(8)), state, forward=lambda rows: [one(rows) for one in model.values()]):
            before = [one(rows).detach().clone() for one in model.values()]
            sum(one(rows).sum() for one in model.values()).backward()
            optimizer.step()
            changed.append([not torch.equal(one(rows), was) for one, was in zip(model.values(), before, strict=True)])
    state.close()
    assert changed == [[True, False]] * 2 + [[True, True]] * 2
