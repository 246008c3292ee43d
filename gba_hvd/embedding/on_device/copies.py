"""Copies of records in a device's own memory: of all, or of those that are used most.

Copies are kept only while this worker alone changes rows. So none is outdated, but by what `forget` is called for.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gba_hvd.embedding.on_device import fused
from gba_hvd.embedding.on_device.records import Records

_WAYS = 8
_NO_KEY = -1
_ODD = 0x9E3779B97F4A7C15 - 2**64  # spreads keys over 64 bits


class Copies(Protocol):
    """n_bytes: of the device's memory"""

    @property
    def n_bytes(self) -> int: ...

    def read(self, keys: Tensor) -> tuple[Tensor, int]:
        """(records float32 [n, width], how many were read here); the others are read in the host's memory.

        keys: int64 [n], distinct
        """

    def renew(self, keys: Tensor, records: Tensor) -> None:
        """New numbers of the records that have copies."""

    def forget(self) -> None:
        """The host's memory has other numbers."""


class AllRows:
    """Copies of all records of a group of tables, by key: the weights, and what follows them in a record.

    why_not_fused: in words, why torch's operators change rows, not `fused`
    """

    def __init__(self, dim: int, host: Records, device: torch.device) -> None:
        self._host, self._is_read = host, False
        self._weights = torch.empty(host.n_rows, dim, device=device)
        self._rest = torch.empty(host.n_rows, host.width - dim, device=device)
        self.why_not_fused = fused.obstacle(device, dim)
        self._fused = None if self.why_not_fused else fused.FusedRows(self._weights, self._rest, host)

    @property
    def n_bytes(self) -> int:
        return 4 * (self._weights.numel() + self._rest.numel())

    @property
    def weights(self) -> Tensor:
        """float32 [rows, dim], by key, of which each step changes some: a tensor of its own on the same memory"""
        if not self._is_read:
            self._host.read_all(self._weights, self._rest)
            self._is_read = True
        return self._weights.detach()

    def read(self, keys: Tensor) -> tuple[Tensor, int]:
        return torch.cat([self.weights.index_select(0, keys), self._rest.index_select(0, keys)], 1), len(keys)

    @property
    def fused(self) -> fused.FusedRows | None:
        """What changes copies, and the host's memory; None: it cannot, or the copies are to be read first."""
        return self._fused if self._is_read else None

    def renew(self, keys: Tensor, records: Tensor) -> None:
        dim = self._weights.shape[1]
        if self._fused is not None:
            self._host.writes.before_reading()  # they read the copies
        self._weights.index_copy_(0, keys, records[:, :dim])
        self._rest.index_copy_(0, keys, records[:, dim:])

    def forget(self) -> None:
        self._is_read = False


class HotRows:
    """n_rows: room for so many records, rounded up to 8.

    A set-associative cache: a key can be in one of the ways of its set, and of these the one that was used longest ago
    makes room, unless it was used just now. `spare` is the place of keys that have none. It is written, and what is
    read of it does not count, so that no write depends on a number that only the device knows.
    """

    def __init__(self, n_rows: int, host: Records, device: torch.device) -> None:
        self._host = host
        self._n_sets = -(-n_rows // _WAYS)
        n = self.n_rows = self.spare = self._n_sets * _WAYS
        self._keys = torch.full((n + 1,), _NO_KEY, dtype=torch.int64, device=device)
        self._used = torch.zeros(n + 1, dtype=torch.int64, device=device)
        self._ways = torch.arange(_WAYS, device=device)
        self._records = torch.empty(n + 1, host.width, device=device)
        self._now = 0

    @property
    def n_bytes(self) -> int:
        return 4 * self._records.numel() + 8 * (self._keys.numel() + self._used.numel())

    def read(self, keys: Tensor) -> tuple[Tensor, int]:
        self._now += 1
        slot = self._find(keys)
        self._used.index_fill_(0, slot, self._now)
        found = self._records.index_select(0, slot)
        missing = (slot == self.spare).nonzero()[:, 0]
        if len(missing):
            new = keys.index_select(0, missing)
            fresh = self._host.read(new)
            found.index_copy_(0, missing, fresh)
            if self._chooses:
                self._put(new, fresh)
        return found, len(keys) - len(missing)

    def renew(self, keys: Tensor, records: Tensor) -> None:
        self._records.index_copy_(0, self._find(keys), records)

    def forget(self) -> None:
        self._keys.fill_(_NO_KEY)
        self._used.zero_()

    @property
    def _chooses(self) -> bool:
        """Whether what was missing now should be put: one time in four, at no fixed distance.

        Choosing costs as much as a read, and what is hot now is hot in the next ones.
        """
        return (self._now * 2654435761 >> 20) % 4 == 0

    def _find(self, keys: Tensor) -> Tensor:
        """int64 [n], the slot of each key"""
        slots = self._set_of(keys)[:, None] * _WAYS + self._ways
        same = self._keys[slots] == keys[:, None]
        return torch.where(same, slots, self.spare).amin(1)

    def _put(self, keys: Tensor, records: Tensor) -> None:
        """Keep copies of records, of keys that have none.

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
        slot = torch.where(has_room, new, self.spare)
        self._keys.index_copy_(0, slot, torch.where(has_room, keys, _NO_KEY))
        self._used.index_fill_(0, slot, self._now)
        self._records.index_copy_(0, slot, records)

    def _set_of(self, keys: Tensor) -> Tensor:
        """int64 [n]"""
        return ((keys * _ODD) >> 20).remainder(self._n_sets)
