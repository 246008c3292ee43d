"""One micro-batch of a click log, as readers make it and models take it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Bag:
    """A multi-valued field, as `torch.nn.EmbeddingBag` takes it.

    values:  int64   [n]
    offsets: int64   [B]  where each sample's values start
    weights: float32 [n]  or None
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """B samples.

    ids:   by table name, int64 [B] or a `Bag` of B samples
    dense: float32 [B, n_dense], n_dense may be 0
    label: float32 [B], 0 or 1
    index: position of this micro-batch in the epoch's order, -1 outside training
    """

    ids: dict[str, Tensor | Bag]
    dense: Tensor
    label: Tensor
    index: int = -1

    def __len__(self) -> int:
        return len(self.label)
