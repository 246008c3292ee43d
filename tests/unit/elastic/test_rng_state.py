"""Where random numbers go on: as if nothing had happened, or in streams that no run has used."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from gba_hvd.comm.collectives import SoloWorld
from gba_hvd.elastic import rng_state
from recovery import state_codec


@dataclass
class World(SoloWorld):
    rank: int
    size: int


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = rng_state.capture()
    yield
    rng_state.restore([before], 0, SoloWorld(), same_step=True)


def draws() -> list[float]:
    return [torch.rand(1).item(), np.random.rand(), np.random.standard_normal(), random.random(), random.gauss(0, 1)]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def test_a_worker_goes_on_with_the_numbers_it_would_have_drawn() -> None:
    seed_all(3)
    draws()
    saved = rng_state.gather(SoloWorld())
    expected = [draws() for _ in range(3)]
    seed_all(4)
    rng_state.restore(saved, 7, SoloWorld(), same_step=True)
    assert [draws() for _ in range(3)] == expected


def test_each_rank_takes_over_its_own() -> None:
    states, expected = [], []
    for seed in (1, 2):
        seed_all(seed)
        states.append(rng_state.capture())
        expected.append(draws())
    for rank in (1, 0):
        rng_state.restore(states, 7, World(rank, 2), same_step=True)
        assert draws() == expected[rank]


@pytest.mark.parametrize(("size", "same_step"), [(2, True), (1, False), (2, False)])
def test_other_workers_or_another_step_begin_streams_of_their_own(size: int, same_step: bool) -> None:
    seed_all(3)
    saved = rng_state.gather(SoloWorld())
    streams = [draws()]
    for step in (7, 8):
        for rank in range(size):
            rng_state.restore(saved, step, World(rank, size), same_step=same_step)
            streams.append(draws())
    for one in zip(*streams, strict=True):
        assert len(set(one)) == len(streams)
    rng_state.restore(saved, 8, World(size - 1, size), same_step=same_step)
    assert draws() == streams[-1], "the same ones every time"


def test_a_checkpoint_can_have_it() -> None:
    seed_all(3)
    random.gauss(0, 1)  # one more number is kept
    np.random.standard_normal()
    state = state_codec.decode(state_codec.encode({"random": rng_state.gather(SoloWorld())}))
    expected = draws()
    rng_state.restore(state["random"], 0, SoloWorld(), same_step=True)
    assert draws() == expected
