"""A click log that is computed, not stored: row r is a function of (seed, r), and the best possible AUC is known.

Ids follow a Zipf law. The true logit is a sum of one effect per id, a linear part in the dense features, and optionally
products of effects of neighbouring fields; the label is drawn with the probability it gives. Effects shrink with the
rank of an id, as rare ids cannot be learnt, so a model of modest size comes near the Bayes AUC.

A log may drift by day. From one day to the next every effect and every weight w of a dense feature becomes
sqrt(1 - drift) w + sqrt(drift) n, with n a new standard normal number: a random walk whose variance stays. And the id
at each rank is replaced with probability `new_ids` by one that was never seen, with an effect of its own. Scales and
shift are those of day 0, so the Bayes AUC of a day is known, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gba_hvd.batch import Batch
from gba_hvd.data.click_log import Rows, check_range
from gba_hvd.data.hashing import hash_integers, standard_normal, stream_key, unit_interval

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DEFAULT_TABLES = {f"field_{i}": rows for i, rows in enumerate([100, 300, 1000, 1000, 2000, 5000, 10_000, 50_000])}
_CALIBRATION_ROWS = 20_000
_CALIBRATION_START = 1 << 62  # rows that no split reaches
_BLOCK = 1 << 16
_ROOM = 4  # with new ids, a table has so many rows for each id in use; then rows of the oldest ids are used again
# Names of the random streams; a field adds its number, a day after the first that of the day.
_LABEL, _ID, _EFFECT, _DENSE, _WEIGHT, _PERMUTE, _RENEW = range(7)


class Zipf:
    """Ranks 0 .. n-1 with P(rank >= k) falling as in the continuous law x**-exponent on [1, n + 1): one power per draw.

    The exact discrete law would need a table of n numbers or rejection; the two agree in the tail.
    """

    def __init__(self, n: int, exponent: float) -> None:
        self.n = n
        self._q = 1.0 - exponent
        self._top = np.log(n + 1.0) if abs(self._q) < 1e-9 else (n + 1.0) ** self._q - 1.0

    def ranks(self, uniform: Floats) -> Ints:
        """int64 ranks by the inverse of the distribution function at `uniform` in [0, 1)."""
        scaled = uniform * self._top
        x = np.exp(scaled) if abs(self._q) < 1e-9 else (scaled + 1.0) ** (1.0 / self._q)
        ranks: Ints = np.clip(x.astype(np.int64) - 1, 0, self.n - 1)
        return ranks

    def probability(self) -> Floats:
        """float64 [n], sums to 1: of each rank."""
        edges = np.arange(1.0, self.n + 2.0)
        below = np.log(edges) if abs(self._q) < 1e-9 else edges**self._q - 1.0
        return np.asarray(np.diff(below) / self._top)


class SyntheticClickLog:
    """n_samples rows, from row `start` of an endless log.

    Two logs with the same other arguments and ranges that do not overlap are two splits of one truth.
    `logit_std` sets how much can be known: 1.3 gives a Bayes AUC of about 0.79. `pairwise` is the share of the logit's
    variance that comes from products of the effects of neighbouring fields. `day`, `drift` and `new_ids` are of a log
    that drifts, see above: all rows of one object are of one day, and ranges of rows must not overlap between days.
    """

    def __init__(
        self,
        n_samples: int,
        tables: Mapping[str, int] | None = None,
        n_dense: int = 4,
        seed: int = 0,
        zipf: float = 1.05,
        start: int = 0,
        *,
        logit_std: float = 1.3,
        base_rate: float = 0.25,
        pairwise: float = 0.0,
        day: int = 0,
        drift: float = 0.0,
        new_ids: float = 0.0,
    ) -> None:
        self.tables = dict(DEFAULT_TABLES if tables is None else tables)
        if n_samples < 1 or n_dense < 0 or start < 0:
            raise ValueError(f"n_samples {n_samples}, n_dense {n_dense}, start {start}: expected >= 1, >= 0, >= 0")
        if not self.tables or min(self.tables.values()) < 1:
            raise ValueError(f"tables are {self.tables}, expected at least one, each with at least one row")
        if zipf <= 0 or logit_std <= 0 or not 0 < base_rate < 1 or not 0 <= pairwise < 1:
            raise ValueError(
                f"zipf {zipf}, logit_std {logit_std}, base_rate {base_rate}, pairwise {pairwise}: out of range"
            )
        if day < 0 or not 0 <= drift <= 1 or not 0 <= new_ids <= 1:
            raise ValueError(f"day {day}, drift {drift}, new_ids {new_ids}: expected >= 0, a share, a share")
        if day and not (drift or new_ids):
            raise ValueError(f"day {day} of a log that does not drift is day 0: give drift or new_ids, or no day")
        self._day, self._drift, self._new_ids = 0, drift, new_ids
        self.n_dense, self._n, self._seed, self._start, self._pairwise = n_dense, n_samples, seed, start, pairwise
        self.description: dict[str, Any] = {
            "kind": "synthetic click log", "samples": n_samples, "tables": self.tables, "n_dense": n_dense,
            "seed": seed, "zipf": zipf, "start": start, "logit_std": logit_std, "base_rate": base_rate,
            "pairwise": pairwise, "day": day, "drift": drift, "new_ids": new_ids,
        }  # fmt: skip
        in_use = [max(1, rows // _ROOM) if new_ids else rows for rows in self.tables.values()]
        self._laws = [Zipf(n_ids, zipf) for n_ids in in_use]
        self._steps = [coprime_step(rows) for rows in self.tables.values()]
        self._weights = self._drifted(np.arange(n_dense), _WEIGHT)
        self._scales = np.ones(len(self._laws))
        self._dense_scale, self._pair_scale, self._shift = 1.0, 1.0, 0.0
        self._calibrate(logit_std, base_rate)
        self._day = day
        self._weights = self._drifted(np.arange(n_dense), _WEIGHT)

    def __len__(self) -> int:
        return self._n

    def take(self, rows: Rows) -> Batch:
        """The samples at `rows` (int64 [n], any order). Raises `IndexError` for a row outside the log."""
        rows = np.asarray(rows, dtype=np.int64)
        check_range(rows, self._n)
        ids, ranks, dense = self._features(rows + self._start)
        draw = unit_interval(hash_integers(rows + self._start, self._key(_LABEL)))
        label = draw < sigmoid(self._logit(ranks, dense))
        columns = torch.from_numpy(ids).unbind(0)
        return Batch(
            dict(zip(self.tables, columns, strict=True)),
            torch.from_numpy(dense.astype(np.float32)),
            torch.from_numpy(label.astype(np.float32)),
        )

    def probability(self, rows: Rows) -> Floats:
        """float64 [n]: the true probability of a click."""
        rows = np.asarray(rows, dtype=np.int64)
        check_range(rows, self._n)
        return sigmoid(self._logit(*self._features(rows + self._start)[1:]))

    def bayes_auc(self, n: int = 200_000) -> float:
        """The AUC no model can beat, up to sampling: of the true probabilities of the first n rows, over all labels."""
        return expected_auc(np.concatenate([self.probability(block) for block in blocks(min(n, self._n), _BLOCK)]))

    def _features(self, rows: Ints) -> tuple[Ints, Ints, Floats]:
        """ids and ranks int64 [F, n], dense float64 [n, n_dense]."""
        ranks = np.empty((len(self._laws), len(rows)), dtype=np.int64)
        ids = np.empty_like(ranks)
        for f, (name, law) in enumerate(zip(self.tables, self._laws, strict=True)):
            ranks[f] = law.ranks(unit_interval(hash_integers(rows, self._key(_ID, f))))
            # Spread over the table: neighbouring ranks must not be neighbouring rows.
            n_rows = self.tables[name]
            offset = self._key(_PERMUTE, f) % n_rows
            ids[f] = (self._identity(f, ranks[f]) % n_rows * self._steps[f] + offset) % n_rows
        dense = np.empty((len(rows), self.n_dense))
        for d in range(self.n_dense):
            dense[:, d] = standard_normal(hash_integers(rows, self._key(_DENSE, d)))
        return ids, ranks, dense

    def _logit(self, ranks: Ints, dense: Floats) -> Floats:
        logit = dense @ (self._weights * self._dense_scale) + self._shift
        previous: Floats | None = None
        for f in range(len(self._laws)):
            effect = self._effect(f, ranks[f])
            logit += effect * self._scales[f]
            if self._pairwise and previous is not None:
                logit += previous * effect * self._pair_scale
            previous = effect
        return logit

    def _effect(self, field: int, ranks: Ints) -> Floats:
        normal = self._drifted(self._identity(field, ranks), _EFFECT, field)
        normal /= 1.0 + ranks / 10.0
        return normal

    def _identity(self, field: int, ranks: Ints) -> Ints:
        """int64: which id is at a rank on this day. Ids that were never replaced have the number of their rank."""
        renewed = np.zeros_like(ranks)
        for day in range(1, self._day + 1) if self._new_ids else ():
            draw = unit_interval(hash_integers(ranks, stream_key(self._seed, _RENEW, field, day)))
            renewed += draw < self._new_ids
        return ranks + renewed * self._laws[field].n

    def _drifted(self, numbers: Ints, stream: int, field: int = 0) -> Floats:
        """float64: standard normal numbers as of this day, of stream `stream` and its daily ones."""
        normal = standard_normal(hash_integers(numbers, self._key(stream, field)))
        for day in range(1, self._day + 1) if self._drift else ():
            new = standard_normal(hash_integers(numbers, stream_key(self._seed, stream, field, day)))
            normal = np.sqrt(1.0 - self._drift) * normal + np.sqrt(self._drift) * new
        return normal

    def _calibrate(self, logit_std: float, base_rate: float) -> None:
        """Scale the parts of the logit to equal shares of the variance, then shift it to the base rate."""
        rows = np.arange(_CALIBRATION_START, _CALIBRATION_START + _CALIBRATION_ROWS)
        _, ranks, dense = self._features(rows)
        effects = [self._effect(f, ranks[f]) for f in range(len(self._laws))]
        linear = dense @ self._weights
        n_parts = len(effects) + (self.n_dense > 0)
        share = logit_std * np.sqrt((1.0 - self._pairwise) / n_parts)
        self._scales = np.array([share / max(float(effect.std()), 1e-3) for effect in effects])
        self._dense_scale = share / max(float(linear.std()), 1e-3) if self.n_dense else 1.0
        if self._pairwise and len(effects) > 1:
            products = sum((a * b for a, b in itertools.pairwise(effects)), np.zeros(len(rows)))
            self._pair_scale = logit_std * np.sqrt(self._pairwise) / max(float(products.std()), 1e-3)
        self._shift = shift_to(base_rate, self._logit(ranks, dense))

    def _key(self, stream: int, number: int = 0) -> int:
        return stream_key(self._seed, stream, number)


def expected_auc(probability: Floats) -> float:
    """The mean AUC of the true probabilities as scores when each label is drawn by its own probability.

    sum over i != j of p_i (1 - p_j) [p_i > p_j, half for ties], over the sum without the bracket.
    """
    p = np.sort(probability)
    q = 1.0 - p
    wins = float((p * (np.cumsum(q) - q)).sum())
    pairs = float(p.sum() * q.sum() - (p * q).sum())
    return wins / pairs


def shift_to(rate: float, logit: Floats) -> float:
    """What to add to logits so that the mean probability is the rate."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sigmoid(logit + middle).mean() > rate else (middle, high)
    return low


def blocks(n: int, size: int) -> list[Ints]:
    """0 to n - 1 in parts."""
    return [np.arange(at, min(at + size, n)) for at in range(0, n, size)]


def coprime_step(n: int) -> int:
    """A step near n times the golden ratio that visits every residue: rank -> rank * step mod n is a permutation."""
    step = max(1, round(n * 0.6180339887))
    while gcd(step, n) != 1:
        step += 1
    return step


def sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-x))
