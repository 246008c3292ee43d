"""Records of one group of tables, read and written by a device. What a record is, see `shm.layout`."""

from __future__ import annotations

import torch
from torch import Tensor

from gba_hvd.shm.layout import Group, Layout


class Records:
    """flat: float32, the host's memory as a tensor of the device. Nothing here waits for the device."""

    def __init__(self, flat: Tensor, layout: Layout, group: Group) -> None:
        self._flat, self._words = flat, flat.view(torch.int32)
        self._n_shards, self._region, self._at = layout.n_shards, layout.region_words, group.at
        self.width = group.record
        self._words_of_record = torch.arange(group.record, device=flat.device)

    def starts(self, keys: Tensor) -> Tensor:
        """int64 [n]: the word at which each key's record starts."""
        shard = keys % self._n_shards
        in_shard = torch.div(keys, self._n_shards, rounding_mode="floor")
        return shard * self._region + self._at + in_shard * self.width

    def read(self, starts: Tensor) -> Tensor:
        """float32 [n, width]. A record that another process writes meanwhile may be half old and half new."""
        return self._flat.index_select(0, self._all_words(starts)).view(len(starts), self.width)

    def versions(self, starts: Tensor) -> Tensor:
        """int32 [n]: the last words of the records, which count their updates."""
        return self._words.index_select(0, starts + (self.width - 1))

    def write(self, starts: Tensor, records: Tensor) -> None:
        """starts: distinct; records: float32 [n, width]"""
        self._flat.scatter_(0, self._all_words(starts), records.reshape(-1))

    def _all_words(self, starts: Tensor) -> Tensor:
        return (starts[:, None] + self._words_of_record).reshape(-1)
