"""Which modes a virtual clock has: those where all workers send gradients of one model to servers."""

from __future__ import annotations

from gba_hvd.errors import BadInput
from gba_hvd.mode_names import REPLICA_MODES, SERVER_MODES

MODES = tuple(name for name in SERVER_MODES if name not in REPLICA_MODES)


def check(mode: str) -> None:
    """Raises BadInput, naming what there is, for a mode with replicas. A misspelt one is refused by `Discipline`."""
    if mode in REPLICA_MODES:
        raise BadInput(
            f"mode {mode!r} cannot be simulated: its workers train replicas of their own, and the simulator has one "
            f"model; choose one of {', '.join(MODES)}"
        )
