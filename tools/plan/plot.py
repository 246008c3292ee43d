"""The picture of `gba-hvd plan`: what each strategy costs and loses at every interval, and where the plan is."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recovery.schedule.planner import JobProfile, Objectives, RecoveryPlan, estimate

from ..picture import INK, picture, plain

_COLOURS = {"full": "#c0392b", "partial": "#2c6fbb"}


def draw(job: JobProfile, objectives: Objectives, plan: RecoveryPlan, file: Path) -> None:
    """Write it; the name's ending says the format. Raises BadInput when it cannot be written."""
    chosen = {"full": plan.full, "partial": plan.partial}
    ends = [found.round_s for found in chosen.values()]
    rounds = np.geomspace(min(ends) / 8, max(ends) * 4, 200)
    with picture(file, 9, 5.9) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        for strategy, found in chosen.items():
            costs = [100 * estimate(job, strategy, float(s), objectives).overhead for s in rounds]
            label = f"{strategy} recovery: {found.overhead:.2%}"
            upper.plot(rounds / 3600, costs, color=_COLOURS[strategy], linewidth=1.6, label=label)
            is_plan = strategy == plan.strategy
            upper.plot(
                found.round_s / 3600, 100 * found.overhead, "o", markersize=8, color=_COLOURS[strategy],
                markerfacecolor=_COLOURS[strategy] if is_plan else "white",
            )  # fmt: skip
        lost = [estimate(job, "partial", float(s), objectives).pls for s in rounds]
        lower.plot(rounds / 3600, lost, color=_COLOURS["partial"], linewidth=1.6, label="partial recovery")
        lower.plot(plan.partial.round_s / 3600, plan.partial.pls, "o", markersize=8, color=_COLOURS["partial"])
        lower.axhline(
            objectives.target_pls, color=INK, linestyle="--", linewidth=1, label=f"target {objectives.target_pls:g}"
        )
        upper.set_ylabel("overhead, % of training time")
        lower.set_ylabel("expected PLS")
        lower.set_xlabel("hours for a round of saves")
        for axis in (upper, lower):
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_major_formatter("{x:g}")
        plain((upper, lower), 9)
        between_h = job.between_failures_s / 3600
        title = f"{plan.strategy} recovery; {job.n_servers} servers, {between_h:.3g} h between failures"
        figure.suptitle(title, fontsize=11, color=INK, parse_math=False)
