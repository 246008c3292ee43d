"""Evaluating a dataset over all workers: in rounds of a collective, or by leases of the servers."""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from gba_hvd.comm.collectives import World, agree_on
from gba_hvd.embedding.module_placement import evaluating
from gba_hvd.errors import BadInput
from gba_hvd.metrics.accumulators import Accumulator, Frames, Part, accumulator, combined
from gba_hvd.modes.allreduce_exchange import AllreduceExchange
from gba_hvd.ps.messages import LeaseGrant
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.training.mode import CountRun, EvaluationRun, SampleReader
from recovery import state_codec

_COUNTS = -1  # evaluations of a phase are numbered from 0
_ASK_AGAIN_S = 0.02


def together(job: EvaluationRun, world: World, exchange: AllreduceExchange, step: int) -> list[dict[str, Any]]:
    """Each rank measures its part of each round. A collective; buffers are those of rank 0."""
    samples, parts = job.samples, job.parts
    agree_on(
        world, "evaluation",
        {
            "samples to evaluate": samples.n_samples, "batch": samples.batch, "step": step,
            "tasks and metrics to evaluate": zlib.crc32(repr(parts).encode()),
        },
    )  # fmt: skip
    so_far = [accumulator(part) for part in parts]
    share_buffers(world, job.model)
    exchange.await_rows(step)
    samples.expect(firsts_of_rank(samples, world))
    with evaluating(job.model):
        for first in range(0, samples.n_batches, world.size):
            loaded = samples.rows((first + world.rank) * samples.batch, samples.batch)
            if exchange.several_hosts:
                exchange.pull(samples.keys([] if loaded is None else [loaded]), whole=True)
            measured = [] if loaded is None else job.measure(loaded)
            for one, frames in zip(so_far, measured, strict=loaded is not None):
                one.add(frames)
            if first == 0 and any(part.may_be_probabilities for part in parts):
                _refuse_probabilities_on_all(world, parts, measured)
    return _combine(world, parts, so_far)


def by_leases(job: EvaluationRun, servers: PsWorker, phase: int, ordinal: int) -> list[dict[str, Any]]:
    """Each worker measures what it gets leases for, with the buffers of the first worker that asks. Where it reads
    ahead, it has as many leases more.

    phase, ordinal: which evaluation it is, the same on all workers
    """
    model, samples = job.model, job.samples
    own = {name: value.clone() for name, value in model.named_buffers()}
    is_prepared, leases = job.prepare is None, deque[LeaseGrant]()

    def pull(reader: SampleReader, batches: list[Any]) -> None:
        servers.pull(reader.keys(batches) if servers.several_hosts else [])

    try:
        with evaluating(model), servers.evaluation_values():
            while True:
                found = None
                while len(leases) <= samples.depth and (found is None or found.lease is not None):
                    found, frames = servers.request_evaluation(
                        phase, ordinal, samples.n_samples, samples.batch, job.parts, state_codec.encode(own)
                    )
                    if found.like_probabilities:
                        _refuse_probabilities(found.like_probabilities)
                    if found.result is not None:
                        return found.result
                    if found.lease is not None:
                        _load_buffers(model, state_codec.decode(bytes(frames[0])))
                        leases.append(found.lease)
                if not leases:
                    time.sleep(_ASK_AGAIN_S)
                    continue
                samples.expect([lease.micro * samples.batch for lease in leases])
                if job.prepare is not None and not is_prepared:
                    job.prepare(pull)
                    is_prepared = True
                lease = leases.popleft()
                loaded = samples.rows(lease.micro * samples.batch, lease.n_samples)
                pull(samples, [loaded])
                servers.send_scores(phase, ordinal, lease, job.measure(loaded))
    finally:
        _load_buffers(model, own)


def count_by_leases(job: CountRun, servers: PsWorker, phase: int, n_groups: int) -> list[int]:
    """Each worker counts what it gets leases for: an evaluation whose samples are what is to be counted.

    phase: the same on all workers; n_groups: of tables, none of which is looked at
    """

    def measure(one: np.ndarray) -> list[Frames]:
        counts = np.zeros(job.n)
        counts[one[0]] = job.count(int(one[0]))
        return [[counts]]

    nothing = [np.empty(0, dtype=np.int64)] * n_groups
    samples = SampleReader(lambda numbers: numbers, job.n, 1, lambda batches: nothing)
    run = EvaluationRun(nn.Identity(), samples, (Part("sums", "counts", n_sums=job.n),), measure)
    (found,) = by_leases(run, servers, phase, _COUNTS)
    return [int(n) for n in found["sums"]]


def firsts_of_rank(samples: SampleReader, world: World) -> Iterator[int]:
    """The first sample of each batch that this rank reads where workers go in rounds."""
    return (batch * samples.batch for batch in range(world.rank, samples.n_batches, world.size))


def _refuse_probabilities_on_all(world: World, parts: Sequence[Part], first: Sequence[Frames]) -> None:
    """All workers refuse, or none does: by the first batch of the dataset, which rank 0 has. A collective."""
    suspect = [part.look_like_probabilities(frames) for part, frames in zip(parts, first, strict=False)]
    suspect += [False] * (len(parts) - len(suspect))
    of_rank_0 = world.gather("outputs", np.array(suspect, dtype=np.int64))[0]
    if of_rank_0.any():
        _refuse_probabilities([part.name for part, one in zip(parts, of_rank_0, strict=True) if one])


def _refuse_probabilities(tasks: Sequence[str]) -> None:
    of_tasks = f" of {', '.join(map(repr, tasks))}" if any(tasks) else ""
    raise BadInput(
        f"evaluate(): all outputs{of_tasks} of the first batch lie in [0, 1], so they may be probabilities, and logits "
        'are expected. Say which they are: activation="none" for probabilities, activation="sigmoid" for logits'
    )


def _load_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, value in model.named_buffers():
        value.copy_(buffers[name])


def _combine(world: World, parts: Sequence[Part], so_far: Sequence[Accumulator]) -> list[dict[str, Any]]:
    data = state_codec.encode([one.state() for one in so_far])
    padded = np.frombuffer(data + b"\0" * (-len(data) % 4), dtype=np.float32)
    splits = np.zeros(world.size, dtype=np.int64)
    splits[0] = len(padded)
    words, counts = world.alltoall("scores", padded.copy(), splits)
    result = None
    if world.rank == 0:
        states = [state_codec.decode(one.tobytes()) for one in np.split(words, np.cumsum(counts)[:-1])]
        found = [combined(part, [state[number] for state in states]) for number, part in enumerate(parts)]
        result = json.dumps(found).encode()
    loaded: list[dict[str, Any]] = json.loads(world.broadcast("scores", result, 0))
    return loaded


def share_buffers(world: World, model: nn.Module) -> None:
    buffers = dict(model.named_buffers())
    if world.size == 1 or not buffers:
        return
    data = world.broadcast("buffers", state_codec.encode(buffers) if world.rank == 0 else None, 0)
    for name, value in state_codec.decode(data).items():
        buffers[name].copy_(value)
