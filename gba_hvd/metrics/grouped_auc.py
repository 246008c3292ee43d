"""GAUC: the AUC within each group of samples, a user's for example, averaged over the groups.

Decided here: how groups are weighted, and which are left out. A group's AUC needs all of its scores in one place, so
the samples of all workers come together (13 bytes each) and there is no histogram.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gba_hvd.metrics.scores import ScoreState


@dataclass(frozen=True)
class GroupedAuc:
    """gauc: sum over groups of (samples x AUC) / sum of samples, over groups with both classes; NaN without any.

    n_groups: that count; n_groups_left_out: groups with positives only or negatives only, whose AUC is undefined
    """

    gauc: float
    n_groups: int
    n_groups_left_out: int


class GroupedScores:
    """One worker's scores with their groups. logits: float32 [n]; labels: uint8 [n]; groups: int64 [n].

    Not thread-safe. A sample whose logit is NaN is left out; `ScoreAccumulator` counts it.
    """

    def __init__(self) -> None:
        self._columns: list[tuple[NDArray[np.float32], NDArray[np.uint8], NDArray[np.int64]]] = []

    def add(self, logits: ArrayLike, labels: ArrayLike, groups: ArrayLike) -> None:
        """Take in the scores of some samples; all three [n], labels 0 or 1."""
        x, y, g = np.array(logits, np.float32), np.asarray(labels).astype(np.uint8), np.array(groups, np.int64)
        if not len(x) == len(y) == len(g):
            raise ValueError(f"as many labels and groups as logits are needed, got {len(x)}, {len(y)} and {len(g)}")
        known = ~np.isnan(x)
        self._columns.append((x[known], y[known], g[known]))

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Plain arrays that can travel."""
        x, y, g = zip(*self._columns, strict=True) if self._columns else ((), (), ())
        return {
            "logits": np.concatenate([np.empty(0, np.float32), *x]),
            "labels": np.concatenate([np.empty(0, np.uint8), *y]),
            "groups": np.concatenate([np.empty(0, np.int64), *g]),
        }


def grouped_auc_from(states: Sequence[ScoreState]) -> GroupedAuc:
    """GAUC of all workers' samples together, however the samples were divided."""
    logits, labels, groups = (np.concatenate([s[name] for s in states]) for name in ("logits", "labels", "groups"))
    return grouped_auc(logits, labels, groups)


def grouped_auc(logits: NDArray[np.generic], labels: NDArray[np.generic], groups: NDArray[np.generic]) -> GroupedAuc:
    """GAUC of samples in any order, each [n]; ties within a group count half.

    Per group in integers up to its one division, as `metrics.auc_from_counts`.
    """
    if not len(logits):
        return GroupedAuc(math.nan, 0, 0)
    order = np.lexsort((logits, groups))
    x, y, g = logits[order], labels[order].astype(np.int64), groups[order]
    new_group = np.concatenate([[True], g[1:] != g[:-1]])
    new_score = new_group | np.concatenate([[True], x[1:] != x[:-1]])
    group_starts, score_starts = np.flatnonzero(new_group), np.flatnonzero(new_score)
    positives = np.add.reduceat(y, score_starts)  # at each distinct score of each group
    negatives = np.diff(np.concatenate([score_starts, [len(x)]])) - positives
    first_score = np.searchsorted(score_starts, group_starts)
    n_positive, n_negative = np.add.reduceat(positives, first_score), np.add.reduceat(negatives, first_score)
    before = np.cumsum(negatives) - negatives  # negatives at lower scores, of all groups before as well
    group_of_score = np.cumsum(new_group[score_starts]) - 1
    below = before - before[first_score][group_of_score]
    twice_won = np.add.reduceat(positives * (2 * below + negatives), first_score)
    pairs = n_positive * n_negative
    has_both = pairs > 0
    n_samples = (n_positive + n_negative)[has_both]
    aucs = twice_won[has_both] / (2 * pairs[has_both])
    n_left_out = int((~has_both).sum())
    if not len(aucs):
        return GroupedAuc(math.nan, 0, n_left_out)
    return GroupedAuc(float((aucs * n_samples).sum() / n_samples.sum()), len(aucs), n_left_out)
