"""Ids of a batch that is read ahead: their keys are copied to the device while the batch before is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gba_hvd.batch import Bag
from gba_hvd.embedding.lookups import Ids, Source, fill_keys, plain_fields
from gba_hvd.embedding.on_device.host_view import pinned, to_device
from gba_hvd.embedding.on_device.rows import DeviceRows
from gba_hvd.errors import BadInput


@dataclass(frozen=True)
class PreparedKeys:
    """rows: that they are of. keys: int64 [F * B], on the device, column after column; is_there: when they are"""

    rows: DeviceRows
    group: int
    keys: Tensor
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
        if found.is_there is not None:
            stream = torch.cuda.current_stream(rows.device)
            stream.wait_event(found.is_there)
            found.keys.record_stream(stream)
        return found


def _version(one: Tensor | Bag) -> int:
    return one._version if isinstance(one, Tensor) else 0


def prepare(ids: Ids, sources: Sequence[Source], device: DeviceRows) -> PreparedIds | None:
    """Of one id for each sample and feature, in tables of one group; None: they are other ids.

    sources: of the features, in the order of `ids`. Called by a thread that reads ahead.
    """
    columns = [one for one in ids.values() if isinstance(one, Tensor) and one.ndim == 1 and one.device.type == "cpu"]
    if any(one.is_inference() for one in columns):  # whether they are changed is not known
        return None
    plain = plain_fields(sources)
    if plain is None or not device.has(plain.group) or len(columns) < len(ids):
        return None
    batch = len(columns[0])
    if any(len(column) != batch for column in columns):
        return None
    with device.uploading() as is_there:
        keys = pinned(batch * len(columns), device.device)
        try:
            for number, (source, column) in enumerate(zip(sources, columns, strict=True)):
                fill_keys(source, column, keys[number * batch : (number + 1) * batch])
        except BadInput:  # the lookup raises it
            return None
        there = to_device(keys, device.device)
        if is_there is not None:
            is_there.record()
        return PreparedIds(ids, PreparedKeys(device, plain.group, there, is_there))
