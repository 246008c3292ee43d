"""Ids of a batch that is read ahead: their keys are copied to the device while the batch before is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gba_hvd.batch import Bag
from gba_hvd.embedding.lookups import Ids, Source, fill_keys, plain_fields
from gba_hvd.embedding.on_device.host_view import pinned, to_device
from gba_hvd.embedding.on_device.rows import DeviceRows
from gba_hvd.errors import BadInput


class PreparedIds(dict[str, "Tensor | Bag"]):
    """Ids by feature, as they were, and their keys on a device. group: of the tables, by number"""

    def __init__(self, ids: Ids, group: int, keys: Tensor, is_there: torch.cuda.Event | None) -> None:
        super().__init__(ids)
        self.group = group
        self._columns = [(one, one._version) for one in ids.values() if isinstance(one, Tensor)]
        self._keys, self._is_there = keys, is_there

    def keys_on_device(self) -> Tensor | None:
        """int64 [F * B], column after column; None where ids have been changed since."""
        now = list(self.values())
        is_same = len(now) == len(self._columns) and all(
            one is column and column._version == version
            for one, (column, version) in zip(now, self._columns, strict=True)
        )
        if not is_same:
            return None
        if self._is_there is not None:
            stream = torch.cuda.current_stream(self._keys.device)
            stream.wait_event(self._is_there)
            self._keys.record_stream(stream)
        return self._keys


def prepare(ids: Ids, sources: Sequence[Source], device: DeviceRows) -> PreparedIds | None:
    """Of one id for each sample and feature, in tables of one group; None: they are other ids.

    sources: of the features, in the order of `ids`. Called by a thread that reads ahead.
    """
    columns = [one for one in ids.values() if isinstance(one, Tensor) and one.ndim == 1 and one.device.type == "cpu"]
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
        return PreparedIds(ids, plain.group, there, is_there)
