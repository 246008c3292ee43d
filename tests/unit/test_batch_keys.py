"""On several hosts the ids of a batch are found in a forward pass of its own, of which nothing remains."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gba_hvd
from gba_hvd import BadInput, GbaError
from gba_hvd.batch_keys import BatchKeys
from gba_hvd.embedding.lookup_recorder import PassLength

Batch = tuple[dict[str, Tensor], Tensor]


class Pairs:
    """Samples as (inputs, label): no `ids` to be seen."""

    def __init__(self, clicks: Any) -> None:
        self.clicks = clicks

    def __len__(self) -> int:
        return len(self.clicks)

    def take(self, rows: np.ndarray) -> Batch:
        batch = self.clicks.take(rows)
        return {**batch.ids, "dense": batch.dense}, batch.label


class Inside(nn.Module):
    """Finds the ids in its inputs, in two lookups, and writes a buffer."""

    def __init__(self, tables: gba_hvd.EmbeddingTables, mlp: nn.Module) -> None:
        super().__init__()
        self.tables, self.mlp, self.norm = tables, mlp, nn.BatchNorm1d(2)
        self.n_passes = self.n_ends = 0

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        self.n_passes += 1
        dense = self.norm(x["dense"])
        user = self.tables({"user": x["user"]})["user"]
        item = self.tables({"item": x["item"]})["item"]
        self.n_ends += 1
        logits: Tensor = self.mlp(torch.cat([user, item, dense], dim=1)).squeeze(1)
        return logits


def inside(job: Any) -> Any:
    """The job's model, on batches without ids."""
    job.state.model = job.model = Inside(job.tables, job.model.mlp)
    return job


def train(job: Any, dataset: Any, epochs: int = 1, **how: Any) -> None:
    for job.state.epoch in range(epochs):
        for x, label in gba_hvd.batches(dataset, job.state, seed=1, **how):
            job.optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(job.model(x), label)
            loss.backward()
            job.optimizer.step(loss=loss)


def first(job: Any) -> Callable[[Batch], Tensor]:
    return lambda batch: job.model(batch[0])


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_rows_of_other_hosts_are_found_by_the_forward_pass(workers: Any, on_host: Any, clicks: Any, hosts: str) -> None:
    jobs, alone = [inside(on_host(host)) for host in hosts], inside(on_host("alone"))
    workers.together(jobs, lambda job: train(job, Pairs(clicks(50)), 2, forward=first(job)))
    workers.together([alone], lambda job: train(job, Pairs(clicks(50)), 2))
    for job in jobs:
        for name, value in alone.all_dense().items():
            np.testing.assert_allclose(job.all_dense()[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_on_one_host_the_forward_pass_is_not_run_for_ids(workers: Any, on_host: Any, clicks: Any) -> None:
    jobs, calls = [inside(on_host("a")) for _ in "ab"], []
    workers.together(jobs, lambda job: train(job, Pairs(clicks(50)), forward=calls.append))
    assert not calls
    assert sum(job.model.n_passes for job in jobs) == 13


@pytest.mark.slow
def test_evaluation_finds_rows_by_the_pass_that_gives_its_outputs(workers: Any, on_host: Any, clicks: Any) -> None:
    jobs, alone, scores = [inside(on_host(host)) for host in "ab"], inside(on_host("alone")), dict[Any, Any]()

    def score(job: Any) -> None:
        train(job, Pairs(clicks(50)), forward=first(job))
        scores[job] = gba_hvd.evaluate(
            job.model, Pairs(clicks(50)), job.state, forward=first(job), label=lambda batch: batch[1],
            activation="sigmoid",
        )  # fmt: skip

    workers.together(jobs, score)
    workers.together([alone], score)
    assert scores[jobs[0]] == scores[jobs[1]]
    assert scores[alone].n == 50


def keys_of(job: Any, **how: Any) -> BatchKeys:
    return BatchKeys(job.tables, job.model, how.get("ids"), how.get("forward"))


def test_the_keys_are_those_of_all_lookups_and_nothing_else_changes(training: Any, clicks: Any) -> None:
    job, dataset = inside(training()), Pairs(clicks(50))
    batch, seen = dataset.take(np.arange(9)), clicks(50).take(np.arange(9))
    job.model.register_buffer("drawn", torch.zeros(1))

    def forward(batch: Batch) -> None:
        job.model.drawn = torch.rand(1) + np.random.rand() + random.random()  # another tensor, not in place
        job.model(batch[0])

    before = {name: value.clone() for name, value in job.model.named_buffers()}
    random_before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    found = keys_of(job, forward=forward).of([batch, batch])
    by_ids = keys_of(job, ids=lambda batch: batch.ids).of([seen])
    assert [sorted(set(keys.tolist())) for keys in found] == [sorted(set(keys.tolist())) for keys in by_ids]
    for name, value in job.model.named_buffers():
        torch.testing.assert_close(value, before[name])
    assert torch.equal(torch.get_rng_state(), random_before[0])
    assert np.random.get_state()[1].tolist() == random_before[1]  # type: ignore[index]
    assert random.getstate() == random_before[2]
    assert not job.tables.captured


def test_a_pass_ends_at_its_last_lookup_when_twenty_passes_agreed(training: Any, clicks: Any) -> None:
    job, dataset = inside(training()), Pairs(clicks(50))
    keys = keys_of(job, forward=lambda batch: job.model(batch[0]))
    batch = dataset.take(np.arange(9))
    found = [keys.of([batch]) for _ in range(25)]
    assert (job.model.n_passes, job.model.n_ends) == (25, 20)
    assert all(np.array_equal(one, other) for one, other in zip(found[0], found[-1], strict=True))
    job.model.eval()  # another forward pass, as far as anybody knows
    keys.of([batch])
    assert job.model.n_ends == 21


def test_passes_that_disagree_never_end_early() -> None:
    length = PassLength()
    for n in [8] * 15 + [9] + [8] * 30:
        length.saw_complete(n)
        assert length.stop_after is None


def test_ids_of_the_batch_count_without_any_other_word(training: Any, clicks: Any) -> None:
    job = training()
    keys, batch = keys_of(job), clicks(50).take(np.arange(4))
    assert not keys.runs_model(batch)
    assert keys.runs_model((batch,))
    job.tables.looks_up_inside = True  # its ids are not those of the tables
    assert keys.runs_model(batch)
    assert not keys_of(job, ids=lambda batch: batch.ids).runs_model(batch)


def test_a_forward_pass_that_fails_says_how_to_name_it(training: Any, clicks: Any) -> None:
    job = inside(training())
    with pytest.raises(BadInput, match=r"run on a tuple to find its ids, and failed \(TypeError: .*forward=lambda"):
        keys_of(job).of([Pairs(clicks(50)).take(np.arange(4))])


def test_a_forward_pass_without_lookups_is_refused(training: Any, clicks: Any) -> None:
    with pytest.raises(BadInput, match="looked up no row"):
        keys_of(training(), forward=lambda batch: None).of([Pairs(clicks(50)).take(np.arange(4))])


def test_ids_and_forward_at_once_are_refused(training: Any, clicks: Any) -> None:
    with pytest.raises(BadInput, match="pass one of them"):
        next(gba_hvd.batches(clicks(50), training().state, ids=lambda b: b.ids, forward=lambda b: b))


def test_bags_that_their_hosts_pool_cannot_be_found_by_a_forward_pass(training: Any, clicks: Any) -> None:
    job = training(row_compression=gba_hvd.Compression.dct_mp(keep=0.5))
    with pytest.raises(BadInput, match="dct_mp pools bags"):
        keys_of(job, forward=lambda batch: None).bags_of([Pairs(clicks(50)).take(np.arange(4))])


def test_what_the_pass_did_not_look_up_is_named(workers: Any, on_host: Any, clicks: Any) -> None:
    jobs = [inside(on_host(host)) for host in "ab"]
    with pytest.raises(GbaError, match="looked up by its `forward` each time"):
        workers.together(
            jobs,
            lambda job: train(job, Pairs(clicks(50)), forward=lambda batch: job.tables({"user": batch[0]["user"]})),
        )
