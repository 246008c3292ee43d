"""Tables with real shard memory in a folder of the test, and a world of one to train in."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

import gba_hvd
from gba_hvd.checkpoint import claim_renewal
from gba_hvd.shm import reaper
from gba_hvd.shm.shard_memory import ShardMemory
from tests.unit.thread_world import Workers

settings.register_profile("unit", settings.get_profile("every test"), max_examples=60)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _no_keeper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper is a process of its own: only tests marked `processes` start it."""
    if request.node.get_closest_marker("processes") is None:
        monkeypatch.setattr(reaper, "start", lambda folder, grace_s: None)


@pytest.fixture(autouse=True)
def _no_claim_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker renews its claim until it ends, which the workers of most tests never do."""
    begun, begin = list[claim_renewal.ClaimRenewal](), claim_renewal.ClaimRenewal.__init__

    def recorded(self: claim_renewal.ClaimRenewal, *args: Any) -> None:
        begun.append(self)
        begin(self, *args)

    monkeypatch.setattr(claim_renewal.ClaimRenewal, "__init__", recorded)
    yield
    for one in begun:
        one.close()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHARD_DIR", "JOB_ID", "N_SHARDS", "TIMEOUT_S", "GRACE_S"):
        monkeypatch.delenv(f"GBA_HVD_{name}", raising=False)
    monkeypatch.delenv("HOROVOD_RANK", raising=False)


@pytest.fixture
def make_tables(tmp_path: Path) -> Iterator[Callable[..., gba_hvd.EmbeddingTables]]:
    """Tables with initial rows, ready for a forward pass: `make_tables({"user": (100, 8)}, mode="mean")`."""
    made: list[gba_hvd.EmbeddingTables] = []

    def make(tables: Mapping[str, tuple[int, int]], optimizer: Any = None, **settings: Any) -> gba_hvd.EmbeddingTables:
        settings = {"n_shards": 3, "seed": 1, "shard_dir": tmp_path, **settings}
        new = gba_hvd.EmbeddingTables(tables, optimizer or gba_hvd.SGD(lr=0.1), **settings)
        new.memory = ShardMemory.create_or_open(tmp_path, f"tables-{len(made)}", new.layout, grace_s=0)
        new.memory.initial = new.initial_rows
        new.memory.reserve(list(range(new.layout.n_shards)))
        for shard in range(new.layout.n_shards):
            new.memory.init_shard(shard, 0)
        made.append(new)
        return new

    yield make
    for tables in made:
        assert tables.memory is not None
        tables.memory.close()


class Clicks:
    """Two fields and two dense features; remembers which rows were taken."""

    def __init__(self, n: int = 50, users: int = 20, items: int = 7, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.user, self.item = rng.integers(0, users, n), rng.integers(0, items, n)
        self.dense = rng.normal(size=(n, 2)).astype(np.float32)
        self.label = (rng.random(n) < 0.4).astype(np.float32)
        self.taken: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        self.taken.append(rows)
        ids: dict[str, Tensor | gba_hvd.Bag] = {
            "user": torch.from_numpy(self.user[rows]),
            "item": torch.from_numpy(self.item[rows]),
        }
        return gba_hvd.Batch(ids, torch.from_numpy(self.dense[rows]), torch.from_numpy(self.label[rows]))


class Clicker(nn.Module):
    """A small click model on any `embed(ids) -> {"user": [B, 4], "item": [B, 3]}`."""

    def __init__(self, embed: Callable[..., Any]) -> None:
        super().__init__()
        self.embed = embed
        torch.manual_seed(11)
        self.mlp = nn.Sequential(nn.Linear(4 + 3 + 2, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        out = self.embed(batch.ids)
        logits: Tensor = self.mlp(torch.cat([out["user"], out["item"], batch.dense], dim=1)).squeeze(1)
        return logits


class Training:
    """A whole job in a world of one: `Training(tmp_path).epoch(dataset)`."""

    def __init__(
        self,
        shard_dir: Path,
        *,
        rows: Any = None,
        dense: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.5),
        global_batch: int = 16,
        micro_batch: int = 4,
        n_shards: int = 3,
        compression: Any = gba_hvd.Compression.none,
        row_compression: Any = gba_hvd.Compression.none,
        row_average: str = "global",
        more: Mapping[str, Any] | None = None,  # arguments of DistributedOptimizer
        tables: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> None:
        self.tables = gba_hvd.EmbeddingTables(
            tables or {"user": (20, 4), "item": (7, 3)},
            rows or gba_hvd.SGD(lr=0.5),
            seed=2,
            n_shards=n_shards,
            shard_dir=shard_dir,
        )
        self.model = Clicker(self.tables)
        self.optimizer = gba_hvd.DistributedOptimizer(
            dense(list(self.model.parameters())),
            self.tables,
            global_batch=global_batch,
            micro_batch=micro_batch,
            named_parameters=self.model.named_parameters(),
            row_average=row_average,
            compression=compression,
            row_compression=row_compression,
            **(more or {}),
        )
        self.state = gba_hvd.elastic.TorchState(self.model, self.optimizer, **values)

    def loss(self, batch: gba_hvd.Batch) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.label)

    def micro_step(self, batch: gba_hvd.Batch) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step(loss=loss)

    def epoch(self, dataset: Clicks, **settings: Any) -> None:
        for batch in gba_hvd.batches(dataset, self.state, **settings):
            self.micro_step(batch)

    def all_rows(self) -> dict[str, np.ndarray]:
        """Of this host; 0 elsewhere."""
        found = {}
        for table in self.tables.layout.tables:
            ids, first_key = np.arange(table.n_rows), self.tables.layout.place_of_table[table.name][1]
            if self.tables.local is not None:
                ids = ids[self.tables.local[(first_key + ids) % self.tables.layout.n_shards]]
            found[table.name] = np.zeros((table.n_rows, table.dim), np.float32)
            found[table.name][ids] = self.tables.rows(table.name, ids)
        return found

    def all_dense(self) -> dict[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Makes `Training`s, each closed at the end."""
    made: list[Training] = []

    def make(**settings: Any) -> Training:
        made.append(Training(tmp_path / f"job-{len(made)}", **settings))
        return made[-1]

    yield make
    for job in made:
        job.state.close()
    for folder in tmp_path.glob("job-*/gba-hvd-*"):  # kept for a restart; its server ends when it is gone
        shutil.rmtree(folder)


@pytest.fixture
def clicks() -> Callable[..., Clicks]:
    return Clicks


@pytest.fixture
def clicker() -> Callable[..., Clicker]:
    return Clicker


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(monkeypatch)


@pytest.fixture
def on_host(training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A worker on a host; a host is a folder here."""

    def make(host: str, **settings: Any) -> Any:
        settings = {"rows": gba_hvd.Adagrad(lr=0.1, eps=1e-3), "n_shards": 5, "epoch": 0, **settings}
        job = training(**settings)
        (tmp_path / host).mkdir(exist_ok=True)
        object.__setattr__(job.tables.config, "shard_dir", tmp_path / host)
        return job

    return make
