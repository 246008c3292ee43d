"""What a model returns, as columns of scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd.errors import BadInput


def scores_of(outputs: Any, activation: str) -> dict[str, np.ndarray]:
    """Columns [B] by name: `score` of a tensor [B] or [B, 1], `score_0`, ... of one [B, T] or of a tuple, or the names
    of a mapping. activation: "sigmoid" or "none". Raises BadInput for anything else."""
    found = {name: value.detach().float().cpu() for name, value in _columns(outputs, "score").items()}
    if activation == "sigmoid":
        found = {name: torch.sigmoid(value) for name, value in found.items()}
    return {name: value.numpy() for name, value in found.items()}


def _columns(value: Any, name: str) -> dict[str, Tensor]:
    if isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == 1:
        return {name: value[:, 0]}
    if isinstance(value, Tensor) and value.ndim == 2:
        return {f"{name}_{i}": column for i, column in enumerate(value.unbind(1))}
    if isinstance(value, Tensor) and value.ndim == 1:
        return {name: value}
    if isinstance(value, Mapping):
        return {k: v for key, one in value.items() for k, v in _columns(one, str(key)).items()}
    if isinstance(value, tuple | list):
        return {k: v for i, one in enumerate(value) for k, v in _columns(one, f"{name}_{i}").items()}
    what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise BadInput(f"the model returned {what}; scores are tensors [B] or [B, T], or mappings and tuples of these")


def same_outputs(expected: Any, found: Any, builder: str) -> None:
    """Raises BadInput where two outputs are not the same, bit for bit."""
    mine, theirs = _flat(expected, "the output"), _flat(found, "the output")
    for name in mine.keys() | theirs.keys():
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype or not _same_bits(a, b):
            raise BadInput(
                f"{name} of what {builder} builds differs from the model's on input_example: it builds another model, "
                "or one that is not determined by its parameters and buffers (a constant that was changed, or random "
                "numbers in evaluation)"
            )


def _flat(value: Any, name: str) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value.detach().cpu()}
    if isinstance(value, Mapping):
        return {k: v for key, one in value.items() for k, v in _flat(one, f"{name}[{key!r}]").items()}
    if isinstance(value, tuple | list):
        return {k: v for i, one in enumerate(value) for k, v in _flat(one, f"{name}[{i}]").items()}
    return {}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if not a.numel():
        return True
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
