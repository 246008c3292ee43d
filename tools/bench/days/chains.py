"""Which days are trained in which mode, what is kept of each, and what it says. No launch, no file.

A chain is a job's life: some days in one mode (the base), then days in another, which inherits the model. Direction
`from_sync` has synchronous base days and every mode after them; `to_sync` has base days in every mode, and synchronous
ones after them. The chain that never leaves sync is what both are compared with. Day d's model is tested on day d + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from ..harness.measure import Row

SYNC = "sync"
MODES = {SYNC: "allreduce", "gba": "gba", "async": "async", "bsp": "bsp", "hop_bs": "hop_bs", "hop_bw": "hop_bw"}
DIRECTIONS = ("from_sync", "to_sync")
BASE, AFTER = "base", "after"
GOAL = 0.0005  # AUC: how far gba may be from sync in the mean over the days
USUAL = {"row_average": "global", "rule": "none"}
KEY = ("phase", "base", "then", "seed", "day", *USUAL)  # what distinguishes one row from another


@dataclass(frozen=True)
class Chain:
    """Base days in the mode `base`, the days after in `then`; both names of `MODES`.

    row_average: as of `DistributedOptimizer`. rule: of the servers; "none" where no day has any
    """

    base: str
    then: str
    seed: int
    row_average: str = USUAL["row_average"]
    rule: str = USUAL["rule"]

    def __str__(self) -> str:
        words = [value for name, value in self.setting(self.rule).items() if value != USUAL[name]]
        return ", ".join([f"{self.base} -> {self.then}", *words, f"seed {self.seed}"])

    def rule_of(self, mode: str) -> str:
        """The rule of the days in this mode of it."""
        return USUAL["rule"] if mode == SYNC else self.rule

    def setting(self, rule: str) -> dict[str, str]:
        """Entries of its rows."""
        return {"row_average": self.row_average, "rule": rule}

    @property
    def base_name(self) -> str:
        """Of the base days, which several chains may inherit."""
        setting = self.setting(self.rule_of(self.base))
        return "-".join([self.base, str(self.seed), *(v for name, v in setting.items() if v != USUAL[name])])


def planned(
    modes: Sequence[str], directions: Sequence[str], seeds: Sequence[int], row_average: str = USUAL["row_average"],
    rule: str = USUAL["rule"],
) -> list[Chain]:  # fmt: skip
    """Seed by seed, sync first: what is there when time is over can be compared."""
    chains: list[Chain] = []
    for seed in seeds:
        chains.append(Chain(SYNC, SYNC, seed, row_average))
        others = [mode for mode in modes if mode != SYNC]
        chains += [Chain(SYNC, mode, seed, row_average, rule) for mode in others if "from_sync" in directions]
        chains += [Chain(mode, SYNC, seed, row_average, rule) for mode in others if "to_sync" in directions]
    return chains


def of_setting(rows: Sequence[Row], row_average: str, rule: str) -> list[Row]:
    """The rows of these settings; those of synchronous days alone, which have no rule, are of every rule."""
    return [
        row for row in rows
        if row["row_average"] == row_average and (row["rule"] == rule or {row["base"], row["then"]} <= {SYNC, ""})
    ]  # fmt: skip


def missing(chains: Sequence[Chain], rows: Sequence[Row]) -> list[Chain]:
    """Those without rows. A chain's rows are written together."""
    names = ("base", "then", "seed", *USUAL)
    done = {tuple(row[name] for name in names) for row in rows if row["phase"] == AFTER}
    return [chain for chain in chains if tuple(getattr(chain, name) for name in names) not in done]


def rows_of_job(
    phase: str, chain: Chain, days: range, summary: Mapping[str, Any], before: Mapping[str, Any] | None
) -> list[Row]:
    """One row a day of a job that trained `days`: the base of a chain, or the days after it.

    before: the summary of the job it inherited the model from.

    Samples and staleness are of the whole job, without what it inherited. Raises ValueError when the job did something
    else: another mode at some step, or a day without a test.
    """
    base, then = chain.base, chain.then if phase == AFTER else ""
    mode, setting = MODES[then or base], chain.setting(chain.rule if phase == AFTER else chain.rule_of(base))
    by_day = {entry["epoch"]: entry for entry in summary["by_epoch"]}
    norms = {day: [one for one in summary["grad_norms"] if one["epoch"] == day] for day in days}
    counted = _since(summary, before)
    rows = []
    for day in days:
        if day not in by_day or "test_auc" not in by_day[day]:
            raise ValueError(f"day {day} was not tested: {sorted(by_day)}")
        modes = {one["mode"]: one["steps"] for one in norms[day]}
        if set(modes) != {mode}:
            raise ValueError(f"day {day} was to be trained in {mode}, steps by mode: {modes}")
        entry = by_day[day]
        rows.append({
            "phase": phase, "base": base, "then": then, "seed": chain.seed, "day": day, "mode": mode, **setting,
            "auc": entry["test_auc"], "logloss": entry["test_logloss"], "auc_bayes": entry["test_auc_bayes"],
            "grad_norms": {name: norms[day][0][name] for name in ("steps", "mean", "histogram")}, **counted,
        })  # fmt: skip
    return rows


def _since(summary: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Samples and staleness of a job alone: its account begins with that of the job before it."""

    def of(name: str) -> int:
        return int(summary[name]) - (0 if before is None else int(before[name]))

    inherited = {} if before is None else before["staleness"]["histogram"]
    counts = {int(k): n - inherited.get(k, 0) for k, n in summary["staleness"]["histogram"].items()}
    n = sum(counts.values())
    total = of("samples_total")
    return {
        "steps_of_job": of("steps"),
        "dropped_share": of("samples_dropped") / total if total else 0.0,
        "staleness_mean": sum(k * count for k, count in counts.items()) / n if n else None,
        "staleness_max": max((k for k, count in counts.items() if count), default=None) if n else None,
    }


def headline(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """direction -> mode -> AUC of the first and the last day after the base, and the mean over these days.

    Each is a mean over the seeds; `vs_sync...` is the mean difference from the chain that never left sync, over the
    seeds that both have, with the seed where it is lowest and where it is highest (`_worst`, `_best`: of the mean).
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for direction in DIRECTIONS:
        sync = dict(by_seed(rows, direction, SYNC))
        for mode in MODES if _has_others(rows, direction) else ():
            mine = dict(by_seed(rows, direction, mode))
            if not mine:
                continue
            columns: dict[str, Any] = {"seeds": len(mine)}
            differences: dict[str, list[float]] = {}
            for name, of in _FIGURES.items():
                columns[name] = mean(of(some) for some in mine.values())
                differences[name] = [of(some) - of(sync[seed]) for seed, some in mine.items() if seed in sync]
                columns[f"vs_sync_{name}"] = mean(differences[name]) if differences[name] else None
            columns["vs_sync_worst"] = min(differences["mean"], default=None)
            columns["vs_sync_best"] = max(differences["mean"], default=None)
            # Of the job in which this mode trained: the days after the base, or the base.
            of_mode = [row for row in rows if _trained_in(row, direction, mode)]
            stale = [row["staleness_mean"] for row in of_mode if row["staleness_mean"] is not None]
            columns |= {
                "below_bayes": mean(row["auc_bayes"] - row["auc"] for some in mine.values() for row in some),
                "dropped_share": mean(row["dropped_share"] for row in of_mode) if of_mode else None,
                "staleness_mean": mean(stale) if stale else None,
            }
            found.setdefault(direction, {})[mode] = columns
    return found


_FIGURES: dict[str, Callable[[Sequence[Row]], float]] = {
    "first": lambda some: some[0]["auc"],
    "last": lambda some: some[-1]["auc"],
    "mean": lambda some: mean(row["auc"] for row in some),
}


def by_seed(rows: Sequence[Row], direction: str, mode: str) -> Iterator[tuple[int, list[Row]]]:
    """The days after the base, in order, of each seed."""
    ends = (SYNC, mode) if direction == "from_sync" else (mode, SYNC)
    of_chain = [row for row in rows if row["phase"] == AFTER and (row["base"], row["then"]) == ends]
    for seed in dict.fromkeys(row["seed"] for row in of_chain):
        yield seed, sorted((row for row in of_chain if row["seed"] == seed), key=lambda row: int(row["day"]))


def _has_others(rows: Sequence[Row], direction: str) -> bool:
    side = "then" if direction == "from_sync" else "base"
    return any(row["phase"] == AFTER and row[side] != SYNC for row in rows)


def _trained_in(row: Row, direction: str, mode: str) -> bool:
    if direction == "from_sync":
        return bool(row["phase"] == AFTER and (row["base"], row["then"]) == (SYNC, mode))
    return bool(row["phase"] == BASE and row["base"] == mode)


def goal(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """direction -> how far the mean of gba is from that of sync, and whether that is within `GOAL`."""
    distances = {}
    for direction, modes in found.items():
        difference = modes.get("gba", {}).get("vs_sync_mean")
        if difference is not None:
            distances[direction] = {"difference": difference, "is_met": abs(difference) <= GOAL}
    return distances


def norms_by_mode(rows: Sequence[Row]) -> dict[str, dict[int, int]]:
    """Mode -> bin -> steps, of the days after synchronous base days, over all of them and all seeds.

    A bin has the norms from 2 ** (bin / 8) on, as of `ctr.norm_log`.
    """
    found: dict[str, dict[int, int]] = {}
    for mode in MODES:
        for row in rows:
            if _trained_in(row, "from_sync", mode):
                counts = found.setdefault(mode, {})
                for name, steps in row["grad_norms"]["histogram"].items():
                    counts[int(name)] = counts.get(int(name), 0) + steps
    return found


def quantile(counts: Mapping[int, int], share: float) -> float:
    """The norm that this share of the steps does not exceed, from a histogram: the middle of its bin."""
    n, seen = sum(counts.values()), 0
    for number in sorted(counts):
        seen += counts[number]
        if seen >= share * n:
            return float(2.0 ** ((number + 0.5) / 8))
    raise ValueError("a histogram without steps has no quantiles")
