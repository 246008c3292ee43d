"""How often a running job saves, and what: the plan that follows from what the job has measured. No clock, no I/O.

A job passes its measurements, `plan_interval` returns a plan and the reason. What is not measured yet is assumed; the
reason says so. The plan in force is passed again, so that noise changes nothing (see `planner.plan`).

A job of one host can only lose everything, so its interval is that of full recovery. With several hosts the strategy
that costs less is planned (`planner.plan`), unless the user named one: with partial recovery the interval is what the
target PLS allows, never longer than `longest_s` (what the loss of the complete job may cost); with full recovery it is
the one that costs least. Full recovery needs checkpoints that leave out no change, so these are what is saved then.
What a lost host's survivors do at that moment is decided in `recovery_choice`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from recovery.errors import BadInput
from recovery.format.manifest import Manifest
from recovery.policies import is_lossless, lossless_kind
from recovery.schedule import failures, planner
from recovery.schedule.costs import Costs, JobProfile, Objectives
from recovery.schedule.failures import MeanTime
from recovery.units import duration

FIRST_INTERVAL_S = 300.0  # until a save was measured
ASSUMED_MTBF_H = 28.0  # CPR's emulated cluster
ASSUMED_RESCHEDULE_S = 180.0
# What a save that runs beside training takes from it (memory bandwidth, a core) is not seen as time it stands still.
LEAST_STALL_SHARE = 0.05
TOTAL_S = 30 * 86400.0  # of training, for overheads as shares of it


PLANNED_POLICY = "mfu"  # with several hosts, where none is configured


@dataclass(frozen=True)
class Goals:
    """What the user wants. mtbf_h: assumed mean time between failures of any host, in hours; None: not known.

    one_host: the policy where full recovery is planned, as for a job of one host, where that is another one; None: the
    same. strategy: of recovery when one of several hosts is lost: "auto" (what costs less), "full" or "partial"
    """

    policy: str
    r: float
    mtbf_h: float | None = None
    target_pls: float = 0.1
    longest_s: float = 3600.0
    one_host: str | None = None
    strategy: str = "auto"

    def __post_init__(self) -> None:
        if self.mtbf_h is not None and not 0 < self.mtbf_h < math.inf:
            raise BadInput(f"mtbf_h is a number of hours above 0, got {self.mtbf_h}")
        if not 0 < self.longest_s < math.inf:
            raise BadInput(f"longest_s is a number of seconds above 0, got {self.longest_s}")
        self.objectives(self.strategy)

    def policy_for(self, strategy: str) -> str:
        """The policy that saves go by where this strategy is planned."""
        return self.one_host if self.one_host is not None and strategy == "full" else self.policy

    def objectives(self, strategy: str) -> Objectives:
        return Objectives(
            strategy,
            target_pls=self.target_pls,
            policy=self.policy_for(strategy),
            r=self.r,
            max_interval_s=self.longest_s,
        )


@dataclass(frozen=True)
class JobMeasurements:
    """What a job saw so far; None: not yet. Seconds.

    save_s:         the newest save of all rows, until durable; partial_save_s: the newest of some rows
    stall_s:        for how long training stood still for the newest save
    load_s:         loading all rows, each host its own; partial_load_s: those of a lost host
    reschedule_s:   from the last step before a host was lost until training resumed, without the loading
    delta_share:    bytes of the newest partial save over those of its base
    observed_s:     of training, in this job and those it resumes from
    failures_s:     when, in that time, a host or the whole job was lost
    samples_lost:   by all recoveries of lost hosts: each row's since its own last save, mean over all rows of the
                    model. Over the samples of the planned training it is the portion of lost samples (PLS) so far
    """

    save_s: float | None = None
    stall_s: float | None = None
    load_s: float | None = None
    partial_load_s: float | None = None
    reschedule_s: float | None = None
    delta_share: float | None = None
    partial_save_s: float | None = None
    observed_s: float = 0.0
    failures_s: tuple[float, ...] = field(default_factory=tuple)
    samples_lost: float = 0.0

    @classmethod
    def of_mapping(cls, values: Mapping[str, Any]) -> JobMeasurements:
        """The inverse of `asdict`, as JSON leaves it; what is not there, or makes no sense, counts as not seen."""

        def number(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf

        known = {name: values[name] for name in cls.__dataclass_fields__ if number(values.get(name))}
        failures_s = values.get("failures_s")
        times = tuple(float(t) for t in failures_s if number(t)) if isinstance(failures_s, list | tuple) else ()
        return cls(**{**known, "failures_s": times})

    @classmethod
    def of_checkpoint(cls, manifest: Manifest) -> JobMeasurements:
        """What a checkpoint says was measured until then; and if it has all rows, what it took itself."""
        stored, took_s = manifest.about.get("measured"), manifest.about.get("save_s")
        measured = cls.of_mapping(stored if isinstance(stored, dict) else {})
        if manifest.kind == "full" and isinstance(took_s, int | float) and 0 < took_s < math.inf:
            return replace(measured, save_s=float(took_s))
        return measured

    def saved(self, kind: str, seconds: float, n_bytes: int, base_bytes: int) -> JobMeasurements:
        """A save was durable after so many seconds. base_bytes: of the full save that a partial one is on top of."""
        if kind == "full":
            return replace(self, save_s=max(seconds, 1e-3))
        seen = replace(self, partial_save_s=seconds)
        return replace(seen, delta_share=min(1.0, n_bytes / base_bytes)) if base_bytes else seen

    def with_those_of(self, other: JobMeasurements) -> JobMeasurements:
        """What two workers, or a worker and a checkpoint, have seen of one job: of the one that saw more of it.

        Figures that this one lacks are those of the other.
        """
        more, less = (self, other) if self.observed_s >= other.observed_s else (other, self)
        known = {name: value for name, value in asdict(less).items() if getattr(more, name) is None}
        return replace(more, **known)

    def lost(self, at_s: float) -> JobMeasurements:
        """A host, or the whole job, was lost when the job had trained for so long."""
        return replace(self, observed_s=at_s, failures_s=(*self.failures_s, at_s))

    def costs(self) -> Costs | None:
        """As the planner takes them, with assumptions for what was not seen; None before the first save of all rows."""
        if self.save_s is None:
            return None
        stall_s, partial_s = self.stall_s or 0.0, self.partial_save_s
        return Costs(
            self.save_s,
            load_s=self.save_s if self.load_s is None else self.load_s,
            reschedule_s=ASSUMED_RESCHEDULE_S if self.reschedule_s is None else self.reschedule_s,
            partial_load_s=self.partial_load_s,
            stall_share=min(1.0, max(LEAST_STALL_SHARE, stall_s / self.save_s)),
            delta_share=self.delta_share,
            # Not in proportion to its rows: writing the training state, and a store's latency, are the same for all.
            partial_stall_s=None if partial_s is None else max(LEAST_STALL_SHARE * partial_s, stall_s),
        )

    def assumed(self) -> list[str]:
        """Which costs are not measured."""
        names = {"load_s": "loading takes as long as saving", "reschedule_s": f"{ASSUMED_RESCHEDULE_S:.0f} s to resume"}
        return [words for name, words in names.items() if getattr(self, name) is None]

    def between_failures(self, mtbf_h: float | None) -> MeanTime:
        """What was given, or assumed, counts as one failure more. With the gamma law's shape, if estimable."""
        found = failures.mean_time(
            self.observed_s, len(self.failures_s), 3600 * (ASSUMED_MTBF_H if mtbf_h is None else mtbf_h)
        )
        gaps = [b - a for a, b in zip((0.0, *self.failures_s), self.failures_s, strict=False) if b > a]
        law = failures.fit(gaps)
        if law is None or law.shape == 1.0:
            return found
        return replace(found, reason=f"{found.reason}; gamma law of shape {law.shape:.2f}")


@dataclass(frozen=True)
class IntervalPlan:
    """Save this kind every `interval_s`. plan: what it follows from; None: nothing was measured yet."""

    interval_s: float
    kind: str
    reason: str
    plan: planner.RecoveryPlan | None = None

    def differs_from(self, other: IntervalPlan) -> bool:
        """In what is done, not in the figures of the sentence."""
        return (self.interval_s, self.kind) != (other.interval_s, other.kind)


def plan_interval(
    measured: JobMeasurements, given: Goals, n_bytes: int, n_servers: int, now: IntervalPlan | None = None
) -> IntervalPlan:
    """How to continue. n_bytes: of all records; n_servers: hosts that hold rows; now: the pace in force."""
    costs, asked = measured.costs(), given.strategy if n_servers > 1 else "full"
    if costs is None:
        kind = _kind_for("partial" if asked == "auto" else asked, given, n_servers)
        first_s = min(FIRST_INTERVAL_S, given.longest_s)
        return IntervalPlan(first_s, kind, f"every {first_s:g} s until a save was measured")
    between = measured.between_failures(given.mtbf_h)
    job = JobProfile(costs, n_bytes, n_servers, between.mean_s, TOTAL_S)
    before = now.plan if now is not None and now.plan is not None and asked in ("auto", now.plan.strategy) else None
    found = planner.plan(job, given.objectives(asked), before)
    strategy = found.strategy
    # Without a first partial save it would never be known how small they are.
    is_whole = found.kind == "full" and measured.delta_share is not None
    kind = "full" if is_whole else _kind_for(strategy, given, n_servers)
    recovered = "a lost one is recovered alone" if strategy == "partial" else "with a lost one all roll back"
    hosts = "one host: its loss is the job's" if n_servers == 1 else f"{n_servers} hosts: {recovered}"
    expected = found.expected
    reason = [
        f"{kind} saves every {_whole(found.interval_s)} ({hosts})",
        f"{expected.overhead:.2%} of training time expected for saving and recovering",
        f"{_other(found)}" if n_servers > 1 and asked == "auto" else "",
        f"PLS {expected.pls:.3g} at a target of {given.target_pls:.3g}" if strategy == "partial" else "",
        f"a save takes {costs.save_s:.2f} s, training stands still for {costs.stall_share:.0%} of it",
        between.reason,
        "assumed: " + ", ".join(measured.assumed()) if measured.assumed() else "",
    ]
    return IntervalPlan(found.interval_s, kind, "; ".join(part for part in reason if part), found)


def _kind_for(strategy: str, given: Goals, n_servers: int) -> str:
    """What a save takes once there is a base. Going back to a checkpoint needs one that leaves out no change.

    A job of one host saves by the policy that the user named, also where that leaves out changes: it has no choice.
    """
    policy = given.policy_for(strategy)
    return lossless_kind(policy) if strategy == "full" and n_servers > 1 and not is_lossless(policy) else policy


def _whole(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1 else duration(seconds)


def _other(plan: planner.RecoveryPlan) -> str:
    other = plan.partial if plan.strategy == "full" else plan.full
    return f"{other.strategy} recovery would take {other.overhead:.2%}"
