"""`load_for_inference` and `open_model`: a saved model as a module that predicts, in a process without a job."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from gba_hvd.batch import Bag, Batch
from gba_hvd.embedding.features import is_whole
from gba_hvd.errors import BadInput, refuse_unknown
from gba_hvd.serving import inputs
from gba_hvd.serving.block_cache import BlockCache
from gba_hvd.serving.block_index import read_index
from gba_hvd.serving.builder import Builder
from gba_hvd.serving.compact_rows import PACKED
from gba_hvd.serving.frozen_rows import StoredRows
from gba_hvd.serving.hashed_columns import example_of, id_columns, with_hashes
from gba_hvd.serving.logged_model import is_address
from gba_hvd.serving.manifest import ModelManifest, read_manifest
from gba_hvd.serving.module import assemble, freeze, padding_rows_of
from gba_hvd.serving.outputs import scores_of
from gba_hvd.serving.stored_bytes import get_verified
from gba_hvd.serving.stored_encoder import read_encoder, read_facts
from gba_hvd.serving.tensor_file import decode_tensors
from recovery.storage.local_store import LocalStore
from recovery.storage.open import open_store
from recovery.storage.store import Store

if TYPE_CHECKING:
    from gba_hvd.data.row_encoder import RowEncoder

WHERE = ("memory", "mmap", "remote")
CACHE_BYTES = 256 << 20
LEAST_CACHE_BYTES = 1 << 20
_BATCH = 4096


class OpenModel:
    """A saved model, open. Made by `open_model`.

    module: in evaluation mode. manifest: what the version consists of. example: the columns of a request, or None
    """

    def __init__(
        self, module: nn.Module, manifest: ModelManifest, example: Mapping[str, Any] | None, device: torch.device,
        read_encoder: Callable[[], RowEncoder] | None = None,
    ) -> None:  # fmt: skip
        self.module, self.manifest, self.example, self._device = module, manifest, example, device
        self._read_encoder, self._lock = read_encoder, threading.Lock()
        self._encoder: RowEncoder | None = None

    @property
    def encoder(self) -> RowEncoder | None:
        """What makes ids of raw values; None: the model was saved without. Read from the store at the first use."""
        with self._lock:
            if self._encoder is None and self._read_encoder is not None:
                self._encoder = self._read_encoder()
        return self._encoder

    def predict(
        self,
        request: Mapping[str, Any],
        *,
        batch: int = _BATCH,
        encoded: bool = False,
        on_samples: Callable[[int], object] = lambda n: None,
    ) -> dict[str, np.ndarray]:
        """Scores, float32 [n] by name, of samples in columns: a pandas `DataFrame`, or arrays and lists by name.

        The names are `score` for one output, else those of the outputs. on_samples: called with how many more are done.
        With an encoder the columns hold raw values, as the input of `gba-hvd data prepare` had them; those that the
        model was saved with as `hashed` hold strings. encoded: ids and numbers, as `RowEncoder.columns` makes them, and
        hashes.
        Raises BadInput naming the field that is missing or of another dtype, and an id that its table does not have.
        """
        if batch < 1:
            raise BadInput(f"batch must be at least 1, got {batch}")
        spec = self.manifest.input
        if spec is None:
            raise BadInput(
                "this model was saved without input_example, so how a request becomes its input is not known: save it "
                "with one, or call the module of gba_hvd.load_for_inference with inputs of your own"
            )
        columns = inputs.columns_in(request)
        if self.manifest.encoder is None:
            inputs.refuse_doubtful(spec, columns)
        if not encoded and (encoder := self.encoder) is not None:
            inputs.refuse_single_values({name: columns[name] for name in encoder.raw_columns if name in columns})
            columns = encoder.encoded(columns)
        elif not encoded and self.manifest.hashed:
            columns = with_hashes(columns, self.manifest.hashed, id_columns(spec))
        # Of columns that the model does not need only the names count: an error lists them where one is missing.
        lengths = inputs.lengths_of(spec, columns)
        n = max(lengths.values(), default=0)
        parts = []
        for start in range(0, max(n, 1), batch):
            some = columns | {name: columns[name][start : start + batch] for name in lengths}
            parts.append(scores_of(self._outputs(inputs.input_of(spec, some)), self.manifest.activation))
            on_samples(min(batch, n - start))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _outputs(self, value: Any) -> Any:
        value = self._moved(value)
        with torch.inference_mode():
            return self.module(*value) if isinstance(value, tuple) else self.module(value)

    def _moved(self, value: Any) -> Any:
        """On the device of the model; ids that `EmbeddingTables` look up stay on the CPU, where the rows are."""
        if self._device.type == "cpu":
            return value
        if isinstance(value, Batch):
            return Batch(value.ids, value.dense.to(self._device), value.label)
        if isinstance(value, tuple):
            return tuple(self._moved(one) for one in value)
        if isinstance(value, Mapping):
            return {key: self._moved(one) for key, one in value.items()}
        if isinstance(value, Bag) and self.manifest.converted:  # its module returns rows where the ids are
            return Bag(*(self._moved(one) for one in (value.values, value.offsets, value.weights)))
        keeps = not self.manifest.converted and isinstance(value, Tensor) and not value.is_floating_point()
        return value.to(self._device) if isinstance(value, Tensor) and not keeps else value


def open_model(
    url: str | Path,
    *,
    version: int | str = "newest",
    device: str | torch.device = "cpu",
    tables: str = "memory",
    row_dtype: str = "float32",
    cache_bytes: int | None = None,
    **storage_options: Any,
) -> OpenModel:
    """Open a saved model: its module, and `predict` for columns. Arguments and errors: as of `load_for_inference`."""
    _check(tables, row_dtype, cache_bytes)
    if is_address(url):
        raise BadInput(
            f"{url} is an address of MLflow, not a URL: mlflow.pyfunc.load_model opens it, and so do the commands of "
            "`gba-hvd model`; gba_hvd.serving.logged_model.downloaded brings the model into a folder"
        )
    store = open_store(url, **storage_options)
    folder = _folder_of(store) if tables == "mmap" else None
    manifest = read_manifest(store, version)
    module = Builder.stored(store, manifest.builder).build()
    values = decode_tensors(bytes(get_verified(store, manifest.dense)), manifest.dense.name)
    stored = {table.name: table for table in manifest.tables}
    own = assemble(module, stored, manifest.converted, values, padding_rows_of(values), manifest.lookup_dtypes)
    cache = _cache_of(store, manifest, cache_bytes or CACHE_BYTES) if tables == "remote" else None
    readers = {table.name: StoredRows(store, table, folder, row_dtype, cache) for table in manifest.tables}
    freeze(module, own, readers, cache)
    columns = None
    if manifest.example is not None:
        columns = example_of(json.loads(bytes(get_verified(store, manifest.example))), manifest.hashed)
    encoder, read = manifest.encoder, None
    if encoder is not None:
        facts = read_facts(store, encoder)
        columns, read = facts["example"], functools.partial(read_encoder, store, encoder, facts, own)
    return OpenModel(module.to(device), manifest, columns, torch.device(device), read)


def load_for_inference(
    url: str | Path,
    device: str | torch.device = "cpu",
    tables: str = "memory",
    *,
    version: int | str = "newest",
    row_dtype: str = "float32",
    cache_bytes: int | None = None,
    **storage_options: Any,
) -> nn.Module:
    """The module of a saved model, in evaluation mode: its predictions are those of the model that was saved, bit for
    bit in float32 on the CPU. Needs neither Horovod nor the script of the job, only what its builder imports.

        model = gba_hvd.load_for_inference("s3://bucket/ctr")
        logits = model(batch)

    device: of the dense part; rows stay in the CPU's memory, and ids are looked up there.
    tables: "memory": rows are read now, and verified. "mmap": files are mapped when rows of theirs are looked up, so
    processes of a machine share them, and a model may be larger than the memory; for a local folder. Then sizes are
    checked, and bytes by `gba-hvd model verify`. "remote": rows stay in the store; a request reads the blocks of 16 KiB
    that it needs and that are not in a cache, all at once, and each is verified.
    cache_bytes: of "remote": most bytes of blocks in memory, the last used ones; default 256 MiB, at least 1 MiB.
    version: "newest", or its number. storage_options: see `recovery.open_store`.
    row_dtype: of rows in memory, "float32", or "int8" or "bfloat16" with the errors that `compact_rows` states; what is
    looked up is float32.

    Opening a model runs its builder: open only those whose writer you trust.

    Raises BadInput where there is no model, no such version, or its builder is missing or builds another one; Damaged
    where an object is gone, truncated or altered; StoreError where the store fails. With "remote" a call of the module
    raises the latter two as well, and gives no outputs then; the next call tries again.
    """
    return open_model(
        url, version=version, device=device, tables=tables, row_dtype=row_dtype, cache_bytes=cache_bytes,
        **storage_options,
    ).module  # fmt: skip


def _check(tables: str, row_dtype: str, cache_bytes: int | None) -> None:
    refuse_unknown("tables", tables, WHERE)
    refuse_unknown("row_dtype", row_dtype, tuple(PACKED))
    if tables != "memory" and row_dtype != "float32":
        what = "maps rows of the files" if tables == "mmap" else "reads parts of the files"
        raise BadInput(f"tables={tables!r} {what}, which are float32; row_dtype={row_dtype!r} needs memory")
    if cache_bytes is not None and tables != "remote":
        raise BadInput(f"cache_bytes is of tables='remote'; tables={tables!r} has no cache")
    if cache_bytes is not None and not is_whole(cache_bytes, LEAST_CACHE_BYTES):
        raise BadInput(f"cache_bytes must be a whole number of at least {LEAST_CACHE_BYTES:,}, got {cache_bytes!r}")


def _cache_of(store: Store, manifest: ModelManifest, n_bytes: int) -> BlockCache:
    block_bytes = 0 if manifest.blocks is None else manifest.blocks.block_bytes
    return BlockCache(store, n_bytes, read_index(store, manifest), block_bytes)


def _folder_of(store: Store) -> Path:
    inner = getattr(store, "store", store)
    if not isinstance(inner, LocalStore):
        raise BadInput(f"{store.url}: tables='mmap' needs a local folder: copy the model there, or use tables='memory'")
    return inner.folder
