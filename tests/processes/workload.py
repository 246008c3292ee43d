"""What the process tests train: a small click model, and how to look at everything it is made of."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from gba_hvd_tools.chaos import data
from gba_hvd_tools.chaos.data import raw_ids
from torch import Tensor, nn

import gba_hvd
from gba_hvd.compression import Spec
from gba_hvd.data import ParquetStream, ShardedStream
from gba_hvd.shm.checkpoint_rows import ShardRows
from gba_hvd.shm.shard_memory import ShardMemory
from recovery.rows import RowSource


@dataclass(frozen=True)
class NamedBatch(gba_hvd.Batch):
    """A batch that knows which samples it holds."""

    rows: tuple[int, ...] = ()


class Clicks(data.ChaosClicks):
    """What the chaos jobs learn, in batches that know which samples they hold."""

    def take(self, rows: np.ndarray) -> NamedBatch:
        batch = super().take(rows)
        return NamedBatch(batch.ids, batch.dense, batch.label, rows=tuple(rows.tolist()))


class ParquetClicks(ParquetStream):
    """The same samples in Parquet files, in batches that know which samples they hold."""

    def __init__(self, url: str) -> None:
        super().__init__(url, ids=["user", "item"], dense=["x", "y"], label="click", window=3)

    def take(self, rows: np.ndarray) -> NamedBatch:
        batch = super().take(rows)
        return NamedBatch(batch.ids, batch.dense, batch.label, rows=tuple(rows.tolist()))

    @staticmethod
    def write(folder: Path, n: int = 1000, n_files: int = 3, row_group: int = 64) -> str:
        """Write them; the URL of all files."""
        clicks = Clicks(n)
        columns = {"user": clicks.user, "item": clicks.item, "x": clicks.dense[:, 0], "y": clicks.dense[:, 1]}
        table, folder = pa.table(columns | {"click": clicks.label}), folder / "clicks"
        folder.mkdir(exist_ok=True)
        for number, part in enumerate(np.array_split(np.arange(n), n_files)):
            pq.write_table(table.take(pa.array(part)), folder / f"part-{number}.parquet", row_group_size=row_group)
        return f"file://{folder}/*.parquet"


class ShardedClicks(ShardedStream):
    """The same samples in shards that are read in sequence; two of them are empty. Made to batches by `to_batch`."""

    def __init__(self, n: int = 1000, n_shards: int = 20, counts: bool = False) -> None:
        at = np.sort(np.random.default_rng(3).integers(0, n, n_shards - 2))
        ends = [*at.tolist(), n, n, n]
        self._limits = {f"shard-{i}": (ends[i - 1] if i else 0, ends[i]) for i in range(n_shards)}
        super().__init__(list(self._limits), self._rows, count=self._n_rows if counts else None, segment=8)

    def _rows(self, shard: str) -> Iterator[int]:
        yield from range(*self._limits[shard])

    def _n_rows(self, shard: str) -> int:
        return len(range(*self._limits[shard]))


def to_batch(samples: list[int]) -> NamedBatch:
    return Clicks(1000).take(np.array(samples))


class Model(nn.Module):
    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables
        self.mlp = nn.Sequential(nn.Linear(8 + 6 + 2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        out = self.tables(batch.ids)
        logits: Tensor = self.mlp(torch.cat([out["user"], out["item"], batch.dense], dim=1)).squeeze(1)
        return logits


class FeatureClicks(Clicks):
    """Beside user and item: items seen before, padded with 0; and items liked, none to three, jagged."""

    def take(self, rows: np.ndarray) -> NamedBatch:
        batch = super().take(rows)
        user, item = (np.asarray(batch.ids[name]) for name in ("user", "item"))
        seen = (item[:, None] * np.arange(1, 5) + user[:, None]) % 40
        seen[np.arange(4)[None] >= (user % 5)[:, None]] = 0
        liked = [(np.arange(u % 4) * 7 + i) % 40 for u, i in zip(user, item, strict=True)]
        cuts = torch.from_numpy(np.cumsum([0, *map(len, liked)]))
        values = torch.from_numpy(np.concatenate(liked).astype(np.int64))
        ids: dict[str, Tensor | gba_hvd.Bag] = {
            **batch.ids, "seen": torch.from_numpy(seen.astype(np.int32)),
            "liked": torch.nested.nested_tensor_from_jagged(values, cuts),
        }  # fmt: skip
        return NamedBatch(ids, batch.dense, batch.label, rows=batch.rows)


class FeatureModel(Model):
    """Attention of the item over those seen, and the maximum of those liked; one linear layer instead of `Model`'s."""

    def __init__(self, tables: Any) -> None:
        super().__init__(tables)
        self.mlp = nn.Sequential(nn.Linear(8 + 6 + 6 + 6 + 2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        out = self.tables(batch.ids)
        share = torch.softmax((out["seen"] * out["item"][:, None]).sum(2), 1)
        seen = (share[:, :, None] * out["seen"]).sum(1)
        parts = [out["user"], out["item"], seen, out["liked"], batch.dense]
        logits: Tensor = self.mlp(torch.cat(parts, dim=1)).squeeze(1)
        return logits


def feature_tables(plan: dict[str, Any], optimizer: Any) -> gba_hvd.EmbeddingTables:
    items = gba_hvd.Table(40, 6, optimizer=gba_hvd.Adam(lr=0.02), init=item_rows, padding_idx=0)
    tables = gba_hvd.EmbeddingTables(
        {"user": (300, 8), "item": items}, optimizer=optimizer, seed=5, n_shards=plan.get("n_shards", 4),
        features={"item": "item", "seen": gba_hvd.Feature("item", None), "liked": gba_hvd.Feature("item", "max")},
    )  # fmt: skip
    tables.assign("seen", [3, 4], np.full((2, 6), 0.25))
    return tables


def item_rows(ids: np.ndarray) -> np.ndarray:
    return np.sin(ids[:, None] + np.arange(6)) / 10


def user_rows(ids: np.ndarray) -> Tensor:
    return torch.sin(torch.from_numpy(ids % 1000)[:, None] + torch.arange(8)) / 10


DENSE_OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def compression_of(plan: dict[str, Any], forced: bool = False) -> Spec:
    """{"name": "dct", "keep": 0.1, "values": "int8"}: as `Compression.by_name`, with values a second one after it."""
    settings = dict(plan)
    name, values = settings.pop("name", "none"), settings.pop("values", "none")
    spec = gba_hvd.Compression.by_name(name, **settings)
    spec = spec if values == "none" else spec.then(gba_hvd.Compression.by_name(values))
    return spec.always() if forced else spec


@dataclass(frozen=True)
class Training:
    """The parts of one worker's training, as a plan (a dict with everything optional) describes them."""

    dataset: Clicks
    tables: gba_hvd.EmbeddingTables
    model: Model
    optimizer: Any
    state: gba_hvd.elastic.TorchState
    scaler: torch.amp.GradScaler | None

    @classmethod
    def of(cls, plan: dict[str, Any], more_users: int = 0, **values: Any) -> Training:
        torch.manual_seed(plan.get("torch_seed", 3))
        module, _, kind = plan.get("row_optimizer", "Adagrad").rpartition(":")
        row_optimizer = getattr(importlib.import_module(module or "gba_hvd"), kind)(lr=plan.get("row_lr", 0.05))
        has_features, users = bool(plan.get("features")), gba_hvd.Table(300 + more_users, 8)
        if "hashed" in plan:
            by_function = {"init": user_rows} if plan.get("init_by_function") else {}
            users = gba_hvd.Table(dim=8, keys="hash64", **plan["hashed"], **by_function)
        tables = (
            feature_tables(plan, row_optimizer)
            if has_features
            else gba_hvd.EmbeddingTables(
                {"user": users, "item": (40, 6)},
                optimizer=row_optimizer,
                seed=5,
                n_shards=plan.get("n_shards", 4),
                hot_rows=plan.get("hot_rows", 0),
            )
        )
        model = FeatureModel(tables) if has_features else Model(tables)
        scaler = torch.amp.GradScaler("cpu", **plan["scaler"]) if "scaler" in plan else None
        optimizer = gba_hvd.DistributedOptimizer(
            DENSE_OPTIMIZERS[plan.get("dense_optimizer", "Adam")](model.parameters()),
            tables,
            global_batch=plan.get("global_batch", 96),
            micro_batch=plan.get("micro_batch", 16),
            sync_micro_batch=plan.get("sync_micro_batch"),
            named_parameters=model.named_parameters(),
            row_average=plan.get("row_average", "global"),
            compression=compression_of(plan.get("compression", {}), forced=not plan.get("bypass")),
            row_compression=compression_of(plan.get("row_compression", {}), forced=not plan.get("bypass")),
            max_norm=plan.get("max_norm"),
            max_row_norm=plan.get("max_row_norm"),
            grad_scaler=scaler,
        )
        if plan.get("lr_decay"):
            values["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, plan["lr_decay"])
        if plan.get("one_cycle"):  # moves betas, too
            values["scheduler"] = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=plan["one_cycle"])
        state = gba_hvd.elastic.TorchState(model, optimizer, **values)
        if "scheduler" in values:
            state.on_step(state.scheduler.step)
        for step, changed in plan.get("settings_at", {}).items():  # of the dense group

            def change(step: int = int(step), changed: dict[str, Any] = changed) -> None:
                if state.step == step:
                    optimizer.param_groups[0].update(changed)

            state.on_step(change)
        dataset = (FeatureClicks if has_features else Clicks)(plan.get("samples", 1000), raw="hashed" in plan)
        return cls(dataset, tables, model, optimizer, state, scaler)

    def loss(self, batch: gba_hvd.Batch) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.label)

    def backward(self, loss: Tensor, overflows: bool = False) -> None:
        """Of a loss that the scaler scales, where there is one. overflows: the gradients are not finite."""
        loss = loss if self.scaler is None else self.scaler.scale(loss)
        (loss * float("inf") if overflows else loss).backward()

    def step(self, loss: Tensor) -> None:
        if self.scaler is None:
            self.optimizer.step(loss=loss)
        else:
            self.scaler.step(self.optimizer, loss=loss)
            self.scaler.update()

    def arrays(self) -> dict[str, np.ndarray]:
        """Dense parameters, and rows and their slots where one host has them all; the ids that a hashed table has."""
        arrays = {f"dense.{name}": p.detach().numpy().copy() for name, p in self.model.named_parameters()}
        if self.tables.local is None:
            for table in self.tables.layout.tables:
                rows = np.arange(table.n_rows) if table.hashed is None else raw_ids(np.arange(300))
                if table.hashed is not None:
                    arrays[f"{table.name}.ids"] = self.tables.vocabulary(table.name)
                for what in ("weights", *(slot.name for slot in self.tables.layout.slots_of(table))):
                    arrays[f"{table.name}.{what}"] = self.tables.rows(table.name, rows, what)
        return arrays

    def accesses(self) -> dict[str, np.ndarray]:
        """How often each row of this host was accessed, uint32 [n] by table."""
        assert self.tables.memory is not None
        rows, found = ShardRows(self.tables.memory), {}
        for number, table in enumerate(rows.schema.tables):
            found[table.name] = np.zeros(table.n_rows, np.uint32)
            for shard in rows.shards():
                found[table.name][shard :: rows.schema.n_shards] = rows.slab(number, shard).counts
        return found

    def optimizer_arrays(self) -> dict[str, np.ndarray]:
        """The state of the dense optimizer, from its `state_dict`."""
        state = self.optimizer.state_dict()["state"]
        return {
            f"{number}.{name}": np.asarray(value)
            for number, values in state.items()
            for name, value in values.items()
            if value is not None
        }


def digests(memory: ShardMemory) -> dict[int, str]:
    """Of the weights and slots of every shard that is in this memory."""
    return digests_of(ShardRows(memory), memory.ready())


def digests_of(rows: RowSource, shards: Iterable[int]) -> dict[int, str]:
    """Of the weights and slots of some shards."""
    found = {}
    for shard in shards:
        digest = hashlib.sha256()
        for table in range(len(rows.schema.tables)):
            for piece in rows.slab(table, shard).columns:
                digest.update(np.ascontiguousarray(piece).tobytes())
        found[shard] = digest.hexdigest()[:16]
    return found


def digest_of_dense(parameters: Iterable[tuple[Any, Mapping[str, Any]]]) -> str:
    """Of the values of dense parameters, in order, and of the optimizer's state of each."""
    digest = hashlib.sha256()
    for values, state in parameters:
        digest.update(np.asarray(values).tobytes())
        for name, value in sorted(state.items()):
            digest.update(name.encode() + np.asarray(value).tobytes())
    return digest.hexdigest()[:16]


def served_model(hashed: dict[str, Any] | None = None) -> Model:
    """The model of a plan without features, for predictions."""
    users = gba_hvd.Table(300, 8) if hashed is None else gba_hvd.Table(dim=8, keys="hash64", **hashed)
    return Model(
        gba_hvd.EmbeddingTables({"user": users, "item": (40, 6)}, gba_hvd.Adagrad(lr=0.05), seed=5, n_shards=4)
    )
