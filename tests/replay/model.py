"""What the chaos job trains, written down a second time: the data, the order, the first rows, gradients, optimizers.

Float64, and formulas from the documents, not from the code: splitmix64, Box-Muller, a Feistel network with cycle
walking; logit = w . [user row, item row, dense] + b with a mean cross-entropy; optimizers as torch documents them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


def permutation(n: int, key: int) -> np.ndarray:
    """Of 0 .. n-1: a Feistel network, walking along its cycles."""
    bits, out = 1, []
    while 4**bits < n:
        bits += 1
    mask = (1 << bits) - 1
    for position in range(n):
        x = position
        while True:
            left, right = x >> bits, x & mask
            for turn in range(6):
                left, right = right, left ^ (mix(right ^ mix((key + turn) & _MASK)) & mask)
            x = (left << bits) | right
            if x < n:
                break
        out.append(x)
    return np.array(out, dtype=np.int64)


def order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The samples of an epoch, one after the other."""
    return permutation(n, seed_of(seed, f"epoch {epoch}"))


def order_in_lanes(
    sizes: list[int], groups: np.ndarray, seed: int, epoch: int, micro_batch: int, n_micro: int, window: int
) -> np.ndarray:
    """The same of samples in groups: these dealt to lanes, what a lane has too much to those that have too little."""
    n = sum(sizes)
    n_all = -(-n // micro_batch)
    needed = [
        sum(min(micro_batch, n - i * micro_batch) for i in range(lane, n_all, n_micro)) for lane in range(n_micro)
    ]
    first = np.cumsum([0, *sizes])
    lanes: list[list[list[int]]] = [[] for _ in range(n_micro)]
    too_much: list[list[int]] = []
    for lane in range(n_micro):
        missing = needed[lane]
        for group in groups[lane::n_micro]:
            samples = list(range(first[group], first[group + 1]))
            lanes[lane].append(samples[:missing])
            if samples[missing:]:
                too_much.append(samples[missing:])
            missing -= len(lanes[lane][-1])
    for lane, pieces in enumerate(lanes):
        missing = needed[lane] - sum(map(len, pieces))
        while missing:
            samples = too_much.pop()
            pieces.append(samples[:missing])
            if samples[missing:]:
                too_much.append(samples[missing:])
            missing -= len(pieces[-1])
    in_order: list[list[int]] = []
    for lane, all_pieces in enumerate(lanes):
        pieces, samples = [piece for piece in all_pieces if piece], list[int]()
        for number, at in enumerate(range(0, len(pieces), window)):
            together = [sample for piece in pieces[at : at + window] for sample in piece]
            key = seed_of(seed, f"lane {lane} window {number} of epoch {epoch}")
            samples += [together[i] for i in permutation(len(together), key)]
        in_order.append(samples)
    return np.array([
        sample for micro in range(n_all)
        for sample in in_order[micro % n_micro][micro // n_micro * micro_batch :][:micro_batch]
    ])  # fmt: skip


def first_rows(n_rows: int, dim: int, seed: int, table: str, std: float) -> np.ndarray:
    key, out = seed_of(seed, table), np.zeros((n_rows, dim + dim % 2))
    for row in range(n_rows):
        state = mix(key ^ mix(row))
        for j in range(0, dim, 2):
            bits = mix((state + j) & _MASK)
            radius = std * math.sqrt(-2 * math.log(((bits >> 32) + 0.5) / 2**32))
            angle = 2 * math.pi * (bits & 0xFFFFFFFF) / 2**32
            out[row, j : j + 2] = radius * math.cos(angle), radius * math.sin(angle)
    return out[:, :dim]


@dataclass(frozen=True)
class Clicks:
    """Samples: user [n], items [n, 1], or [n, 3] with those seen (int64), dense [n, 2], label [n]."""

    user: np.ndarray
    items: np.ndarray
    dense: np.ndarray
    label: np.ndarray

    @classmethod
    def of(cls, n: int, features: bool) -> Clicks:
        rng = np.random.default_rng(7)
        user, item = rng.integers(0, 300, n), rng.integers(0, 40, n)
        dense = rng.normal(size=(n, 2)).astype(np.float32).astype(np.float64)
        seen = [user % 40, (item * 3 + user) % 40] if features else []
        return cls(user, np.stack([item, *seen], axis=1), dense, ((user % 7 + item % 3) > 4).astype(np.float64))


def gradients(
    data: Clicks, samples: np.ndarray, user: np.ndarray, items: np.ndarray, w: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of the mean loss of some samples: by w, b, user and items.

    user [n, 8]; items [n, k, 6]: rows of the item, and with features of the two that were seen, whose mean counts
    """
    k, dim = items.shape[1:]
    pooled = [items[:, 0], *([items[:, 1:].mean(axis=1)] if k > 1 else [])]
    x = np.concatenate([user, *pooled, data.dense[samples]], axis=1)
    off = (1 / (1 + np.exp(-(x @ w[0] + b[0]))) - data.label[samples]) / len(samples)
    by_x, at = off[:, None] * w, user.shape[1]
    by_items = [by_x[:, at : at + dim]]
    if k > 1:
        by_items += [by_x[:, at + dim : at + 2 * dim] / (k - 1)] * (k - 1)
    return (off @ x)[None], np.array([off.sum()]), by_x[:, :at], np.stack(by_items, axis=1)


@dataclass
class Dense:
    """torch.optim.SGD (with momentum), Adagrad, Adam over one flat vector."""

    kind: str
    settings: dict[str, Any]
    values: np.ndarray
    slots: dict[str, np.ndarray] = field(default_factory=dict)
    steps: int = 0

    def step(self, grad: np.ndarray, lr: float) -> None:
        self.steps += 1
        if self.kind == "SGD":
            momentum = self.settings["momentum"]
            if momentum:
                before = self.slots.get("momentum")
                grad = self.slots["momentum"] = grad if before is None else momentum * before + grad
            self.values = self.values - lr * grad
        elif self.kind == "Adagrad":
            self.slots["sum"] = self.slots.get("sum", np.zeros_like(grad)) + grad**2
            self.values = self.values - lr * grad / (np.sqrt(self.slots["sum"]) + self.settings["eps"])
        elif self.kind == "Adam":
            one, two = self.settings["betas"]
            m = self.slots["m"] = one * self.slots.get("m", 0.0) + (1 - one) * grad
            v = self.slots["v"] = two * self.slots.get("v", 0.0) + (1 - two) * grad**2
            m_hat, v_hat = m / (1 - one**self.steps), v / (1 - two**self.steps)
            self.values = self.values - lr * m_hat / (np.sqrt(v_hat) + self.settings["eps"])
        else:
            raise AssertionError(f"no formula for {self.kind}")


_ROUNDING = 4 * 2.0**-24  # of some operations, each correct to half of the last bit


@dataclass
class Rows:
    """One table [n, dim] under SGD, Adagrad, RowAdagrad or lazy Adam; `grad` of the touched rows only.

    rounding: [n], how far float32 may be from `values` for what was summed up to a gradient
    """

    kind: str
    settings: dict[str, Any]
    values: np.ndarray
    slots: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rounding = np.zeros(len(self.values))

    def step(self, touched: np.ndarray, grad: np.ndarray, lr: float, step: int, summed: np.ndarray) -> None:
        """touched: [k] distinct; grad: [k, dim]; step: of the job. summed: [k], the magnitudes that grad is a sum of:
        float32 has their rounding, which an adaptive optimizer magnifies where they cancel each other."""
        values = self.values.copy()  # what gradients were computed with stays readable
        gain = lr  # of the values, by the gradient
        if self.kind == "SGD":
            values[touched] -= lr * grad
        elif self.kind in ("Adagrad", "RowAdagrad"):
            square = (
                grad**2
                if self.kind == "Adagrad"
                else np.repeat((grad**2).mean(axis=1, keepdims=True), grad.shape[1], 1)
            )
            total = self.slots.setdefault("sum", np.zeros_like(values))
            total[touched] += square
            root = np.sqrt(total[touched]) + self.settings["eps"]
            values[touched] -= lr * grad / root
            gain = lr / root.min(axis=1)
        elif self.kind == "Adam":
            one, two = self.settings["betas"]
            m, v = (self.slots.setdefault(name, np.zeros_like(values)) for name in "mv")
            m[touched] = one * m[touched] + (1 - one) * grad
            v[touched] = two * v[touched] + (1 - two) * grad**2
            root = np.sqrt(v[touched] / (1 - two**step)) + self.settings["eps"]
            values[touched] -= lr * m[touched] / (1 - one**step) / root
            gain = lr * (1 - one) / (1 - one**step) / root.min(axis=1)
        else:
            raise AssertionError(f"no formula for {self.kind}")
        self.rounding[touched] += gain * _ROUNDING * summed
        self.values = values
