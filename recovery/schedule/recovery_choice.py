"""Full or partial recovery, at the moment when a host of a running job was lost. No clock, no I/O.

CPR's benefit estimate: the overhead that each strategy is expected to have (`planner`), with what the job has measured
and what is assumed for the rest. Partial recovery is chosen where it costs clearly less and its expected portion of
lost samples (PLS) is within the target; else all roll back to the newest checkpoint that leaves out no change.

Where the interval is planned, each strategy is estimated at its own interval, as the plan in force has it. Where the
user gave the interval, both are estimated at that interval: the saves are made anyway, so what a failure costs is
compared without them. A checkpoint that is older than its interval (saves failed, or only some rows were saved since)
is more to redo, and full recovery is estimated with that age.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from recovery.policies import is_lossless
from recovery.schedule import planner
from recovery.schedule.adaptive import TOTAL_S, Goals, IntervalPlan, JobMeasurements, plan_interval
from recovery.schedule.costs import JobProfile

_NOTHING = "nothing was measured yet"


@dataclass(frozen=True)
class RecoveryDecision:
    """What the survivors of a lost host do, and why.

    strategy: "full" or "partial". asked: as the user set it ("auto": by the estimate). full, partial: expected
    overhead, shares of training time; None: not known. expected_pls: of partial recovery. manifest, step: of the
    checkpoint that full recovery rolls back to; empty and -1 with partial recovery.
    """

    strategy: str
    reason: str
    asked: str = "auto"
    full: float | None = None
    partial: float | None = None
    expected_pls: float | None = None
    manifest: str = ""
    step: int = -1

    def event_data(self) -> dict[str, Any]:
        """For events and records."""
        return {
            "strategy": self.strategy, "strategy_reason": self.reason, "strategy_asked": self.asked,
            "overhead_full": self.full, "overhead_partial": self.partial, "pls_expected": self.expected_pls,
        }  # fmt: skip


@dataclass(frozen=True)
class Situation:
    """What is known when the rows of a lost host are to be restored.

    n_bytes: of all records; n_servers: hosts that held rows before, as the lost rows' share has it: 1 when all rows
    are lost. every_s: the interval that the user gave, in seconds; None: it is planned. pace: the plan in force; None:
    the worker that decides knows none. age_s: how long ago the checkpoint was made that full recovery rolls back to, in
    seconds of training; age_steps: the same in steps. why_not_full: what rules full recovery out; empty: nothing
    """

    n_bytes: int
    n_servers: int
    every_s: float | None
    pace: IntervalPlan | None = None
    age_s: float = 0.0
    age_steps: int = 0
    why_not_full: str = ""


def choose_recovery(measured: JobMeasurements, given: Goals, now: Situation) -> RecoveryDecision:
    """How to recover. measured: with the failure at hand."""
    asked = given.strategy
    full, partial, source = _estimates(measured, given, now)
    decision = RecoveryDecision("partial", "", asked)
    if full is not None and partial is not None:
        decision = replace(decision, full=full.overhead, partial=partial.overhead, expected_pls=partial.pls)
        costs = f"partial recovery costs {partial.overhead:.3%} of training time, full {full.overhead:.3%} ({source})"
    else:
        costs = source
    if now.why_not_full:
        wanted = "full recovery was asked for, but " if asked == "full" else ""
        return replace(decision, reason=f"partial: {wanted}full recovery is not possible: {now.why_not_full}; {costs}")
    if asked != "auto":
        return replace(decision, strategy=asked, reason=f"{asked}: it was asked for; {costs}")
    if now.n_servers == 1:
        return replace(decision, strategy="full", reason=f"full: all rows were lost with the host; {costs}")
    if now.age_steps == 0:
        why = "nothing was trained since the checkpoint, so partial recovery loses nothing"
        return replace(decision, reason=f"partial: {why}; {costs}")
    if full is None or partial is None:
        return replace(decision, reason=f"partial: {costs}, so full recovery cannot be estimated")
    if partial.pls > given.target_pls:
        why = f"the expected PLS of partial recovery is {partial.pls:.3g}, the target {given.target_pls:.3g}"
        return replace(decision, strategy="full", reason=f"full: {why}; {costs}")
    objectives = given.objectives("auto")
    is_planned = now.every_s is None
    costs_full, costs_partial = (one.overhead - (0.0 if is_planned else one.saving) for one in (full, partial))
    was_partial = now.pace is not None and now.pace.plan is not None and now.pace.plan.strategy == "partial"
    margin = objectives.leave_margin if was_partial else objectives.margin
    strategy = "partial" if costs_partial <= costs_full * (1 - margin) else "full"
    limit = "" if strategy == "partial" else f", partial must cost {margin:.0%} less"
    limit += "" if is_planned or strategy == "partial" else f" without the saves, {partial.saving:.3%} of each"
    pls = f", expected PLS {partial.pls:.3g}, target {given.target_pls:.3g}" if strategy == "partial" else ""
    return replace(decision, strategy=strategy, reason=f"{strategy}: {costs}{limit}{pls}")


def _estimates(
    measured: JobMeasurements, given: Goals, now: Situation
) -> tuple[planner.Estimate | None, planner.Estimate | None, str]:
    """(full, partial, what they follow from)."""
    costs = measured.costs()
    if costs is None:
        return None, None, _NOTHING
    between = measured.between_failures(given.mtbf_h)
    job = JobProfile(costs, now.n_bytes, now.n_servers, between.mean_s, TOTAL_S)
    objectives = given.objectives("auto")
    if now.every_s is None:
        plan = plan_interval(measured, given, now.n_bytes, max(2, now.n_servers), now.pace).plan
        assert plan is not None, "costs are known"
        full, partial = plan.full, plan.partial
        source = f"at planned intervals of {full.round_s:,.0f} and {partial.round_s:,.0f} s"
    else:
        share = 1.0 if is_lossless(given.policy) else given.r
        partial = planner.estimate(job, "partial", now.every_s / share, objectives)
        # A checkpoint without changes left out comes with every save, or with each new base of a chain.
        whole_s = now.every_s if is_lossless(given.policy) else now.every_s * (1 + objectives.rebase_at / share)
        full = replace(planner.estimate(job, "full", whole_s, objectives), saving=partial.saving)
        source = f"at the given interval, {now.every_s:,.1f} s of training"
    if now.age_s > full.round_s:
        full = replace(full, round_s=now.age_s, redoing=now.age_s / 2 / between.mean_s)
        source += f"; the newest complete checkpoint is {now.age_s:,.0f} s old"
    unknown = measured.assumed()
    if measured.partial_load_s is None:
        unknown = [*unknown, "loading a lost host's rows takes as long as loading all"]
    return full, partial, "; ".join([source, between.reason, *(["assumed: " + ", ".join(unknown)] if unknown else [])])
