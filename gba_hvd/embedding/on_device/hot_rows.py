"""Copies of records in a device's own memory, of the rows that are used most.

A set-associative cache: a key can be in one of the ways of its set, and of these the one that was used longest ago
makes room, unless it was used just now. It is never ahead of the host's memory: a record is written there first, and a
copy counts only as long as it has the version that the record in the host's memory has.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WAYS = 8
_NO_KEY = -1
_ODD = 0x9E3779B97F4A7C15 - 2**64  # spreads keys over 64 bits


class HotRows:
    """n_rows: room for so many records, rounded up to 8. width: words of a record, the last one its version.

    A slot is where a record is; `spare` is that of keys that have none. It is written, and what is read of it does not
    count, so that nothing here depends on a number that only the device knows: the device need not be waited for.
    """

    def __init__(self, n_rows: int, width: int, device: torch.device) -> None:
        self._n_sets = -(-n_rows // _WAYS)
        n = self.n_rows = self.spare = self._n_sets * _WAYS
        self._keys = torch.full((n + 1,), _NO_KEY, dtype=torch.int64, device=device)
        self._used = torch.zeros(n + 1, dtype=torch.int64, device=device)
        self._ways = torch.arange(_WAYS, device=device)
        self._records = torch.empty(n + 1, width, device=device)
        self._versions = self._records.view(torch.int32)[:, -1]
        self._now = 0

    @property
    def n_bytes(self) -> int:
        """Of the device's memory."""
        return 4 * self._records.numel() + 8 * (self._keys.numel() + self._used.numel())

    @property
    def chooses(self) -> bool:
        """Whether what was missing now should be put: one time in four, at no fixed distance.

        Choosing costs as much as a read, and what is hot now is hot in the next ones.
        """
        return (self._now * 2654435761 >> 20) % 4 == 0

    def find(self, keys: Tensor) -> Tensor:
        """int64 [n], the slot of each key. Counts as a use. keys: int64 [n], distinct"""
        self._now += 1
        slots = self._set_of(keys)[:, None] * _WAYS + self._ways
        same = self._keys[slots] == keys[:, None]
        slot = torch.where(same, slots, self.spare).amin(1)
        self._used.index_fill_(0, slot, self._now)
        return slot

    def read(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """(records float32 [n, width], their versions int32 [n]); of `spare`, any numbers"""
        return self._records.index_select(0, slot), self._versions.index_select(0, slot)

    def put(self, keys: Tensor, slot: Tensor, records: Tensor) -> Tensor:
        """Keep copies of records, of keys in the slots that they have, or in new ones; the slots where they are now.

        Room is what was not used just now: of each set, from the way on that was used longest ago.
        """
        in_set = self._set_of(keys)
        ordered, order = in_set.sort(stable=True)
        nth = torch.arange(len(keys), device=keys.device) - torch.searchsorted(ordered, ordered)
        nth = torch.empty_like(nth).index_copy_(0, order, nth)  # of the keys that want a place in its set
        first = in_set * _WAYS
        oldest = self._used[first[:, None] + self._ways].argmin(1)
        new = first + (oldest + nth) % _WAYS
        has_room = (nth < _WAYS) & (self._used[new] < self._now)
        slot = torch.where(slot == self.spare, torch.where(has_room, new, self.spare), slot)
        self._keys.index_copy_(0, slot, torch.where(slot == self.spare, _NO_KEY, keys))
        self._used.index_fill_(0, slot, self._now)
        self._records.index_copy_(0, slot, records)
        return slot

    def renew(self, keys: Tensor, slot: Tensor, records: Tensor) -> None:
        """New numbers of records, where the keys still are in these slots."""
        self._records.index_copy_(0, torch.where(self._keys[slot] == keys, slot, self.spare), records)

    def forget(self) -> None:
        self._keys.fill_(_NO_KEY)
        self._used.zero_()

    def _set_of(self, keys: Tensor) -> Tensor:
        """int64 [n]"""
        return ((keys * _ODD) >> 20).remainder(self._n_sets)
