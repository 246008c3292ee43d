"""What a checkpoint of an asynchronous mode has beside rows: put together from what all servers add.

Each server adds its dense tensors; the coordinator the user's values and the position to resume from. The values are
the chief's, as of the start of the epoch, or as of the end once its training function has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gba_hvd.errors import GbaError
from gba_hvd.ps.messages import JobPosition
from gba_hvd.ps.partition import residuals
from gba_hvd.ps.partition.partition import Partition
from recovery import state_codec


def part_state(part: Partition) -> bytes:
    """What this server adds to a checkpoint: its dense tensors by name, and what its host's workers had not sent."""
    _, values, state = part.export()
    ends = np.cumsum([0, *(tensor.size for tensor in part.dense.tensors)])
    states = state_codec.decode(state)
    dense = {
        tensor.name: {"values": values[ends[i] : ends[i + 1]], "state": states[i]}
        for i, tensor in enumerate(part.dense.tensors)
    }
    return state_codec.encode({"dense": dense, "workers": part.residuals.workers, "rest": part.residuals.total()})


def asynchronous_state(
    snapshot: bytes, extras: Sequence[bytes], position: JobPosition, living: Sequence[int] | None = None
) -> bytes:
    """What a checkpoint has beside rows: the user's values, the dense tensors of all servers, and the position to
    resume from.

    extras: of all servers (`part_state`). living: the workers, where gradients are compressed: what all of them had not
    sent yet is in it too, and of how many that is not known.
    Raises GbaError when the values are of an earlier epoch than the job is in: complete epochs would be trained again.
    """
    values = state_codec.decode(snapshot)
    order = values["position"].get("order")
    if order is not None and order["epoch"] < position.epoch:
        raise GbaError(
            f"the values of the training script are as of epoch {order['epoch']}, the job is in epoch {position.epoch} "
            "already: they do not belong together"
        )
    parts = [state_codec.decode(extra) for extra in extras]
    dense: dict[str, Any] = {}
    for part in parts:
        dense |= part["dense"]
    state = {"snapshot": values, "dense": dense, "position": msgspec.to_builtins(position)}
    if living is not None:
        known = {worker for part in parts for worker in part["workers"]}
        residual = residuals.total(part["rest"] for part in parts)
        state["compression"] = {"rest": residual, "missing": len(set(living) - known)}
    return state_codec.encode(state)
