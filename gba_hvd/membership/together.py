"""Doing what may fail on one rank of a world that forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from gba_hvd.collectives import World, worker_lost
from gba_hvd.errors import GbaError, ShardMemoryError

T = TypeVar("T")


def together(
    world: World, is_restart: bool, name: str, act: Callable[[], T], what: str = "its host's shard memory"
) -> T:
    """Do something that may fail on one rank, and stop on all: nobody is left waiting for a worker that gave up.

    name: of what is done, also of the collective. Raises the rank's own error there, elsewhere one that names the rank.
    The survivors of a running job do not fail with a newcomer: they form a world without it.
    """
    failure: Exception | None = None
    try:
        result = act()
    except (GbaError, OSError) as error:
        failure = error
    failed = np.flatnonzero(world.gather(name, np.array([failure is not None], dtype=np.int64))[:, 0])
    if failure is not None:
        raise failure
    if len(failed):
        text = f"the worker of rank {failed[0]} could not {name} {what}; its log says why"
        raise worker_lost(text) if is_restart else ShardMemoryError(text)
    return result
