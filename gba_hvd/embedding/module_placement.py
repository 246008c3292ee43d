"""What a module takes from the model it is in: dtype and device of one without parameters, and its mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn


class FollowsModule(nn.Module):
    """Lookups return `dtype` on `device`, which `model.to(...)`, `.bfloat16()`, `.cuda()` and so on set, as they set
    those of the weight of an `nn.Embedding`. Rows stay float32 in the host's memory, and so do their gradients.

    weight_table: the table that has the rows of the module's `weight`; empty: it had no weight
    """

    weight_table: str = ""
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], *rest: Any, **named: Any) -> Self:
        super()._apply(fn, *rest, **named)  # type: ignore[no-untyped-call]
        found = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        self.dtype = found.dtype
        if found.device.type != "meta":  # (where a model without values is made, rows have theirs)
            self.device = found.device
        return self


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module is in the mode that it was in."""
    was = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in was.items():
            module.training = training
