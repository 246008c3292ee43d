"""Records of one group of tables, read and written by a device. What a record is, see `shm.layout`."""

from __future__ import annotations

import torch
from torch import Tensor

from gba_hvd.embedding.on_device.host_view import HostWrites
from gba_hvd.shm.layout import Group, Layout

_WORDS_AT_ONCE = 1 << 19  # of a kernel that writes: so few that kernels of the next step run beside it


class Records:
    """flat: float32, the host's memory as a tensor of the device. This process does not wait for it here.

    writes: what writes to it. n_shards, region, at: the place of a record is explained in `_words`
    """

    def __init__(self, flat: Tensor, writes: HostWrites, layout: Layout, group: Group) -> None:
        self.flat, self.writes = flat, writes
        self.n_shards, self.region, self.at = layout.n_shards, layout.region_words, group.at
        self.n_rows, self.width = group.rows_per_shard * layout.n_shards, group.record
        self._words_of_record = torch.arange(group.at, group.at + group.record, device=flat.device)

    def read(self, keys: Tensor) -> Tensor:
        """float32 [n, width]. A record that another process writes meanwhile may be half old and half new.

        keys: int64 [n]
        """
        self.writes.before_reading()
        return self.flat.index_select(0, self._words(keys).view(-1)).view(len(keys), self.width)

    def read_all(self, *columns: Tensor) -> None:
        """The words of all records, by key, from the first to the last. columns: float32 [n_rows, words] each"""
        self.writes.before_reading()
        n_words, at = self.n_rows // self.n_shards * self.width, 0
        by_shard = self.flat.view(self.n_shards, self.region)[:, self.at : self.at + n_words]
        records = by_shard.view(self.n_shards, -1, self.width).transpose(0, 1)
        for column in columns:
            words = column.shape[1]
            column.view(-1, self.n_shards, words).copy_(records[:, :, at : at + words])
            at += words

    def write(self, keys: Tensor, records: Tensor) -> None:
        """Beside what is asked of the device from now on. keys: int64 [n], distinct; records: float32 [n, width]"""
        n = max(1, _WORDS_AT_ONCE // self.width)
        with self.writes.after(keys, records):
            for some, of_some in zip(self._words(keys).split(n), records.split(n), strict=True):
                self.flat.scatter_(0, some.view(-1), of_some.reshape(-1))

    def _words(self, keys: Tensor) -> Tensor:
        """int64 [n, width]: where the words of the records are. key = place in the shard * n_shards + shard"""
        in_shard = torch.div(keys, self.n_shards, rounding_mode="floor")
        starts = (in_shard * (self.width - self.n_shards * self.region)).add_(keys, alpha=self.region)
        return starts[:, None] + self._words_of_record
