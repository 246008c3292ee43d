"""What dtype a module without parameters of its own has: that of the model it is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class FollowsDtype(nn.Module):
    """Lookups return `dtype`, which `model.to(dtype)`, `.bfloat16()`, `.half()` and so on set, as they set that of the
    weight of an `nn.Embedding`. Rows stay float32 in memory, and so do their gradients."""

    dtype: torch.dtype = torch.float32

    def _apply(self, fn: Callable[[Tensor], Tensor], *rest: Any, **named: Any) -> Self:
        super()._apply(fn, *rest, **named)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self
