"""AUC and log loss of click predictions, from scores that several workers hold; squared and absolute errors of ratings.

Decided here: how these figures are computed, and from which size on AUC comes from a histogram instead of all scores.
Not here: groups (`grouped_auc`), rankings (`ranking`), who evaluates which samples and how the states travel
(`evaluation`).

    ScoreAccumulator.add (per worker) -> .state() -> scores_from(all states) -> Scores
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gba_hvd.errors import BadInput

EXACT_LIMIT = 5_000_000  # samples over all workers; 5 bytes each
N_BINS = 1 << 16
# The histogram divides this range of logits evenly; the two end bins take what lies outside (p < 1e-13).
LOGIT_RANGE = 30.0
_LEAST_PROBABILITY = 1e-12  # 0 and 1 themselves would cost infinite log loss

ScoreState = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Scores:
    """What an evaluation found. `auc` is NaN when it is undefined, and `note` then says why.

    exact: AUC of every pair, ties counted half; otherwise from a histogram of logits, where a bin is one tie
    """

    auc: float
    logloss: float
    n: int
    exact: bool
    note: str = ""


@dataclass(frozen=True)
class TaskScores:
    """What an evaluation found about one task.

    values: by metric name, in the order they were asked for; NaN where a metric is undefined, and `note` then says why
    n: samples that counted. exact: as in `Scores`; True where no AUC was asked for
    n_groups, n_groups_left_out: of "gauc", groups that count and groups that have one class only; 0 without it
    """

    values: Mapping[str, float]
    n: int
    exact: bool = True
    note: str = ""
    n_groups: int = 0
    n_groups_left_out: int = 0

    def __getitem__(self, metric: str) -> float:
        if metric not in self.values:
            raise KeyError(f"{metric!r} was not asked for: this evaluation has {', '.join(self.values)}")
        return self.values[metric]


class ScoreAccumulator:
    """One worker's scores: all of them up to `exact_limit`, a histogram of logits beyond.

    logits: float32 [n] and labels: uint8 [n], or positives, negatives: int64 [N_BINS]. Not thread-safe.
    """

    def __init__(self, exact_limit: int = EXACT_LIMIT) -> None:
        if exact_limit < 0:
            raise ValueError(f"exact_limit must be 0 or more samples, got {exact_limit}")
        self.exact_limit = exact_limit
        self._logits: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.uint8]] = []
        self._histogram: NDArray[np.int64] | None = None  # [2, n_bins] negatives, positives
        self._n = 0
        self._n_nan = 0
        self._loss_sum = 0.0

    def add(self, logits: ArrayLike, labels: ArrayLike) -> None:
        """Take in the logits (before the sigmoid) and the labels, 0 or 1, of some samples; both [n]."""
        x, y = np.array(logits, dtype=np.float32).ravel(), np.array(labels).ravel()
        if x.shape != y.shape:
            raise ValueError(f"as many labels as logits are needed, got {y.size} labels and {x.size} logits")
        wrong = ~((y == 0) | (y == 1))
        if wrong.any():
            raise BadInput(f"a label must be 0 or 1, got {y[wrong][0]:g} in {int(wrong.sum())} of {y.size} samples")
        self._n += x.size
        # NaN is counted, not raised: one worker that leaves an evaluation alone would keep the others waiting.
        known = ~np.isnan(x)
        self._n_nan += int((~known).sum())
        x, clicked = x[known], y[known].astype(np.uint8)
        self._loss_sum += _log_loss_sum(x, clicked)
        if self._histogram is None:
            self._logits.append(x)
            self._labels.append(clicked)
            if self._n > self.exact_limit:
                self._histogram = histogram(*self._scores(), N_BINS)
                self._logits.clear()
                self._labels.clear()
        else:
            self._histogram += histogram(x, clicked, N_BINS)

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Plain arrays that can travel; the ones not in use are empty."""
        logits, labels = self._scores()
        negatives, positives = np.empty((2, 0), np.int64) if self._histogram is None else self._histogram
        return {
            "logits": logits,
            "labels": labels,
            "negatives": negatives,
            "positives": positives,
            "counts": np.array([self._n, self._n_nan, self.exact_limit, N_BINS], np.int64),
            "loss_sum": np.array([self._loss_sum], np.float64),
        }

    def _scores(self) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        if not self._logits:
            return np.empty(0, np.float32), np.empty(0, np.uint8)
        return np.concatenate(self._logits), np.concatenate(self._labels)


def logits_of(outputs: NDArray[np.float32], activation: str | None) -> NDArray[np.float32]:
    """Logits float32 [n] of a model's outputs: these themselves, or where the activation is "none" of probabilities.

    Raises BadInput for an output outside [0, 1] where probabilities are expected. NaN stays NaN.
    """
    if activation != "none":
        return outputs
    wrong = (outputs < 0) | (outputs > 1)
    if wrong.any():
        raise BadInput(
            f'with activation="none" outputs are probabilities, got {outputs[wrong].flat[0]} in {int(wrong.sum())} of '
            f'{outputs.size}; if the model gives logits, say activation="sigmoid"'
        )
    p = np.clip(outputs.astype(np.float64), _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    return np.asarray(np.log(p / (1 - p)), dtype=np.float32)


def scores_from(states: Sequence[ScoreState]) -> Scores:
    """The scores of all workers' samples together; the AUC does not depend on how the samples were divided."""
    if not states:
        raise ValueError("scores_from needs the state of at least one ScoreAccumulator, got none")
    settings = {(int(s["counts"][2]), int(s["counts"][3])) for s in states}
    if len(settings) > 1:
        raise ValueError(f"every ScoreAccumulator must have the same exact_limit and n_bins, got {sorted(settings)}")
    ((exact_limit, n_bins),) = settings
    n = sum(int(s["counts"][0]) for s in states)
    n_nan = sum(int(s["counts"][1]) for s in states)
    logloss = sum(float(s["loss_sum"][0]) for s in states) / n if n else math.nan
    logits = np.concatenate([s["logits"] for s in states])
    labels = np.concatenate([s["labels"] for s in states])
    exact = n <= exact_limit
    if n_nan:
        return Scores(math.nan, math.nan, n, exact, f"{n_nan} of {n} logits are NaN: the model has diverged")
    if exact:
        negatives, positives = tally(logits, labels)
    else:
        negatives, positives = histogram(logits, labels, n_bins)
        for s in states:
            if s["negatives"].size:
                negatives, positives = negatives + s["negatives"], positives + s["positives"]
    n_positive, n_negative = int(positives.sum()), int(negatives.sum())
    note = ""
    if n_positive == 0 or n_negative == 0:
        note = f"AUC needs both classes; these {n} samples have {n_positive} positive and {n_negative} negative"
    return Scores(auc_from_counts(negatives, positives), logloss, n, exact, note)


def exact_auc(logits: ArrayLike, labels: ArrayLike) -> float:
    """Probability that a positive scores above a negative, ties counted half; NaN when one class is missing."""
    return auc_from_counts(*tally(np.asarray(logits), np.asarray(labels)))


def tally(logits: NDArray[np.generic], labels: NDArray[np.generic]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Negatives and positives at each distinct score, ascending: two int64 arrays [distinct scores]."""
    if not logits.size:
        return np.zeros(1, np.int64), np.zeros(1, np.int64)
    order = np.argsort(logits)
    ordered = logits[order]
    starts = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])
    counts = np.diff(np.concatenate([starts, [ordered.size]]))
    positives = np.add.reduceat(labels[order].astype(np.int64), starts)
    return counts - positives, positives


def histogram(logits: NDArray[np.generic], labels: NDArray[np.generic], n_bins: int) -> NDArray[np.int64]:
    """Negatives and positives per bin of logits, ascending: int64 [2, n_bins]."""
    inside = np.clip(logits.astype(np.float64), -LOGIT_RANGE, LOGIT_RANGE)
    bins = np.minimum(((inside + LOGIT_RANGE) * (n_bins / (2 * LOGIT_RANGE))).astype(np.int64), n_bins - 1)
    slot = bins + n_bins * labels.astype(np.int64)
    return np.bincount(slot, minlength=2 * n_bins).astype(np.int64).reshape(2, n_bins)


def auc_from_counts(negatives: NDArray[np.int64], positives: NDArray[np.int64]) -> float:
    """Area under the ROC curve from the negatives and positives at each score, ascending; NaN without both classes.

    In integers up to the last division, so the order of the samples changes nothing.
    """
    pairs = int(negatives.sum()) * int(positives.sum())
    if pairs == 0:
        return math.nan
    below = np.cumsum(negatives) - negatives
    twice_won = int((positives * (2 * below + negatives)).sum())
    return twice_won / (2 * pairs)


def _log_loss_sum(logits: NDArray[np.float32], labels: NDArray[np.uint8]) -> float:
    """Sum of log(1 + exp(-x)) over the positives and log(1 + exp(x)) over the negatives; never overflows."""
    signed = np.where(labels == 1, -logits.astype(np.float64), logits.astype(np.float64))
    return float(np.logaddexp(0.0, signed).sum())


# --- ratings ---------------------------------------------------------------------------------------------------------

N_ERROR_SUMS = 4


def error_sums(outputs: ArrayLike, labels: ArrayLike) -> NDArray[np.float64]:
    """float64 [4] of some samples: how many, how many outputs are NaN, sum of squared and of absolute errors.

    outputs, labels: [n]. Raises BadInput for a label that is not finite.
    """
    x, y = np.array(outputs, np.float64).ravel(), np.array(labels, np.float64).ravel()
    if x.shape != y.shape:
        raise ValueError(f"as many labels as outputs are needed, got {y.size} labels and {x.size} outputs")
    if not np.isfinite(y).all():
        raise BadInput(f"a label must be a finite number, got {y[~np.isfinite(y)][0]} in a batch of {y.size} samples")
    n_nan = int(np.isnan(x).sum())
    errors = (x - y)[~np.isnan(x)]
    return np.array([x.size, n_nan, np.square(errors).sum(), np.abs(errors).sum()])


def errors_from(sums: ArrayLike) -> tuple[dict[str, float], int, str]:
    """ "mse", "rmse" and "mae" of the sums of all samples, how many these are, and why a value is NaN, in words."""
    n, n_nan, squares, absolute = np.asarray(sums, np.float64).tolist()
    if n_nan or not n:
        why = f"{n_nan:.0f} of {n:.0f} outputs are NaN: the model has diverged" if n_nan else "no samples"
        return dict.fromkeys(("mse", "rmse", "mae"), math.nan), int(n), why
    return {"mse": squares / n, "rmse": math.sqrt(squares / n), "mae": absolute / n}, int(n), ""
