"""Scoring a dataset over all workers: in rounds of a collective, or by leases of the servers."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor, nn

from gba_hvd.comm.collectives import World, agree_on
from gba_hvd.epoch import EpochPlan
from gba_hvd.errors import BadInput
from gba_hvd.metrics import ScoreAccumulator, Scores, logits_of, scores_from
from gba_hvd.modes.allreduce_exchange import AllreduceExchange
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.training.mode import EvaluationRun
from recovery import state_codec

_ASK_AGAIN_S = 0.02
_LOOKS_LIKE_PROBABILITIES = (
    "evaluate(): all outputs of the first batch lie in [0, 1], so they may be probabilities, and logits are expected. "
    'Say which they are: activation="none" for probabilities, activation="sigmoid" for logits'
)


def together(job: EvaluationRun, world: World, exchange: AllreduceExchange, step: int) -> Scores:
    """Each rank scores its part of each round. A collective; buffers are those of rank 0."""
    agree_on(world, "evaluation", {"samples to evaluate": job.n_samples, "batch": job.batch, "step": step})
    cut = EpochPlan(job.n_samples, job.batch, job.batch)
    scores = ScoreAccumulator(exact_limit=job.exact_limit)
    _share_buffers(world, job.model)
    exchange.await_rows(step)
    with _evaluating(job.model):
        for first in range(0, cut.n_steps, world.size):
            loaded = job.rows((first + world.rank) * job.batch, job.batch)
            if exchange.several_hosts:
                exchange.pull(job.keys([] if loaded is None else [loaded]), whole=True)
            outputs = np.empty(0, np.float32)
            if loaded is not None:
                outputs = job.score(loaded)
                scores.add(logits_of(outputs, job.activation), job.labels(loaded))
            if first == 0 and job.activation is None:
                _refuse_probabilities(world, outputs)
    return _combine(world, scores)


def by_leases(job: EvaluationRun, servers: PsWorker, phase: int, ordinal: int) -> Scores:
    """Each worker scores what it gets leases for, with the buffers of the first worker that asks.

    phase, ordinal: which evaluation it is, the same on all workers
    """
    model = job.model
    own = {name: value.clone() for name, value in model.named_buffers()}
    try:
        with _evaluating(model), servers.evaluation_values():
            while True:
                found, frames = servers.request_evaluation(
                    phase, ordinal, job.n_samples, job.batch, job.exact_limit, job.activation is None,
                    state_codec.encode(own),
                )  # fmt: skip
                if found.like_probabilities:
                    raise BadInput(_LOOKS_LIKE_PROBABILITIES)
                if found.result is not None:
                    return Scores(**found.result)
                if found.lease is None:
                    time.sleep(_ASK_AGAIN_S)
                    continue
                _load_buffers(model, state_codec.decode(bytes(frames[0])))
                loaded = job.rows(found.lease.micro * job.batch, found.lease.n_samples)
                servers.pull(job.keys([loaded]) if servers.several_hosts else [])
                logits = logits_of(job.score(loaded), job.activation)
                servers.send_scores(phase, ordinal, found.lease, logits, job.labels(loaded).astype(np.float32))
    finally:
        _load_buffers(model, own)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
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
