"""A job's operation on a virtual clock: failures come as a trace, everything else is decided by the code of real jobs.

`simulate` plans, saves, fails, recovers and plans again as its knowledge of failures grows. The clock is that of useful
training, as in CPR's emulation: what saving and recovering cost is added up beside it, and no failure comes meanwhile.
So agreement with the closed forms says that they were applied rightly, and as little as they about overheads of tens of
per cent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from recovery.schedule import formulas
from recovery.schedule.failures import mean_time
from recovery.schedule.planner import ChainSize, JobProfile, Objectives, RecoveryPlan, next_kind, plan
from recovery.simulation.simulated_rows import RowModel, SimulatedRows


@dataclass(frozen=True)
class SimulatedJob:
    """What is simulated.

    job:     total_s is the time simulated; between_failures_s what is assumed before any failure was seen
    rows:    None: losses are only counted by time, not row by row
    settled: the time is cut out of a longer operation; else the job begins with it
    seeded:  the job needs no first base: its initial values follow from a seed, so partial saves can be on top of them
    replan_s: how often it is planned again, beside after each failure; None: the first plan stays
    """

    job: JobProfile
    objectives: Objectives
    rows: RowModel | None = None
    settled: bool = True
    seeded: bool = False
    replan_s: float | None = 86400.0


@dataclass
class SimulationOutcome:
    """What an operation came to. Seconds of training lost, by cause.

    pls:         portion of lost samples, by CPR's closed form's idea: time since the last round of saves ended
    pls_by_row:  by CPR's definition, each row from its own last save; None without a model of rows
    updates_lost: the portion of accesses that the lost rows had since their own last save; None without a model of rows
    written:     saved bytes, as a multiple of all rows' bytes
    plans:       (at_s, plan): the first, and every one that changed something
    """

    total_s: float
    saving_s: float = 0.0
    loading_s: float = 0.0
    rescheduling_s: float = 0.0
    redoing_s: float = 0.0
    n_failures: int = 0
    n_saves: int = 0
    n_bases: int = 0
    pls: float = 0.0
    pls_by_row: float | None = None
    updates_lost: float | None = None
    written: float = 0.0
    plans: list[tuple[float, RecoveryPlan]] = field(default_factory=list)

    @property
    def overhead(self) -> float:
        """As a share of useful training time."""
        return (self.saving_s + self.loading_s + self.rescheduling_s + self.redoing_s) / self.total_s


def simulate(world: SimulatedJob, failures: np.ndarray, rng: np.random.Generator) -> SimulationOutcome:
    """One operation. failures: float64 [F, 2], time in seconds (ascending), number of the server."""
    run = _Operation(world, rng)
    for at_s, server in failures[failures[:, 0] < world.job.total_s]:
        run.until(at_s)
        run.fail(int(server))
    run.until(world.job.total_s)
    return run.outcome


class _Operation:
    """Where the simulated job stands. Times are seconds of useful training; those before the start are below 0."""

    def __init__(self, world: SimulatedJob, rng: np.random.Generator) -> None:
        self._world, self._job = world, world.job
        self.outcome = SimulationOutcome(world.job.total_s)
        self._plan = plan(world.job, world.objectives)
        self.outcome.plans.append((0.0, self._plan))
        self._now = self._saved = self._round = self._replanned = 0.0
        self._chain = ChainSize(base_bytes=world.job.n_bytes) if world.seeded else ChainSize()
        self._in_round = 0
        self._rows: SimulatedRows | None = None
        self._rows_at = 0.0
        wants_rows = self._plan.strategy == "partial" or self._plan.kind == "delta"
        if world.rows is not None and wants_rows:
            self._rows = SimulatedRows(world.rows, rng, self._plan.kind, self._plan.r)
            self.outcome.updates_lost = self.outcome.pls_by_row = 0.0
        if world.settled:
            self._settle(rng)

    def _settle(self, rng: np.random.Generator) -> None:
        """As though the job had run before: some rounds of saves, the start at any point of the last one."""
        rounds = 2 + rng.random()
        self._now = self._saved = self._round = self._rows_at = -rounds * self._plan.interval_s / self._plan.r
        self._save(next_kind(self._chain, self._plan.kind, self._world.objectives.rebase_at)[0])
        self.until(0.0)
        kept, self.outcome = self.outcome, SimulationOutcome(self._job.total_s)
        self.outcome.plans, self.outcome.updates_lost = kept.plans, kept.updates_lost
        self.outcome.pls_by_row = kept.pls_by_row

    def until(self, at_s: float) -> None:
        while True:
            save_at = max(self._saved + self._plan.interval_s, self._now)
            replan_at = self._replanned + (self._world.replan_s or math.inf)
            if min(save_at, replan_at) >= at_s:
                break
            self._now = min(save_at, replan_at)
            if save_at <= replan_at:
                self._save(next_kind(self._chain, self._plan.kind, self._world.objectives.rebase_at)[0])
            else:
                self._replan()
        self._now = at_s

    def fail(self, server: int) -> None:
        costs, found = self._job.costs, self.outcome
        found.n_failures += 1
        found.rescheduling_s += costs.reschedule_s
        if self._plan.strategy == "full":
            found.loading_s += costs.load_s
            found.redoing_s += self._now - self._saved
        else:
            found.loading_s += costs.load_s if costs.partial_load_s is None else costs.partial_load_s
            found.pls += formulas.lost_portion(self._now - self._round, self._job.total_s, self._job.n_servers)
            if self._rows is not None and server < self._rows.schema.n_shards:
                lost, since_s = self._present(self._rows).lose(server)
                lost /= self._rows.updates_per_s * self._job.total_s
                found.updates_lost = (found.updates_lost or 0.0) + lost
                portion = formulas.lost_portion(since_s, self._job.total_s, self._job.n_servers)
                found.pls_by_row = (found.pls_by_row or 0.0) + portion
        if self._world.replan_s is not None:
            self._replan()

    def _save(self, kind: str) -> None:
        share = self._share(kind)
        n_bytes = round(share * self._job.n_bytes)
        if kind == "full":
            self._chain = ChainSize(base_bytes=n_bytes)
        else:
            self._chain = replace(self._chain, partial_bytes=self._chain.partial_bytes + n_bytes, next_bytes=n_bytes)
        costs, found = self._job.costs, self.outcome
        found.saving_s += costs.save_s * costs.stall_share * share
        found.written += share
        found.n_saves += 1
        found.n_bases += kind == "full"
        self._saved = self._now
        self._in_round += 1
        if kind in ("full", "delta") or self._in_round >= round(1 / self._plan.r):
            self._round, self._in_round = self._now, 0

    def _present(self, rows: SimulatedRows) -> SimulatedRows:
        """The rows, after all updates until now; they are not used in between."""
        rows.pass_time(self._now - self._rows_at)
        self._rows_at = self._now
        return rows

    def _share(self, kind: str) -> float:
        if self._rows is not None:
            return self._present(self._rows).save(kind)
        if kind == "delta" and self._job.costs.delta_share is not None:
            return self._job.costs.delta_share
        return 1.0 if kind in ("full", "delta") else self._plan.r

    def _replan(self) -> None:
        """With what is known by now of failures."""
        self._replanned = self._now
        known = mean_time(max(self._now, 0.0), self.outcome.n_failures, self._job.between_failures_s)
        new = plan(replace(self._job, between_failures_s=known.mean_s), self._world.objectives, self._plan)
        if (new.strategy, new.kind, new.interval_s) != (self._plan.strategy, self._plan.kind, self._plan.interval_s):
            self.outcome.plans.append((self._now, new))
        self._plan = new


@dataclass(frozen=True)
class Mean:
    """Over independent operations: the mean, and its standard error."""

    value: float
    error: float

    def sigmas_from(self, expected: float) -> float:
        """How many standard errors the mean is from what was expected; 0 when both are the same number."""
        apart = self.value - expected
        return 0.0 if abs(apart) <= 1e-12 * abs(expected) else apart / self.error if self.error > 0 else math.inf


def mean_of(outcomes: Sequence[SimulationOutcome], figure: Callable[[SimulationOutcome], float]) -> Mean:
    found = np.array([figure(outcome) for outcome in outcomes])
    error = float(found.std(ddof=1)) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return Mean(float(found.mean()), error)
