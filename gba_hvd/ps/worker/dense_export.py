"""Taking the dense parameters and the optimizer's state back from the servers, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gba_hvd.errors import GbaError
from gba_hvd.ps.client import Client, Reply, ServerLost
from gba_hvd.ps.coordinator.coordinator import Coordinator
from gba_hvd.ps.messages import Endpoint, Export, Exported, HeartbeatMsg, JobPosition, Ok
from gba_hvd.ps.partition.dense_part import DensePart
from gba_hvd.ps.state_files import StateFiles, path_of
from gba_hvd.ps.worker.replies import wait_reply
from gba_hvd.ps.worker.session import DenseParts, DenseState
from recovery import state_codec

_TRIES = 3


def export_dense(client: Client, request: Export, parts: DenseParts) -> tuple[int, dict[int, DenseState]]:
    """The oldest step of them, and every dense tensor by its number in the model. Raises as `replies.wait_reply`."""
    futures = [client.send(s, request) for s in range(len(parts))]
    replies = [wait_reply(future) for future in futures]
    step = min(reply.body.step for reply in replies if isinstance(reply.body, Exported))
    return step, {t: state for s, reply in enumerate(replies) for t, state in unpacked(parts, s, reply)}


def export_from_reachable(
    client: Client, generation: int, beat: HeartbeatMsg, parts: DenseParts, timeout_s: float
) -> tuple[dict[int, DenseState], JobPosition | None]:
    """What the servers that still answer have; and the newest position, if the coordinator is among them."""
    request = Export(generation, False)
    asked = [client.send(s, request, timeout_s=timeout_s) for s in range(len(parts))]
    word = client.send(0, beat, timeout_s=timeout_s)
    found: dict[int, DenseState] = {}
    position = None
    for s, future in enumerate((*asked, word)):
        try:
            reply = future.result()
        except ServerLost:
            continue
        if isinstance(reply.body, Exported):
            found |= dict(unpacked(parts, s, reply))
        elif isinstance(reply.body, Ok) and reply.body.position is not None:
            position = reply.body.position
    return found, position


def left_in_files(
    folder: Path, host: int, servers: Sequence[Endpoint], parts: DenseParts, generation: int
) -> tuple[dict[int, DenseState], JobPosition | None]:
    """What silent servers of this host have published, from their files: as of the last complete step of each; and
    where training stands, if the coordinator is among them and its ledger is of the same step.

    A server that only hung may wake and continue meanwhile: then its file is read again.
    """
    found: dict[int, DenseState] = {}
    position = None
    for s, server in enumerate(servers):
        if server.host != host:
            continue
        for _ in range(_TRIES):
            try:
                part = DensePart.open(path_of(folder, server.index, "dense"))
            except (GbaError, OSError):  # also one that is read while it changes
                continue
            try:
                step, sizes = part.step, [tensor.size for tensor in part.tensors]
                values, states, is_whole = part.values.copy(), part.state(), part.is_newest
            finally:
                part.close()
            if is_whole and sizes == [parts.sizes[t] for t in parts.tensors[s]]:
                ends = np.cumsum([0, *sizes])
                for i, t in enumerate(parts.tensors[s]):
                    found[t] = DenseState(values[ends[i] : ends[i + 1]], states[i])
                if s == 0:
                    position = _left_position(folder, server.index, generation, step)
                break
    return found, position


def _left_position(folder: Path, index: int, generation: int, step: int) -> JobPosition | None:
    """By the coordinator's ledger; None when it has decided a step that it has not published."""
    records = StateFiles(folder, index)
    try:
        session = records.session()
        if session is None or session[0].generation != generation or not records.path("ledger").exists():
            return None
        if (state := records.ledger(generation)) is None:
            return None
    except (GbaError, OSError):
        return None
    coordinator = Coordinator(session[0], heartbeat_timeout_s=1.0, lease_s=1.0, clock=time.monotonic)
    coordinator.resume(state)
    position = coordinator.position()
    return position if position.step == step else None


def unpacked(parts: DenseParts, server: int, reply: Reply) -> Iterator[tuple[int, DenseState]]:
    """The dense tensors of a server's answer to `Export`, by number in the model."""
    flat, at = np.frombuffer(reply.frames[0], dtype=np.float32), 0
    for t, state in zip(parts.tensors[server], state_codec.decode(bytes(reply.frames[1])), strict=True):
        size = parts.sizes[t]
        yield t, DenseState(flat[at : at + size], state)
        at += size
