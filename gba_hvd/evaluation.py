"""Distributed evaluation: every worker scores its part of a dataset, all get the same AUC and log loss."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gba_hvd.batches import Dataset, Ids, agree_on, ids_of, keys_by_group
from gba_hvd.comm.collectives import World
from gba_hvd.elastic import TorchState
from gba_hvd.epoch import Cut
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.metrics import ScoreAccumulator, Scores, logits_of, scores_from
from gba_hvd.modes.parameter_server import GbaMode
from gba_hvd.switching import handover
from gba_hvd.training.engine import Engine
from gba_hvd.update_rules import rule_class
from recovery import state_codec

Activation = Literal["sigmoid", "none"]

_ASK_AGAIN_S = 0.02
_LOOKS_LIKE_PROBABILITIES = (
    "evaluate(): all outputs of the first batch lie in [0, 1], so they may be probabilities, and logits are expected. "
    'Say which they are: activation="none" for probabilities, activation="sigmoid" for logits'
)


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    state: TorchState,
    *,
    batch: int | None = None,
    ids: Callable[[Any], Ids] | None = None,
    label: Callable[[Any], Tensor] = lambda b: b.label,
    activation: Activation | None = None,
    exact_limit: int = 5_000_000,
) -> Scores:
    """AUC and log loss of `model(batch)` (float [B]) over a dataset; the same result on every rank.

    activation: what makes probabilities of the model's outputs: "sigmoid", they are logits; "none", they are
    probabilities. When it is not given, they are taken for logits, and BadInput is raised on all workers if all outputs
    of the first batch lie in [0, 1].

    A collective in allreduce mode. In asynchronous modes the workers take parts of the dataset as they come; call it
    after an epoch's batches, where all workers have the same parameters.

    Buffers (batch norm statistics) are those of rank 0 on all workers, so that one model is judged; in asynchronous
    modes those of the first worker that asks. Above `exact_limit` samples the AUC comes from a
    histogram, and the result says so.
    """
    state.ensure_synced()
    engine = state.engine
    world, mode, size = engine.world, engine.mode, batch or engine.micro_batch
    if engine.is_within_step:
        raise GbaError("evaluate() only between steps: workers with uneven shares would wait for each other")
    if activation not in (None, "sigmoid", "none"):
        raise BadInput(f'evaluate(): activation must be "sigmoid" or "none", got {activation!r}')
    if isinstance(mode, GbaMode):
        return _evaluate_by_leases(model, dataset, engine, mode, size, ids or ids_of, label, activation, exact_limit)
    assert mode is not None
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
                    found = [] if loaded is None else [(ids or ids_of)(loaded)]
                    mode.pull(keys_by_group(engine.tables, found), whole=True)
                outputs = np.empty(0, np.float32)
                if loaded is not None:
                    outputs = model(loaded).float().cpu().numpy()
                    scores.add(logits_of(outputs, activation), label(loaded).cpu().numpy())
                if first == 0 and activation is None:
                    _refuse_probabilities(world, outputs)
    finally:
        model.train(was_training)
    return _combine(world, scores)


def _evaluate_by_leases(
    model: nn.Module,
    dataset: Dataset,
    engine: Engine,
    mode: GbaMode,
    size: int,
    ids: Callable[[Any], Ids],
    label: Callable[[Any], Tensor],
    activation: Activation | None,
    exact_limit: int,
) -> Scores:
    if rule_class(mode.session.rule).looks_ahead:  # the model is judged, not what a rule shows to workers
        handover.take_dense_state(engine, mode, leaving=False)
    ordinal, phase = engine.n_evaluated, 2 * engine.cursor.epoch + engine.epoch_over
    engine.n_evaluated += 1
    own = {name: value.clone() for name, value in model.named_buffers()}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), mode.judged():
            while True:
                found, frames = mode.ask_to_judge(
                    phase, ordinal, len(dataset), size, exact_limit, activation is None, state_codec.encode(own)
                )
                if found.like_probabilities:
                    raise BadInput(_LOOKS_LIKE_PROBABILITIES)
                if found.result is not None:
                    return Scores(**found.result)
                if found.lease is None:
                    time.sleep(_ASK_AGAIN_S)
                    continue
                _load_buffers(model, state_codec.decode(bytes(frames[0])))
                first = found.lease.micro * size
                loaded = dataset.take(np.arange(first, first + found.lease.n_samples, dtype=np.int64))
                mode.pull(keys_by_group(engine.tables, [ids(loaded)]) if mode.several_hosts else [])
                logits = logits_of(model(loaded).float().cpu().numpy(), activation)
                labels = label(loaded).cpu().numpy().astype(np.float32)
                mode.send_scores(phase, ordinal, found.lease, logits, labels)
    finally:
        _load_buffers(model, own)
        model.train(was_training)


def _refuse_probabilities(world: World, outputs: np.ndarray) -> None:
    """All workers refuse, or none does: by the first batch of the dataset, which rank 0 has. A collective."""
    suspect = bool(outputs.size) and bool(((outputs >= 0) & (outputs <= 1)).all())
    if world.gather("outputs", np.array([suspect], dtype=np.int64))[0][0]:
        raise BadInput(_LOOKS_LIKE_PROBABILITIES)


def _load_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, value in model.named_buffers():
        value.copy_(buffers[name])


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
