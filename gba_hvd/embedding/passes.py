"""What forward passes find of the rows, and what they leave for backward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gba_hvd.embedding.bags import Borrowed, PooledBag
from gba_hvd.embedding.compiled import CompiledPass
from gba_hvd.embedding.on_device.row_gradients import DeviceRowGrad, Found, MergedRowGrad, SortedKeys, SparseRowGrad
from gba_hvd.embedding.row_gradients import RowGrad


@dataclass(frozen=True)
class PulledRows:
    """Rows of one group fetched from other hosts for the micro-batches ahead.

    keys: int64 [n]; slots: their hash table (`kernels.find_keys`); values: float32 [n, dim]
    bags: those whose rows the owners have pooled; keys has their activations, too. borrowed: by owner, where what it
    sent is a part of the rows' elements
    """

    keys: np.ndarray
    slots: np.ndarray
    values: np.ndarray
    bags: Sequence[PooledBag] = ()
    borrowed: Mapping[int, Borrowed] = field(default_factory=dict)


@dataclass(frozen=True)
class Captured:
    """The rows one forward pass used, as the autograd leaf that collects their gradient.

    ids: int32 [n], of each id its place in `keys`; samples: int64 [n], its sample. Empty unless the tables have
    `notes_samples`
    n_samples: how many samples the fields have: one number where all have as many
    accesses: uint32 [n], how often each was looked up; None: not counted
    """

    group: int
    keys: np.ndarray
    rows: Tensor
    ids: np.ndarray
    samples: np.ndarray
    n_samples: frozenset[int]
    accesses: np.ndarray | None = None
    compiled: list[CompiledPass] = field(default_factory=list)  # kept for the backward operator

    def gradient(self) -> RowGrad:
        assert self.rows.grad is not None
        return RowGrad(self.keys, self.rows.grad.numpy(), self.accesses)

    @property
    def values(self) -> np.ndarray:
        """float32 [d, dim], of the keys"""
        return self.rows.detach().numpy()


@dataclass(frozen=True)
class CapturedOnDevice:
    """The same, where a device looked the rows up, in its memory.

    found: of the distinct keys. None: `rows` are those of all keys, of which some are changed when the step ends, and
    `index` has keys; their gradient is sparse. index: int64 [n], of each id its row
    order: of the keys in the gradient's order, if it is known
    """

    group: int
    found: Found | None
    rows: Tensor
    index: Tensor
    counts_accesses: bool
    order: SortedKeys | None = None

    @property
    def keys(self) -> np.ndarray:
        """int64 [d], distinct; waits for the device"""
        keys: np.ndarray = (torch.unique(self.index) if self.found is None else self.found.keys).cpu().numpy()
        return keys

    @property
    def values(self) -> np.ndarray:
        """float32 [d, dim], of the keys; waits for the device"""
        rows = self.rows.detach()
        values: np.ndarray = (rows if self.found else rows[torch.unique(self.index)]).cpu().numpy()
        return values

    def gradient(self) -> DeviceRowGrad:
        grad = self.rows.grad
        assert grad is not None
        if self.found is None:
            return SparseRowGrad(grad, self.index, self.counts_accesses, self.order)
        accesses = torch.bincount(self.index, minlength=len(grad)).to(torch.int32) if self.counts_accesses else None
        return MergedRowGrad(self.found.keys, grad, accesses, self.found)


@dataclass
class Passes:
    """What forward passes find, and what they leave for backward passes.

    remote: rows of other hosts, by group
    """

    remote: list[PulledRows | None]
    captured: list[Captured | CapturedOnDevice] = field(default_factory=list)
