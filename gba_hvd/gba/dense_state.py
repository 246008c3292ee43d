"""Taking the dense parameters and the optimizer's state back from the servers, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gba_hvd.gba.answers import answer_of
from gba_hvd.gba.session import DenseParts, DenseState
from gba_hvd.ps.client import Client, Reply, ServerLost
from gba_hvd.ps.protocol import Beat, Export, Exported, Ok, Position
from recovery import state_codec


def exported(client: Client, request: Export, parts: DenseParts) -> dict[int, DenseState]:
    """Every dense tensor by its number in the model. Raises as `answers.answer_of`."""
    futures = [client.send(s, request) for s in range(len(parts))]
    replies = [answer_of(future) for future in futures]
    return {t: state for s, reply in enumerate(replies) for t, state in _unpacked(parts, s, reply)}


def rescued(
    client: Client, generation: int, beat: Beat, parts: DenseParts, timeout_s: float
) -> tuple[dict[int, DenseState], Position | None]:
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
            found |= dict(_unpacked(parts, s, reply))
        elif isinstance(reply.body, Ok) and reply.body.position is not None:
            position = reply.body.position
    return found, position


def _unpacked(parts: DenseParts, server: int, reply: Reply) -> Iterator[tuple[int, DenseState]]:
    flat, at = np.frombuffer(reply.frames[0], dtype=np.float32), 0
    for t, state in zip(parts.tensors[server], state_codec.decode(bytes(reply.frames[1])), strict=True):
        size = parts.sizes[t]
        yield t, DenseState(flat[at : at + size], state)
        at += size
