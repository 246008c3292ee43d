"""Whether numbers of a dataset are scaled as those that a job was trained with.

Decided here: in which column the same value is another number of the dense input. That is reported and not refused in
training, since new data has other means; from then on those of the newest dataset count, or none where it has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_One = tuple[str, float, float]
Scaling = dict[str, _One]
"""By numeric column: the transform, then the mean that is subtracted, and the deviation that divides."""

_ROUNDING = 1e-6  # of a deviation: less is no difference in float32


def scaling_of(dataset: object) -> Scaling:
    """What a dataset has as `dense_scaling`; empty for one that has none, or None."""
    return dict(getattr(dataset, "dense_scaling", None) or {})


def trained_with(trained: Mapping[str, _One], dataset: object) -> Scaling:
    """What counts once this dataset is trained, too. One that leaves the comparison out does so for its columns."""
    if getattr(dataset, "dense_scaling", {}) is None:
        own = getattr(dataset, "dense_names", trained)
        return {column: one for column, one in trained.items() if column not in own}
    return {**trained, **scaling_of(dataset)}


def to_state(trained: Mapping[str, _One]) -> dict[str, Any]:
    return {column: list(one) for column, one in trained.items()}


def of_state(stored: Mapping[str, Any]) -> Scaling:
    return {column: (transform, mean, std) for column, (transform, mean, std) in stored.items()}


def of_other_workers(everyone: Sequence[Mapping[str, _One]]) -> str:
    """In words, the first worker whose values are other numbers than those of rank 0; else empty. everyone: by rank"""
    found = (
        other_scaling(everyone[0], one, f"the dataset of rank {rank}", "of rank 0") for rank, one in enumerate(everyone)
    )
    return next(filter(None, found), "")


def other_scaling(
    trained: Mapping[str, _One], found: Mapping[str, _One], owner: str, whose: str = "that was trained last"
) -> str:
    """In words, the first column whose values are other numbers than in training; else empty.

    owner: of `found`. whose: `trained`
    """
    others = [name for name, one in found.items() if name in trained and not _is_same(trained[name], one)]
    if not others:
        return ""
    more = f" (and {len(others) - 1} more columns)" if len(others) > 1 else ""
    return (
        f"column {others[0]!r}{more}: expected the scaling {whose}, {_words(trained[others[0]])}, got "
        f"{_words(found[others[0]])}, in {owner}: the same value is another number of the dense input"
    )


def _is_same(a: _One, b: _One) -> bool:
    is_near = math.isclose(a[2], b[2], rel_tol=_ROUNDING) and abs(a[1] - b[1]) <= _ROUNDING * max(a[2], b[2])
    return a[0] == b[0] and is_near


def _words(one: _One) -> str:
    return f"transform {one[0]}, mean {one[1]:.10g}, deviation {one[2]:.10g}"
