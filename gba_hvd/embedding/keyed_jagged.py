"""Ids as a `KeyedJaggedTensor` of TorchRec: all features of a batch in one tensor of values, feature after feature.

TorchRec is not imported: what counts is the methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from gba_hvd.batch import Bag
from gba_hvd.embedding.lookups import Ids
from gba_hvd.errors import BadInput

_METHODS = ("keys", "values", "offsets", "weights_or_none")


class KeyedJaggedTensor(Protocol):
    """F features of B samples each, as TorchRec has them.

    values:  int64 or int32 [n], of the first feature, then of the second, ...
    offsets: int64 or int32 [F B + 1], where the values of each sample of each feature start
    weights: float32 [n], or None
    """

    def keys(self) -> list[str]: ...
    def values(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


AnyIds = Ids | KeyedJaggedTensor


def by_feature(ids: AnyIds) -> Ids:
    """Ids by feature: a mapping as it is, a `KeyedJaggedTensor` as a `Bag` for each of its keys, views of its tensors.

    Raises BadInput for anything else, and for a tensor whose keys have different numbers of samples.
    """
    if isinstance(ids, Mapping):
        return ids
    if not all(callable(getattr(ids, method, None)) for method in _METHODS):
        raise BadInput(
            f"ids must be a mapping from features to tensors or gba_hvd.Bag, or a KeyedJaggedTensor, got a "
            f"{type(ids).__name__}"
        )
    names, values, offsets, weights = list(ids.keys()), ids.values(), ids.offsets(), ids.weights_or_none()
    if len(set(names)) < len(names):
        raise BadInput(f"a KeyedJaggedTensor with one key twice: {names}")
    differs = getattr(ids, "variable_stride_per_key", None)
    n_samples, rest = divmod(len(offsets) - 1, max(1, len(names)))
    if rest or (differs is not None and differs()):
        raise BadInput(
            f"a KeyedJaggedTensor must have as many samples of each key, got {len(offsets) - 1} lists for "
            f"{len(names)} keys, {', '.join(names)}: a batch size for each key (stride_per_key_per_rank) is not taken"
        )
    cuts = offsets[:: max(1, n_samples)].tolist() if n_samples else [0] * (len(names) + 1)
    found = {}
    for number, name in enumerate(names):
        first, end = cuts[number], cuts[number + 1]
        starts = offsets[number * n_samples : (number + 1) * n_samples] - first
        found[name] = Bag(values[first:end], starts, None if weights is None else weights[first:end])
    return found
