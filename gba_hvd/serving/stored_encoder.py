"""The `RowEncoder` of the data that a model was trained on, stored with the model: its vocabularies, and all else.

`files/SHA256.json` has the recipe, the means and the example of a request; `files/SHA256.arrow` the values of a
vocabulary, compressed: a version writes those that no other has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gba_hvd.errors import BadInput
from gba_hvd.extras import extra
from gba_hvd.serving import inputs
from gba_hvd.serving.manifest import StoredEncoder, StoredTable
from gba_hvd.serving.stored_bytes import get_verified, put_file
from recovery.errors import Damaged
from recovery.storage.store import Store

if TYPE_CHECKING:
    from gba_hvd.data.row_encoder import RowEncoder


@dataclass(frozen=True)
class EncoderToStore:
    """example: of a request, raw columns by name"""

    encoder: RowEncoder
    example: Mapping[str, Any]

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
    tables: Mapping[str, StoredTable],
) -> EncoderToStore:  # fmt: skip
    """Raises BadInput where rows of the encoder do not become the model's input.

    spec, example: the fields of a request, and one with ids and numbers. tables: of the model
    """
    encoder = opened_encoder(given)
    if spec is None or example is None:
        raise BadInput("encoder needs input_example, which describes the fields of a request")
    for name, rows in encoder.tables.items():
        if name in tables and not tables[name].is_hashed and tables[name].n_rows < rows:
            raise BadInput(
                f"encoder: its table {name!r} has {rows:,} ids, and that of the model {tables[name].n_rows:,} rows: it "
                "is of other data than the model was trained on"
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
    return EncoderToStore(encoder, raw)


def put_encoder(store: Store, made: EncoderToStore) -> StoredEncoder:
    facts = {**made.encoder.facts, "example": made.example}
    file = put_file(store, [json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()], "json")
    vocabularies = {name: put_file(store, _packed(one), "arrow") for name, one in made.encoder.vocabularies.items()}
    return StoredEncoder(file, vocabularies)


def read_facts(store: Store, stored: StoredEncoder) -> dict[str, Any]:
    """All but the vocabularies. Raises Damaged."""
    file = stored.file
    found: dict[str, Any] = json.loads(bytes(get_verified(store, file.name, file.n_bytes, file.sha256)))
    return found


def read_encoder(store: Store, stored: StoredEncoder, facts: Mapping[str, Any]) -> RowEncoder:
    """Raises Damaged where a vocabulary is, or is gone."""
    with extra("data", "pyarrow", "raw values of a request need"):
        import pyarrow

    from gba_hvd.data.raw_rows import one_array
    from gba_hvd.data.row_encoder import RowEncoder

    def vocabulary(table: str) -> Any:
        one = stored.vocabularies[table]
        data = get_verified(store, one.name, one.n_bytes, one.sha256)
        return one_array(pyarrow.ipc.open_file(pyarrow.py_buffer(data)).read_all()["value"])

    try:
        return RowEncoder.of(facts, vocabulary)
    except (KeyError, TypeError, ValueError, pyarrow.ArrowException) as error:
        raise Damaged(f"{store.url}: the encoder of raw values, {stored.file.name}, makes no sense: {error}") from error


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
