"""`EmbeddingTables`: how a model sees the tables in shard memory.

A forward pass numbers the distinct rows a micro-batch touches, fetches each once, and pools. The fetched rows are an
autograd leaf, so the backward pass leaves one merged gradient per distinct row, ready to be sent. Which process serves
a row, and who applies gradients, is the mode's concern, not decided here.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gba_hvd import kernels
from gba_hvd.batch import Batch
from gba_hvd.config import Config
from gba_hvd.embedding import compiled
from gba_hvd.embedding.bags import BagLookups, FieldBags
from gba_hvd.embedding.compiled import CompiledPass
from gba_hvd.embedding.features import (
    Feature,
    Table,
    default_optimizer,
    features_of,
    is_whole,
    optimizers_of,
    poolings_of,
    refuse_unused_modes,
    tables_of,
)
from gba_hvd.embedding.initial_rows import AssignedRows, InitialRows, checked_rows, not_assignable, whole_ids
from gba_hvd.embedding.keyed_jagged import AnyIds, by_feature
from gba_hvd.embedding.lookup_recorder import LookupRecorder
from gba_hvd.embedding.lookups import (
    IdOutside,
    Ids,
    Lookup,
    PlainFields,
    Source,
    ends_of_tables,
    fill_keys,
    is_row_of_each,
    look_up,
    plain_fields,
    pooled_elsewhere,
    same_ids,
    sample_of_ids,
)
from gba_hvd.embedding.module_placement import FollowsModule
from gba_hvd.embedding.on_device import pooling as on_device
from gba_hvd.embedding.on_device.access import DeviceAccess
from gba_hvd.embedding.on_device.host_view import pinned, to_device
from gba_hvd.embedding.on_device.prepared_ids import PreparedIds, prepare
from gba_hvd.embedding.on_device.row_gradients import (
    DeviceRowGrad,
    SortedKeys,
    on_host,
)
from gba_hvd.embedding.on_device.rows import DeviceRows
from gba_hvd.embedding.passes import Captured, CapturedOnDevice, Passes, PulledRows
from gba_hvd.embedding.pooling import Pooling, pool, pool_stacked, stack
from gba_hvd.embedding.row_buffers import RowBuffers
from gba_hvd.embedding.row_gradients import RowGrad, distinct_parts
from gba_hvd.embedding.row_optimizers import RowOptimizer
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.shm.layout import Group, Layout, keys_of_ids
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.shm.vocabulary import Vocabulary

_MOST_UNUSED = 100
ALL = "all"  # rows, of which a device keeps copies


class EmbeddingTables(FollowsModule):
    """Named embedding tables that live in shard memory, trained by a row optimizer.

    Called with ids by feature, like a keyed `nn.EmbeddingBag`:

        tables = EmbeddingTables({"user": (10_000_000, 16), "item": (2_000_000, 16)}, optimizer=RowAdagrad(lr=0.05))
        out = tables({"user": user_ids, "item": Bag(item_ids, offsets)})       # {"user": [B, 16], "item": [B, 16]}
        out = tables.stacked({"user": user_ids, "item": item_ids})             # [B, 2, 16]

    Without `features` each table has one feature, of its own name, pooled as `mode` says ("sum", "mean" or "max", one
    for all or by table). With `features`, several features may look up one table, pooled or not:

        tables = EmbeddingTables(
            {"item": Table(2_000_000, 16, padding_idx=0), "user": (10_000_000, 16)},
            optimizer=RowAdagrad(lr=0.05),
            features={"history": Feature("item", pooling=None), "candidate": "item", "liked": Feature("item", "mean")},
        )
        out = tables({"history": ids, "candidate": item_ids, "user": user_ids})  # [B, L, 16], [B, 16], [B, 16]

    A row that several features of a call look up is fetched once and gets one gradient. A table that no feature names
    has a feature of its own name.

    optimizer: of the rows of tables that name none; it may be left out where every table names one.
    seed, init_std: of the initial rows, normal(0, init_std). They depend on (seed, table, row) only.
    mode: as above. n_shards, shard_dir: of the shard memory; default: $GBA_HVD_N_SHARDS, $GBA_HVD_SHARD_DIR, or those
    of `Config`.

    On a GPU (`model.to("cuda")`) lookups return rows there, of ids on the CPU. Where all rows are on this host, the GPU
    itself reads them in the host's memory, and pools them; with one worker it applies their gradients as well. Hashed
    tables, and the tables of a job on several hosts, are looked up by the CPU and copied.
    hot_rows: of how many rows, of all tables that are not hashed, the GPU keeps a copy in its own memory: those used
    most; "all" where they fit there. With each step they are written to the host's memory as well.

    The tables are no `nn.Parameter`s: they are shared by all workers of a host and are not in `state_dict()`.
    Rows are float32 in memory. Lookups return float32, or the `dtype` of a model that is in another one
    (`model.bfloat16()`), as `nn.Embedding` would; under autocast they return float32. Gradients of rows are float32.

    Raises BadInput for tables, features, modes or settings that do not fit together, by name, and for a table without
    an optimizer; a call raises it for ids of unknown features, of a wrong dtype or shape, or out of range.
    """

    def __init__(
        self,
        tables: Mapping[str, Table | tuple[int, int]],
        optimizer: RowOptimizer | None = None,
        *,
        features: Mapping[str, Feature | str] | None = None,
        seed: int = 0,
        init_std: float = 0.01,
        mode: str | Mapping[str, str] = "sum",
        n_shards: int | None = None,
        shard_dir: Any = None,
        hot_rows: int | str = 0,
    ) -> None:
        super().__init__()
        self.config = Config.from_env(n_shards=n_shards, shard_dir=shard_dir)
        self.tables = tables_of(tables)
        self.optimizer = default_optimizer(optimizer, self.tables)
        self.mode = poolings_of(self.tables, mode)
        self.features = features_of(self.tables, features, self.mode)
        refuse_unused_modes(features, mode)
        self.optimizers, numbers = optimizers_of(self.optimizer, self.tables)
        shapes = {name: (table.n_rows, table.dim) for name, table in self.tables.items()}
        own_slots, n_shards_ = tuple(one.slots for one in self.optimizers.own), self.config.n_shards
        specs = {name: table.hashed_spec(n_shards_) for name, table in self.tables.items()}
        hashed = {name: spec for name, spec in specs.items() if spec is not None}
        n_plain = sum(table.n_rows for name, table in self.tables.items() if name not in hashed)
        n_hot = n_plain if hot_rows == ALL else hot_rows
        if not is_whole(n_hot, 0) or (hot_rows and not n_plain):
            why = (
                f"expected a whole number of at least 0, or {ALL!r}"
                if n_plain
                else "the device keeps none of hashed tables"
            )
            raise BadInput(f"hot_rows={hot_rows!r}: {why}")
        self.hot_rows = int(n_hot)
        self.on_device = DeviceAccess(self.config.device_rows, self.hot_rows)
        self.layout = Layout.of(shapes, self.optimizer.slots, n_shards_, seed, init_std, numbers, own_slots, hashed)
        self.initial_rows = InitialRows(self.tables, init_std)
        self._sources = {name: self._source(name, feature) for name, feature in self.features.items()}
        self._where: Callable[[int], str] | None = None  # see `naming_samples`
        self.memory: ShardMemory | None = None
        # Lookups of each row, in every micro-batch: for admission, and for checkpoints that save what is used most.
        self.counts_accesses = bool(hashed)
        self.local: np.ndarray | None = None  # bool [S]: shards of this host; None when all are
        # Sets rows (group, keys, values) in the memory, between steps; None: it cannot be done here.
        self.write_rows: Callable[[int, np.ndarray, np.ndarray], None] | None = None
        # Called when the script loads a `state_dict` of a model with these tables, which has no rows; set by the state.
        self.when_loaded: Callable[[], Any] | None = None
        # Returns when all workers of the host have applied their part of the newest step; set by allreduce mode.
        self.await_steps: Callable[[], None] = _nothing_to_await
        # Entered while the rows are saved by this worker alone; set where others may train meanwhile.
        self.while_saved: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.notes_samples = False  # forward passes note which sample each id belongs to
        self.trained_vocabularies: Mapping[str, Mapping[int, str]] = {}  # see `reading.trained_vocabularies.Trained`
        self.trained_scaling: Mapping[str, tuple[str, float, float]] = {}  # see `reading.trained_scaling.Scaling`
        self._wants_grad = True  # see `requires_grad_`
        self.is_trained = False  # an optimizer has them
        self.is_frozen = False  # rows are looked up and never trained: forward passes leave nothing
        # The features that `stacked` looked up on a device last; batches that were prepared since it used one.
        self._stacked_names: tuple[str, ...] | None = None
        self._n_unused = 0
        self._plain_fields: dict[tuple[str, ...], PlainFields | None] = {}
        self.pools_bags = False  # rows of bags on other hosts are pooled there: their weights get no gradient
        self._not_pooled = tuple(name for name, feature in self.features.items() if feature.pooling is None)
        self.part_of: tuple[EmbeddingTables, ...] = ()  # the tables that these have become a part of
        self.parts: tuple[EmbeddingTables, ...] = ()  # the tables that have become these
        self._handle, self._anchor = compiled.register(self)
        self._row_buffers = RowBuffers()
        self._common = Passes([None] * len(self.layout.groups))
        self._apart: dict[int, Passes] = {}  # by thread, of those that keep theirs to themselves
        self._recorders: dict[int, LookupRecorder] = {}  # by thread
        self.looked_up: set[str] = set()  # tables that forward passes of this worker have looked up
        self.looks_up_inside = False  # the model itself finds ids in its inputs; batches need not have any

    def _source(self, name: str, feature: Feature) -> Source:
        group, first_key = self.layout.place_of_table[feature.table]
        table = self.tables[feature.table]
        padding = None if table.padding_idx is None else first_key + table.padding_idx
        if table.keys and table.padding_idx is not None:
            padding = int(keys_of_ids(np.array([table.padding_idx]))[0])
        return Source(name, feature.table, group, first_key, table.n_rows, feature.pooling, padding)

    def extra_repr(self) -> str:
        shapes = {n: f"{t.n_rows:,}" if not t.keys else f"up to {t.capacity:,}" for n, t in self.tables.items()}
        return ", ".join(f"{name}: {shapes[name]} x {table.dim}" for name, table in self.tables.items())

    def __getstate__(self) -> dict[str, Any]:
        """Neither `copy.deepcopy` nor pickle can copy memory that other processes write."""
        if self.memory is not None or self.part_of or self.is_trained:
            raise GbaError(
                "tables that an optimizer trains are in memory shared by all workers, and not copied with a model: "
                "keep model.state_dict() for the dense part, and tables.rows(name, ids) for rows; an average "
                "(torch.optim.swa_utils.AveragedModel) is one of the dense modules"
            )
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle, self._anchor = compiled.register(self)

    def _load_from_state_dict(self, *about: Any) -> None:
        super()._load_from_state_dict(*about)
        self.note_loaded()

    def note_loaded(self) -> None:
        """A `state_dict` of a module that looks up here is loaded."""
        whole = self.part_of[0] if self.part_of else self
        if whole.when_loaded is not None:
            whole.when_loaded()

    # --- threads ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def apart(self) -> Iterator[Passes]:
        """While this lasts, this thread's passes and gradients are its own, and no other thread's."""
        me = threading.get_ident()
        self._apart[me] = Passes([None] * len(self.layout.groups))
        try:
            yield self._apart[me]
        finally:
            del self._apart[me]

    @contextlib.contextmanager
    def recording(self, stop_after: int | None = None) -> Iterator[LookupRecorder]:
        """Forward passes of this thread fetch no row: their keys are recorded, and they compute with zeros.

        Needs no memory. stop_after: raise AllRecorded at this lookup
        """
        me = threading.get_ident()
        self._recorders[me] = LookupRecorder(len(self.layout.groups), stop_after)
        try:
            yield self._recorders[me]
        finally:
            del self._recorders[me]

    @contextlib.contextmanager
    def naming_samples(self, where: Callable[[int], str]) -> Iterator[None]:
        """While this lasts, errors of ids in forward passes say where a sample of the batch comes from.

        where: of its number in the batch that the forward pass gets; in words, or empty. Not asked in threads `apart`.
        """
        before, self._where = self._where, where
        try:
            yield
        finally:
            self._where = before

    def _name_sample(self, error: IdOutside) -> None:
        if self._where is not None and error.sample is not None and threading.get_ident() not in self._apart:
            error.where = self._where(error.sample)

    @property
    def _passes(self) -> Passes:
        return self._apart.get(threading.get_ident(), self._common) if self._apart else self._common

    @property
    def remote(self) -> list[PulledRows | None]:
        """Rows of other hosts for the micro-batches ahead, by group."""
        return self._passes.remote

    @remote.setter
    def remote(self, rows: list[PulledRows | None]) -> None:
        self._passes.remote = rows

    # --- forward ---------------------------------------------------------------------------------------------------

    def forward(self, ids: AnyIds) -> dict[str, Tensor]:
        """Embeddings by feature, for the features named in `ids`; float32, or the `dtype` of the model.

        ids: by feature, one of
            int64 or int32 [B]       one id for each sample
            int64 or int32 [B, L]    L of them, with the table's `padding_idx` where a sample has fewer
            `Bag` of B samples, or a jagged nested tensor [B, j] (torch.nested, layout=torch.jagged)
        or all of them in a `KeyedJaggedTensor` of TorchRec, whose keys are features: each is a `Bag`.
        A pooled feature gives [B, dim]. One that is not (`Feature(table, pooling=None)`) takes tensors of any shape
        and gives ids.shape + [dim], zeros where padding is, and a jagged nested tensor [B, j, dim] of a Bag or a
        nested tensor.
        Raises BadInput for an unknown feature, ids of another dtype or shape, an id outside its table, offsets that do
        not cut the values, and weights of a Bag where they would be ignored.
        """
        ids = by_feature(ids)
        out: dict[str, Tensor]
        if self.part_of:
            self._refuse_unknown(ids)
            out = self._whole().looked_up_rows(ids, self._trains)
        else:
            out = self.looked_up_rows(ids, self._trains)
        return {name: out[name].to(self.device, self.dtype) for name in ids}

    def looked_up_rows(self, ids: Ids, train: bool) -> dict[str, Tensor]:
        """As `forward`, where the rows are. train: their gradient will be taken"""
        if torch.compiler.is_compiling() and ids:
            return compiled.look_up(self._handle, self._anchor, ids, self._not_pooled, train)
        _refuse_tracing()
        self._fetch_remote(ids)
        out = self._frozen_rows_of(ids) if self.is_frozen else self._looked_up_on_device(ids, train)
        rest = {name: ids[name] for name in ids if name not in out} if out else ids
        for some in self._fetched(rest, train):
            for (one, _), rows in zip(some, pool([pooling for _, pooling in some], self._row_buffers), strict=True):
                out[one.source.feature] = one.result(rows)
        return out

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """False: forward passes from here on leave the rows as they are. At any time, the same on every worker.

        They get no gradient, no weight decay, and no room in a hashed table; weights of bags are trained all the same.
        (`requires_grad_` of a model that has these tables in it does not come here: rows are none of its parameters.)
        """
        self._wants_grad = requires_grad
        return super().requires_grad_(requires_grad)

    @property
    def n_trained(self) -> int:
        """How many parts `requires_grad_` lets train; tables that were not joined are one."""
        return sum(part._wants_grad for part in self.parts or (self,))

    @property
    def _trains(self) -> bool:
        return self._wants_grad and torch.is_grad_enabled()

    def compiled_pass(self, ids: Ids, train: bool, weights_train: bool) -> tuple[CompiledPass, list[Tensor]]:
        """See `compiled.LooksUp`."""
        if weights_train and not train:
            raise BadInput(
                "weights of bags that ask for a gradient, of tables with requires_grad_(False), under torch.compile: "
                "detach the weights, let the tables train, or leave the lookup out of what is compiled"
            )
        if self.memory is not None:
            self.on_device.rows(self.memory, self.device, "the model is compiled")
        found, results = {}, {}
        first = len(self._passes.captured)
        for one, pooling in itertools.chain.from_iterable(self._fetched(ids, train, weights_train)):
            results[one.source.feature] = pooling.pooled().view(*one.shape_of_rows, pooling.rows.shape[1])
            found[one.source.feature] = one, pooling, pooling.rows
        done = CompiledPass([found[name] for name in ids])
        for captured in self._passes.captured[first:]:
            if isinstance(captured, Captured):
                captured.compiled.append(done)
        return done, [results[name] for name in ids]

    def open_passes(self) -> Iterator[CompiledPass]:
        """See `compiled.LooksUp`."""
        return (done for one in self._passes.captured if isinstance(one, Captured) for done in one.compiled)

    def width_of(self, feature: str) -> tuple[int, bool]:
        """(dimension, whether it is pooled)."""
        self._refuse_unknown({feature: None})
        source = self._sources[feature]
        return self.layout.groups[source.group].dim, source.pooling is not None

    def _fetched(
        self, ids: Ids, train: bool, weights_train: bool | None = None
    ) -> Iterator[list[tuple[Lookup, Pooling]]]:
        """Of each group of tables, its features' lookups and their pooling, of distinct rows that are one leaf."""
        for number, some in self._lookups_by_group(ids, weights_train):
            wanted, cuts = np.concatenate([one.keys for one in some]), [one.by_sample for one in some]
            lengths = [len(one.keys) for one in some]
            ends = [len(wanted)] if self.pools_bags else ends_of_tables([one.source for one in some], lengths)
            rows, index = self._fetch(number, wanted, ends, cuts, train)
            parts = np.split(index, np.cumsum(lengths)[:-1])
            yield [
                (one, Pooling(rows, part, one.offsets, one.weights, one.pooling))
                for one, part in zip(some, parts, strict=True)
            ]

    def _lookups_by_group(self, ids: Ids, weights_train: bool | None) -> Iterator[tuple[int, list[Lookup]]]:
        """Of each group of tables, its number and its features' lookups, those of one table side by side."""
        self._refuse_unknown(ids)
        by_group: dict[int, list[Lookup]] = {}
        try:
            found = self.lookups(ids)
        except IdOutside as error:
            self._name_sample(error)
            raise
        for one in found:
            by_group.setdefault(one.source.group, []).append(self._with_pooled(one, ids, weights_train))
            self.looked_up.add(one.source.table)
        for number, some in by_group.items():
            yield number, sorted(some, key=lambda one: one.source.first_key)

    def _device_rows(self) -> DeviceRows | None:
        """What looks rows up on the device of the model; None: the CPU does, for now or at all."""
        if self.is_frozen or self.memory is None or self._recorders:
            return None
        obstacle = ""
        if self.local is not None:
            obstacle = "rows are on several hosts"
        elif self._apart:
            obstacle = "several threads train this worker's replica"
        elif self.notes_samples:
            obstacle = "sync_micro_batch with rows averaged over contributors counts the samples of each row"
        return self.on_device.rows(self.memory, self.device, obstacle)

    def _looked_up_on_device(self, ids: Ids, train: bool) -> dict[str, Tensor]:
        """By feature, of those whose rows the device looks up."""
        device, out = self._device_rows(), dict[str, Tensor]()
        if device is None:
            return out
        self._refuse_unknown(ids)
        cuts: dict[int, Tensor] = {}
        here = {name: ids[name] for name in ids if device.has(self._sources[name].group)}
        for number, some in self._lookups_by_group(here, None):
            keys = to_device(np.concatenate([one.keys for one in some]), device.device)
            by_key = not on_device.takes_maximum(some)
            rows, index, is_sparse = self._fetch_on_device(device, number, keys, train, by_key)
            for one, pooled in zip(some, on_device.pool(rows, index, some, is_sparse), strict=True):
                out[one.source.feature] = one.result(pooled, cuts)
        return out

    def _fetch_on_device(
        self,
        device: DeviceRows,
        group: int,
        keys: Tensor,
        train: bool,
        by_key: bool = True,
        order: SortedKeys | None = None,
    ) -> tuple[Tensor, Tensor, bool]:
        """(rows [d, dim], int64 [n] of each key its row, whether these are to get a sparse gradient), on the device.

        by_key: the device may give all rows that it has copies of; order: see `CapturedOnDevice`
        """
        self.await_steps()
        found, index, rows = None, keys, device.weights(group) if by_key else None
        if rows is None:
            found, index, rows = device.look_up(group, keys)
        if not train:
            rows = rows.detach()  # (the device's copies ask for a gradient once they were trained)
        else:
            rows.requires_grad_()
            self._passes.captured.append(CapturedOnDevice(group, found, rows, index, self.counts_accesses, order))
        return rows, index, found is None

    def _stacked_on_device(
        self, device: DeviceRows, group: int, keys: Tensor, train: bool, order: SortedKeys | None = None
    ) -> Tensor:
        """keys: int64 [B, F]"""
        rows, index, is_sparse = self._fetch_on_device(device, group, keys.reshape(-1), train, order=order)
        return on_device.stack(rows, index.view(keys.shape), is_sparse).to(self.dtype)

    def prepare(self, batch: Any) -> Any:
        """The batch with its keys on the device, where `stacked` looks up what is in it; from a thread that reads."""
        device, names = self.on_device.current, self._stacked_names
        if device is None or not isinstance(batch, Batch) or names is None or names != tuple(batch.ids):
            return batch
        plain = None if self._n_unused > _MOST_UNUSED else self._plain(names)
        if plain is None or (ids := prepare(batch.ids, plain, device)) is None:
            return batch
        self._n_unused += 1  # of a model that makes ids of its own, all are
        return replace(batch, ids=ids)

    def _stacked_prepared(self, ids: Ids, train: bool) -> Tensor | None:
        """`stacked` of ids whose keys are on the device; None: they are not."""
        if not isinstance(ids, PreparedIds) or (device := self._device_rows()) is None:
            return None
        if (found := ids.of(device)) is None:
            return None
        self._n_unused = 0
        self.looked_up.update(self._sources[name].table for name in ids)
        return self._stacked_on_device(device, found.group, found.keys, train, found.order)

    def stacked(self, ids: AnyIds) -> Tensor:
        """Embeddings [B, F, dim] of the F features in `ids`, in that order; all of one dimension.

        The fast path for single-valued features: one gather for all. Features of several ids are pooled.
        """
        ids = by_feature(ids)
        if self.part_of:
            self._refuse_unknown(ids)
            return self._whole().stacked_rows(ids, self._trains).to(self.device, self.dtype)
        return self.stacked_rows(ids, self._trains)

    def stacked_rows(self, ids: Ids, train: bool) -> Tensor:
        """As `stacked`. train: the rows' gradient will be taken"""
        if torch.compiler.is_compiling():
            return self._stacked_pooled(ids, train)
        _refuse_tracing()
        if self.is_frozen and (rows := self._stacked_frozen(ids)) is not None:
            return rows.to(self.device, self.dtype)
        if (prepared := self._stacked_prepared(ids, train)) is not None:
            return prepared
        self._refuse_unknown(ids)
        sources = [self._sources[name] for name in ids]
        dims = {source.table: self.layout.groups[source.group].dim for source in sources}
        if len(set(dims.values())) != 1:
            raise BadInput(
                f"stacked() takes fields of tables of one dimension, got {dims}; call tables(ids) for others"
            )
        columns = [column for column in ids.values() if isinstance(column, Tensor) and column.ndim == 1]
        if any(len(column) != len(columns[0]) for column in columns):
            raise BadInput(f"stacked(): all fields need {len(columns[0])} ids, got {[len(c) for c in columns]}")
        has_padding = any(source.padding_key is not None for source in sources)
        if len(columns) != len(ids) or has_padding or len({source.group for source in sources}) > 1:
            return self._stacked_pooled(ids, train)
        device, group, batch = self._device_rows(), sources[0].group, len(columns[0])
        is_there = device is not None and device.has(group)
        keys = pinned(self.device if is_there else torch.device("cpu"), batch * len(columns)).numpy()
        try:
            for number, (source, column) in enumerate(zip(sources, columns, strict=True)):
                fill_keys(source, column, keys[number * batch : (number + 1) * batch], int)
        except IdOutside as error:
            self._name_sample(error)
            raise
        self.looked_up.update(dims)
        if device is not None and is_there:
            self._stacked_names = tuple(ids)
            on_its_way = to_device(keys, device.device).view(len(columns), batch).t()
            return self._stacked_on_device(device, group, on_its_way, train)
        cuts = [np.arange(batch + 1)] * len(columns)
        ends = ends_of_tables(sources, [batch] * len(sources))
        rows, index = self._fetch(group, keys, ends, cuts, train)
        return stack(rows, index, len(columns), batch, self._row_buffers).to(self.device, self.dtype)

    def _whole(self) -> EmbeddingTables:
        """The tables that these have become a part of; lookups of this part are for its model's device."""
        whole = self.part_of[0]
        whole.device = self.device
        return whole

    def _fetch_remote(self, ids: Ids) -> None:
        """Of rows that stay in a store, read what all features need at once; a lookup would wait for its own alone."""
        memory: Any = self.memory
        if not self.is_frozen or self._recorders or not getattr(memory, "is_remote", False):
            return
        self._refuse_unknown(ids)
        with contextlib.suppress(IdOutside):  # (the lookup names it)
            memory.fetch([(self.layout.groups[one.source.group], one.keys) for one in self.lookups(ids)])

    def _frozen_rows_of(self, ids: Ids) -> dict[str, Tensor]:
        """Of the features that give each id its row, by feature."""
        self._refuse_unknown(ids)
        found: dict[str, Tensor] = {}
        if self._recorders or self.memory is None:
            return found
        for name, some in ids.items():
            source = self._sources[name]
            if isinstance(some, Tensor) and is_row_of_each(source, some):
                keys = np.empty(some.numel(), np.int64)
                fill_keys(source, some.reshape(-1), keys, sample_of_ids(some))
                found[name] = self._frozen_rows(source.group, keys).view(
                    *some.shape, self.layout.groups[source.group].dim
                )
        return found

    def _plain(self, names: tuple[str, ...]) -> PlainFields | None:
        """See `plain_fields`; of those names that are features."""
        if names not in self._plain_fields:
            self._plain_fields[names] = plain_fields([self._sources[name] for name in names if name in self._sources])
        return self._plain_fields[names]

    def _stacked_frozen(self, ids: Ids) -> Tensor | None:
        """The same for one int64 id in each field, all in tables of one group; None for anything else."""
        names = tuple(ids)
        plain, columns = self._plain(names), [one for one in ids.values() if isinstance(one, Tensor)]
        if plain is None or not len(plain.first_key) == len(columns) == len(names):
            return None
        if any(one.dtype != torch.int64 or one.ndim != 1 or len(one) != len(columns[0]) for one in columns):
            return None
        if columns[0].device.type != "cpu" or self._recorders or self.memory is None:
            return None
        stacked = torch.stack(columns).numpy()
        keys = np.empty(stacked.shape[::-1], np.int64)
        if kernels.fill_keys_of_columns(stacked, plain.first_key, plain.n_rows, keys) >= 0:
            return None  # (the other path says which id it is)
        dim = self.layout.groups[plain.group].dim
        return self._frozen_rows(plain.group, keys.reshape(-1)).view(*keys.shape, dim)

    def _stacked_pooled(self, ids: Ids, train: bool) -> Tensor:
        sources = [self._sources[name] for name in ids]
        is_one_group = len({source.group for source in sources}) == 1
        device = self._device_rows()
        by_cpu = not torch.compiler.is_compiling() and (device is None or not device.has(sources[0].group))
        if is_one_group and all(source.pooling for source in sources) and by_cpu:
            (some,) = self._fetched(ids, train)
            features = {one.source.feature: pooling for one, pooling in some}
            _refuse_other_lengths([features[name].n_bags for name in ids])
            return pool_stacked([features[name] for name in ids], self._row_buffers).to(self.device, self.dtype)
        found = {name: rows.to(self.device, self.dtype) for name, rows in self.looked_up_rows(ids, train).items()}
        for name, rows in found.items():
            if rows.is_nested or rows.ndim != 2:
                raise BadInput(
                    f"stacked(): feature {name!r} is not pooled and gives every id a row; leave it out, and call "
                    "tables(ids) for it"
                )
        _refuse_other_lengths([len(found[name]) for name in ids])
        return torch.stack([found[name] for name in ids], dim=1)

    def lookups(self, ids: Ids) -> list[Lookup]:
        """What these ids look up, in the order of the features; names that are no feature are left out."""
        return [look_up(source, ids[name]) for name, source in self._sources.items() if name in ids]

    def keys_of(self, group: int, columns: list[tuple[str, Tensor]]) -> np.ndarray:
        """int64 keys of the ids [n] of tables of one group, column after column, padding among them."""
        keys = np.empty(sum(column.numel() for _, column in columns), np.int64)
        at = 0
        for name, column in columns:
            source = Source(
                name, name, group, self.layout.place_of_table[name][1], self.tables[name].n_rows, None, None
            )
            fill_keys(source, column, keys[at : at + column.numel()])
            at += column.numel()
        return keys

    def bag_lookups(self, ids: Sequence[Ids]) -> BagLookups:
        """What some batches look up, those apart of which sums suffice: multi-valued features that are summed or
        averaged."""
        single: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in self.layout.groups]
        bags: list[list[tuple[int, FieldBags]]] = [[] for _ in self.layout.groups]
        for i, by_name in enumerate(ids):
            for one in self.lookups(by_name):
                name, group = one.source.feature, one.source.group
                if one.is_bag:
                    bags[group].append((i, FieldBags(name, by_name[name], one.keys, one.offsets, one.factors())))
                else:
                    single[group].append(one.keys)
        return BagLookups([np.concatenate(some) for some in single], bags)

    def _with_pooled(self, lookup: Lookup, ids: Ids, weights_train: bool | None) -> Lookup:
        """The lookup as rows that are pooled here, after what other hosts have pooled."""
        if not self.pools_bags:
            return lookup
        if lookup.weights is not None and (
            torch.is_grad_enabled() and lookup.weights.requires_grad if weights_train is None else weights_train
        ):
            raise BadInput(
                f"{lookup.source}: the weights of its bags ask for a gradient, and row_compression=dct_mp pools rows "
                "of other hosts there, without sending them: use another row_compression, or detach the weights"
            )
        pulled = self.remote[lookup.source.group]
        if not lookup.is_bag or pulled is None:
            return lookup
        name = lookup.source.feature
        for one in pulled.bags:
            if one.field.feature == name and same_ids(one.field.ids, ids[name]):
                return pooled_elsewhere(lookup, one.keys, one.offsets, one.factors)
        return lookup

    def _fetch(
        self, group_number: int, wanted: np.ndarray, ends: list[int], by_sample: list[np.ndarray], train: bool
    ) -> tuple[Tensor, np.ndarray]:
        """The distinct rows of some keys as a leaf [d, dim], and each key's number among them int32 [n].

        ends: see `distinct_parts`
        by_sample: int64 [B + 1] of each feature, where the keys of its samples begin and end
        train: the rows' gradient will be taken
        """
        if self._recorders and (recorder := self._recorders.get(threading.get_ident())) is not None:
            keys, index = distinct_parts(wanted, ends)
            recorder.add(group_number, keys)
            return torch.zeros(len(keys), self.layout.groups[group_number].dim), index
        self._made_memory()
        if self.is_frozen:
            return self._frozen_rows(group_number, wanted), np.arange(len(wanted), dtype=np.int32)
        group = self.layout.groups[group_number]
        keys, index = distinct_parts(wanted, ends)
        rows = self._row_buffers.empty(len(keys), group.dim)
        self._read_rows(group, group_number, keys, rows.numpy())
        if train:
            rows.requires_grad_()
            ids, samples = index[:0], np.empty(0, np.int64)
            if self.notes_samples:
                ids, samples = index, np.concatenate([np.repeat(np.arange(len(o) - 1), np.diff(o)) for o in by_sample])
            n_samples = frozenset(len(o) - 1 for o in by_sample)
            accesses = None
            if self.counts_accesses:
                accesses = np.zeros(len(keys), np.uint32)
                kernels.count_numbers(index, accesses)
            self._passes.captured.append(Captured(group_number, keys, rows, ids, samples, n_samples, accesses))
        return rows, index

    def _made_memory(self) -> ShardMemory:
        """With all that this worker's steps changed. Raises GbaError before it is made."""
        if self.memory is None:
            raise GbaError(
                "the tables have no memory yet: iterate gba_hvd.batches(dataset, state), or call state.sync() first. A "
                "deep copy that was made before, as by torch.optim.swa_utils.AveragedModel(model), never has it: copy "
                "the dense part alone"
            )
        self.await_steps()
        return self.memory

    def _frozen_rows(self, group_number: int, keys: np.ndarray) -> Tensor:
        """float32 [n, dim], of keys int64 [n] in any order: no gradient will be merged, so none is numbered."""
        assert self.memory is not None
        group = self.layout.groups[group_number]
        rows = torch.empty(len(keys), group.dim)
        self.memory.gather(keys, group, 0, rows.numpy())
        return rows

    def _read_rows(self, group: Group, group_number: int, keys: np.ndarray, out: np.ndarray) -> None:
        assert self.memory is not None
        layout = self.layout
        if self.local is None:
            self.memory.gather(keys, group, 0, out)
            return
        here = self.local[keys % layout.n_shards]
        local_at, remote_at = np.flatnonzero(here), np.flatnonzero(~here)
        rows = np.empty((len(local_at), group.dim), dtype=np.float32)
        self.memory.gather(keys[local_at], group, 0, rows)
        out[local_at] = rows
        if len(remote_at):
            remote, index = self.remote[group_number], np.empty(len(remote_at), dtype=np.int32)
            missing = 0 if remote is None else kernels.find_keys(keys[remote_at], remote.slots, remote.keys, index)
            if remote is None or missing >= 0:
                table, row = layout.locate(int(keys[remote_at][max(missing, 0)]), group_number)
                raise GbaError(
                    f"row {row} of table {table!r} lives on another host and was not fetched: ids must come from the "
                    "batch's `ids` (pass ids=... to gba_hvd.batches when your batches keep them elsewhere), or be "
                    "looked up by its `forward` each time it gets this batch (ids that it draws from a generator of "
                    "one's own differ the second time: draw them where the batch is made, as in collate_fn)"
                    + (", and bags unchanged: with row_compression=dct_mp they are pooled there" * self.pools_bags)
                    + ". Outside gba_hvd.batches, as for predictions after the loop, rows of other hosts are not here: "
                    "use gba_hvd.evaluate, or export the model (gba_hvd.save_model)"
                )
            out[remote_at] = remote.values[index]

    def _refuse_unknown(self, ids: Mapping[str, Any]) -> None:
        unknown = [name for name in ids if name not in self._sources]
        if unknown:
            what = "table" if list(self.features) == list(self.tables) else "feature"
            raise BadInput(f"no {what} named {unknown[0]!r}; the {what}s are {', '.join(self.features)}")

    def why_missing(self, name: object) -> str:
        """Of a key that a model did not find: that it is a feature which no forward pass has looked up; else empty."""
        source = self._sources.get(name) if isinstance(name, str) else None
        if source is None or source.table in self.looked_up or not self.looked_up:
            return ""
        found = [one.feature for one in self._sources.values() if one.table in self.looked_up]
        return (
            f"{name!r} is a feature of the EmbeddingTables, which give rows for the features that their ids have: "
            f"{', '.join(found)} so far, of {', '.join(self.features)}. Is it missing in the batch's ids?"
        )

    # --- backward --------------------------------------------------------------------------------------------------

    def take_gradients(self) -> list[list[RowGrad]]:
        """The gradients captured since the last call, per group one for each forward pass."""
        return [[on_host(grad) for grad in some] for some in self.take_gradients_in_place()]

    def take_gradients_in_place(self) -> list[list[RowGrad | DeviceRowGrad]]:
        """The same, where they are: those of rows that the device looked up stay in its memory."""
        passes = self._passes
        captured, passes.captured = passes.captured, []
        grads: list[list[RowGrad | DeviceRowGrad]] = [[] for _ in self.layout.groups]
        for c in captured:
            if c.rows.grad is not None:
                grads[c.group].append(c.gradient())
        return grads

    def contributors(self, micro_batch: int, n_samples: int) -> list[RowGrad]:
        """In how many micro-batches of the forward passes since the last gradients each row is, by group.

        The batch has n_samples, the samples of several micro-batches one after the other. Values: float32 [n, 1].
        Raises BadInput for a pass with another number of samples, where that cannot be determined. Needs
        `notes_samples`.
        """
        n_micro = -(-n_samples // micro_batch)
        keys: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in self.layout.groups]
        micro: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in self.layout.groups]
        for c in self._passes.captured:
            if c.rows.grad is None:
                continue
            assert isinstance(c, Captured)  # with `notes_samples` the CPU looks rows up
            if c.n_samples != {n_samples}:
                raise BadInput(
                    f"a forward pass over {' and '.join(map(str, sorted(c.n_samples)))} samples in a batch of "
                    f"{n_samples}: with sync_micro_batch and rows averaged over contributors the tables must see which "
                    "micro-batch each id belongs to. Leave sync_micro_batch out, or use row_average='global'"
                )
            keys[c.group].append(c.keys[c.ids])
            micro[c.group].append(c.samples // micro_batch)
        counts = []
        for some, numbers in zip(keys, micro, strict=True):
            distinct_keys, which = np.unique(np.concatenate(some), return_inverse=True)
            pairs = np.unique(which * n_micro + np.concatenate(numbers))
            n = np.bincount(pairs // n_micro, minlength=len(distinct_keys))
            counts.append(RowGrad(distinct_keys, n.astype(np.float32)[:, None]))
        return counts

    @property
    def captured(self) -> Sequence[Captured | CapturedOnDevice]:
        """The rows of the forward passes since gradients were taken last."""
        return self._passes.captured

    def scale_gradients_(self, factor: float) -> None:
        """Multiply the gradients captured since they were last taken."""
        for c in self._passes.captured:
            if c.rows.grad is not None:
                c.rows.grad.mul_(factor)

    def zero_gradients(self) -> None:
        """Clear the gradients of the forward passes so far; a backward pass may still follow."""
        for c in self._passes.captured:
            c.rows.grad = None

    def drop_gradients(self) -> None:
        """Discard the row gradients of this thread's forward passes."""
        self._passes.captured = []

    # --- rows from elsewhere ---------------------------------------------------------------------------------------

    def assign(self, name: str, ids: Any, values: Any) -> None:
        """Set rows, such as pretrained ones. ids: whole numbers [n], distinct; values: float [n, dim].

        name: of a table, or of one of its features. Before the first `state.sync()` the rows are recorded, on every
        worker, and written where the memory is made: the same on all hosts. Rows of a checkpoint that the job resumes
        from win. Later the rows are written at once: then call it on every worker, with the same values, outside the
        loop over batches and in allreduce mode. Optimizer slots stay. Positions with `padding_idx` look no row up, so
        they return what they did.
        Raises BadInput for an unknown name, ids and values that do not fit the table, and values that are not finite;
        GbaError where rows cannot be written now.
        """
        table = self.table_of(name)
        if self.part_of:
            return self.part_of[0].assign(table, ids, values)
        if self.memory is None:
            self.initial_rows.assign(AssignedRows.of(table, self.tables[table], ids, values), table)
            return
        if self.write_rows is None:
            raise not_assignable()
        found, rows = checked_rows(table, self.tables[table], ids, values)
        group, first_key = self.layout.place_of_table[table]
        self.write_rows(group, keys_of_ids(found) if self.tables[table].keys else first_key + found, rows)

    def assign_from(self, name: str, url: str) -> None:
        """As `assign`, from a file: a path or any fsspec URL that every host can read.

        .npy: float32 [n, dim], rows 0 to n - 1; .npz: arrays `values` float32 [n, dim] and `ids` int64 [n] (without it,
        rows 0 to n - 1); .parquet: columns `ids` and `values`, a list of dim numbers each.
        """
        table = self.table_of(name)
        if self.part_of:
            return self.part_of[0].assign_from(table, url)
        rows = AssignedRows.of_file(table, self.tables[table], str(url))
        if self.memory is None:
            self.initial_rows.assign(rows, table)
        else:
            self.assign(table, *rows.read())

    def table_of(self, name: str) -> str:
        """The table with this name, or that of a feature. Raises BadInput."""
        if name in self.tables:
            return name
        if name in self.features:
            return self.features[name].table
        raise BadInput(f"no table or feature named {name!r}; the tables are {', '.join(self.tables)}")

    def describe_tables(self) -> dict[str, Any]:
        """What workers must have in common beyond the layout; nothing of a table that is only a shape."""
        named: dict[str, dict[str, Any]] = {"optimizer": {}, "init": {}, "padding_idx": {}}
        for name, table in self.tables.items():
            init = table.init
            named["init"][name] = getattr(init, "__qualname__", type(init).__name__) if callable(init) else init
            named["optimizer"][name] = None if table.optimizer is None else repr(table.optimizer)
            named["padding_idx"][name] = table.padding_idx
        given = {what: {n: v for n, v in values.items() if v is not None} for what, values in named.items()}
        assigned = self.initial_rows.assigned
        found: dict[str, Any] = {f"{what} of tables": values for what, values in given.items() if values}
        return {**found, **({"assigned tables": assigned} if assigned else {})}

    # --- a look inside ---------------------------------------------------------------------------------------------

    def rows(self, table: str, ids: Any, what: str = "weights") -> np.ndarray:
        """A copy of some rows of this host's memory: float32 [n, dim], or [n] for a slot with one number per row.

        In allreduce mode as after the newest step of this worker, which waits for the others of its host to apply
        theirs; in an asynchronous mode as servers have them by now.

        table: its name, or that of a feature. what: "weights" or the name of an optimizer slot. For tests, export and
        curiosity. Raises BadInput for an unknown name, other ids and rows of other hosts; GbaError before
        `state.sync()`.
        """
        table = self.table_of(table)
        if self.part_of:
            return self.part_of[0].rows(table, ids, what)
        memory = self._made_memory()
        g, _ = self.layout.place_of_table[table]
        group, layout = self.layout.groups[g], self.layout
        keys = self._keys_here(table, ids)
        slots = {
            slot.name: (slot.per_row, at)
            for slot, at in zip(layout.slots_of(group.tables[0]), group.slots, strict=True)
        }
        per_row, offset = slots.get(what, (False, 0))
        out = np.empty((len(keys), 1 if per_row else group.dim), dtype=np.float32)
        memory.gather(keys, group, offset, out)
        return out[:, 0] if per_row else out

    def admitted(self, table: str, ids: Any) -> np.ndarray:
        """bool [n], which ids of a hashed table have a row of their own; others share one.

        table: its name, or that of a feature; ids: whole numbers [n]. Raises BadInput for a table that is not hashed,
        other ids and ids of other hosts; GbaError before `state.sync()`.
        """
        table = self.table_of(table)
        if self.part_of:
            return self.part_of[0].admitted(table, ids)
        vocabulary = self._vocabulary(table)
        return vocabulary.has(self._keys_here(table, ids))

    def vocabulary(self, table: str) -> np.ndarray:
        """int64 [n], ascending: the ids of a hashed table that have a row of their own, in the shards of this host.

        With several hosts, all ids are the union over one worker of each host; a checkpoint has them as well
        (`gba-hvd checkpoint export`). Raises BadInput for a table that is not hashed; GbaError before `state.sync()`.
        """
        table = self.table_of(table)
        if self.part_of:
            return self.part_of[0].vocabulary(table)
        vocabulary = self._vocabulary(table)
        return vocabulary.ids(self._made_memory().ready())

    def _keys_here(self, table: str, ids: Any) -> np.ndarray:
        """int64 [n]: the keys of ids whose shards are on this host. Raises BadInput for others."""
        ids = whole_ids(table, ids).ravel()
        keys = self.keys_of(self.layout.place_of_table[table][0], [(table, torch.from_numpy(ids))])
        elsewhere = [] if self.local is None else ids[~self.local[keys % self.layout.n_shards]]
        if len(elsewhere):
            raise BadInput(
                f"{len(elsewhere)} of {len(ids)} rows of table {table!r} are on other hosts, the first is of id "
                f"{elsewhere[0]}: only rows of this host can be read here. recovery.open_checkpoint(url) and "
                "`gba-hvd checkpoint export` read the rows of all hosts from a checkpoint"
            )
        return keys

    def _vocabulary(self, table: str) -> Vocabulary:
        if not self.tables[table].keys:
            raise BadInput(f"table {table!r} is not hashed: its ids are 0 to {self.tables[table].n_rows - 1}")
        group, _ = self.layout.place_of_table[table]
        found = self._made_memory().vocabulary(self.layout.groups[group])
        assert found is not None
        return found


def _nothing_to_await() -> None:
    """Servers apply what an asynchronous mode pushes, and a model apart from its job is not trained."""


def _refuse_other_lengths(lengths: Sequence[int]) -> None:
    if len(set(lengths)) > 1:
        raise BadInput(f"stacked(): all fields need {lengths[0]} samples, got {lengths}")


def _refuse_tracing() -> None:
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise GbaError(
            "torch.jit.trace would bake the rows of its example input into the traced model as constants: trace "
            "the dense part by itself, with looked-up rows as its input"
        )
