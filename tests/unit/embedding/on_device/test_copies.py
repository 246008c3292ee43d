"""The copies in a device's memory: which are found, who makes room, and who wins a slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gba_hvd.embedding.on_device.copies import AllRows, HotRows
from gba_hvd.embedding.on_device.host_view import HostWrites
from gba_hvd.embedding.on_device.records import Records
from gba_hvd.shm.layout import Layout

N_ROWS = 1_200_000


def host_of(device: torch.device, n_rows: int = N_ROWS) -> Records:
    """Records of three words, the first two of which are their key."""
    layout = Layout.of({"user": (n_rows, 2)}, (), 3, 0, 0.0)
    flat, group = np.zeros(3 * layout.region_words, np.float32), layout.groups[0]
    keys = np.arange(3 * group.rows_per_shard)
    starts = layout.record_starts(keys, group).astype(np.int64)
    flat[starts] = flat[starts + 1] = keys
    return Records(torch.from_numpy(flat).to(device), HostWrites(device), layout, group)


def keys_of(*keys: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int64, device=device)


def records_of(keys: torch.Tensor) -> torch.Tensor:
    return torch.stack([keys.float(), keys.float(), torch.zeros_like(keys).float()], 1)


class Chosen(HotRows):
    """Copies are chosen where a test wants it."""

    chooses = False

    @property
    def _chooses(self) -> bool:
        return self.chooses


def hot_rows(n: int, device: torch.device) -> Chosen:
    return Chosen(n, host_of(device), device)


def here(hot: Chosen, keys: torch.Tensor) -> list[bool]:
    """Of which keys there are copies, read one by one."""
    found = []
    for key in keys.split(1):
        records, hits = hot.read(key)
        torch.testing.assert_close(records, records_of(key))
        found.append(hits == 1)
    return found


def put(hot: Chosen, keys: torch.Tensor) -> None:
    """Read keys, of which copies are kept."""
    hot.chooses = True
    hot.read(keys)
    hot.chooses = False


def test_all_rows_are_those_of_the_host_until_they_are_forgotten(device: torch.device) -> None:
    host = host_of(device, 100)
    copies, keys = AllRows(2, host, device), keys_of(0, 7, 50, 99, device=device)
    records, hits = copies.read(keys)
    torch.testing.assert_close(records, records_of(keys))
    assert hits == 4
    copies.renew(keys, records + 1)
    torch.testing.assert_close(copies.read(keys)[0], records_of(keys) + 1)
    torch.testing.assert_close(copies.read(keys + 0)[0], records_of(keys) + 1)
    copies.forget()
    torch.testing.assert_close(copies.read(keys)[0], records_of(keys))


@pytest.mark.slow
def test_what_was_put_is_found_with_its_numbers(device: torch.device) -> None:
    hot = hot_rows(1000, device)
    keys = torch.from_numpy(np.random.default_rng(1).choice(10**6, 200, replace=False)).to(device)
    assert not any(here(hot, keys))
    put(hot, keys)
    assert sum(here(hot, keys)) > 180  # a set with more than eight of them keeps eight
    assert not any(here(hot, keys + 10**5 * 2))


@pytest.mark.slow
def test_the_one_that_was_used_longest_ago_makes_room(device: torch.device) -> None:
    hot = hot_rows(8, device)  # one set
    for key in range(8):
        put(hot, keys_of(key, device=device))
    here(hot, keys_of(0, device=device))
    put(hot, keys_of(100, device=device))
    assert here(hot, keys_of(0, 1, 2, 100, device=device)) == [True, False, True, True]


def test_what_is_used_now_makes_no_room(device: torch.device) -> None:
    hot = hot_rows(8, device)
    old, new = keys_of(*range(8), device=device), keys_of(*range(100, 104), device=device)
    put(hot, old)
    put(hot, torch.cat([old, new]))
    assert all(here(hot, old))
    assert not any(here(hot, new))


@pytest.mark.slow
def test_of_keys_that_want_one_set_as_many_get_a_place_as_it_has(device: torch.device) -> None:
    hot = hot_rows(8, device)
    keys = keys_of(*range(50), device=device)
    put(hot, keys)
    assert here(hot, keys) == [True] * 8 + [False] * 42


def test_new_numbers_reach_those_that_are_there_wherever_they_are(device: torch.device) -> None:
    hot = hot_rows(8, device)
    keys = keys_of(*range(8), device=device)
    put(hot, keys)
    put(hot, keys_of(100, 101, device=device))  # two of them go
    put(hot, keys_of(0, 1, device=device))  # and come back to other places
    hot.renew(keys, records_of(keys) + 0.5)
    assert hot.read(keys[:2])[1] == 2
    for key in keys.split(1):
        records, hits = hot.read(key)
        torch.testing.assert_close(records, records_of(key) + 0.5 * hits)


@pytest.mark.slow
def test_forgotten_ones_are_not_found(device: torch.device) -> None:
    hot = hot_rows(64, device)
    keys = keys_of(*range(20), device=device)
    put(hot, keys)
    assert any(here(hot, keys))
    hot.forget()
    assert not any(here(hot, keys))
