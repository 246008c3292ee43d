"""Columns of strings that are ids of hashed tables: hashed as `ParquetStream(hashed=)` does, in files and requests.

A model may have them (`save_model(hashed=)`), or who asks for scores names them. Columns are pyarrow arrays here; those
of a request become some.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from gba_hvd.embedding.lookups import IdOutside
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import BadInput
from gba_hvd.extras import extra
from gba_hvd.serving import inputs
from gba_hvd.serving.inputs import is_missing
from gba_hvd.serving.manifest import ModelManifest

_LISTS = (list, tuple, np.ndarray)
_LEAVE_OUT = ": whole numbers are ids as they are, leave it out of --hashed"
_GIVE_TEXTS = (
    ": give the text (JSON: in quotes; pandas.read_csv(..., dtype=str, keep_default_na=False)). Hashes that are made "
    "already need encoded=True, --encoded"
)


def id_columns(spec: inputs.Spec | None) -> list[str]:
    """Columns that may be fields of whole numbers. None are known where a model was saved without an example."""
    found = () if spec is None else inputs.fields(spec)
    return [name for field in found if field["dtype"].startswith("int") for name in inputs.columns_for(field)]


def check_hashed(manifest: ModelManifest, hashed: Sequence[str], encoded: bool = False) -> None:
    """Raises BadInput for a column that is no field of ids, and where the model itself makes the ids."""
    if hashed and not encoded and (manifest.encoder is not None or manifest.hashed):
        has = f"was saved with the hashed columns {', '.join(manifest.hashed)}"
        if manifest.encoder is not None:
            has = "has the encoder of the training data"
        raise BadInput(
            f"--hashed {hashed[0]}: the model {has}, and makes the ids: leave --hashed out, or give --encoded as well"
        )
    _check_fields(manifest.input, hashed)


def _check_fields(spec: inputs.Spec | None, hashed: Sequence[str]) -> None:
    of_ids = id_columns(spec)
    if spec is not None and (unknown := [name for name in hashed if name not in of_ids]):
        raise BadInput(f"hashed column {unknown[0]!r} is no field of ids of the model: these are {', '.join(of_ids)}")


def checked(
    hashed: Sequence[str], spec: inputs.Spec | None, tables: Sequence[EmbeddingTables], has_encoder: bool
) -> tuple[str, ...]:
    """The columns that a model is saved with. Raises BadInput for those that are no ids of hashed tables."""
    if isinstance(hashed, str) or not all(isinstance(name, str) for name in hashed):
        raise BadInput(f"hashed must be a list of columns, such as ['user', 'item'], got {hashed!r}")
    if not hashed:
        return ()
    if spec is None:
        raise BadInput("hashed needs input_example, which describes the fields of a request")
    if has_encoder:
        raise BadInput(f"hashed column {hashed[0]!r}: the encoder makes the ids: leave out one of the two")
    _check_fields(spec, hashed)
    for field in inputs.fields(spec):
        if field["dtype"] != "int64" and (mine := {*inputs.columns_for(field)} & {*hashed}):
            raise BadInput(f"hashed column {min(mine)!r}: a hash has 64 bits, and the model takes {field['dtype']}")
    for one in tables:
        for name in hashed:
            if name in one.features and one.tables[table := one.features[name].table].n_rows:
                raise BadInput(f"hashed column {name!r}: its table {table!r} is not hashed (keys='hash64')")
    return tuple(dict.fromkeys(hashed))


def try_example(
    outputs_of: Callable[[Any], Any], spec: inputs.Spec, example: Mapping[str, Any], hashed: Sequence[str]
) -> None:
    """Raises BadInput where the model does not take hashes in these columns. outputs_of: the model with its rows"""
    columns = with_hashes(example_of(example, hashed), hashed, id_columns(spec))
    try:
        outputs_of(inputs.input_of(spec, columns))
    except IdOutside as error:
        raise BadInput(
            f"{error}. The hashed columns ({', '.join(hashed)}) have to be ids of hashed tables: leave out others"
        ) from error


def example_of(columns: Mapping[str, Any], hashed: Collection[str]) -> dict[str, Any]:
    """Columns with strings in place of hashes, which have no text: an example of a request, of other ids."""
    return {name: _texts(values) if name in hashed else values for name, values in columns.items()}


def _texts(values: Any) -> list[Any]:
    return [_texts(one) if isinstance(one, _LISTS) else str(one) for one in values]


def holds_strings(kind: Any) -> bool:
    """Whether a type of pyarrow is of strings, or of lists of them."""
    from gba_hvd.data.hashing import is_text
    from gba_hvd.data.list_columns import is_list

    return is_text(kind.value_type if is_list(kind) else kind)


def hashes_of(column: Any, name: str, is_own: bool = False) -> np.ndarray | list[np.ndarray]:
    """int64 [n], or [n] arrays of them, of strings or lists of strings. is_own: the model was saved with it as hashed.

    Raises BadInput for another type, and nulls.
    """
    import pyarrow

    from gba_hvd.data.parquet_columns import ids_of

    if not holds_strings(column.type):
        raise BadInput(
            f"hashed column {name!r} holds {column.type}, not strings{_GIVE_TEXTS if is_own else _LEAVE_OUT}"
        )
    _refuse_nulls(column, name)
    found = ids_of(pyarrow.chunked_array([column]), f"column {name!r}")
    if not isinstance(found, tuple):
        return found
    values, starts = found
    return [values[first:last] for first, last in pairwise(starts)]


def _refuse_nulls(column: Any, name: str) -> None:
    """Raises BadInput for a sample without a string, or a list that has a null; no list at all is an empty one."""
    import pyarrow.compute

    from gba_hvd.data.list_columns import is_list

    has_lists = is_list(column.type)
    flat = pyarrow.compute.list_flatten(column) if has_lists else column
    if not flat.null_count:
        return
    samples = column.to_pylist()
    at = next(i for i, one in enumerate(samples) if (None in (one or ()) if has_lists else one is None))
    what = "a list of strings, and one of them is null" if has_lists else "a string, got null, or nothing"
    raise BadInput(
        f"hashed column {name!r}: {flat.null_count} of {len(flat)} values are missing: of sample {at} expected {what}; "
        "fill it in"
    )


def with_hashes(
    columns: Mapping[str, Any], hashed: Collection[str], ids: Collection[str], how: str | None = None
) -> dict[str, Any]:
    """The columns of a request, with hashes in place of the strings of `hashed`.

    ids: columns of ids (`id_columns`). how: to give --hashed, in words; None: the model was saved with these columns.
    Raises BadInput for strings in one that is not hashed, and where one that is hashed has something else, or a missing
    value.
    """
    found = inputs.columns_in(columns)
    for name in sorted(found.keys() & set(ids)):
        if name in hashed:
            found[name] = hashes_of(_arrow(found[name], name), name, is_own=how is None)
        elif _has_text(found[name]):
            raise _not_hashed(name, "strings", hashed, how)
    return found


def refuse_strings(types: Mapping[str, Any], hashed: Collection[str], how: str | None) -> None:
    """Raises BadInput for a field of ids whose column is of strings, and not hashed. types: of pyarrow, by name"""
    for name, kind in types.items():
        if name not in hashed and holds_strings(kind):
            raise _not_hashed(name, str(kind), hashed, how)


def _not_hashed(name: str, kind: str, hashed: Collection[str], how: str | None) -> BadInput:
    advice = (
        f"The model was saved with the hashed columns {', '.join(hashed)}: where this one is of a hashed table, too, "
        "save it with all of them"
        if how is None
        else _hash_them(f"{how} --hashed {name}")
    )
    return BadInput(f"field {name!r}: expected numbers, got {kind}. {advice}")


@contextmanager
def of_hashed_tables(hashed: Sequence[str]) -> Iterator[None]:
    """Adds to the error of an id that its table does not have, that it may be a hash."""
    try:
        yield
    except IdOutside as error:
        if not hashed:
            raise
        raise BadInput(
            f"{error}. The columns of --hashed ({', '.join(hashed)}) have to be ids of hashed tables: leave out others"
        ) from error


def _hash_them(how: str) -> str:
    return (
        f"Where they are ids of a hashed table, and were hashed for the training (ParquetStream(hashed=), "
        f"hash_strings), {how}. Those of a dataset of `gba-hvd data prepare`: gba_hvd.data.RowEncoder makes the ids"
    )


def _arrow(values: Any, name: str) -> Any:
    """A column of a request. Without a value in it, such as one of empty lists, it counts as strings."""
    with extra("data", "pyarrow", "hashes of strings need"):
        import pyarrow

    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise BadInput(f"hashed column {name!r}: expected a column of strings, got the single value {values!r}")
    given = [None if is_missing(one) else one for one in values]
    try:
        column = pyarrow.array(given)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError) as error:
        what = _other_value(given) or str(error)
        raise BadInput(f"hashed column {name!r}: expected strings, or lists of strings: {what}") from error
    except UnicodeEncodeError as error:
        at = next(i for i, one in enumerate(given) if not _is_encodable(one))
        raise BadInput(f"hashed column {name!r}: sample {at} is no text in UTF-8: {error.reason}") from error
    if pyarrow.types.is_null(column.type):
        return column.cast(pyarrow.string())
    if pyarrow.types.is_list(column.type) and pyarrow.types.is_null(column.type.value_type):
        return column.cast(pyarrow.list_(pyarrow.string()))
    return column


def _other_value(samples: Sequence[Any]) -> str:
    """The first value that is no string, in words."""
    for i, sample in enumerate(samples):
        for one in sample if isinstance(sample, _LISTS) else [sample]:
            if not (isinstance(one, str) or is_missing(one)):
                return f"sample {i} has {one!r}" + _GIVE_TEXTS * isinstance(one, int)
    return ""


def _is_encodable(value: Any) -> bool:
    if isinstance(value, _LISTS):
        return all(map(_is_encodable, value))
    return not isinstance(value, str) or not any("\ud800" <= one <= "\udfff" for one in value)


def _has_text(values: Any) -> bool:
    if getattr(getattr(values, "dtype", None), "kind", "O") in "iufb":
        return False
    return any(_is_text(one) or (isinstance(one, _LISTS) and any(map(_is_text, one))) for one in list(values))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
