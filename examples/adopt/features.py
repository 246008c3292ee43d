"""The features of the torch-rechub models in this folder. History and negatives are rows of the item's table."""

from __future__ import annotations

from typing import Any

from samples import CATEGORIES, ITEMS, PADDING, USERS, Samples, impressions
from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature

DIM = 8


def user() -> Any:
    return SparseFeature("user", USERS, DIM)


def item() -> Any:
    return SparseFeature("item", ITEMS, DIM, padding_idx=PADDING)


def category() -> Any:
    return SparseFeature("category", CATEGORIES, DIM)


def items(name: str, pooling: str = "concat") -> Any:
    """A list of items of each sample."""
    return SequenceFeature(name, ITEMS, DIM, pooling=pooling, shared_with="item", padding_idx=PADDING)


def age() -> Any:
    return DenseFeature("age")


def make_samples(n: int, seed: int) -> Samples:
    """Inputs: columns by name, as this library takes them. Label: clicked."""
    columns = impressions(n, seed)
    return Samples({name: columns[name] for name in columns if name not in ("clicked", "bought")}, columns["clicked"])
