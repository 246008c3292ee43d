"""Decoded groups: what is kept, and what gives way."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest

from gba_hvd.data.group_cache import GroupCache
from gba_hvd.reading.datasets import Block


class Group:
    pass


class Decoder:
    """Decodes groups, and knows how often each was decoded and how many are in memory."""

    def __init__(self) -> None:
        self.decoded, self._alive = Counter[int](), weakref.WeakSet[Group]()

    def __call__(self, number: int) -> Group:
        self.decoded[number] += 1
        group = Group()
        self._alive.add(group)
        return group

    @property
    def n_alive(self) -> int:
        gc.collect()
        return len(self._alive)


def test_of_one_lane_the_present_and_the_next_window_are_kept_and_one_more():
    decoder = Decoder()
    cache = GroupCache(decoder)
    for window in range(20):
        cache.announce(Block(0, window, (window,)), Block(0, window + 1, (window + 1,)))
        cache.get(window)
        assert len(cache._kept) <= 3
    cache.close()
    assert set(decoder.decoded.values()) == {1}


def test_a_group_that_was_not_announced_takes_the_place_of_none_that_was():
    decoder = Decoder()
    cache = GroupCache(decoder)
    cache.announce(Block(0, 0, (0,)), Block(0, 1, (1,)))
    for number in (0, 1, 7, 7, 8, 0, 1):
        cache.get(number)
        assert len(cache._kept) <= 3
    cache.close()
    assert decoder.decoded == {0: 1, 1: 1, 7: 1, 8: 1}


@pytest.mark.slow
def test_where_nothing_is_announced_the_last_eight_are_kept():
    decoder = Decoder()
    cache = GroupCache(decoder)
    for number in (*range(20), *range(12, 20)):
        cache.get(number)
    assert decoder.n_alive == 8
    assert set(decoder.decoded.values()) == {1}


@pytest.mark.slow
def test_what_is_not_announced_any_more_is_given_up_at_once():
    decoder = Decoder()
    cache = GroupCache(decoder)
    cache.announce(Block(-1, 0, tuple(range(12))), None)
    cache.announce(Block(0, 0, tuple(range(20, 30))), None)
    for number in (*range(12), *range(20, 30)):
        cache.get(number)
    cache.release()
    assert len(cache._kept) == 13  # a lane below 0 stays, and one more
    cache.close()
    assert decoder.n_alive == 8
