"""Which texts of a vocabulary a reader takes for another value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gba_hvd.data.doubtful_values import TextsReadAs


def read_as(kind: str, *texts: str) -> TextsReadAs:
    return TextsReadAs.of(kind, pa.array(texts, pa.large_string()))


@pytest.mark.parametrize(
    ("kind", "value", "texts"),
    [
        ("number", 7, ["007", "+7", " 7", "7 ", "7.0", "7.", "07.00"]),
        ("number", -7.5, ["-07.5", "-7.50"]),
        ("number", 0, ["00", "+0", "-00"]),
        ("boolean", True, ["True", "TRUE"]),
        ("boolean", False, ["False", "FALSE"]),
        ("NaN", np.nan, ["NA", "null", "nan", "None", "N/A"]),
    ],
)
def test_texts_that_are_printed_otherwise_are_found(kind: str, value: Any, texts: list[str]) -> None:
    for text in texts:
        found = read_as(kind, "u", "1.50", text, "08").first_in([value])
        assert found is not None and found[0] is value and found[1] == text


@pytest.mark.parametrize(
    ("kind", "value", "texts"),
    [
        ("number", 7, ["7", "u07", "08", "070", "7_0", "", "True", "NA"]),
        ("number", 7.5, ["7.5", "7.0", "007"]),
        ("number", 2**53 + 1, ["9007199254740993"]),
        ("boolean", True, ["true", "False", "Truth", "1", "01"]),
        ("NaN", np.nan, ["Na", "nothing", "0"]),
    ],
)
def test_others_are_not(kind: str, value: Any, texts: list[str]) -> None:
    assert read_as(kind, *texts).first_in([value]) is None


def test_only_the_numbers_of_such_texts_are_doubtful() -> None:
    assert read_as("number", "1", "2", "007", "3.50").first_in([1, 2, 3, 70]) is None
    assert read_as("number", "1", "2", "007", "3.50").first_in([1, 2, 3.5, 7]) == (3.5, "3.50")


def test_the_first_value_is_found_in_any_column() -> None:
    mixed: list[Any] = ["7", None, np.nan, True, 7, 8]
    sevens, yes, missing = (
        read_as("number", "07", "05", "2.50"),
        read_as("boolean", "True", "False"),
        read_as("NaN", "NA"),
    )
    found = [sevens.first_in(mixed), yes.first_in(mixed)]
    assert found == [(7, "07"), (True, "True")] and missing.first_in(mixed) is not None
    assert sevens.first_in(pa.array([None, 5])) == (5, "05")
    assert sevens.first_in(pa.chunked_array([[np.nan], [2.5]])) == (2.5, "2.50")
    assert yes.first_in(np.array([False])) == (np.False_, "False") and yes.first_in(pa.array([False])) == (
        False,
        "False",
    )
    assert yes.first_in(np.array([1])) is None and sevens.first_in(np.array([True])) is None
    assert missing.first_in(np.array([1.0, np.nan])) is not None and missing.first_in(np.array([1])) is None
    assert sevens.first_in([10**400, 7]) == (7, "07")
    assert sevens.first_in(pa.array(["7"])) is None and sevens.first_in([True, "7", np.nan]) is None
