"""What servers sum in a decided step: who counts, with which weight and divisor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.coordinator.ledger import StepPlan
from gba_hvd.ps.messages import PlannedMember


def row_damping(plan: StepPlan, answers: Sequence[tuple[int, int, float]]) -> list[float]:
    """What the row gradients of each member are multiplied by: the mean of the rule's damping over all dense elements.

    answers: micro-batch, dense elements there, mean damping of these; of each server that has the push. A server
    without dense elements has no say, unless none has any. 1 for a push that no server has.
    """
    found = []
    for member in plan.members:
        own = [(n, factor) for micro, n, factor in answers if micro == member.micro]
        n_all = sum(n for n, _ in own)
        if n_all:
            found.append(sum(n * factor for n, factor in own) / n_all)
        else:
            found.append(sum(factor for _, factor in own) / len(own) if own else 1.0)
    return found


@dataclass(frozen=True)
class WeighedStep:
    """What servers sum in a step.

    members: those that count, each with its weight. scale: of their weighted sum, which becomes a mean over `n_micro`
    micro-batches. dropped: (micro, serial) of those that only count as contributors of rows, see `ROW_AVERAGES`
    """

    members: list[PlannedMember]
    scale: float
    dropped: list[tuple[int, int]]
    n_micro: int


def weighed(plan: StepPlan, micro_batch: int, discipline: Discipline, row_average: str) -> WeighedStep:
    """The weights and divisors of a decided step."""
    kept = [m for m in plan.members if m.weight > 0]
    damping = plan.row_damping or (1.0,) * len(plan.members)
    members = [
        PlannedMember(m.micro, m.serial, m.weight * m.n_samples / micro_batch, factor)
        for m, factor in zip(plan.members, damping, strict=True)
        if m.weight > 0
    ]
    is_round = discipline.step_of == "round"  # a round is the gradients it waited for
    all_of_it = kept if is_round and kept else plan.members
    n_samples = sum(m.n_samples for m in all_of_it)
    dropped: list[tuple[int, int]] = []
    if row_average == "contributors" and kept and not is_round:
        dropped = [(m.micro, m.serial) for m in plan.members if not m.weight and not m.refused]
    return WeighedStep(members, micro_batch / n_samples, dropped, len(all_of_it))
