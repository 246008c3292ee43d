"""How to be safe at the least cost: full or partial recovery, how often to save, and what the next save should be.

`plan` is a function of measurements and goals, and gives its reason. CPR's closed forms (`formulas`) give the
cost of both strategies; partial recovery is planned when it costs clearly less. A job plans again as measurements come
in, and passes the plan in force, so that noise changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from recovery.schedule import formulas
from recovery.schedule.costs import Costs, JobProfile, Objectives
from recovery.units import duration

__all__ = [
    "ChainSize",
    "Costs",
    "Estimate",
    "JobProfile",
    "Objectives",
    "RecoveryPlan",
    "estimate",
    "estimates",
    "next_kind",
    "plan",
]

_DAY_S = 86400.0
_PUT_BYTES = 64 * 2**20  # a blob
_DELTA_PAYS = 0.5  # share of bytes below which full recovery saves deltas
_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of rows, to pick from
_LEAST_INTERVAL_S = 600.0  # between partial saves of a picked share: choosing rows and a manifest cost the same for few


@dataclass(frozen=True)
class Estimate:
    """What a strategy is expected to cost. Shares of training time; `overhead` is their sum.

    round_s: T_save, in which all rows (or all that matter) are saved once
    """

    strategy: str
    round_s: float
    saving: float
    loading: float
    rescheduling: float
    redoing: float
    pls: float

    @property
    def overhead(self) -> float:
        return self.saving + self.loading + self.rescheduling + self.redoing


@dataclass(frozen=True)
class RecoveryPlan:
    """What to do from now on, and why.

    strategy:   "full": after a failure everything rolls back to the last save; "partial": only what was lost does
    kind:       "full", "delta", "mfu", "ssu", "scar": what is saved every `interval_s`
    r:          the share of rows of one save; 1 for full and delta
    full, partial: what each strategy is expected to cost
    """

    strategy: str
    kind: str
    interval_s: float
    r: float
    full: Estimate
    partial: Estimate
    bytes_per_day: float
    stored_bytes: float
    cost_per_month: float
    reason: str

    @property
    def expected(self) -> Estimate:
        return self.full if self.strategy == "full" else self.partial


def estimates(job: JobProfile, objectives: Objectives) -> tuple[Estimate, Estimate]:
    """(full, partial), each at its own interval: full recovery's optimum, and the one that meets the target PLS."""
    objectives, between_s = picked(job, objectives), job.between_failures_s
    full_s = formulas.best_full_interval_s(_round_stall_s(job, "full", objectives), between_s)
    partial_s = formulas.interval_for_pls_s(objectives.target_pls, job.n_servers, between_s)
    full = estimate(job, "full", _feasible(full_s, job, objectives), objectives)
    return full, estimate(job, "partial", _feasible(partial_s, job, objectives), objectives)


def estimate(job: JobProfile, strategy: str, round_s: float, objectives: Objectives) -> Estimate:
    """What "full" or "partial" recovery costs with a round of saves every `round_s`."""
    objectives = picked(job, objectives)
    costs, between_s, partial = job.costs, job.between_failures_s, strategy == "partial"
    load_s = costs.load_s if not partial or costs.partial_load_s is None else costs.partial_load_s
    return Estimate(
        strategy,
        round_s,
        saving=_round_stall_s(job, strategy, objectives) / round_s,
        loading=load_s / between_s,
        rescheduling=costs.reschedule_s / between_s,
        redoing=0.0 if partial else round_s / 2 / between_s,
        pls=formulas.expected_pls(round_s, between_s, job.n_servers) if partial else 0.0,
    )


def plan(job: JobProfile, objectives: Objectives, now: RecoveryPlan | None = None) -> RecoveryPlan:
    """The strategy that costs less, its interval and kind. `now`: the plan in force, left only for good reason."""
    is_picked, objectives = objectives.r is None, picked(job, objectives, now)
    full, partial = estimates(job, objectives)
    if now is not None:
        full, partial = _kept(job, objectives, full, now.full), _kept(job, objectives, partial, now.partial)
    margin = objectives.leave_margin if now is not None and now.strategy == "partial" else objectives.margin
    strategy = objectives.strategy
    if strategy == "auto":
        strategy = "partial" if partial.overhead <= full.overhead * (1 - margin) else "full"
    kind, r = _saves(job.costs, strategy, objectives)
    chosen = full if strategy == "full" else partial
    shares = _of_a_round(job.costs, strategy, objectives, 1.0, None)  # of all rows, new bases included
    per_day = shares * job.n_bytes * _DAY_S / chosen.round_s
    longest = 1.0 if kind == "full" else 1 + objectives.rebase_at if objectives.rebase_at < math.inf else 1.0
    stored = job.n_bytes * objectives.kept_bases * longest
    puts_per_month = 30 * max(per_day / _PUT_BYTES, _DAY_S / (r * chosen.round_s))
    cost = stored / 1e9 * objectives.price_per_gb_month + puts_per_month / 1000 * objectives.price_per_1000_puts
    reason = _reason(strategy, full, partial, objectives, margin, job.n_servers)
    if is_picked and r < 1:
        reason += f"; {r:.3g} of the rows a save, so that one comes every {duration(r * chosen.round_s)}"
    return RecoveryPlan(strategy, kind, r * chosen.round_s, r, full, partial, per_day, stored, cost, reason)


@dataclass(frozen=True)
class ChainSize:
    """What there is on the store to put the next save on top of.

    base_bytes:    of the last save of all rows; 0: there is none
    partial_bytes: of all saves since, together
    next_bytes:    expected of the next partial save
    trusted:       the tracker knows what was saved: it belongs to the chain's last checkpoint
    """

    base_bytes: int = 0
    partial_bytes: int = 0
    next_bytes: int = 0
    trusted: bool = True


def next_kind(chain: ChainSize, wanted: str, rebase_at: float = 1.0) -> tuple[str, str]:
    """("full" or the wanted kind, why): a new base when restoring the chain would cost more than one (Check-N-Run).

    rebase_at: how many times the base's bytes the partial saves on top of it may have
    """
    if wanted == "full":
        return "full", "full: every save takes all rows"
    if chain.base_bytes == 0:
        return "full", f"full: there is no base yet that {wanted} saves could be on top of"
    if not chain.trusted:
        return "full", "full: what was saved is not known for sure, so all rows are saved once more"
    total = chain.partial_bytes + chain.next_bytes
    reason = f"{total / 1e6:,.1f} MB of partial saves on a base of {chain.base_bytes / 1e6:,.1f} MB"
    if total > rebase_at * chain.base_bytes:
        return (
            "full",
            f"full: {reason} would be more than {rebase_at:g} times the base, a new one is cheaper to restore",
        )
    return wanted, f"{wanted}: {reason}"


def picked(job: JobProfile, objectives: Objectives, now: RecoveryPlan | None = None) -> Objectives:
    """With a share r, if none was asked for: the smallest whose saves are not too close to each other.

    What a round of partial saves writes does not depend on r (CPR), but the rows that matter are saved 1 / r times in
    it. The share of the plan in force stays while its saves are at least half as far apart.
    """
    if objectives.r is not None:
        return objectives
    round_s = formulas.interval_for_pls_s(objectives.target_pls, job.n_servers, job.between_failures_s)
    round_s = _feasible(round_s, job, objectives)
    if now is not None and now.kind == objectives.policy and now.r * round_s >= _LEAST_INTERVAL_S / 2:
        return replace(objectives, r=now.r)
    return replace(objectives, r=next((r for r in _SHARES if r * round_s >= _LEAST_INTERVAL_S), _SHARES[-1]))


def _saves(costs: Costs, strategy: str, objectives: Objectives) -> tuple[str, float]:
    """(kind, r). Full recovery needs every change: deltas where they are known to be small, else all rows."""
    if strategy == "partial":
        assert objectives.r is not None, "picked"
        return objectives.policy, 1.0 if objectives.policy in ("full", "delta") else objectives.r
    small = costs.delta_share is not None and costs.delta_share <= _DELTA_PAYS
    return ("delta" if small else "full"), 1.0


def _round_stall_s(job: JobProfile, strategy: str, objectives: Objectives) -> float:
    """Seconds that training stands still for one round of saves."""
    costs = job.costs
    return _of_a_round(costs, strategy, objectives, costs.save_s * costs.stall_share, costs.partial_stall_s)


def _of_a_round(costs: Costs, strategy: str, objectives: Objectives, full: float, partial: float | None) -> float:
    """What a round of saves costs, new bases included, when a save of all rows costs `full`.

    partial: what a partial save costs; None: in proportion to its rows. With saves of a share s, and partial saves up
    to a times the base: a base and a / s others in a / s + 1 saves, 1 / r of them in a round.
    """
    kind, r = _saves(costs, strategy, objectives)
    if kind == "full":
        return full
    share = r if kind != "delta" else costs.delta_share if costs.delta_share is not None else 1.0
    partial, a = share * full if partial is None else partial, objectives.rebase_at
    return ((share * full + a * partial) / (share + a) if a < math.inf else partial) / r


def _feasible(round_s: float, job: JobProfile, objectives: Objectives) -> float:
    """A save of all rows ends before the next begins."""
    return max(min(round_s, objectives.max_interval_s), job.costs.save_s)


def _kept(job: JobProfile, objectives: Objectives, found: Estimate, old: Estimate) -> Estimate:
    """With the interval of the plan in force, if it is near the new one and still possible."""
    near = abs(found.round_s - old.round_s) <= objectives.interval_band * old.round_s
    possible = _feasible(old.round_s, job, objectives) == old.round_s
    return estimate(job, found.strategy, old.round_s, objectives) if near and possible else found


def _reason(
    strategy: str, full: Estimate, partial: Estimate, objectives: Objectives, margin: float, n_servers: int
) -> str:
    costs = f"partial recovery costs {partial.overhead:.2%} of training time, full {full.overhead:.2%}"
    reason = f"{strategy}: {costs}"
    if n_servers == 1 and strategy == "full":
        reason += ", and the loss of the only server is the loss of the job"
    elif objectives.strategy != "auto":
        reason += f", {strategy} was asked for"
    elif strategy == "full":
        reason += f", partial must cost {margin:.0%} less"
    chosen = full if strategy == "full" else partial
    reason += f"; a round of saves every {duration(chosen.round_s)}"
    return (
        reason
        if strategy == "full"
        else f"{reason}, expected PLS {partial.pls:.3g}, target {objectives.target_pls:.3g}"
    )
