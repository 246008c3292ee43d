"""Which texts of a vocabulary a reader takes for another value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gba_hvd.data.doubtful_values import first_of, text_read_as


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("number", ["007", "-07", "+7", " 7", "7 ", "7.0", "7.", "7.50", "00"]),
        ("boolean", ["True", "FALSE"]),
        ("NaN", ["NA", "null", "nan", "None", "N/A"]),
    ],
)
def test_texts_that_are_printed_otherwise_are_found(kind: str, texts: list[str]) -> None:
    for text in texts:
        assert text_read_as(kind, pa.array(["u", text], pa.large_string())) == text


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("number", ["7", "-7", "0", "-0", "70", "7.5", "0.05", "-0.5", "u07", "1_0", "", "9007199254740993"]),
        ("boolean", ["true", "false", "Truth"]),
        ("NaN", ["Na", "nothing", "0"]),
    ],
)
def test_others_are_not(kind: str, texts: list[str]) -> None:
    assert text_read_as(kind, pa.array(texts, pa.large_string())) is None


def test_the_first_value_of_a_kind_is_found_in_any_column() -> None:
    mixed: list[Any] = ["7", None, np.nan, True, 7, 8]
    assert first_of("number", mixed) == 7 and first_of("boolean", mixed) is True and np.isnan(first_of("NaN", mixed))
    assert first_of("number", pa.array([None, 5])) == 5 and first_of("number", pa.array([np.nan, 2.5])) == 2.5
    assert first_of("boolean", np.array([False])) == np.False_ and first_of("boolean", pa.array([False])) is False
    assert first_of("number", pa.array(["7"])) is None and first_of("number", [True, "7", np.nan]) is None
