"""Trained models, and batches for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd.shm.shard_memory import ShardMemory
from tests.unit.serving import model_code

CODE = f"{Path(model_code.__file__)}:make_model"


def batch(n: int = 8, users: int = 50, seed: int = 3) -> gba_hvd.Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, n)
    history = gba_hvd.Bag(
        torch.from_numpy(rng.integers(0, 9, lengths.sum())), torch.from_numpy(np.cumsum(lengths) - lengths)
    )
    ids = {"user": rng.integers(0, users, n), "item": rng.integers(0, 9, n)}
    dense = torch.from_numpy(rng.normal(size=(n, 2)).astype(np.float32))
    return gba_hvd.Batch(
        {**{k: torch.from_numpy(v) for k, v in ids.items()}, "history": history}, dense, torch.zeros(n)
    )


def with_memory(tables: gba_hvd.EmbeddingTables, folder: Path, name: str) -> ShardMemory:
    """What the first sync makes."""
    memory = ShardMemory.create_or_open(folder, name, tables.layout, grace_s=0)
    tables.memory, memory.initial = memory, tables.initial_rows
    memory.reserve(list(range(tables.layout.n_shards)))
    for shard in range(tables.layout.n_shards):
        memory.init_shard(shard, 0)
    return memory


@pytest.fixture
def job_memory(tmp_path: Path) -> Iterator[Callable[[gba_hvd.EmbeddingTables], None]]:
    made: list[ShardMemory] = []
    yield lambda tables: made.append(with_memory(tables, tmp_path, f"job-{len(made)}"))
    for memory in made:
        memory.close()


@pytest.fixture
def trained(job_memory: Callable[[gba_hvd.EmbeddingTables], None]) -> Callable[..., nn.Module]:
    """`model_code.make_model`, with rows and a dense part that no builder makes."""

    def make(touched: int | None = None, **how: Any) -> nn.Module:
        model = model_code.make_model(**how)
        job_memory(model.tables)
        generator = torch.Generator().manual_seed(7)
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 1.0, generator=generator)
        rng = np.random.default_rng(5)
        for name, table in model.tables.tables.items():
            ids = np.arange(table.n_rows)[:touched]
            if table.keys:
                ids = rng.integers(-(2**62), 2**62, 40)
            change_rows(model, name, ids)
        return model

    return make


def change_rows(model: nn.Module, name: str, ids: np.ndarray, seed: int = 5) -> None:
    tables: Any = model.tables
    values = np.random.default_rng(seed).normal(size=(len(ids), tables.tables[name].dim)).astype(np.float32)
    memory, (number, first) = tables.memory, tables.layout.place_of_table[name]
    group = tables.layout.groups[number]
    keys = ids + first
    if tables.tables[name].keys:
        from gba_hvd.shm.layout import keys_of_ids

        keys = keys_of_ids(ids)
        memory.vocabulary(group).admit(keys, 0)
    starts = memory.record_starts(keys, group).astype(np.int64)
    memory.flat[starts[:, None] + np.arange(group.dim)] = values


@torch.no_grad()
def evaluated(model: nn.Module, one: Any) -> torch.Tensor:
    """What the training model's evaluation gives."""
    was = model.training
    model.eval()
    out: torch.Tensor = model(one)
    model.train(was)
    return out


def objects(url: Path) -> dict[str, int]:
    return {str(path.relative_to(url)): path.stat().st_size for path in url.rglob("*") if path.is_file()}


@pytest.fixture
def three(trained: Callable[..., nn.Module], tmp_path: Path) -> tuple[nn.Module, Path]:
    """The third of three versions, each with rows that the one before has not."""
    model = trained()
    for seed in range(3):
        change_rows(model, "user", np.arange(4), seed)
        gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(2))
    return model, tmp_path / "m"
