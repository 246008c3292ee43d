"""The `RowEncoder` of the data that a model was trained on, stored with the model: its vocabularies, and all else.

`files/SHA256.json` has the recipe, the means and the example of a request; `files/SHA256.arrow` the values of a
vocabulary, compressed: a version writes those that no other has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gba_hvd.errors import BadInput
from gba_hvd.extras import extra
from gba_hvd.reading.trained_scaling import other_scaling, scaling_of
from gba_hvd.reading.trained_vocabularies import not_compared, other_vocabulary
from gba_hvd.serving import inputs
from gba_hvd.serving.manifest import StoredEncoder
from gba_hvd.serving.stored_bytes import get_verified, put_file
from recovery.errors import Damaged
from recovery.storage.store import Store

if TYPE_CHECKING:
    from gba_hvd.data.row_encoder import RowEncoder
    from gba_hvd.embedding.tables import EmbeddingTables


@dataclass(frozen=True)
class EncoderToStore:
    """example: of a request, raw columns by name. is_trained: the model is known to have been trained with its
    vocabularies"""

    encoder: RowEncoder
    example: Mapping[str, Any]
    is_trained: bool

    @property
    def n_values(self) -> int:
        """Of all vocabularies."""
        return sum(map(len, self.encoder.vocabularies.values()))


def opened_encoder(encoder: RowEncoder | str | Path) -> RowEncoder:
    """The encoder of a folder, or the one that is given. Raises BadInput for a folder that is no prepared dataset."""
    with extra("data", "pyarrow", "an encoder of raw values needs"):
        from gba_hvd.data.row_encoder import RowEncoder

    return encoder if isinstance(encoder, RowEncoder) else RowEncoder.open(encoder)


def encoder_to_store(
    given: RowEncoder | str | Path, spec: inputs.Spec | None, example: Mapping[str, Any] | None,
    tables: Sequence[EmbeddingTables], trained: Mapping[str, Mapping[int, str]],
    scaling: Mapping[str, tuple[str, float, float]],
) -> EncoderToStore:  # fmt: skip
    """Raises BadInput where rows of the encoder do not become the model's input.

    spec, example: the fields of a request, and one with ids and numbers. tables: of the model. trained: vocabularies
    that it is known to have been trained with; scaling: of numbers, in its newest training data
    """
    encoder = opened_encoder(given)
    if spec is None or example is None:
        raise BadInput("encoder needs input_example, which describes the fields of a request")
    check_sizes(encoder, tables)
    if words := other_vocabulary(trained, encoder.vocabulary_digests):
        raise BadInput(f"encoder: {words}. Give that of the data that the model was trained on, or leave it out")
    if words := other_scaling(scaling, scaling_of(encoder), encoder.name):
        raise BadInput(
            f"encoder: {words}. Give that of the data that the model was trained on last, or leave it out. Where its "
            "numbers are meant, `encoder = RowEncoder.open(STORE)` and `encoder.dense_scaling = None` leave the "
            "comparison out"
        )
    fields = list(inputs.fields(spec))
    if padded := [one["column"] for one in fields if one["column"] in encoder.multi_valued and not one["is_bag"]]:
        raise BadInput(
            f"encoder: the model takes lists of {padded[0]!r} in a fixed length, and the encoder makes them of any "
            "length: give the model a Bag, or leave the encoder out and pad what RowEncoder.columns returns"
        )
    raw = encoder.decoded(example, _n_samples(example))
    try:
        inputs.input_of(spec, encoder.encoded(raw))
    except BadInput as error:
        raise BadInput(
            f"encoder: its fields ({', '.join(encoder.encoded(raw))}) are not those of the model's input. Arguments of "
            f"forward() and keys need the names of the fields. {error}"
        ) from error
    of_encoder = encoder.vocabulary_digests
    is_known = bool(of_encoder.digests) and of_encoder.digests.keys() <= trained.keys()
    return EncoderToStore(encoder, raw, is_known and not not_compared(trained, of_encoder))


def check_sizes(encoder: RowEncoder, tables: Sequence[EmbeddingTables]) -> None:
    """Raises BadInput where the encoder numbers the values of a field otherwise than the model's table has rows.

    A table that several fields look up has the rows of the largest. Of ids that are whole numbers of the input, a table
    may have more. A field that the model looks up by another name, as converted models do, counts for the table of its
    name.
    """
    for (_, n_rows), fields in _fields_of_tables(encoder, tables).items():
        sizes = {field: encoder.tables[encoder.features[field]] for field in fields}
        field = max(sizes, key=sizes.__getitem__)
        may_be_fewer = any(encoder.has_ids_of_input(encoder.features[one]) for one in fields)
        if sizes[field] > n_rows or (sizes[field] < n_rows and not may_be_fewer):
            raise BadInput(
                f"encoder: feature {field!r} has {sizes[field]:,} ids, and its table in the model {n_rows:,} rows: the "
                "encoder is of other data than the model was trained on. Give that of its own data, or leave it out"
            )


def _fields_of_tables(encoder: RowEncoder, tables: Sequence[EmbeddingTables]) -> dict[tuple[str, int], list[str]]:
    """The encoder's fields by name and rows of the numbered table that has their ids."""
    found: dict[tuple[str, int], list[str]] = {}
    for one in tables:
        for field, table in encoder.features.items():
            name = one.features[field].table if field in one.features else table
            if name in one.tables and one.tables[name].n_rows:
                found.setdefault((name, one.tables[name].n_rows), []).append(field)
    return found


def put_encoder(store: Store, made: EncoderToStore) -> StoredEncoder:
    facts = {**made.encoder.facts, "example": made.example}
    file = put_file(store, [json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()], "json")
    vocabularies = {name: put_file(store, _packed(one), "arrow") for name, one in made.encoder.vocabularies.items()}
    return StoredEncoder(file, vocabularies)


def read_facts(store: Store, stored: StoredEncoder) -> dict[str, Any]:
    """All but the vocabularies. Raises Damaged."""
    found: dict[str, Any] = json.loads(bytes(get_verified(store, stored.file)))
    return found


def read_encoder(
    store: Store, stored: StoredEncoder, facts: Mapping[str, Any], tables: Sequence[EmbeddingTables]
) -> RowEncoder:
    """Raises Damaged where a vocabulary is, or is gone, and BadInput for an encoder that does not fit the tables."""
    with extra("data", "pyarrow", "raw values of a request need"):
        import pyarrow

    from gba_hvd.data.list_columns import one_array
    from gba_hvd.data.row_encoder import RowEncoder

    def vocabulary(table: str) -> Any:
        data = get_verified(store, stored.vocabularies[table])
        return one_array(pyarrow.ipc.open_file(pyarrow.py_buffer(data)).read_all()["value"])

    try:
        encoder = RowEncoder.of(facts, vocabulary, f"the model at {store.url}")
    except (KeyError, TypeError, ValueError, pyarrow.ArrowException) as error:
        raise Damaged(f"{store.url}: the encoder of raw values, {stored.file.name}, makes no sense: {error}") from error
    check_sizes(encoder, tables)
    return encoder


def _packed(values: Any) -> list[bytes]:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"value": values})
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return [sink.getvalue().to_pybytes()]


def _n_samples(columns: Mapping[str, Any]) -> int:
    return max(map(len, columns.values()), default=0)
