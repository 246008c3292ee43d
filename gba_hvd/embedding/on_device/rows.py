"""What a worker's device does with the rows of its host: look them up, keep copies of some or all, apply gradients.

Who writes what. The rows in the host's memory are the rows. Other processes of the host may write them, a server or the
workers that serve other shards: then each lookup reads them there. Where this worker is the only one that applies
gradients, its device does it, and may keep copies.

In which order. Records are changed in the device's memory; a stream of its own writes them to the host's memory, and
then the mark that the step is finished, while the device computes the next step. So a process that looks at the marks
finds a step in flight, as during the CPU's pass, until all rows of the step are there; a kill meanwhile leaves what a
kill in that pass leaves. This process waits before it reads the memory or begins the next step
(`ShardMemory.await_device`); lookups by the device wait in their stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gba_hvd.embedding.on_device import optimizers, streams
from gba_hvd.embedding.on_device.copies import AllRows, Copies, HotRows
from gba_hvd.embedding.on_device.fused import FusedRows
from gba_hvd.embedding.on_device.host_view import HostView, HostWrites
from gba_hvd.embedding.on_device.records import Records
from gba_hvd.embedding.on_device.row_gradients import DeviceRowGrad, Found, SparseRowGrad
from gba_hvd.embedding.row_optimizers import TableOptimizers
from gba_hvd.shm.layout import FINISHED, Group, Layout


def can_apply(layout: Layout, of_tables: TableOptimizers) -> bool:
    """Whether a device has all that is done to rows, of each group that is not hashed."""
    return all(_can_apply(layout, group, of_tables) for group in layout.groups if group.hashed is None)


def _can_apply(layout: Layout, group: Group, of_tables: TableOptimizers) -> bool:
    return layout.sampled is None and optimizers.can_update(of_tables.of(group.optimizer))  # (samples: by the CPU)


class DeviceRows:
    """The rows of all groups of tables that are not hashed, for one worker. Not thread-safe.

    copies_all: there is room for a copy of each row. hits, lookups: distinct rows so far that were read from the
    device's own memory, and in all
    """

    def __init__(self, flat: np.ndarray, layout: Layout, device: torch.device, hot_rows: int = 0) -> None:
        """flat: float32, the host's memory; hot_rows: copies in the device's memory, of all groups together.

        Raises CannotRegister.
        """
        self.device, self._layout = device, layout
        self._view = HostView(flat, device)
        self._writes = HostWrites(device)
        self._streams = streams.of(device)
        self._uploads = None if self._streams is None else self._streams.new()
        self._records = {
            number: Records(self._view.tensor, self._writes, layout, group)
            for number, group in enumerate(layout.groups)
            if group.hashed is None
        }
        self._finished = self._view.tensor.view(torch.int64).view(layout.n_shards, -1)[:, FINISHED]
        try:
            self._copies = self._made_copies(hot_rows)
        except torch.OutOfMemoryError:
            self._view.close()
            raise
        self.keeps_copies = bool(self._copies)
        self._ahead: dict[int, tuple[SparseRowGrad, float, float, int]] = {}  # by group, what `apply_ahead` was given
        self.hits, self.lookups = 0, 0

    def _made_copies(self, hot_rows: int) -> dict[int, Copies]:
        """By group. Sets `copies_all`."""
        groups, device = self._layout.groups, self.device
        n_rows = {number: sum(table.n_rows for table in groups[number].tables) for number in self._records}
        total = sum(n_rows.values())
        self.copies_all = hot_rows >= total
        if self.copies_all:
            return {number: AllRows(groups[number].dim, host, device) for number, host in self._records.items()}
        found: dict[int, Copies] = {}
        for number, host in self._records.items() if hot_rows else ():
            found[number] = HotRows(max(1, round(hot_rows * n_rows[number] / total)), host, device)
        return found

    def has(self, group: int) -> bool:
        """Whether this device looks up rows of the group, by number."""
        return group in self._records

    @property
    def n_bytes_of_copies(self) -> int:
        return sum(copies.n_bytes for copies in self._copies.values())

    @contextlib.contextmanager
    def uploading(self) -> Iterator[torch.cuda.Event | None]:
        """What a thread asks of the device in here is done beside all else. Gives an event to record; None on a CPU."""
        if self._streams is None or self._uploads is None:
            yield None
            return
        with self._streams.using(self._uploads):
            yield self._streams.event()

    def look_up(self, group: int, keys: Tensor) -> tuple[Found, Tensor, Tensor]:
        """(what was read of the distinct keys, each key's number among them int64 [n], their weights float32 [d, dim]).

        keys: int64 [n], on the device, of the group with this number, all of rows of this host
        """
        distinct, index = torch.unique(keys, return_inverse=True)
        found = self._read(group, distinct)
        weights = found.records[:, : self._layout.groups[group].dim]
        return found, index, weights.clone(memory_format=torch.contiguous_format)  # (records change when the step ends)

    def weights(self, group: int) -> Tensor | None:
        """float32 [rows, dim], by key, of which each step changes some; None: the device has no copies of all rows"""
        copies = self._current(group)
        return copies.weights if isinstance(copies, AllRows) else None

    def _current(self, group: int) -> Copies | None:
        """The copies, to be read; None: none are kept."""
        if not self.keeps_copies:
            return None
        if self._ahead:  # of a step that was not applied
            self.forget()
        return self._copies.get(group)

    def is_fused(self, group: int) -> bool:
        """Whether gradients of lookups are applied in one pass, in the order of their keys."""
        return self._fused(group) is not None

    def _fused(self, group: int) -> FusedRows | None:
        copies = self._copies.get(group) if self.keeps_copies else None
        return copies.fused if isinstance(copies, AllRows) else None

    @property
    def why_not_fused(self) -> str:
        """Why gradients are applied by torch's operators where all rows have copies, in words; empty if not."""
        found = (copies.why_not_fused for copies in self._copies.values() if isinstance(copies, AllRows))
        return next(filter(None, found), "") if self.device.type == "cuda" else ""

    def can_apply(self, group: int, of_tables: TableOptimizers) -> bool:
        """Whether the device has all that is done to rows of the group."""
        return _can_apply(self._layout, self._layout.groups[group], of_tables)

    def apply(
        self, group: int, grad: DeviceRowGrad, of_tables: TableOptimizers, scale: float, lr: float, step: int
    ) -> None:
        """Apply scale * grad, as `RowOptimizer.update_` does, in shards that no other process writes meanwhile.

        Count the accesses, one for each row where they are not counted. Does not wait: see `finish`.
        """
        number, ahead = self._layout.groups[group].optimizer, self._ahead.pop(group, None)
        if ahead is not None and ahead != (grad, scale, lr, step):
            self.forget()
        if isinstance(grad, SparseRowGrad) and grad.has_one_of_each and (fused := self._fused(group)) is not None:
            if ahead is None:
                fused.update(grad, of_tables.of(number), scale, of_tables.rate(number, lr), step)
            fused.write(grad)
            return
        grad = grad.merged
        if not len(grad.keys):
            return
        found = grad.found or self._read(group, grad.keys)
        records = found.records
        optimizers.update_(of_tables.of(number), records, grad.values, scale, of_tables.rate(number, lr), step)
        records.view(torch.int32)[:, -1] += 1 if grad.accesses is None else grad.accesses
        if self.keeps_copies:
            self._copies[group].renew(found.keys, records)
        self._records[group].write(found.keys, records)

    def apply_ahead(
        self, group: int, grad: SparseRowGrad, of_tables: TableOptimizers, scale: float, lr: float, step: int
    ) -> None:
        """Begin `apply`, which may or may not come with the same: change the copies, and nothing of the host's memory.

        Only where `is_fused`. If another use of the rows comes first, the copies are forgotten.
        """
        fused, number = self._fused(group), self._layout.groups[group].optimizer
        assert fused is not None
        self._ahead[group] = grad, scale, lr, step
        fused.update(grad, of_tables.of(number), scale, of_tables.rate(number, lr), step)

    def finish(self, step: int) -> None:
        """Mark the step as finished on all shards, once all that was applied is in the host's memory. See `wait`."""
        with self._writes.after():
            self._finished.fill_(step)

    def keep_copies(self, does: bool) -> None:
        """Whether copies are kept from now on, where there is room for some. Those that there are, are forgotten."""
        if self.keeps_copies != (does and bool(self._copies)):
            self.forget()
            self.keeps_copies = not self.keeps_copies

    def wait(self) -> None:
        """Return when all that was asked of the device is done, and the host's memory has it. From any thread."""
        self._writes.wait()

    def forget(self) -> None:
        """Rows were written otherwise: copies no longer count."""
        self._ahead.clear()
        for copies in self._copies.values():
            copies.forget()

    def close(self) -> None:
        """Let go of the host's memory. May be called twice."""
        if self._streams is not None:
            self._streams.current().synchronize()
        self.wait()
        self._records.clear()
        self._copies.clear()
        self._ahead.clear()
        self._finished = torch.empty(0)
        self._view.close()

    def _read(self, group: int, keys: Tensor) -> Found:
        self.lookups += len(keys)
        if (copies := self._current(group)) is not None:
            records, hits = copies.read(keys)
            self.hits += hits
            return Found(keys, records)
        return Found(keys, self._records[group].read(keys))
