"""The copies in a device's memory: which are found, who makes room, and who wins a slot."""

from __future__ import annotations

import numpy as np
import torch

from gba_hvd.embedding.on_device.hot_rows import HotRows


def keys_of(*keys: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int64, device=device)


def records_of(keys: torch.Tensor) -> torch.Tensor:
    return keys[:, None].float().expand(-1, 3).contiguous()


def here(hot: HotRows, keys: torch.Tensor) -> list[bool]:
    found: list[bool] = hot.find(keys)[1].tolist()
    return found


def test_what_was_put_is_found_with_its_numbers(device: torch.device) -> None:
    hot = HotRows(1000, 3, device)
    keys = torch.from_numpy(np.random.default_rng(1).choice(10**6, 200, replace=False)).to(device)
    assert not any(here(hot, keys))
    hot.put(keys, records_of(keys))
    slot, is_here = hot.find(keys)
    assert float(is_here.float().mean()) > 0.9  # a set with more than eight of them keeps eight
    torch.testing.assert_close(hot.records[slot[is_here]], records_of(keys[is_here]))
    assert not any(here(hot, keys + 10**6))


def test_the_one_that_was_used_longest_ago_makes_room(device: torch.device) -> None:
    hot = HotRows(8, 3, device)  # one set
    for key in range(8):
        one = keys_of(key, device=device)
        hot.find(one)
        hot.put(one, records_of(one))
    hot.find(keys_of(0, device=device))
    new = keys_of(100, device=device)
    hot.find(new)
    hot.put(new, records_of(new))
    assert here(hot, keys_of(0, 1, 2, 100, device=device)) == [True, False, True, True]


def test_what_is_used_now_makes_no_room(device: torch.device) -> None:
    hot = HotRows(8, 3, device)
    old, new = keys_of(*range(8), device=device), keys_of(*range(100, 104), device=device)
    for key in range(8):
        hot.find(old[key : key + 1])
        hot.put(old[key : key + 1], records_of(old[key : key + 1]))
    hot.find(torch.cat([old, new]))
    hot.put(new, records_of(new))
    assert all(here(hot, old))
    assert not any(here(hot, new))


def test_of_keys_that_want_one_set_as_many_get_a_place_as_it_has(device: torch.device) -> None:
    hot = HotRows(8, 3, device)
    keys = keys_of(*range(50), device=device)
    hot.find(keys)
    hot.put(keys, records_of(keys))
    slot, is_here = hot.find(keys)
    assert is_here.tolist() == [True] * 8 + [False] * 42
    torch.testing.assert_close(hot.records[slot[is_here]], records_of(keys[is_here]))


def test_forgotten_ones_are_not_found(device: torch.device) -> None:
    hot = HotRows(64, 3, device)
    keys = keys_of(*range(20), device=device)
    hot.find(keys)
    hot.put(keys, records_of(keys))
    assert any(here(hot, keys))
    hot.forget()
    assert not any(here(hot, keys))
