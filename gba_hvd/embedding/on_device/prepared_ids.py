"""Ids of a batch that is read ahead: their keys are copied to the device while the batch before is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gba_hvd import kernels
from gba_hvd.batch import Bag
from gba_hvd.embedding.lookups import Ids, PlainFields
from gba_hvd.embedding.on_device import streams
from gba_hvd.embedding.on_device.host_view import pinned
from gba_hvd.embedding.on_device.row_gradients import SortedKeys
from gba_hvd.embedding.on_device.rows import DeviceRows


@dataclass(frozen=True)
class PreparedKeys:
    """rows: that they are of. keys: int64 [B, F], on the device; is_there: when they are

    order: of the keys, sample after sample; None: nothing uses it
    """

    rows: DeviceRows
    group: int
    keys: Tensor
    order: SortedKeys | None
    is_there: torch.cuda.Event | None


class PreparedIds(dict[str, "Tensor | Bag"]):
    """Ids by feature, and their keys on a device. Copies of it are ids alone, as a dict's are."""

    def __init__(self, ids: Any = (), prepared: PreparedKeys | None = None) -> None:
        super().__init__(ids)
        self._prepared = prepared
        self._columns = [] if prepared is None else [(name, one, _version(one)) for name, one in self.items()]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def of(self, rows: DeviceRows) -> PreparedKeys | None:
        """The keys, for what the device does next; None: they are of other rows, or ids were changed since."""
        found = self._prepared
        if found is None or found.rows is not rows or len(self) != len(self._columns):
            return None
        for (name, one), (before, column, version) in zip(self.items(), self._columns, strict=True):
            if name != before or one is not column or _version(one) != version:
                return None
        if found.is_there is not None and (of_device := streams.of(rows.device)) is not None:
            stream = of_device.current()
            stream.wait_event(found.is_there)
            order = () if found.order is None else (found.order.keys, found.order.order)
            of_device.used_by(stream, found.keys, *order)
        return found


def _version(one: Tensor | Bag) -> int:
    return one._version if isinstance(one, Tensor) else 0


def prepare(ids: Ids, plain: PlainFields, device: DeviceRows) -> PreparedIds | None:
    """Of one id for each sample and feature, of the features in `plain`, in this order; None: they are other ids.

    Called by a thread that reads ahead. Few operations: for each the thread takes the interpreter from the training.
    """
    columns = [one for one in ids.values() if isinstance(one, Tensor) and one.ndim == 1 and one.device.type == "cpu"]
    if not device.has(plain.group) or len(columns) < len(ids) or not all(map(_is_simple, columns)):
        return None
    n_fields, batch = len(columns), len(columns[0])
    if any(len(column) != batch for column in columns):
        return None
    stacked = torch.empty(n_fields, batch, dtype=torch.int64)
    torch.stack(columns, out=stacked)
    with device.uploading() as is_there:
        keys = pinned(device.device, batch, n_fields)
        if kernels.fill_keys_of_columns(stacked.numpy(), plain.first_key, plain.n_rows, keys.numpy()) >= 0:
            return None  # (the lookup says which id it is)
        there = keys.to(device.device, non_blocking=True)
        order = SortedKeys.of(there.view(-1)) if device.is_fused(plain.group) else None
        if is_there is not None:
            is_there.record()
        return PreparedIds(ids, PreparedKeys(device, plain.group, there, order, is_there))


def _is_simple(column: Tensor) -> bool:
    """Its ids are numbers as keys are, and whether it is changed is known."""
    return column.dtype in (torch.int64, torch.int32) and column.layout == torch.strided and not column.is_inference()
