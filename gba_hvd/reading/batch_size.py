"""How many samples a batch has, where that can be seen: the account counts what was planned, so both must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from gba_hvd.batch import Bag
from gba_hvd.errors import BadInput

_LABELS = ("label", "labels")


def n_samples_of(batch: Any, find_ids: Callable[[], Any] = lambda: None) -> int | None:
    """By its label, else by its ids (as `find_ids` finds them, or under that name), else by all its tensors.

    These have the samples in their first dimension. None where they disagree, or there are none.
    """
    for name in _LABELS:
        if (found := _first_dimension(_member(batch, name))) is not None:
            return found
    ids = _member(batch, "ids") if (found := find_ids()) is None else found
    if isinstance(ids, Mapping):
        return _agreed(ids.values())
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return _agreed(one for part in batch for one in (part.values() if isinstance(part, Mapping) else [part]))
    return None


def check_n_samples(found: int | None, expected: int, where: str) -> None:
    """Raises BadInput when a batch has another number of samples; found: None where that cannot be seen."""
    if found is None or found == expected:
        return
    raise BadInput(
        f"{where}: the batch has {found} samples, and {expected} were to be read. Samples are counted by their "
        "numbers, once each, so a dataset gives as many as it is asked for: instead of leaving bad ones out in take(), "
        "__getitems__ or collate_fn, give them weight 0 in the loss, or make a dataset without them. Where samples are "
        "not the first dimension of labels, ids or tensors (negatives were added, time comes first), pass "
        "n_samples=lambda batch: ..., how many samples it was made of, to gba_hvd.batches"
    )


def _member(batch: Any, name: str) -> Any:
    return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)


def _agreed(members: Iterable[Any]) -> int | None:
    """The first dimension of all; None for any that has none, and where they differ."""
    found = {_first_dimension(member) for member in members}
    return found.pop() if len(found) == 1 else None


def _first_dimension(value: Any) -> int | None:
    if isinstance(value, Bag):
        return len(value.offsets)
    if isinstance(value, Tensor):
        return value.size(0) if value.dim() else None
    return len(value) if isinstance(value, np.ndarray) and value.ndim else None
