"""Who has the newest step, and who sends late joiners the mode: pure functions of what every rank reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gba_hvd.errors import GbaError


class ModeExitRace(GbaError):
    """Workers leave a mode together, and this world was formed in the midst of it."""


@dataclass(frozen=True)
class RankState:
    """What one rank reports when a world forms."""

    has_state: bool
    step: int
    held_step: int  # the step whose row gradients it holds, or -1
    host: int
    settings: int  # fingerprint of tables, batch sizes and optimizers
    pid: int
    generation: int = 0  # of the asynchronous mode it is in; 0 in allreduce mode
    membership: int = 0  # in an asynchronous mode: the newest change of membership it knows
    row_factor: float = 1.0  # what the row gradients of its newest step were multiplied by

    def row(self) -> np.ndarray:
        fields = (self.has_state, self.step, self.held_step, self.host, self.settings, self.pid)
        factor = int(np.float64(self.row_factor).view(np.int64))
        return np.array([*fields, self.generation, self.membership, factor], dtype=np.int64)

    @classmethod
    def of_row(cls, row: np.ndarray) -> RankState:
        """The inverse of `row`."""
        fields = row.tolist()
        return replace(cls(bool(fields[0]), *fields[1:-1]), row_factor=float(row[-1:].view(np.float64)[0]))


@dataclass(frozen=True)
class Agreement:
    """What the ranks make of their facts.

    step: the newest committed step; source: a rank that has it; catch_up: ranks that apply the gradients they hold
    row_factor: what they multiply them by, as all others did
    """

    step: int
    source: int
    catch_up: tuple[int, ...]
    is_restart: bool
    reason: str
    row_factor: float = 1.0


def agree(facts: Sequence[RankState]) -> Agreement:
    """The newest step wins. Nobody goes back.

    Seeing a step's result means that every worker holds its row gradients, so the survivors are at most one step apart
    and the one behind can apply what it holds. A rank further behind was gone for longer and starts as a late joiner.
    """
    old = [rank for rank, f in enumerate(facts) if f.has_state]
    if not old:
        return Agreement(0, 0, (), False, "a new job: everybody takes the values of rank 0")
    step = max(facts[rank].step for rank in old)
    source = next(rank for rank in old if facts[rank].step == step)
    catch_up = tuple(rank for rank in old if facts[rank].step == step - 1 and facts[rank].held_step == step)
    reason = f"rank {source} has step {step}, the newest of {len(old)} survivors"
    return Agreement(step, source, catch_up, True, reason, facts[source].row_factor)


def asynchronous_source(facts: Sequence[RankState]) -> int | None:
    """The rank from which late joiners learn of the asynchronous mode the others are in; None in allreduce mode.

    A survivor that is not in it and behind was gone for long: a late joiner. One that is not behind has just left it.
    Raises ModeExitRace when some have left it: the others are about to leave, too, and the world is to be formed again.
    """
    inside = [rank for rank, f in enumerate(facts) if f.has_state and f.generation]
    if not inside:
        return None
    newest = max(facts[rank].step for rank in inside)
    if any(f.has_state and not f.generation and f.step >= newest for f in facts):
        raise ModeExitRace("some workers have left the asynchronous mode and some have not yet")
    return max(inside, key=lambda rank: (facts[rank].generation, -rank))
