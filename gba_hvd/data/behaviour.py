"""A behaviour log that is computed, not stored: users, the items they clicked, and a candidate or their next click.

Row r is a function of (seed, r). Every user has a few interests (categories). A history alternates between them in runs
of `RUN` clicks, so what was clicked last says more than what was clicked long ago. The true logit of a click grows with
the candidate's *relevance*: the clicks on its category, each with weight decay**age, age 0 for the newest. A model that
averages the history sees neither which clicks match the candidate nor how old they are. The next click is drawn from a
softmax over all items whose logits grow with the relevance of their category in the same way. So the best possible AUC
and the best possible recall are known.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gba_hvd.batch import Bag, Batch
from gba_hvd.data.click_log import Rows, check_range
from gba_hvd.data.hashing import hash_integers, standard_normal, stream_key, unit_interval
from gba_hvd.data.synthetic import Floats, Ints, Zipf, blocks, coprime_step, expected_auc, shift_to, sigmoid
from gba_hvd.errors import BadInput

Target = Literal["click", "next_item"]

PADDING = 0  # row of "item" and "category" that no click has
RUN = 4  # clicks in a row on one interest
N_INTERESTS = 3
_NOISE = 0.15  # share of clicks that no interest explains
_MATCHING = 0.5  # share of candidates from the user's interests
_SHARES = {"relevance": 0.8, "item": 0.1, "user": 0.1}  # of the variance of the logit
_CATEGORY_EXPONENT = 0.5
_LENGTH_EXPONENT = 0.5
_CALIBRATION_ROWS = 20_000
_CALIBRATION_START = 1 << 62  # rows that no split reaches
_BLOCK = 1 << 13
# Names of the random streams.
_USER, _LENGTH, _INTEREST, _PHASE, _RUN, _CATEGORY, _RANK, _NOISY, _TARGET, _LABEL, _EFFECT, _PERMUTE, _NEGATIVE = (
    range(100, 113)
)


class SyntheticBehaviourLog:
    """n_samples rows, from row `start` of an endless log.

    `take(rows)` gives a `Batch` without numeric fields and with these ids, int64, of tables "user" (n_users rows),
    "item" (n_items + 1) and "category" (n_categories + 1):

        user, candidate, candidate_category     [n]
        history, history_category               [n, max_length], oldest click first, `PADDING` behind the newest
        negative, negative_category             [n, max_length], with `negatives`: for each click an item by popularity

    target: "click": label 1 is a click on the candidate; "next_item": the candidate is the item clicked next, label 1
    decay: weight of a click against the one after it; 1: their order has no effect
    logit_std: how much can be known of a click; concentration: of a next item, the most that a history adds to a logit

    Two logs with the same other arguments and ranges that do not overlap are two splits of one truth.
    """

    n_dense = 0

    def __init__(
        self,
        n_samples: int,
        n_users: int = 2000,
        n_items: int = 1000,
        n_categories: int = 20,
        max_length: int = 50,
        seed: int = 0,
        zipf: float = 1.05,
        start: int = 0,
        *,
        target: Target = "click",
        negatives: bool = False,
        decay: float = 0.8,
        logit_std: float = 2.0,
        base_rate: float = 0.3,
        concentration: float = 6.0,
    ) -> None:
        if min(n_samples, n_users, n_items, n_categories, max_length) < 1 or start < 0:
            raise BadInput(
                f"n_samples {n_samples}, n_users {n_users}, n_items {n_items}, n_categories {n_categories}, "
                f"max_length {max_length}, start {start}: expected at least 1 of each, and start 0 or more"
            )
        if n_items % n_categories:
            raise BadInput(f"n_items {n_items}: expected a multiple of n_categories, {n_categories}, as all are alike")
        if target not in ("click", "next_item"):
            raise BadInput(f'target must be "click" or "next_item", got {target!r}')
        if zipf <= 0 or not 0 < decay <= 1 or logit_std <= 0 or not 0 < base_rate < 1 or concentration < 0:
            raise BadInput(
                f"zipf {zipf}, decay {decay}, logit_std {logit_std}, base_rate {base_rate}, concentration "
                f"{concentration}: expected > 0, in (0, 1], > 0, in (0, 1), >= 0"
            )
        self.tables = {"user": n_users, "item": n_items + 1, "category": n_categories + 1}
        self.target, self.negatives, self.max_length = target, negatives, max_length
        self._n, self._seed, self._start = n_samples, seed, start
        self._decay, self._concentration = decay, concentration
        self.description: dict[str, Any] = {
            "kind": "synthetic behaviour log", "samples": n_samples, "tables": self.tables, "max_length": max_length,
            "seed": seed, "zipf": zipf, "start": start, "target": target, "negatives": negatives, "decay": decay,
            "logit_std": logit_std, "base_rate": base_rate, "concentration": concentration,
        }  # fmt: skip
        self._users, self._ranks = Zipf(n_users, zipf), Zipf(n_items // n_categories, zipf)
        self._categories = Zipf(n_categories, _CATEGORY_EXPONENT)
        self._lengths = Zipf(max_length, _LENGTH_EXPONENT)
        # Slot rank * n_categories + category holds one item: neighbouring ranks must not be neighbouring rows.
        slots = np.arange(n_items)
        self._item_of_slot: Ints = 1 + (slots * coprime_step(n_items) + self._key(_PERMUTE) % n_items) % n_items
        self._slot_of_item = np.empty(n_items + 1, np.int64)
        self._slot_of_item[self._item_of_slot] = slots
        self._logit_std, self._base_rate = logit_std, base_rate

    def __len__(self) -> int:
        return self._n

    @property
    def n_items(self) -> int:
        return self.tables["item"] - 1

    @property
    def n_categories(self) -> int:
        return self.tables["category"] - 1

    def category_of(self, items: Ints) -> Ints:
        """int64, the shape of `items`: the category's row of each item's row; `PADDING` of `PADDING`."""
        return np.where(items == PADDING, PADDING, 1 + self._slot_of_item[items] % self.n_categories)

    def take(self, rows: Rows) -> Batch:
        """The samples at `rows` (int64 [n], any order). Raises `IndexError` for a row outside the log."""
        at = self._at(rows)
        user, history = self._history(at)
        candidate = self._candidate(at, user, history)
        label = np.ones(len(at), np.float32)
        if self.target == "click":
            draw = unit_interval(hash_integers(at, self._key(_LABEL)))
            label = (draw < sigmoid(self._logit(user, history, candidate))).astype(np.float32)
        items = {"candidate": candidate, "history": history}
        if self.negatives:
            items["negative"] = np.where(history == PADDING, PADDING, self._popular(at, _NEGATIVE))
        ids: dict[str, Tensor | Bag] = {"user": torch.from_numpy(user)}
        for name, some in items.items():
            ids |= {name: torch.from_numpy(some), f"{name}_category": torch.from_numpy(self.category_of(some))}
        return Batch(ids, torch.empty(len(at), 0), torch.from_numpy(label))

    def probability(self, rows: Rows) -> Floats:
        """float64 [n]: the true probability of a click on the candidate. Only with target "click"."""
        self._only("click", "probability")
        at = self._at(rows)
        user, history = self._history(at)
        return sigmoid(self._logit(user, history, self._candidate(at, user, history)))

    def bayes_auc(self, n: int = 200_000) -> float:
        """The AUC no model can beat, up to sampling: of the true probabilities of the first n rows, over all labels."""
        return expected_auc(np.concatenate([self.probability(block) for block in blocks(min(n, self._n), _BLOCK)]))

    def item_probability(self, rows: Rows) -> Floats:
        """float64 [n, n_items + 1]: of each item, that it is clicked next. Only with target "next_item"."""
        self._only("next_item", "item_probability")
        category = self._next_category(self._history(self._at(rows))[1])
        slots = np.arange(self.n_items)
        out = np.zeros((len(rows), self.n_items + 1))
        out[:, self._item_of_slot] = (
            category[:, slots % self.n_categories] * self._ranks.probability()[slots // self.n_categories]
        )
        return out

    def bayes_recall(self, k: int, n: int = 20_000) -> float:
        """The recall@k no model can beat: the k most probable items, over the first n rows and all next clicks."""
        if not 0 < k <= self.n_items:
            raise BadInput(f"bayes_recall: k is a number of items, from 1 to {self.n_items}, got {k}")
        found = 0.0
        for block in blocks(min(n, self._n), _BLOCK):
            found += float(np.partition(self.item_probability(block), -k, axis=1)[:, -k:].sum())
        return found / min(n, self._n)

    def items(self) -> Catalogue:
        """All items, each once, as candidates."""
        return Catalogue(self)

    def popularity(self, n: int = 20_000) -> Floats:
        """float64 [n_items + 1]: the share of next clicks of each item, the mean over the first n rows."""
        total = np.zeros(self.n_items + 1)
        for block in blocks(min(n, self._n), _BLOCK):
            total += self.item_probability(block).sum(0)
        return np.asarray(total / min(n, self._n))

    def _at(self, rows: Rows) -> Ints:
        """int64 [n]: the places of rows in the endless log."""
        rows = np.asarray(rows, dtype=np.int64)
        check_range(rows, self._n)
        return rows + self._start

    def _only(self, target: Target, what: str) -> None:
        if self.target != target:
            raise BadInput(f'{what} is of a log with target "{target}", this one has "{self.target}"')

    def _history(self, at: Ints) -> tuple[Ints, Ints]:
        """user [n] and clicked items [n, max_length], oldest first, `PADDING` behind the newest."""
        user = self._users.ranks(self._uniform(at, _USER))
        lengths = 1 + self._lengths.ranks(self._uniform(at, _LENGTH))
        # Drawn by age, so that a click does not depend on how many came before it.
        age = lengths[:, None] - 1 - np.arange(self.max_length)
        clicked = age >= 0
        age = np.where(clicked, age, 0)
        run = (age + hash_integers(at, self._key(_PHASE)).astype(np.int64)[:, None] % RUN) // RUN
        interest = (self._uniform(at, _RUN, run) * N_INTERESTS).astype(np.int64)
        category = self._interest(user[:, None], interest)
        noisy = self._uniform(at, _NOISY, age) < _NOISE
        category = np.where(noisy, self._categories.ranks(self._uniform(at, _CATEGORY, age)), category)
        rank = self._ranks.ranks(self._uniform(at, _RANK, age))
        return user, np.where(clicked, self._item(category, rank), PADDING)

    def _candidate(self, at: Ints, user: Ints, history: Ints) -> Ints:
        rank = self._ranks.ranks(unit_interval(hash_integers(at, self._key(_TARGET, 1))))
        draw = unit_interval(hash_integers(at, self._key(_TARGET, 2)))
        if self.target == "next_item":
            below = np.cumsum(self._next_category(history), axis=1)
            category = np.minimum((draw[:, None] >= below).sum(1), self.n_categories - 1)
            return self._item(category, rank)
        # One uniform number decides both whether the candidate is of an interest and of which one, or which category.
        matching = draw < _MATCHING
        interest = (draw / _MATCHING * N_INTERESTS).astype(np.int64) % N_INTERESTS
        other = self._categories.ranks(np.maximum(draw - _MATCHING, 0.0) / (1 - _MATCHING))
        return self._item(np.where(matching, self._interest(user, interest), other), rank)

    def _logit(self, user: Ints, history: Ints, candidate: Ints) -> Floats:
        scales, shift = self._calibration
        return _scaled(self._parts(user, history, candidate), scales) + shift

    def _parts(self, user: Ints, history: Ints, candidate: Ints) -> dict[str, Floats]:
        relevance = self._relevance(history)[np.arange(len(user)), self.category_of(candidate) - 1]
        rank = self._slot_of_item[candidate] // self.n_categories
        item = standard_normal(hash_integers(candidate, self._key(_EFFECT, 1))) / (1.0 + rank / 10.0)
        return {
            "relevance": relevance,
            "item": item,
            "user": standard_normal(hash_integers(user, self._key(_EFFECT, 2))) / (1.0 + user / 10.0),
        }

    def _relevance(self, history: Ints) -> Floats:
        """float64 [n, n_categories], 0 to 1: the sum of decay**age of the clicks on each category, over its maximum."""
        clicked = history != PADDING
        age = clicked.sum(1)[:, None] - 1 - np.arange(history.shape[1])
        weight = np.where(clicked, self._decay ** np.where(clicked, age, 0), 0.0)
        place = np.arange(len(history))[:, None] * (self.n_categories + 1) + self.category_of(history)
        total = np.bincount(place.ravel(), weight.ravel(), minlength=len(history) * (self.n_categories + 1))
        most = float((self._decay ** np.arange(self.max_length)).sum())
        return np.asarray(total.reshape(len(history), -1)[:, 1:] / most)

    def _next_category(self, history: Ints) -> Floats:
        """float64 [n, n_categories]: the softmax of the log of the popularity plus concentration * relevance."""
        odds = self._categories.probability() * np.exp(self._concentration * self._relevance(history))
        return np.asarray(odds / odds.sum(1, keepdims=True))

    def _popular(self, at: Ints, stream: int) -> Ints:
        """Items [n, max_length] drawn by popularity, without regard to the user."""
        age = np.arange(self.max_length)[None, :]
        category = self._categories.ranks(self._uniform(at, stream, age))
        return self._item(category, self._ranks.ranks(self._uniform(at, stream, age + self.max_length)))

    def _item(self, category: Ints, rank: Ints) -> Ints:
        items: Ints = self._item_of_slot[rank * self.n_categories + category]
        return items

    def _interest(self, user: Ints, number: Ints) -> Ints:
        uniform = unit_interval(hash_integers(user * N_INTERESTS + number, self._key(_INTEREST)))
        return self._categories.ranks(uniform)

    def _uniform(self, at: Ints, stream: int, numbers: Ints | None = None) -> Floats:
        """float64 in [0, 1) [n] by row, or [n, m] by row and number."""
        hashes = hash_integers(at, self._key(stream))
        if numbers is None:
            return unit_interval(hashes)
        return unit_interval(hash_integers(hashes[:, None] + numbers.astype(np.uint64), self._key(stream, 1)))

    @functools.cached_property
    def _calibration(self) -> tuple[dict[str, float], float]:
        """Scales of the parts of the logit, for their shares of the variance, and its shift, for the base rate."""
        at = np.arange(_CALIBRATION_START, _CALIBRATION_START + _CALIBRATION_ROWS)
        user, history = self._history(at)
        parts = self._parts(user, history, self._candidate(at, user, history))
        scales = {
            name: self._logit_std * share**0.5 / max(float(parts[name].std()), 1e-3) for name, share in _SHARES.items()
        }
        return scales, shift_to(self._base_rate, _scaled(parts, scales))

    def _key(self, stream: int, number: int = 0) -> int:
        return _key_of(self._seed, stream, number)


_key_of = functools.cache(stream_key)


def _scaled(parts: dict[str, Floats], scales: dict[str, float]) -> Floats:
    return np.asarray(sum(parts[name] * scales[name] for name in parts))


class Catalogue:
    """The items of a behaviour log. Sample i is item i + 1, in a `Batch` with ids candidate, candidate_category [n]."""

    def __init__(self, log: SyntheticBehaviourLog) -> None:
        self._log = log

    def __len__(self) -> int:
        return self._log.n_items

    def take(self, rows: Rows) -> Batch:
        """The items at `rows` (int64 [n], any order); labels are 0."""
        rows = np.asarray(rows, dtype=np.int64)
        check_range(rows, len(self))
        ids = {"candidate": rows + 1, "candidate_category": self._log.category_of(rows + 1)}
        of_tables: dict[str, Tensor | Bag] = {name: torch.from_numpy(some) for name, some in ids.items()}
        return Batch(of_tables, torch.empty(len(rows), 0), torch.zeros(len(rows)))
