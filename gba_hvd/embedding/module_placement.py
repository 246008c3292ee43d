"""What dtype and device a module without parameters of its own has: those of the model it is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class FollowsModule(nn.Module):
    """Lookups return `dtype` on `device`, which `model.to(...)`, `.bfloat16()`, `.cuda()` and so on set, as they set
    those of the weight of an `nn.Embedding`. Rows stay float32 in the host's memory, and so do their gradients."""

    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], *rest: Any, **named: Any) -> Self:
        super()._apply(fn, *rest, **named)  # type: ignore[no-untyped-call]
        found = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        self.dtype = found.dtype
        if found.device.type != "meta":  # (where a model without values is made, rows have theirs)
            self.device = found.device
        return self
