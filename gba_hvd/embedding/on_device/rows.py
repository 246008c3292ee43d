"""What a worker's device does with the rows of its host: look them up, keep copies of hot ones, apply gradients.

Who writes what. The rows in the host's memory are the rows; a device's copies are read where their version, a record's
last word, is that of the host's record, which is read for each lookup. So other processes of the host may write rows as
before: a server, or the workers that serve other shards. A lookup reads a record's version before its numbers: what is
written meanwhile counts up the version, and the copy is read again next time.

Where this worker is the only one that applies gradients, its device does it, within the marks of the step that
`modes.allreduce_exchange` writes: records are changed, written to the host's memory, then copied to where they are
kept. A kill in between leaves what one leaves in the CPU's pass, a step that is in the shards in part; the device's
memory is gone with its process.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gba_hvd.embedding.on_device import optimizers
from gba_hvd.embedding.on_device.host_view import HostView, to_device
from gba_hvd.embedding.on_device.hot_rows import HotRows
from gba_hvd.embedding.on_device.records import Records
from gba_hvd.embedding.on_device.row_gradients import DeviceRowGrad, Found
from gba_hvd.embedding.row_optimizers import TableOptimizers
from gba_hvd.shm.layout import Group, Layout


def can_apply(layout: Layout, of_tables: TableOptimizers) -> bool:
    """Whether a device has all that is done to rows, of each group that is not hashed."""
    return all(_can_apply(layout, group, of_tables) for group in layout.groups if group.hashed is None)


def _can_apply(layout: Layout, group: Group, of_tables: TableOptimizers) -> bool:
    return layout.sampled is None and optimizers.can_update(of_tables.of(group.optimizer))  # (samples: by the CPU)


class DeviceRows:
    """The rows of all groups of tables that are not hashed, for one worker. Not thread-safe.

    hits, lookups: distinct rows so far that were read from the device's own memory, and in all
    """

    def __init__(self, flat: np.ndarray, layout: Layout, device: torch.device, hot_rows: int = 0) -> None:
        """flat: float32, the host's memory; hot_rows: copies in the device's memory, of all groups together.

        Raises CannotRegister.
        """
        self.device, self._layout = device, layout
        self._view = HostView(flat, device)
        plain = [group for group in layout.groups if group.hashed is None]
        n_rows = sum(group.rows_per_shard for group in plain) * layout.n_shards
        self._records = {
            number: Records(self._view.tensor, layout, group)
            for number, group in enumerate(layout.groups)
            if group.hashed is None
        }
        self._hot: dict[int, HotRows] = {}
        for number, records in self._records.items() if hot_rows else ():
            here = layout.groups[number].rows_per_shard * layout.n_shards
            n_hot = min(here, max(1, round(hot_rows * here / n_rows)))
            self._hot[number] = HotRows(n_hot, records.width, device)
        self.keeps_copies = bool(self._hot)
        self.hits, self.lookups = 0, 0

    def has(self, group: int) -> bool:
        """Whether this device looks up rows of the group, by number."""
        return group in self._records

    @property
    def hot_bytes(self) -> int:
        """What the copies take."""
        return sum(hot.n_bytes for hot in self._hot.values())

    def look_up(self, group: int, keys: np.ndarray) -> tuple[Found, Tensor, Tensor]:
        """(what was read of the distinct keys, each key's number among them int64 [n], their weights float32 [d, dim]).

        keys: int64 [n], of the group with this number, all of rows of this host
        """
        distinct, index = torch.unique(to_device(keys, self.device), return_inverse=True)
        found = self._read(group, distinct)
        weights = found.records[:, : self._layout.groups[group].dim]
        return found, index, weights.clone(memory_format=torch.contiguous_format)  # (records change when the step ends)

    def can_apply(self, group: int, of_tables: TableOptimizers) -> bool:
        """Whether the device has all that is done to rows of the group."""
        return _can_apply(self._layout, self._layout.groups[group], of_tables)

    def apply(
        self, group: int, grad: DeviceRowGrad, of_tables: TableOptimizers, scale: float, lr: float, step: int
    ) -> None:
        """Apply scale * grad, as `RowOptimizer.update_` does, in shards that no other process writes meanwhile.

        Count the accesses, one for each row where they are not counted. Does not wait: see `wait`.
        """
        if not len(grad.keys):
            return
        number, found = self._layout.groups[group].optimizer, grad.found or self._read(group, grad.keys)
        records = found.records
        optimizers.update_(of_tables.of(number), records, grad.values, scale, of_tables.rate(number, lr), step)
        records.view(torch.int32)[:, -1] += 1 if grad.accesses is None else grad.accesses
        self._records[group].write(found.starts, records)
        if found.slot is not None and self.keeps_copies:
            self._hot[group].renew(found.keys, found.slot, records)

    def keep_copies(self, does: bool) -> None:
        """Whether copies are kept from now on, where there is room for some. Those that there are, are forgotten."""
        if self.keeps_copies != (does and bool(self._hot)):
            self.forget()
            self.keeps_copies = not self.keeps_copies

    def wait(self) -> None:
        """Return when all that was asked of the device is done, and the host's memory has it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def forget(self) -> None:
        """Rows were written, and their versions may be those of other values: copies no longer count."""
        for hot in self._hot.values():
            hot.forget()

    def close(self) -> None:
        """Let go of the host's memory. May be called twice."""
        self.wait()
        self._records.clear()
        self._view.close()

    def _read(self, group: int, keys: Tensor) -> Found:
        records = self._records[group]
        starts, hot = records.starts(keys), self._hot.get(group) if self.keeps_copies else None
        self.lookups += len(keys)
        if hot is None:
            return Found(keys, records.read(starts), starts)
        versions = records.versions(starts)
        slot = hot.find(keys)
        found, known = hot.read(slot)
        missing = ((slot == hot.spare) | (known != versions)).nonzero()[:, 0]
        self.hits += len(keys) - len(missing)
        if len(missing):
            fresh = records.read(starts.index_select(0, missing))
            fresh.view(torch.int32)[:, -1] = versions.index_select(0, missing)
            found.index_copy_(0, missing, fresh)
            if hot.chooses:
                new = hot.put(keys.index_select(0, missing), slot.index_select(0, missing), fresh)
                slot.index_copy_(0, missing, new)
        return Found(keys, found, starts, slot)
