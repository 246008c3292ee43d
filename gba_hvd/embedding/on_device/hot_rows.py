"""Copies of records in a device's own memory, of the rows that are used most.

A set-associative cache: a key can be in one of the ways of its set, and of these the one that was used longest ago
makes room, unless it was used just now. It is never ahead of the host's memory: a record is written there first, and a
copy counts only as long as it has the version that the record in the host's memory has.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WAYS = 8
_NOBODY = -1
_ODD = 0x9E3779B97F4A7C15 - 2**64  # spreads keys over 64 bits


class HotRows:
    """n_rows: room for so many records, rounded up to 8. width: words of a record, the last one its version."""

    def __init__(self, n_rows: int, width: int, device: torch.device) -> None:
        self._n_sets = -(-n_rows // _WAYS)
        n = self.n_rows = self._n_sets * _WAYS
        self._keys = torch.full((n,), _NOBODY, dtype=torch.int64, device=device)
        self._used = torch.zeros(n, dtype=torch.int64, device=device)
        self._ways = torch.arange(_WAYS, device=device)
        self.records = torch.empty(n, width, device=device)
        self.versions = self.records.view(torch.int32)[:, -1]
        self._now = 0

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(slot int64 [n], bool [n]: whether the key's copy is there). Counts as a use of those that are.

        keys: int64 [n], distinct
        """
        self._now += 1
        slots = self._set_of(keys)[:, None] * _WAYS + self._ways
        same = self._keys[slots] == keys[:, None]
        slot = slots.gather(1, same.to(torch.uint8).argmax(1, keepdim=True))[:, 0]
        is_here = same.any(1)
        self._used.scatter_reduce_(0, slot, is_here * self._now, "amax")
        return slot, is_here

    def put(self, keys: Tensor, records: Tensor) -> None:
        """Keep copies of records whose keys are not here, as far as there is room that was not used just now."""
        sets, order = self._set_of(keys).sort(stable=True)
        at = torch.arange(len(keys), device=keys.device)
        is_first = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        is_first[1:] = sets[1:] != sets[:-1]
        nth = at - torch.where(is_first, at, 0).cummax(0).values  # of the keys that want a place in its set
        slots = sets[:, None] * _WAYS + self._ways
        used, oldest_first = self._used[slots].sort(dim=1, stable=True)
        choice = nth.clamp(max=_WAYS - 1)[:, None]
        slot = slots.gather(1, oldest_first.gather(1, choice))[:, 0]
        has_place = (nth < _WAYS) & (used.gather(1, choice)[:, 0] < self._now)
        slot, chosen = slot[has_place], order[has_place]
        self._keys[slot], self._used[slot] = keys[chosen], self._now
        self.records[slot] = records[chosen]

    def forget(self) -> None:
        self._keys.fill_(_NOBODY)
        self._used.zero_()

    def _set_of(self, keys: Tensor) -> Tensor:
        """int64 [n]"""
        return ((keys * _ODD) >> 20).remainder(self._n_sets)
