"""Who has the newest step, and who sends late joiners the mode: pure functions of what every rank reports.

A job may roll back to a checkpoint while it runs (`full_recovery`). States are therefore compared by the number of such
recoveries behind them first, and by their step only then: of two states, the one that was rolled back more often is
newer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gba_hvd.errors import GbaError


class ModeExitRace(GbaError):
    """Workers leave a mode together, and this world was formed in the midst of it."""


_FACTOR = 8  # where `RankState.row` has a float


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
    rollbacks: int = 0  # full recoveries behind its state
    rollbacks_agreed: int = 0  # and those that it knows to have been agreed on
    refused: int = 0  # number of the mode that it left since servers refused to train; 0: none

    def row(self) -> np.ndarray:
        fields = (self.has_state, self.step, self.held_step, self.host, self.settings, self.pid)
        factor = int(np.float64(self.row_factor).view(np.int64))
        numbers = (self.generation, self.membership, factor, self.rollbacks, self.rollbacks_agreed, self.refused)
        return np.array([*fields, *numbers], dtype=np.int64)

    @classmethod
    def of_row(cls, row: np.ndarray) -> RankState:
        """The inverse of `row`."""
        fields = row.tolist()
        factor = float(row[_FACTOR : _FACTOR + 1].view(np.float64)[0])
        return replace(cls(bool(fields[0]), *fields[1:]), row_factor=factor)


@dataclass(frozen=True)
class Agreement:
    """What the ranks make of their facts.

    step: the newest committed step; source: a rank that has it; catch_up: ranks that apply the gradients they hold
    row_factor: what they multiply them by, as all others did. rollbacks: full recoveries behind the newest state.
    decider: the rank that has the decision of a full recovery that was agreed on and is not complete; -1: there is none
    """

    step: int
    source: int
    catch_up: tuple[int, ...]
    is_restart: bool
    reason: str
    row_factor: float = 1.0
    rollbacks: int = 0
    decider: int = -1


def agree(facts: Sequence[RankState]) -> Agreement:
    """The newest step wins, among the states with most full recoveries behind them. No rank rolls back by this.

    Seeing a step's result means that every worker holds its row gradients, so the survivors are at most one step apart
    and the one behind can apply what it holds. A rank further behind was gone for longer and starts as a late joiner.
    Where a worker knows of a full recovery that no state has behind it, its world ended before the recovery did: shards
    may have been overwritten, so it is carried out again, in this world.
    """
    old = [rank for rank, f in enumerate(facts) if f.has_state]
    if not old:
        return Agreement(0, 0, (), False, "a new job: everybody takes the values of rank 0")
    rollbacks = max(facts[rank].rollbacks for rank in old)
    newest = [rank for rank in old if facts[rank].rollbacks == rollbacks]
    step = max(facts[rank].step for rank in newest)
    source = next(rank for rank in newest if facts[rank].step == step)
    catch_up = tuple(rank for rank in newest if facts[rank].step == step - 1 and facts[rank].held_step == step)
    decider = next((rank for rank in newest if facts[rank].rollbacks_agreed > rollbacks), -1)
    reason = f"rank {source} has step {step}, the newest of {len(old)} survivors"
    if decider >= 0:
        reason += f"; rank {decider} has a full recovery that is not complete"
    return Agreement(step, source, catch_up, True, reason, facts[source].row_factor, rollbacks, decider)


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
