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
    found: list[bool] = (hot.find(keys) != hot.spare).tolist()
    return found


def put(hot: HotRows, keys: torch.Tensor) -> None:
    hot.put(keys, hot.find(keys), records_of(keys))


def test_what_was_put_is_found_with_its_numbers(device: torch.device) -> None:
    hot = HotRows(1000, 3, device)
    keys = torch.from_numpy(np.random.default_rng(1).choice(10**6, 200, replace=False)).to(device)
    assert not any(here(hot, keys))
    put(hot, keys)
    slot = hot.find(keys)
    is_here = slot != hot.spare
    assert float(is_here.float().mean()) > 0.9  # a set with more than eight of them keeps eight
    torch.testing.assert_close(hot.read(slot[is_here])[0], records_of(keys[is_here]))
    assert not any(here(hot, keys + 10**6))


def test_the_one_that_was_used_longest_ago_makes_room(device: torch.device) -> None:
    hot = HotRows(8, 3, device)  # one set
    for key in range(8):
        put(hot, keys_of(key, device=device))
    hot.find(keys_of(0, device=device))
    put(hot, keys_of(100, device=device))
    assert here(hot, keys_of(0, 1, 2, 100, device=device)) == [True, False, True, True]


def test_what_is_used_now_makes_no_room(device: torch.device) -> None:
    hot = HotRows(8, 3, device)
    old, new = keys_of(*range(8), device=device), keys_of(*range(100, 104), device=device)
    put(hot, old)
    slot = hot.find(torch.cat([old, new]))
    hot.put(new, slot[8:], records_of(new))
    assert all(here(hot, old))
    assert not any(here(hot, new))


def test_of_keys_that_want_one_set_as_many_get_a_place_as_it_has(device: torch.device) -> None:
    hot = HotRows(8, 3, device)
    keys = keys_of(*range(50), device=device)
    put(hot, keys)
    assert here(hot, keys) == [True] * 8 + [False] * 42
    torch.testing.assert_close(hot.read(hot.find(keys[:8]))[0], records_of(keys[:8]))


def test_new_numbers_reach_those_that_are_still_there(device: torch.device) -> None:
    hot = HotRows(8, 3, device)
    keys = keys_of(*range(8), device=device)
    put(hot, keys)
    slot = hot.find(keys)
    put(hot, keys_of(100, 101, device=device))  # two of them go
    hot.renew(keys, slot, records_of(keys) + 0.5)
    now = hot.find(keys)
    stayed = now != hot.spare
    assert int(stayed.sum()) == 6
    torch.testing.assert_close(hot.read(now[stayed])[0], records_of(keys[stayed]) + 0.5)
    torch.testing.assert_close(
        hot.read(hot.find(keys_of(100, 101, device=device)))[0][:, 0].cpu(), torch.tensor([100.0, 101.0])
    )


def test_forgotten_ones_are_not_found(device: torch.device) -> None:
    hot = HotRows(64, 3, device)
    keys = keys_of(*range(20), device=device)
    put(hot, keys)
    assert any(here(hot, keys))
    hot.forget()
    assert not any(here(hot, keys))
