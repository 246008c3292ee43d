"""A small recipe that most tests use, and rows for it."""

from __future__ import annotations

from gba_hvd.data import Categorical, Numeric, Recipe

COLOURS = Recipe(
    format="csv", label="label", categorical=(Categorical("colour"), Categorical("shape")), numeric=(Numeric("size"),)
)
HEADER = "label,size,colour,shape\n"
GOOD = "1,3,red,round\n0,,blue,square\n"
