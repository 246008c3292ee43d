"""Distributed evaluation: every worker scores its part of a dataset, all get the same AUC and log loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gba_hvd import state_codec
from gba_hvd.batches import Dataset, Ids, agree_on, ids_of, keys_by_group
from gba_hvd.collectives import World
from gba_hvd.elastic import TorchState
from gba_hvd.errors import GbaError
from gba_hvd.metrics import ScoreAccumulator, Scores, scores_from
from gba_hvd.order import Cut


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    state: TorchState,
    *,
    batch: int | None = None,
    ids: Callable[[Any], Ids] | None = None,
    label: Callable[[Any], Tensor] = lambda b: b.label,
    exact_limit: int = 5_000_000,
) -> Scores:
    """AUC and log loss of `model(batch)` (logits [B]) over a dataset. A collective; the same result on every rank.

    Buffers (batch norm statistics) are those of rank 0 on all workers, so that one model is judged. Above
    `exact_limit` samples the AUC comes from a histogram, and the result says so.
    """
    state.ensure_synced()
    engine = state.engine
    world, mode = engine.world, engine.mode
    assert mode is not None
    if engine.is_within_step:
        raise GbaError("evaluate() only between steps: workers with uneven shares would wait for each other")
    size = batch or engine.micro_batch
    agree_on(world, "evaluation", {"samples to evaluate": len(dataset), "batch": size, "step": engine.step})
    cut = Cut(len(dataset), size, size)
    scores = ScoreAccumulator(exact_limit=exact_limit)
    _share_buffers(world, model)
    mode.await_rows(engine.step)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for first in range(0, cut.n_steps, world.size):
                index = first + world.rank
                rows = np.arange(index * size, min((index + 1) * size, len(dataset)), dtype=np.int64)
                loaded = dataset.take(rows) if len(rows) else None
                if mode.several_hosts:
                    mode.pull(keys_by_group(engine.tables, [] if loaded is None else [(ids or ids_of)(loaded)]))
                if loaded is not None:
                    scores.add(model(loaded).float().cpu().numpy(), label(loaded).cpu().numpy())
    finally:
        model.train(was_training)
    return _combine(world, scores)


def _combine(world: World, scores: ScoreAccumulator) -> Scores:
    data = state_codec.encode(scores.state())
    padded = np.frombuffer(data + b"\0" * (-len(data) % 4), dtype=np.float32)
    splits = np.zeros(world.size, dtype=np.int64)
    splits[0] = len(padded)
    words, counts = world.alltoall("scores", padded.copy(), splits)
    result = None
    if world.rank == 0:
        parts = np.split(words, np.cumsum(counts)[:-1])
        result = json.dumps(asdict(scores_from([state_codec.decode(part.tobytes()) for part in parts]))).encode()
    return Scores(**json.loads(world.broadcast("scores", result, 0)))


def _share_buffers(world: World, model: nn.Module) -> None:
    buffers = dict(model.named_buffers())
    if world.size == 1 or not buffers:
        return
    data = world.broadcast("buffers", state_codec.encode(buffers) if world.rank == 0 else None, 0)
    for name, value in state_codec.decode(data).items():
        buffers[name].copy_(value)
