"""Clipping a global step by its norm: the formulas, and that all workers do what torch does with the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.gradients.clipping import Clip, Factors, squares
from gba_hvd.shm.host_sum import HostSum
from tests.unit.modes.test_allreduce import HOSTS, check_same, train
from tests.unit.test_optimizer import Reference, check_equal
from tests.unit.thread_world import Workers, miss_a_result

LIMITS = [{"max_norm": 0.1}, {"max_row_norm": 0.03}, {"max_norm": 0.08, "max_row_norm": 0.03}]


def dense_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


class Clipped(Reference):
    """Plain torch over the global batch. norms: of each step, all parameters together, before it was clipped."""

    def __init__(self, job: Any, clicker: Any, limits: dict[str, float]) -> None:
        super().__init__(job, clicker, dense_sgd, lambda p: torch.optim.SGD(p, lr=0.5))
        self.norms: list[float] = []
        self._limits, self._rows = limits, [e.weight for e in self.embeddings.values()]
        self.optimizers[0].register_step_pre_hook(lambda *_: self._clip())  # the first of the two

    def _clip(self) -> None:
        dense, rows = [p for p in self.model.parameters() if p.grad is not None], self._rows
        apart = "max_row_norm" in self._limits
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in (*dense, *rows) if p.grad is not None])))
        if "max_norm" in self._limits:
            nn.utils.clip_grad_norm_(dense if apart else [*dense, *rows], self._limits["max_norm"])
        if apart:
            nn.utils.clip_grad_norm_(rows, self._limits["max_row_norm"])


class NormsTo(gba_hvd.Callback):
    def __init__(self, norms: list[float | None]) -> None:
        self.norms = norms

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        self.norms.append(record.grad_norm)


# --- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "1"])
@pytest.mark.parametrize("name", ["max_norm", "max_row_norm"])
def test_a_limit_is_a_positive_finite_number(training: Any, name: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"{name} must be a positive, finite number.*got {value!r}"):
        training(more={name: value})


def test_one_norm_for_all_or_one_for_rows_and_one_for_the_rest() -> None:
    assert Clip().factors(9.0, 16.0) == Factors(1.0, 1.0, 5.0)
    together, apart = Clip(max_norm=1.0).factors(9.0, 16.0), Clip(1.0, 2.0).factors(9.0, 16.0)
    assert (together.dense, together.rows) == (pytest.approx(0.2), pytest.approx(0.2))
    assert (apart.dense, apart.rows, apart.norm) == (pytest.approx(1 / 3), pytest.approx(0.5), 5.0)
    assert Clip(max_row_norm=2.0).factors(9.0, 16.0).dense == 1.0
    assert Clip(max_norm=10.0).factors(9.0, 16.0) == Factors(1.0, 1.0, 5.0)
    assert Clip(max_norm=1.0).factors(0.0, 0.0) == Factors(1.0, 1.0, 0.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_not_clipped_but_refused_elsewhere(bad: float) -> None:
    assert Clip(max_norm=1.0).factors(bad, 1.0).dense == 1.0
    assert not math.isfinite(squares([np.array([1.0, bad], np.float32)]))
    assert squares([np.array([3e30, -4e30], np.float32), np.empty((0, 4), np.float32)]) == pytest.approx(2.5e61)


# --- allreduce mode --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a_step_is_clipped_as_torch_clips_the_global_batch(
    training: Any, clicks: Any, clicker: Any, limits: dict[str, float]
) -> None:
    job, dataset = training(dense=dense_sgd, more=limits), clicks(50)
    reference = Clipped(job, clicker, limits)
    norms: list[float | None] = []
    job.state.register_callbacks([NormsTo(norms)])
    for epoch in range(3):
        job.epoch(dataset)
        reference.epoch(dataset, epoch, global_batch=16)
    assert min(reference.norms) < 0.15 and max(reference.norms) > 0.1, "steps were to be clipped, some more than others"
    check_equal(job, reference)
    assert norms == pytest.approx(reference.norms, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("row_average", ["global", "contributors"])
@pytest.mark.parametrize("hosts", [HOSTS[name] for name in list(HOSTS) if len(HOSTS[name]) < 5])
def test_any_number_of_workers_on_any_hosts_clips_alike(
    workers: Workers, on_host: Any, clicks: Any, hosts: str, row_average: str
) -> None:
    settings = {"more": {"max_norm": 0.05}, "row_average": row_average}
    jobs, received = [on_host(host, **settings) for host in hosts], [[] for _ in hosts]  # type: ignore[var-annotated]
    for job, norms in zip(jobs, received, strict=True):
        job.state.register_callbacks([NormsTo(norms)])
    workers.together(jobs, lambda job: train(job, clicks(50), 2))
    alone = on_host("alone", **settings)
    workers.together([alone], lambda job: train(job, clicks(50), 2))
    check_same(jobs, alone)
    assert len(received[0]) == 8 and all(norms == received[0] for norms in received), (
        "one norm everywhere, to the last bit"
    )


@pytest.mark.slow
@pytest.mark.parametrize("misses", [0, 1])
def test_who_missed_the_result_of_a_step_applies_its_rows_with_the_factor_of_the_others(
    workers: Workers, on_host: Any, clicks: Any, misses: int
) -> None:
    settings = {"more": {"max_norm": 0.05}}
    jobs = [on_host("a", **settings) for _ in range(2)]
    miss_a_result(workers, jobs, misses, 2, lambda job: train(job, clicks(50), 2))
    workers.together(jobs, lambda job: train(job, clicks(50), 2))
    alone = on_host("alone", **settings)
    workers.together([alone], lambda job: train(job, clicks(50), 2))
    check_same(jobs, alone)
    assert {job.state.samples.shard_steps_missed for job in jobs} == {0}


def test_no_collective_is_added_where_nothing_is_clipped(
    workers: Workers, on_host: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[int] = []
    sum_ = HostSum.sum_
    monkeypatch.setattr(HostSum, "sum_", lambda self, values: sums.append(len(values)) or sum_(self, values))
    workers.together([on_host("a"), on_host("a")], lambda job: train(job, clicks(50), 1))
    assert len(sums) == 2 * 4 and 0 not in sums
    workers.together([on_host("b", more={"max_norm": 1.0}) for _ in "bb"], lambda job: train(job, clicks(50), 1))
    assert sums.count(0) == 2 * 4, "rows are measured when all workers have posted theirs"


# --- modes that would ignore it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["shadow", "easgd", "ma", "bmuf"])
def test_replicas_refuse_to_clip(training: Any, mode: str) -> None:
    job = training(more={"max_norm": 1.0})
    with pytest.raises(
        BadInput, match=rf"mode '{mode}' cannot clip gradients .max_norm=1.: each worker steps a replica"
    ):
        job.state.register_callbacks([gba_hvd.GBACallback(mode=mode)])
    job = training(more={"max_row_norm": 1.0})
    with pytest.raises(BadInput, match=f"mode '{mode}' cannot clip"):
        job.state.register_callbacks([gba_hvd.GBACallback(switch_at={9: mode})])


def test_a_rule_whose_workers_push_momentum_refuses_to_clip(training: Any) -> None:
    job = training(dense=dense_sgd, more={"max_norm": 1.0})
    with pytest.raises(BadInput, match=r"rule 'dana_slim' cannot clip.*use rule 'dana_zero'"):
        job.state.register_callbacks([gba_hvd.GBACallback(mode="gba", rule="dana_slim")])


@pytest.mark.slow
@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks_run_at_global_steps_and_are_refused_where_servers_step(
    training: Any, clicks: Any, register: str
) -> None:
    def counts(*_: Any) -> None:
        calls.append(1)

    calls: list[int] = []
    job = training()
    getattr(job.optimizer, register)(counts)
    job.epoch(clicks(50))
    assert len(calls) == 4, "once for each global step of four micro-batches"
    for mode in ("auto", "gba", "shadow"):
        with pytest.raises(BadInput, match=r"cannot run the optimizer's step hooks at global steps .*counts"):
            job.state.register_callbacks([gba_hvd.GBACallback(mode=mode)])
        job.state.engine._participants.clear()
    job.state.register_callbacks([gba_hvd.GBACallback(mode="allreduce")])
    job = training()
    job.state.register_callbacks([gba_hvd.GBACallback(mode="gba")])
    with pytest.raises(BadInput, match=r"mode 'gba' cannot run the optimizer's step hooks"):
        getattr(job.optimizer, register)(counts)
    assert not job.optimizer._optimizer_step_pre_hooks and not job.optimizer._optimizer_step_post_hooks
