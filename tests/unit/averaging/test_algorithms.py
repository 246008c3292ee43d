"""The formulas by which replicas become one: exact where the algebra is exact, and settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gba_hvd.averaging.algorithms import Averaging, MeanOfReplicas, add_difference_, bmuf_update_, interpolate_
from gba_hvd.errors import BadInput


def some(seed: int, n: int = 1000) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_a_replica_is_pulled_by_the_share_it_is_given():
    assert interpolate_(torch.tensor([1.0, 2.0]), torch.tensor([5.0, -2.0]), 0.25).tolist() == [2.0, 1.0]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9, 1.0])
def test_what_equals_its_target_stays_bit_for_bit(share: float):
    values = some(1)
    assert torch.equal(interpolate_(values.clone(), values, share), values)
    assert torch.equal(add_difference_(values.clone(), values, values, share), values)


def test_a_share_of_one_takes_the_target_whole():
    assert torch.equal(interpolate_(some(1), some(2), 1.0), some(2))


def test_the_difference_rule_keeps_what_was_learned_while_the_round_was_in_flight():
    copy, update = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.25])
    now = copy + update
    assert add_difference_(now, copy, torch.tensor([3.0, 0.0]), 1.0).tolist() == [3.5, -0.25]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_difference_rule_towards_the_mean_preserves_the_sum_of_the_replicas(share: float):
    replicas = [torch.round(some(seed) * 1024) / 1024 * 4 for seed in range(4)]  # so that float32 is exact
    mean = sum(replicas, torch.zeros(1000)) / 4
    moved = [add_difference_(replica.clone(), replica, mean, share) for replica in replicas]
    assert torch.equal(sum(moved, torch.zeros(1000)), sum(replicas, torch.zeros(1000)))
    assert not torch.equal(moved[0], replicas[0])


def test_an_elastic_round_of_two_workers_by_hand():
    central, first, second = torch.tensor([0.0]), torch.tensor([4.0]), torch.tensor([8.0])
    interpolate_(central, first, 0.5)
    interpolate_(first, central, 0.5)
    interpolate_(central, second, 0.5)
    interpolate_(second, central, 0.5)
    assert (central.item(), first.item(), second.item()) == (5.0, 3.0, 6.5)


def test_the_global_copy_of_bmuf_follows_the_mean():
    assert bmuf_update_(torch.tensor([2.0]), torch.tensor([4.0]), 0.5).item() == 3.0
    assert bmuf_update_(torch.tensor([2.0]), torch.tensor([4.0]), 1.5).item() == 5.0


# --- the mean of replicas --------------------------------------------------------------------------------------------


def adam(step: float, moment: Tensor) -> dict[str, Any]:
    return {"step": torch.tensor(step), "exp_avg": moment}


def test_one_replica_is_its_own_mean_bit_for_bit():
    mean = MeanOfReplicas(1000, 1)
    mean.add(some(1), [adam(7.0, some(2))])
    values, (state,) = mean.mean()
    assert torch.equal(values, some(1)) and torch.equal(state["exp_avg"], some(2)) and state["step"].item() == 7.0
    assert state["exp_avg"].dtype == torch.float32


def test_values_and_moments_are_averaged_and_of_counters_the_largest_counts():
    mean = MeanOfReplicas(2, 1)
    mean.add(torch.tensor([1.0, 2.0]), [adam(10.0, torch.tensor([1.0, 0.0]))])
    mean.add(torch.tensor([3.0, 6.0]), [adam(30.0, torch.tensor([0.0, 1.0]))])
    values, (state,) = mean.mean()
    assert values.tolist() == [2.0, 4.0]
    assert state["exp_avg"].tolist() == [0.5, 0.5]
    assert state["step"].item() == 30.0


def test_the_moment_of_a_single_number_is_averaged_too():
    mean = MeanOfReplicas(1, 1)
    mean.add(torch.zeros(1), [adam(1.0, torch.tensor(2.0))])
    mean.add(torch.zeros(1), [adam(2.0, torch.tensor(4.0))])
    assert mean.mean()[1][0]["exp_avg"].item() == 3.0


def test_a_worker_whose_optimizer_has_no_state_yet_does_not_count_in_that_of_others():
    mean = MeanOfReplicas(1, 2)
    mean.add(torch.ones(1), [{}, {}])
    mean.add(torch.ones(1), [adam(4.0, torch.tensor([3.0])), {"momentum_buffer": None, "k": 2}])
    _, (first, second) = mean.mean()
    assert first["exp_avg"].tolist() == [3.0] and first["step"].item() == 4.0
    assert second == {"momentum_buffer": None, "k": 2}


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": "eagsd"}, "did you mean 'easgd'"),
        ({"algorithm": "x"}, "choose one of easgd, ma, bmuf, none"),
        ({"mixing": "diference"}, "did you mean 'difference'"),
        ({"elasticity": 0}, "above 0 and at most 1"),
        ({"elasticity": 1.5}, "above 0 and at most 1"),
        ({"elasticity": float("nan")}, "above 0 and at most 1"),
        ({"block_rate": 0}, "block_rate"),
        ({"every": 0}, "1 or more"),
        ({"every": 2.5}, "whole number"),
        ({"pause_s": -1}, "pause_s"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str):
    with pytest.raises(BadInput, match=words):
        Averaging(**settings)
