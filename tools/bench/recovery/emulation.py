"""CPR's experiment without the command around it: the contestants, their worlds, what came of them, what it shows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recovery.schedule.failures import Gamma, failure_times
from recovery.schedule.formulas import expected_pls_of_job, interval_for_pls_s, least_partial_overhead_s
from recovery.schedule.planner import Costs, JobProfile, Objectives, estimates
from recovery.simulation.simulated_rows import RowModel
from recovery.simulation.simulation import Mean, SimulatedJob, SimulationOutcome, mean_of, simulate

HOURS, SERVERS, TABLE_BYTES = 56, 8, 100 * 10**9
_ROWS = 16_000  # of the model of what is accessed
MEANS_H = (28, 14)
PRODUCTION = Costs(save_s=360.0, load_s=60.0, reschedule_s=180.0)
TARGET_PLS = 0.1
TARGET_OVERHEAD = 0.005
WHERE_FULL_COSTS = 0.08
CONTESTANTS = {
    "full": "everything rolls back to the last save; interval sqrt(2 O_save T_fail)",
    "naive": "only the lost server rolls back; full recovery's interval",
    "cpr_full": "only the lost server rolls back; interval from the target PLS, all rows at each save",
    "cpr_scar": "the same interval; every r of it the share r of rows that changed most in L2",
    "cpr_mfu": "... that were accessed most often since they were saved",
    "cpr_ssu": "... that are in a list of sub-sampled accesses",
    "planned": "what this package does: strategy, interval and new bases by its planner, again after each failure; mfu",
}


def emulated(
    costs: Costs, mean_h: float, n_traces: int, shape: float, r: float, seed: int, servers: int = SERVERS,
    contestants: Collection[str] = tuple(CONTESTANTS),
) -> dict[str, list[SimulationOutcome]]:  # fmt: skip
    """The contestants on the same random failures; one outcome for each trace."""
    mean_s = mean_h * 3600.0
    job = JobProfile(costs, TABLE_BYTES, servers, mean_s, HOURS * 3600.0)
    found: dict[str, list[SimulationOutcome]] = {name: [] for name in CONTESTANTS if name in contestants}
    for number in range(n_traces):
        trace = job_failures(Gamma(shape, mean_s), job.total_s, np.random.default_rng([seed, number]), servers)
        for which, name in enumerate(CONTESTANTS):
            if name not in contestants:
                continue
            as_cpr = name != "planned"
            world = SimulatedJob(
                job,
                objectives_of(name, job, r),
                row_model(servers),
                settled=False,
                seeded=as_cpr,
                replan_s=None if as_cpr else 86400.0,
            )
            found[name].append(simulate(world, trace, np.random.default_rng([seed, number, which])))
    return found


def row_model(servers: int = SERVERS) -> RowModel:
    """As many rows in all for any number of servers."""
    return RowModel(n_servers=servers, rows_per_server=_ROWS // servers, updates_per_row_h=0.1)


def objectives_of(contestant: str, job: JobProfile, r: float) -> Objectives:
    """What distinguishes a contestant from the others. CPR overwrites rows in its one checkpoint: never a new base."""
    cpr = Objectives(strategy="partial", policy="full", target_pls=TARGET_PLS, r=r, rebase_at=math.inf)
    if contestant == "full":
        return replace(cpr, strategy="full")
    if contestant == "naive":
        return replace(cpr, max_interval_s=estimates(job, cpr)[0].round_s)
    if contestant == "planned":
        return Objectives(target_pls=TARGET_PLS, r=r)
    return replace(cpr, policy=contestant.removeprefix("cpr_"))


def job_failures(law: Gamma, until_s: float, rng: np.random.Generator, servers: int = SERVERS) -> np.ndarray:
    """The law is that of the whole job's failures, as in CPR; each hits any of its servers."""
    trace = failure_times(law, until_s, 1, rng)
    trace[:, 1] = rng.integers(servers, size=len(trace))
    return trace


def figures(outcomes: Sequence[SimulationOutcome], servers: int = SERVERS) -> dict[str, Any]:
    """Means and standard errors; `updates_lost` is 0 where nothing but time is lost."""
    return {
        "overhead_pct": as_json(mean_of(outcomes, lambda o: 100 * o.overhead)),
        "pls": as_json(mean_of(outcomes, lambda o: o.pls if o.pls_by_row is None else o.pls_by_row)),
        "updates_lost": as_json(mean_of(outcomes, lambda o: o.updates_lost or 0.0)),
        "written_tables": mean_of(outcomes, lambda o: o.written).value,
        "failures": mean_of(outcomes, lambda o: o.n_failures).value,
        "round_h": outcomes[0].plans[0][1].expected.round_s / 3600,
        "closed_form_overhead_pct": 100 * outcomes[0].plans[0][1].expected.overhead,
        "closed_form_pls": expected_pls(outcomes[0], servers),
        "pls_sigmas": mean_of(outcomes, lambda o: o.pls_by_row or 0.0).sigmas_from(expected_pls(outcomes[0], servers)),
    }


def expected_pls(outcome: SimulationOutcome, servers: int) -> float:
    """CPR's E[PLS] for the first plan of a job as long as this one."""
    plan = outcome.plans[0][1]
    if plan.strategy == "full":
        return 0.0
    # The closed form for a long operation says how often servers fail.
    between_s = 0.5 * plan.expected.round_s / (plan.expected.pls * servers)
    return expected_pls_of_job(plan.expected.round_s, between_s, servers, outcome.total_s)


def pls_agreement(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where all rows are saved at once, the measured PLS is to be the closed form's; elsewhere it has none to be."""
    lines = []
    for mean, rows in found.items():
        for name in ("naive", "cpr_full"):
            row = rows[name]
            agrees = "agrees with" if abs(row["pls_sigmas"]) <= 2 else "DIFFERS from"
            lines.append(
                f"{mean}, {name}: PLS {row['pls']['mean']:.4f} +- {row['pls']['standard_error']:.4f} {agrees} E[PLS] "
                f"{row['closed_form_pls']:.4f} ({row['pls_sigmas']:+.1f} standard errors)"
            )
    return lines


def as_json(mean: Mean) -> dict[str, float]:
    return {"mean": mean.value, "standard_error": mean.error}


def by_mean_time(found: Mapping[str, Mapping[str, Any]], column: str) -> dict[str, dict[str, float]]:
    """Mean time between failures -> contestant -> mean of the column."""
    return {mean: {name: row[column]["mean"] for name, row in rows.items()} for mean, rows in found.items()}


def verdict(found: Mapping[str, Mapping[str, Any]], costs: Costs) -> list[str]:
    """What it shows, and which of it follows from the costs alone."""
    lines = []
    for mean, rows in found.items():
        full = rows["full"]["overhead_pct"]["mean"]
        worst = max(row["overhead_pct"]["mean"] for name, row in rows.items() if name.startswith("cpr_"))
        ours = rows["planned"]["overhead_pct"]["mean"]
        claim = f"{mean}: full recovery costs {full:.2f} %, CPR at most {worst:.2f} %, as planned here {ours:.2f} %"
        if rows["full"]["closed_form_overhead_pct"] < 100 * WHERE_FULL_COSTS:
            lines.append(f"{claim}: the target is for where full recovery costs 8 % or more")
        else:
            lines.append(f"{claim}: CPR {'meets' if worst <= 100 * TARGET_OVERHEAD else 'misses'} the target of 0.5 %")
    return [*lines, *(bound(costs, mean_h) for mean_h in MEANS_H), assumption(costs)]


def bound(costs: Costs, mean_h: float) -> str:
    """What partial recovery costs at the least, by any policy: `formulas.least_partial_overhead_s`."""
    least = least_overhead(costs, mean_h)
    without = least_overhead(costs, mean_h, math.inf)
    kept = "allows the target" if least <= TARGET_OVERHEAD else "no policy can meet the target"
    return (
        f"{mean_h}h: every policy with an expected PLS of at most {TARGET_PLS:g} costs {100 * least:.3f} % or more, "
        f"{100 * without:.3f} % of it for the recoveries alone: {kept} of {TARGET_OVERHEAD:.1%}"
    )


def least_overhead(costs: Costs, mean_h: float, target_pls: float = TARGET_PLS, servers: int = SERVERS) -> float:
    """Share of training time. target_pls infinite: nothing is ever saved."""
    load_s = costs.load_s if costs.partial_load_s is None else costs.partial_load_s
    total_s = HOURS * 3600.0
    least_s = least_partial_overhead_s(
        costs.save_s * costs.stall_share, load_s, costs.reschedule_s, target_pls, mean_h * 3600.0, servers, total_s
    )
    return least_s / total_s


def assumption(costs: Costs) -> str:
    """For which costs of a recovery CPR stays at the target: everything else in it is fixed by the interval."""
    bounds = []
    for mean_h in MEANS_H:
        between_s = mean_h * 3600.0
        round_s = interval_for_pls_s(TARGET_PLS, SERVERS, between_s)
        bounds.append(between_s * (TARGET_OVERHEAD - costs.save_s * costs.stall_share / round_s))
    needed = ", ".join(f"{max(s, 0):.0f} s at {mean_h} h" for s, mean_h in zip(bounds, MEANS_H, strict=True))
    load_s = costs.load_s if costs.partial_load_s is None else costs.partial_load_s
    return (
        f"this follows from the costs: by the closed form {TARGET_OVERHEAD:.1%} needs a server replaced and loaded "
        f"in at most {needed}; {load_s + costs.reschedule_s:.0f} s are "
        f"{'assumed' if costs == PRODUCTION else 'given'}"
    )
