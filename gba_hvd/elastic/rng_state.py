"""Where torch, numpy and Python are in their random numbers, on each worker: part of a checkpoint.

A job that resumes with as many workers, from a step at which all of them were, draws what it would have drawn. Any
other begins streams that depend on the checkpoint, the step and the rank: those of the script's own seed would
repeat the dropout masks that training began with.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gba_hvd.comm.collectives import World
from recovery import state_codec


def capture() -> dict[str, Any]:
    """That of this process; of the default generators, on the CPU and on every GPU in use."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "torch_gpus": gpus,
        "numpy": (name, keys, *rest),
        "python": (version, np.array(words, np.uint32), gauss),
    }


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """What is drawn inside is drawn again after it."""
    before = capture()
    try:
        yield
    finally:
        _take(before)


def gather(world: World) -> list[dict[str, Any]]:
    """Gather the states of all workers, in the order of ranks. A collective."""
    return [state_codec.decode(one.tobytes()) for one in world.gather_bytes("random", state_codec.encode(capture()))]


def restore(states: Sequence[Mapping[str, Any]], step: int, world: World, *, same_step: bool) -> bool:
    """Take over this rank's of those that were saved (True), or begin a stream of its own.

    same_step: they are as of the step at which the job resumes.
    """
    if same_step and len(states) == world.size:
        _take(states[world.rank])
        return True
    saved = state_codec.encode([dict(one) for one in states])
    digest = hashlib.blake2b(saved + f"{step} {world.rank}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    return False


def _take(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["torch_gpus"] and len(state["torch_gpus"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["torch_gpus"])
    np.random.set_state(state["numpy"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
