"""One micro-batch of a click log, as readers make it and models take it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gba_hvd.errors import BadInput

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Bag:
    """A multi-valued feature, as `torch.nn.EmbeddingBag` takes it.

    values:  int64 or int32 [n]
    offsets: int64 or int32 [B]  where each sample's values start
    weights: float32 (or bfloat16, float16) [n], of a feature that is pooled by "sum" or "mean"; or None

    A lookup raises BadInput for other dtypes, and for offsets or weights that do not fit the values.
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """B samples.

    ids:   by feature (without `EmbeddingTables(features=)`, by table): int64 or int32 [B], [B, L] with padding, or any
           shape of a feature that is not pooled; a `Bag` of B samples; or a jagged nested tensor [B, j]
    dense: float32 [B, n_dense], n_dense may be 0
    label: float32 [B], 0 or 1 or ratings; [B, n_labels] of several, n_labels may be 0 where samples have none
    index: position of this micro-batch in the epoch's order, -1 outside training

    `dense` and `label` may be bfloat16 or float16 as well. Raises BadInput for other dtypes, on which PyTorch would
    fail within the model or the loss.
    """

    ids: dict[str, Tensor | Bag]
    dense: Tensor
    label: Tensor
    index: int = -1

    def __post_init__(self) -> None:
        for name, shape in (("dense", "[B, n_dense]"), ("label", "[B] or [B, n_labels]")):
            value = getattr(self, name)
            if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
                got, how = f"a {type(value).__name__}", "make it a tensor, as torch.from_numpy does"
                if isinstance(value, Tensor):
                    got = f"{value.dtype} {list(value.shape)}"
                    how = f"convert it where the batch is made: {name}.float()"
                raise BadInput(f"Batch: {name} must be float32 {shape}, got {got}; {how}")

    def __len__(self) -> int:
        return len(self.label)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same samples with `dense` and `label` on a device. Ids stay: tables look them up from the CPU."""
        dense, label = (one.to(device, non_blocking=non_blocking) for one in (self.dense, self.label))
        return replace(self, dense=dense, label=label)
