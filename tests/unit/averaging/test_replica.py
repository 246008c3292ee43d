"""A replica between its two threads: what a round may do to it, and when it must not."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from gba_hvd.averaging.replica import Replica, is_finite
from gba_hvd.gradients.dense_gradients import DenseGradients


def made(values: list[float]) -> tuple[nn.Parameter, nn.Parameter, Replica]:
    """Two parameters of other shapes, the last one a single number."""
    first, second = nn.Parameter(torch.tensor(values[:-1]).view(-1, 1)), nn.Parameter(torch.tensor(values[-1]))
    return first, second, Replica(DenseGradients([first, second], 0))


def test_a_copy_has_all_parameters_in_order_and_is_a_copy():
    _, second, replica = made([1.0, 2.0, 3.0])
    replica.open(4)
    copy = replica.copy()
    assert copy is not None and copy.values.tolist() == [1.0, 2.0, 3.0] and copy.phase == 4
    second.data.fill_(9.0)
    assert copy.values.tolist() == [1.0, 2.0, 3.0]


def test_a_closed_replica_gives_nothing_and_takes_nothing():
    first, _, replica = made([1.0, 2.0, 3.0])
    assert replica.copy() is None
    replica.open(0)
    copy = replica.close()
    assert copy is not None and replica.close() is None
    assert not replica.mix_in_(copy, torch.zeros(3), 1.0, "interpolate")
    assert first.detach().ravel().tolist() == [1.0, 2.0]


def test_what_a_round_brings_back_to_a_replica_that_was_closed_meanwhile_is_dropped():
    first, second, replica = made([1.0, 2.0, 3.0])
    replica.open(0)
    copy = replica.copy()
    assert copy is not None
    replica.close()
    replica.open(2, torch.tensor([7.0, 8.0, 9.0]))
    assert not replica.mix_in_(copy, torch.zeros(3), 1.0, "interpolate")
    assert [*first.detach().ravel().tolist(), second.item()] == [7.0, 8.0, 9.0]


def test_the_two_rules_differ_by_what_was_learned_meanwhile():
    for mixing, expected in (("interpolate", [2.0, 2.0, 2.0]), ("difference", [3.0, 3.0, 3.0])):
        first, second, replica = made([0.0, 0.0, 0.0])
        replica.open(0)
        copy = replica.copy()
        assert copy is not None
        replica.step(lambda first=first, second=second: (first.data.add_(1.0), second.data.add_(1.0)))  # type: ignore[misc]
        assert replica.mix_in_(copy, torch.full((3,), 2.0), 1.0, mixing)
        assert [*first.detach().ravel().tolist(), second.item()] == expected
        assert replica.n_steps == 1


def test_a_mixing_between_forward_and_backward_is_no_error_to_autograd():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    replica = Replica(DenseGradients(list(layers.parameters()), 0))
    replica.open(0)
    loss = layers(torch.ones(2, 4)).sum()
    copy = replica.copy()
    assert copy is not None and replica.mix_in_(copy, copy.values + 0.01, 1.0, "interpolate")
    loss.backward()
    assert all(p.grad is not None for p in layers.parameters())


def test_no_step_is_lost_between_the_training_thread_and_the_rounds():
    first, second, replica = made([0.0, 0.0, 0.0])
    replica.open(0)
    done = threading.Event()

    def mix() -> None:
        while not done.is_set():
            copy = replica.copy()
            assert copy is not None
            replica.mix_in_(copy, copy.values, 1.0, "difference")  # the target is the copy: nothing may change

    thread = threading.Thread(target=mix)
    thread.start()
    for _ in range(2000):
        replica.step(lambda: (first.data.add_(1.0), second.data.add_(1.0)))  # type: ignore[arg-type,return-value]
    done.set()
    thread.join()
    assert [*first.detach().ravel().tolist(), second.item()] == [2000.0] * 3


def test_finite_numbers_whose_sum_is_not_are_finite():
    large = torch.full((4,), 3e38)
    assert is_finite(large) and not is_finite(torch.tensor([1.0, float("inf")]))
    assert not is_finite(torch.tensor([1.0, float("nan")]))
    assert is_finite(Tensor())
