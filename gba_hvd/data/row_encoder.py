"""Raw rows in memory, as a serving process has them, to the ids and numbers of a prepared dataset.

The rows become the columns that `raw_rows` reads from a file of the dataset's format; all else is what `prepare` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gba_hvd.batch import Bag, Batch
from gba_hvd.data import json_lines
from gba_hvd.data.checked_rows import CheckedRows, features_of
from gba_hvd.data.click_log import ClickLog
from gba_hvd.data.decoding import decoded_columns
from gba_hvd.data.doubtful_values import TextsReadAs
from gba_hvd.data.encoding import Encoder, Encoders, IdentityEncoder, Scaler, VocabularyEncoder, encoder_of
from gba_hvd.data.list_columns import is_list, one_array
from gba_hvd.data.raw_rows import RawRows
from gba_hvd.data.recipe import Categorical, Hashed, Recipe, Vocabulary, require_columns
from gba_hvd.data.store import DatasetLayout, DatasetPart, read_manifest
from gba_hvd.data.vocabulary_files import VocabularyDigests, read_vocabulary, vocabulary_digest
from gba_hvd.errors import BadInput

_LISTS = (list, tuple, np.ndarray)


class RowEncoder:
    """Raw rows to what `gba-hvd data prepare` makes of them: the same ids, and the same numbers.

        encoder = gba_hvd.data.RowEncoder.open("store")
        scores = gba_hvd.open_model(url).predict(encoder.columns([{"user": "u7", "item": "i3", "price": 4.5}]))

    rows: a list of mappings, one mapping (a row), or a pandas `DataFrame`, with the values as the input of `prepare`
    had them, before any encoding: strings, numbers, lists where the input has lists. None and NaN are missing values.
    Labels and other columns may be there.

    What is missing, rare or not in the train split has id 0, as in the dataset. Of the dataset's folder `dataset.json`
    and the folder `vocabulary` are read, by `open` alone. An encoder does not change, so threads may share it.

    tables, features, dense_names: as of `ClickLog`. name: the folder, in messages

    `open` raises BadInput for a dataset that is missing or damaged. `columns` and `batch` raise it for a row that
    `prepare` would leave out as malformed, for a column that is not there, and for a value whose text in the input is
    not known: 7.0, which may have been `7`, where the input was text, and 7 where a vocabulary has "007".
    """

    def __init__(self, recipe: Recipe, encoders: Encoders, name: str = "an encoder") -> None:
        self.tables = {table: encoders.tables[table].rows for table in recipe.tables}
        self.features = {c.name: c.of_table for c in recipe.categorical}
        self.dense_names = tuple(n.name for n in recipe.numeric)
        self._recipe, self._encoders, self.name = recipe, encoders, name
        self._wanted = [name for name in recipe.used if name not in recipe.labels]
        self._read_as: dict[tuple[str, str], TextsReadAs] = {}

    @classmethod
    def open(cls, path: str | Path) -> RowEncoder:
        """The encoder of what `gba-hvd data prepare` wrote."""
        folder = Path(path)
        manifest = read_manifest(folder)
        try:
            facts = {
                "recipe": manifest["recipe"],
                "rows": {field.get("table", field["name"]): int(field["rows"]) for field in manifest["fields"]},
                "numeric": {one["name"]: _fitted(one) for one in manifest["numeric"]},
            }
            return cls.of(facts, lambda table: read_vocabulary(folder, table, facts["rows"][table]), str(folder))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{folder}: its dataset.json has no whole recipe ({error}); prepare it again") from error

    @classmethod
    def of(
        cls, facts: Mapping[str, Any], vocabulary: Callable[[str], pa.Array], name: str = "an encoder"
    ) -> RowEncoder:
        """The encoder of these `facts`. vocabulary: the values of a table with one. name: for messages.

        Raises KeyError, TypeError or ValueError for facts that are not whole.
        """
        recipe = Recipe.from_json(facts["recipe"])
        tables: dict[str, Encoder] = {}
        for table, (field, *_) in recipe.tables.items():
            if not isinstance(field.encoding, Vocabulary):
                tables[table] = encoder_of(field.encoding)
                continue
            encoder = VocabularyEncoder(vocabulary(table))
            if encoder.rows != facts["rows"][table]:
                raise ValueError(f"the vocabulary of {table!r} has {encoder.rows - 1} values")
            tables[table] = encoder
        numeric = {n.name: Scaler(n, **_fitted(facts["numeric"][n.name])) for n in recipe.numeric}
        return cls(recipe, Encoders(tables, numeric, {}), name)

    def encoders_for(self, recipe: Recipe) -> Encoders:
        """Those of another dataset that is to have the same ids. Raises BadInput for columns that become others."""
        mine, others = _columns_of(self._recipe), _columns_of(recipe)
        for name in (*others, *(name for name in mine if name not in others)):
            if mine.get(name) != others.get(name):
                raise BadInput(
                    f"column {name!r}: expected {mine.get(name, 'none of this name')}, as in {self.name}, got "
                    f"{others.get(name, 'none of this name')}: prepare both with the same columns and encodings"
                )
        return self._encoders

    @property
    def facts(self) -> dict[str, Any]:
        """All but the vocabularies, as plain JSON: what `of` takes."""
        numeric = {name: one.to_json() for name, one in self._encoders.numeric.items()}
        return {"recipe": self._recipe.to_json(), "rows": self.tables, "numeric": numeric}

    @property
    def vocabularies(self) -> dict[str, pa.Array]:
        """By table, large_string [n]: the value of id i is at i - 1."""
        found = self._encoders.tables.items()
        return {table: one.values for table, one in found if isinstance(one, VocabularyEncoder)}

    @cached_property
    def vocabulary_digests(self) -> VocabularyDigests:
        values = self.vocabularies
        known = {table: (len(one), vocabulary_digest(one)) for table, one in values.items()}
        return VocabularyDigests(self.name, values.__getitem__, known)

    @cached_property
    def dense_scaling(self) -> dict[str, tuple[str, float, float]] | None:
        """As of `ClickLog`."""
        return {name: (one.column.transform, one.mean, one.std) for name, one in self._encoders.numeric.items()}

    def text_format(self, ending: str) -> tuple[str, bool]:
        """The delimiter of a `.csv` or `.tsv` file of raw rows, and whether it has quotes: those of the input that was
        prepared. Where that was no such file, a comma and quotes, or a tab and none."""
        recipe = self._recipe
        if ending == ".tsv":
            is_known = recipe.is_text and recipe.between != ","
            return (recipe.between, recipe.format == "csv") if is_known else ("\t", False)
        return (recipe.between if recipe.format == "csv" else ","), True

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """The columns that raw rows need."""
        return tuple(self._wanted)

    def has_ids_of_input(self, table: str) -> bool:
        """Whether the ids of a table are whole numbers of the input, the same in any data."""
        return isinstance(self._encoders.tables[table], IdentityEncoder)

    @property
    def multi_valued(self) -> tuple[str, ...]:
        """The fields that have several ids in a row."""
        return tuple(c.name for c in self._recipe.categorical if c.multi_valued)

    def encoded(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """As `columns`, of raw columns by name: arrays, lists or series of one length."""
        require_columns(self._wanted, [*columns], "the request (None is a missing value)")
        lengths = {name: len(columns[name]) for name in self._wanted}
        if len(set(lengths.values())) != 1:
            raise BadInput(f"the columns of a request need one number of samples, got {lengths}")
        return self._columns(self._raw({name: columns[name] for name in self._wanted}))

    def refuse_nan_of_text(self, columns: Mapping[str, Any]) -> None:
        """Raises BadInput for NaN in a column of a vocabulary that has a text such as "NA", of which pandas, where it
        reads CSV, makes NaN."""
        for name, value, text in self._doubtful("NaN", columns):
            raise BadInput(
                f"column {name!r}: {value} is a missing value, or in CSV the text {text!r}, which is an id of the "
                "training data: give '' where a value is missing, and the request as JSON"
            )

    def _doubtful(self, kind: str, columns: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
        """Columns with a value that may be a text of the vocabulary, the value, and such a text."""
        for field in self._recipe.categorical:
            if field.part is None and not field.is_list and field.name in columns:
                encoder = self._encoders.tables[field.of_table]
                if isinstance(encoder, VocabularyEncoder):
                    texts = self._texts_read_as(kind, field.of_table, encoder.values)
                    if (found := texts.first_in(columns[field.name])) is not None:
                        yield field.name, *found

    def _texts_read_as(self, kind: str, table: str, vocabulary: pa.Array) -> TextsReadAs:
        found = self._read_as.get((table, kind))  # a thread beside may drop it
        if found is None:
            found = self._read_as[table, kind] = TextsReadAs.of(kind, vocabulary)
        return found

    def drop_indexes(self) -> None:
        """Free what the first rows made of the vocabularies; the next ones make it again."""
        self._read_as.clear()
        for one in self._encoders.tables.values():
            if isinstance(one, VocabularyEncoder):
                one.drop_index()

    def decoded(self, columns: Mapping[str, Any], n: int) -> dict[str, list[Any]]:
        """Raw columns that have the ids and numbers of n samples, as `columns` gives them: an example of a request.

        A hash has no value: it gets some text, and so another id. A column that is not there has what is missing.
        """
        return decoded_columns(self._recipe, self._encoders, columns, n)

    def columns(self, rows: Any) -> dict[str, Any]:
        """As `OpenModel.predict(encoded=True)` takes them: by field int64 [n] or n arrays of ids; `dense` float32
        [n, n_dense]; and each of its columns by name."""
        return self._columns(self._of_rows(rows))

    def batch(self, rows: Any) -> Batch:
        """As `ClickLog.take` gives them, with labels 0."""
        return self._batch(self._of_rows(rows))

    def _columns(self, raw: RawRows) -> dict[str, Any]:
        batch = self._batch(raw)
        dense = batch.dense.numpy()
        found = dict(zip(self.dense_names, dense.T, strict=True)) | {
            name: _column(ids) for name, ids in batch.ids.items()
        }
        return found | ({"dense": dense} if self.dense_names else {})

    def _batch(self, raw: RawRows) -> Batch:
        flaws: dict[int, str] = {}
        numeric, categorical = features_of(raw, self._recipe, flaws)
        _refuse(flaws, len(raw.numbers))
        label = np.zeros(len(raw.numbers), np.uint8)
        encoded = self._encoders.encode(CheckedRows(raw.positions, label, numeric, categorical), self._recipe)
        bags = tuple((np.append(0, np.cumsum(lengths)), values) for lengths, values in encoded.bags)
        layout = replace(DatasetLayout.of(self._recipe), labels=())
        part = DatasetPart(label, encoded.ids, encoded.dense, bags)
        return ClickLog(self.tables, layout, [part], {}, self.features).take(np.arange(len(label)))

    def _of_rows(self, rows: Any) -> RawRows:
        return self._raw(self._by_name(rows))

    def _raw(self, by_name: Mapping[str, Any]) -> RawRows:
        n = len(next(iter(by_name.values())))
        for kind in ("number", "boolean"):
            for name, value, text in self._doubtful(kind, by_name):
                raise BadInput(
                    f"column {name!r}: {value!r} is a {kind}, and among the ids of the training data is the text "
                    f"{text!r}: give the text (pandas.read_csv(..., dtype=str, keep_default_na=False); JSON: in quotes)"
                )
        try:
            columns = _typed(by_name) if self._recipe.format == "parquet" else self._as_text(by_name, n)
        except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can have
            raise BadInput(f"a text of the rows is not UTF-8: {error}") from error
        for field in self._recipe.categorical:
            if field.part is None:
                columns[field.name] = _checked_list(columns[field.name], field)
        numbers = np.arange(n, dtype=np.int64)
        return RawRows("the rows", "sample", numbers, numbers, columns, n, 0)

    def _by_name(self, rows: Any) -> dict[str, Any]:
        """The columns that the recipe uses, each a list or a series."""
        if hasattr(rows, "columns") and hasattr(rows, "iloc"):
            require_columns(self._wanted, [str(name) for name in rows.columns], "the data frame")
            return {name: rows[name] for name in self._wanted}
        listed = [rows] if isinstance(rows, Mapping) else rows
        if not isinstance(listed, Sequence) or not all(isinstance(row, Mapping) for row in listed):
            raise BadInput(
                f"expected rows: a list of mappings, one mapping or a pandas DataFrame, got {type(rows).__name__}"
            )
        if self._recipe.format != "jsonl":  # of JSON lines an absent name is a missing value
            for i, row in enumerate(listed):
                require_columns(self._wanted, list(row), f"sample {i} (None is a missing value)")
        return {name: [row.get(name) for row in listed] for name in self._wanted}

    def _as_text(self, by_name: Mapping[str, Any], n: int) -> dict[str, pa.Array]:
        """What a file of text or JSON lines would have."""
        numbers, is_json = set(self.dense_names), self._recipe.format == "jsonl"
        there = {name: values for name, values in by_name.items() if _is_text_array(values)}
        texts = {
            name: [_text(value, name, name in numbers, is_json) for value in _listed(values)]
            for name, values in by_name.items()
            if name not in there
        }
        lists = {c.name for c in self._recipe.categorical if c.is_list}
        rows = [{name: values[i] for name, values in texts.items()} for i in range(n)]
        flaws: dict[int, str] = {}
        columns = json_lines.columns_of(rows, {name: name in lists for name in texts}, flaws)
        _refuse(flaws, n)
        return columns | there


def _columns_of(recipe: Recipe) -> dict[str, str]:
    """In words, what each becomes: not how it is read."""
    ids = {
        c.name: f"{_encoding_of(c)} in table {c.of_table!r}" + ", lists" * c.multi_valued for c in recipe.categorical
    }
    return ids | {n.name: str(n) for n in recipe.numeric}


def _encoding_of(field: Categorical) -> str:
    encoding = field.encoding
    if isinstance(encoding, Vocabulary):
        return f"Vocabulary (--min-count {encoding.min_count})"
    if isinstance(encoding, Hashed):
        return f"Hashed (--hash {field.of_table}={encoding.rows})"
    offset = f":{encoding.offset}" if encoding.offset else ""
    return f"Identity (--identity {field.of_table}={encoding.rows}{offset})"


def _fitted(number: Mapping[str, Any]) -> dict[str, Any]:
    """What `Scaler.to_json` gave."""
    return {"mean": number["mean"], "std": number["std"], "missing_becomes": number.get("missing_becomes")}


def _is_text_array(values: Any) -> bool:
    return isinstance(values, pa.Array) and pa.types.is_string(values.type)


def _listed(values: Any) -> list[Any]:
    return values.to_pylist() if isinstance(values, pa.Array) else list(values)


def _typed(by_name: Mapping[str, Any]) -> dict[str, pa.Array]:
    """What a Parquet file would have."""
    columns = {}
    for name, values in by_name.items():
        try:
            column = values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise BadInput(f"column {name!r}: expected values of one type: {error}") from error
        columns[name] = one_array(column) if isinstance(column, pa.ChunkedArray) else column
    return columns


def _checked_list(column: pa.Array, field: Categorical) -> pa.Array:
    """Raises BadInput for lists where single values are expected, and the other way round."""
    if pa.types.is_null(column.type) and field.is_list:
        return column.cast(pa.list_(pa.string()))
    if is_list(column.type) == field.is_list:
        return column
    expected = "a list of values in each row" if field.is_list else "one value in each row, not a list"
    if field.separator is not None:
        expected = f"text with {field.separator!r} between the values, as in the input"
    raise BadInput(f"column {field.name!r}: expected {expected} (one mapping is one row; columns: a DataFrame)")


def _text(value: Any, name: str, is_number: bool, is_json: bool) -> Any:
    """A value as `json_lines` reads it: numbers as text."""
    if isinstance(value, _LISTS):
        return [_text(one, name, is_number, is_json) for one in value]
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
        return None
    if isinstance(value, str) or (isinstance(value, bool) and is_json):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and is_number and math.isfinite(value):
        return repr(value)
    raise BadInput(
        f"column {name!r}: {value!r} is a {type(value).__name__}, and how it was written in the input is not known: "
        "give the text (pandas.read_csv(..., dtype=str, keep_default_na=False)), or a whole number (pandas: Int64, "
        "where some are missing)"
    )


def _refuse(flaws: Mapping[int, str], n: int) -> None:
    if flaws and n == 1:
        raise BadInput(f"malformed: `gba-hvd data prepare` leaves such rows out: {flaws[0]}")
    if flaws:
        first = min(flaws)
        raise BadInput(
            f"{len(flaws)} of {n} rows are malformed: `gba-hvd data prepare` leaves such rows out. The first, sample "
            f"{first}: {flaws[first]}"
        )


def _column(ids: Any) -> npt.NDArray[np.int64] | list[npt.NDArray[np.int64]]:
    if isinstance(ids, Bag):
        values = ids.values.numpy()
        return [values[first:last] for first, last in pairwise([*ids.offsets.tolist(), len(values)])]
    single: npt.NDArray[np.int64] = ids.numpy()
    return single
