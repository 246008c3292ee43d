"""Recipes for public data sets, so that `gba-hvd data prepare --preset NAME` needs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gba_hvd.data.recipe import Categorical, Encoding, Hashed, Numeric, Recipe, Vocabulary

CRITEO_COLUMNS = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
FRAPPE_FIELDS = ("user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city")


def criteo(encoding: Encoding) -> Recipe:
    """Criteo's TSV: label, 13 counts, 26 categories, no header. The Kaggle set and the 1 TB logs share it."""
    return Recipe(
        format="tsv",
        columns=CRITEO_COLUMNS,
        label="label",
        numeric=tuple(Numeric(f"I{i}") for i in range(1, 14)),
        categorical=tuple(Categorical(f"C{i}", encoding) for i in range(1, 27)),
    )


def frappe(encoding: Encoding) -> Recipe:
    """Frappe as BARS splits it: a CSV per split, all fields categorical. A value unseen in train gets id 0."""
    return Recipe(format="csv", label="label", categorical=tuple(Categorical(name, encoding) for name in FRAPPE_FIELDS))


@dataclass(frozen=True)
class Preset:
    """`split_by` None: a folder with files named train, valid and test."""

    recipe: Callable[[Encoding], Recipe]
    encoding: Encoding
    split_by: Literal["random", "order"] | None


PRESETS = {
    # Minimum counts as in the FuxiCTR benchmarks; the 1 TB logs have too many values for a vocabulary in memory.
    "criteo-kaggle": Preset(criteo, Vocabulary(min_count=10), "random"),
    "criteo-1tb": Preset(criteo, Hashed(rows=1_000_000), "order"),
    "frappe": Preset(frappe, Vocabulary(min_count=1), None),
}
