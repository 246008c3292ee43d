"""`save_model` and `export_model`: a model of a job, or of a checkpoint, written for predictions.

Order: shards of rows, dense tensors, code, then the manifest, which makes the version visible. A save that ends before
leaves the versions that were there, and objects that the next save uses or that nothing refers to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gba_hvd.convert import is_converted
from gba_hvd.embedding.module_placement import evaluating
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import BadInput, refuse_unknown
from gba_hvd.serving import hashed_columns, inputs
from gba_hvd.serving.builder import Builder
from gba_hvd.serving.dense_program import DensePrograms, exported_dense_part, formats_of
from gba_hvd.serving.manifest import (
    BuilderRecord,
    ConvertedModule,
    Initial,
    ModelManifest,
    RowShards,
    StoredOnnx,
    StoredProgram,
    StoredTable,
    next_version,
    to_json,
)
from gba_hvd.serving.module import (
    assemble,
    converted_in,
    dense_of,
    freeze,
    lookup_dtypes_of,
    older_buffers,
    padding_rows_in,
    padding_rows_of,
    tables_in,
)
from gba_hvd.serving.outputs import same_outputs
from gba_hvd.serving.row_shards import ShardWriter, TableRows
from gba_hvd.serving.row_sources import (
    CheckpointRows,
    LiveRows,
    live_rows,
    marks_of,
    step_of_rows,
    step_span_of,
    stood_still_since,
    trained_input,
    whole_of,
)
from gba_hvd.serving.stored_bytes import put_file
from gba_hvd.serving.stored_encoder import EncoderToStore, encoder_to_store, put_encoder
from gba_hvd.serving.tensor_file import encode_tensors
from recovery.errors import StoreError
from recovery.restore.open_checkpoint import OpenCheckpoint, open_checkpoint
from recovery.storage.open import open_store
from recovery.storage.store import Store, is_there

log = logging.getLogger("gba_hvd")

if TYPE_CHECKING:
    from gba_hvd.data.row_encoder import RowEncoder

TABLES = ("all", "touched")
ACTIVATIONS = ("none", "sigmoid")
_PACKAGES = ("gba-hvd", "torch", "numpy")


@dataclass(frozen=True)
class SavedModel:
    """One version.

    url: of the store, without credentials. new_shards, new_bytes: of rows, that were not there yet. vocabulary_values,
    vocabulary_bytes: of the encoder; encoder: where it is from; encoder_is_trained: the model is known to have been
    trained with its vocabularies
    """

    url: str
    version: int
    n_rows: int
    n_bytes: int
    new_shards: int
    new_bytes: int
    vocabulary_values: int = 0
    vocabulary_bytes: int = 0
    encoder: str = ""
    encoder_is_trained: bool = False


def save_model(
    model: nn.Module,
    url: str | Path,
    *,
    tables: str = "all",
    input_example: Any = None,
    dense_names: Sequence[str] = (),
    build: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    activation: str = "none",
    shard_bytes: int | None = None,
    dense_program: bool | str | Sequence[str] = False,
    encoder: RowEncoder | str | Path | None = None,
    hashed: Sequence[str] = (),
    source: Mapping[str, Any] | None = None,
    on_bytes: Callable[[int], object] = lambda n: None,
    **storage_options: Any,
) -> SavedModel:
    """Write a model for predictions as a new version at a URL; `load_for_inference` opens it without Horovod.

        saved = gba_hvd.save_model(model, "s3://bucket/ctr", build="model.py:make_model", arguments={"dim": 16},
                                   input_example=batch)

    Call it on one worker, where you would evaluate: inside the training function, between two epochs, where the others
    wait for it. Within an epoch of an asynchronous mode they train on, and a version may have parts of several steps:
    the event `saved_while_training` reports it. Rows that a version at this URL has already are not written again.

    model: the one that is trained, or a part of it, such as one tower. Of a converted model a part is saved with the
    tables that its modules look up; `EmbeddingTables` among its modules are saved with all of theirs.
    build: what makes the module: "package.module:callable", imported where the model is opened, or "file.py:callable",
    whose file is copied with the model; called with `arguments`, plain JSON. Default: the model's class. It may return
    the model before or after `gba_hvd.convert`.
    tables: "all" rows; or "touched": those that training has changed. Others are then computed from the seed where the
    model is opened, with the same bits on a processor of the same kind.
    input_example: an input as the model takes it (a tuple: positional arguments), of few samples. It describes the
    fields of a request, and the built module is compared with the model on it, bit for bit. Bags are `Bag`s: all
    fields have one number of samples.
    dense_names: of the columns of `Batch.dense`, in their order: a request may give them by name.
    activation: "sigmoid": what `predict` applies to the model's outputs; "none".
    shard_bytes: size of a shard of rows. Default: a 1024th of the table, at least 16 KiB.
    dense_program: also store the dense part as a program, which takes looked-up rows, for servers without this package
    (docs/FORMAT.md): "torch" or True, of `torch.export`; "onnx", which is compared with the module when it is made and
    needs the extra `onnx`; or both, ("torch", "onnx"). Needs an input_example of two samples or more.
    encoder: the folder of the prepared dataset that the model was trained on, or its `RowEncoder`: it is stored with
    the model (vocabularies, hashes, means), and requests then hold raw values. Needs an input_example. Another one is
    refused where it is known which vocabularies and means were trained: the rows come from `batches` over a `ClickLog`.
    hashed: fields of ids of hashed tables that were strings in the data, as in `ParquetStream(hashed=)`: requests then
    hold these strings. Needs an input_example.
    source: plain JSON that is kept with the version, as is the step of the rows ("step").
    storage_options: see `recovery.open_store`.

    Raises BadInput where the builder builds another model, a part of a converted model has no input_example, or this
    process has not all rows (several hosts: export from a checkpoint); StoreError where the store fails. The versions
    before stay as they are.
    """
    formats = _check(tables, activation, dense_program, input_example, dense_names)
    own, converted = tables_in(model), converted_in(model)
    rows = live_rows(own)
    if not rows:
        raise BadInput(
            f"{type(model).__name__} has no EmbeddingTables among its modules, and no converted module: make the "
            "tables an attribute of the model (self.tables = tables) and look up in its forward()"
        )
    rows = _looked_up(model, rows, converted, input_example)
    builder = Builder.of(build, arguments, model)
    spec = None if input_example is None else inputs.spec_of(input_example, model, dense_names)
    exported = exported_dense_part(model, input_example, formats) if formats else None
    trained = whole_of(own[0]).trained_vocabularies, whole_of(own[0]).trained_scaling
    dense, fresh = dense_of(model), builder.build()
    stored_as = stand_ins(list(rows.values()))
    assembled = assemble(fresh, stored_as, converted, dense, padding_rows_of(dense), lookup_dtypes_of(model))
    example = None if spec is None else inputs.columns_of(spec, input_example)
    made = None if encoder is None else encoder_to_store(encoder, spec, example, assembled, *trained)
    hashed = hashed_columns.checked(hashed, spec, assembled, has_encoder=encoder is not None)
    with whole_of(own[0]).while_saved():
        if input_example is not None:
            if len(devices := {value.device for value in dense.values()}) == 1:
                fresh.to(devices.pop())  # (of several, the builder puts them there)
            freeze(fresh, assembled, rows)
            _compare(model, fresh, input_example, own, str(builder))
            if hashed and spec is not None and example is not None:
                hashed_columns.try_example(lambda value: _outputs(fresh, value), spec, example, hashed)
        store = open_store(url, **storage_options)
        writer = ShardWriter(store, only_trained=tables == "touched", shard_bytes=shard_bytes, on_bytes=on_bytes)
        stored, step = tuple(writer.table(one) for one in rows.values()), step_of_rows(own)
    return _commit(
        store, builder, stored, model, dense, converted, spec, example, activation,
        {"step": step, **(source or {})}, writer, exported, made, hashed,
    )  # fmt: skip


def export_model(
    checkpoint: str | Path | OpenCheckpoint,
    url: str | Path,
    *,
    step: int | str = "newest",
    tables: str = "all",
    input_example: Any = None,
    dense_names: Sequence[str] = (),
    build: str,
    arguments: Mapping[str, Any] | None = None,
    activation: str = "none",
    shard_bytes: int | None = None,
    dense_program: bool | str | Sequence[str] = False,
    encoder: RowEncoder | str | Path | None = None,
    hashed: Sequence[str] = (),
    on_bytes: Callable[[int], object] = lambda n: None,
    **storage_options: Any,
) -> SavedModel:
    """As `save_model`, from a checkpoint: `build` makes the model whose job saved it.

    The model is complete; for a part of it, such as one tower, `build` makes it with a `forward` of that part.
    checkpoint: its URL, or what `recovery.open_checkpoint` returned, which takes options for its store and the step;
    step: of a URL, see there. storage_options: of the model's store. A table of a converted model has
    the path of its module, so `gba_hvd.convert` is recognised; with `prefix`, let `build` convert.
    input_example: describes the fields of a request; there is no model to compare with. encoder, hashed: as of
    `save_model`.

    Raises BadInput where the builder builds another model than the checkpoint is of, Damaged and StoreError.
    """
    formats = _check(tables, activation, dense_program, input_example, dense_names)
    opened = checkpoint
    if not isinstance(opened, OpenCheckpoint):
        opened = open_checkpoint(opened, step)
    builder = Builder.of(build, arguments, None)
    fresh, dense = builder.build(), opened.dense()
    converted, tensors = _converted_by(fresh, opened), list(fresh.state_dict())
    names = list(opened.tables)
    stored_as = stand_ins([CheckpointRows(opened, name, None) for name in names])
    try:
        assembled = assemble(fresh, stored_as, converted, dense, padding_rows_in(opened), {})
    except BadInput as error:
        if not _are_of_part(tensors, [*dense, *names, *(f"{name}.weight" for name in names)]):
            raise
        raise BadInput(
            f"{error}. If {build} builds a part of the checkpoint's model, such as one tower, let it build the "
            "complete model, with a `forward` of that part"
        ) from error
    if why := older_buffers(fresh, opened):
        log.warning("%s", why)
    dense = dense_of(fresh)  # with padding rows
    spec = None if input_example is None else inputs.spec_of(input_example, fresh, dense_names)
    example = None if spec is None else inputs.columns_of(spec, input_example)
    made = None
    if encoder is not None:
        made = encoder_to_store(encoder, spec, example, assembled, *trained_input(opened))
    hashed = hashed_columns.checked(hashed, spec, assembled, has_encoder=encoder is not None)
    owner = {} if converted else {name: one for one in assembled for name in one.tables}
    rows = {name: CheckpointRows(opened, name, owner.get(name)) for name in names}
    exported = None
    if formats or hashed:
        freeze(fresh, assembled, rows)
    if hashed and spec is not None and example is not None:
        hashed_columns.try_example(lambda value: _outputs(fresh, value), spec, example, hashed)
    if formats:
        exported = exported_dense_part(fresh, input_example, formats)
    store = open_store(url, **storage_options)
    writer = ShardWriter(store, only_trained=tables == "touched", shard_bytes=shard_bytes, on_bytes=on_bytes)
    stored = tuple(writer.table(one) for one in rows.values())
    source = {
        "checkpoint": opened.name, "checkpoint_url": opened.url, "checkpoint_checksum": opened.checksum,
        "step": opened.step, "samples": opened.samples,
    }  # fmt: skip
    return _commit(
        store, builder, stored, fresh, dense, converted, spec, example, activation, source, writer, exported, made,
        hashed,
    )  # fmt: skip


def described_vocabularies(saved: SavedModel) -> str:
    of = "its training data" if saved.encoder_is_trained else saved.encoder
    if not saved.vocabulary_values:
        return f"the model has the encoder of {of}, without vocabularies. Requests hold raw values"
    note = "" if saved.encoder_is_trained else "; that the model was trained with it is not checked"
    return (
        f"the model has the encoder of {of}: {saved.vocabulary_values:,} values of vocabularies, "
        f"{saved.vocabulary_bytes:,} bytes{note}. Requests hold raw values"
    )


def _check(
    tables: str,
    activation: str,
    dense_program: bool | str | Sequence[str],
    input_example: Any,
    dense_names: Sequence[str],
) -> tuple[str, ...]:
    """The formats of the dense part."""
    refuse_unknown("tables", tables, TABLES)
    refuse_unknown("activation", activation, ACTIVATIONS)
    formats = formats_of(dense_program)
    if formats and input_example is None:
        raise BadInput(f"dense_program={dense_program!r} needs input_example, by which the model is traced")
    if len(dense_names) and input_example is None:
        raise BadInput("dense_names needs input_example, which describes the fields of a request")
    return formats


def _compare(model: nn.Module, fresh: nn.Module, example: Any, tables: Sequence[EmbeddingTables], builder: str) -> None:
    """Raises BadInput where their outputs differ."""
    before, (first, _) = marks_of(tables), step_span_of(tables)
    try:
        with evaluating(model):
            same_outputs(_outputs(model, example), _outputs(fresh, example), builder)
    except BadInput as error:
        if stood_still_since(tables, before):
            raise
        last = step_span_of(tables)[1]
        raise BadInput(
            f"other workers trained from step {first} to {last} while what {builder} builds was compared with the "
            "model on input_example, so the outputs differ: save the model between two epochs, where they wait"
        ) from error


def _outputs(model: nn.Module, example: Any) -> Any:
    return model(*example) if isinstance(example, tuple) else model(example)


def _looked_up(
    model: nn.Module, rows: Mapping[str, LiveRows], converted: Sequence[ConvertedModule], example: Any
) -> dict[str, LiveRows]:
    """Those of tables that a model, or a part of one, can look up."""
    wanted = {one.table for one in converted}
    for module in model.modules():
        if isinstance(module, EmbeddingTables):  # which looks up what its caller names
            wanted |= module.tables.keys()
    others = rows.keys() - wanted
    if others and example is None:
        raise BadInput(
            f"{type(model).__name__} is a part of the converted model: no module of it looks up table {min(others)!r}. "
            "Give input_example, by which it is checked that the part works without, or save the complete model"
        )
    return {name: one for name, one in rows.items() if name in wanted}


def _are_of_part(names: Sequence[str], known: Sequence[str]) -> bool:
    """Whether these are names of tensors or tables of a model, less the path of a part of it."""
    return bool(names) and all(any(one.endswith(f".{name}") for one in known) for name in names)


def stand_ins(rows: Sequence[TableRows]) -> dict[str, StoredTable]:
    """Tables without shards: what a built module is checked against before anything is written."""
    return {
        one.name: StoredTable(
            one.name, one.dim, "numbered" if one.n_rows else "hash64", one.n_rows, RowShards(()),
            None if one.n_rows else RowShards(()), Initial(0, 0.0),
        )
        for one in rows
    }  # fmt: skip


def _converted_by(fresh: nn.Module, checkpoint: OpenCheckpoint) -> tuple[ConvertedModule, ...]:
    """The modules that the job's `convert` has made lookups: those whose path, or whose weight's, is a table."""
    by_weight: dict[int, str] = {}
    found = []
    for path, module in fresh.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or is_converted(module):
            continue
        feature = path or "embedding"
        first = by_weight.setdefault(id(module.weight), feature)
        tables = [name for name in (first, f"{first}.weight") if name in checkpoint.tables]  # (`of_optimizer`: weights)
        if tables:
            found.append(ConvertedModule(path, feature, tables[0]))
    return tuple(found)


def _commit(
    store: Store, builder: Builder, stored: tuple[StoredTable, ...], model: nn.Module, dense: Mapping[str, Tensor],
    converted: tuple[ConvertedModule, ...], spec: inputs.Spec | None, example: Mapping[str, Any] | None,
    activation: str, source: Mapping[str, Any], writer: ShardWriter,
    exported: DensePrograms | None = None, encoder: EncoderToStore | None = None,
    hashed: Sequence[str] = (),
) -> SavedModel:  # fmt: skip
    record: BuilderRecord = builder.put(store)
    dense_file = put_file(store, encode_tensors(dense), "safetensors")
    example_file = None if example is None else put_file(store, [inputs.to_json(example)], "json")
    stored_encoder = None if encoder is None else put_encoder(store, encoder)
    program, onnx = (None, None) if exported is None else _put_programs(store, exported)
    blocks, written = writer.put_index(), writer.written
    with next_version(store) as number:
        manifest = ModelManifest(
            number, round(time.time(), 3), record, stored, dense_file, converted, spec, example_file, activation,
            source, {name: version(name) for name in _PACKAGES}, lookup_dtypes_of(model), program, blocks, onnx,
            stored_encoder, tuple(hashed),
        )  # fmt: skip
        _require_all(store, manifest)
        store.put(manifest.name, [to_json(manifest)])
    saved = SavedModel(store.url, number, written.n_rows, manifest.n_bytes, written.n_shards, written.n_bytes)
    if encoder is None or stored_encoder is None:
        return saved
    return replace(
        saved, vocabulary_values=encoder.n_values, vocabulary_bytes=stored_encoder.n_bytes,
        encoder=encoder.encoder.name, encoder_is_trained=encoder.is_trained,
    )  # fmt: skip


def _require_all(store: Store, manifest: ModelManifest) -> None:
    """Raises StoreError where an object was deleted since it was written, or since it was seen."""
    there = store.names("rows/") | store.names("files/")
    for one in manifest.objects():
        if one.name not in there and not is_there(store, one.name, one.n_bytes):
            raise StoreError(f"{store.url}: {one.name} was deleted while the model was saved: save it again")


def _put_programs(store: Store, made: DensePrograms) -> tuple[StoredProgram | None, StoredOnnx | None]:
    program = onnx = None
    if made.torch is not None:
        program = StoredProgram(put_file(store, [made.torch], "pt2"), made.lookups)
    if made.onnx is not None:
        file = put_file(store, [made.onnx.data], "onnx")
        lookups = tuple(one for one in made.lookups if one.feature in made.onnx.rows)
        onnx = StoredOnnx(file, lookups, made.onnx.rows, made.onnx.fields, made.onnx.outputs)
    return program, onnx
