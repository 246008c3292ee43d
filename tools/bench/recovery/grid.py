"""CPR's emulation over r, N_emb and the mean time between failures: what changes with each, the others as in the paper.

A cell is one setting and one recovery, over random failures that are the same for all of them. Nothing is decided about
how it is run: `command` keeps the cells in the result file, and those that are there are not computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recovery.schedule.planner import Costs

from . import emulation

RS, SERVERS, MEANS_H = (0.0625, 0.125, 0.25, 1.0), (2, 4, 8, 18), (28, 14, 8)
R = 0.125
BY_R = ("cpr_scar", "cpr_mfu", "cpr_ssu")  # what depends on r
KEY = ("recovery", "r", "servers", "mean_h", "traces", "shape", "seed")


@dataclass(frozen=True)
class GridCell:
    """r: 1 for saves of all rows. traces, shape, seed: of the failures."""

    recovery: str
    r: float
    servers: int
    mean_h: int
    traces: int
    shape: float
    seed: int

    def __str__(self) -> str:
        return f"{self.recovery}, r = {self.r:g}, {self.servers} servers, {self.mean_h} h between failures"


def cells(traces: int, shape: float, seed: int) -> list[GridCell]:
    """r varies with 8 servers, and the servers vary with r = 1/8; both at each mean time."""
    settings = [(r, emulation.SERVERS) for r in RS] + [(R, servers) for servers in SERVERS]
    found = []
    for mean_h in MEANS_H:
        for r, servers in settings:
            found.append(GridCell("cpr_full", 1.0, servers, mean_h, traces, shape, seed))
            found += [GridCell(recovery, r, servers, mean_h, traces, shape, seed) for recovery in BY_R]
    return list(dict.fromkeys(found))


def emulated(cell: GridCell, costs: Costs) -> dict[str, Any]:
    """A row of results."""
    outcomes = emulation.emulated(
        costs, cell.mean_h, cell.traces, cell.shape, cell.r, cell.seed, cell.servers, [cell.recovery]
    )
    found = emulation.figures(outcomes[cell.recovery], cell.servers)
    least = emulation.least_overhead(costs, cell.mean_h, servers=cell.servers)
    return {**asdict(cell), **found, "least_overhead_pct": 100 * least}


def by_r(rows: Sequence[Mapping[str, Any]], mean_h: int) -> list[dict[str, Any]]:
    """For a table; 8 servers."""
    return _shown(row for row in rows if (row["mean_h"], row["servers"]) == (mean_h, emulation.SERVERS))


def by_servers(rows: Sequence[Mapping[str, Any]], mean_h: int) -> list[dict[str, Any]]:
    """For a table; r = 1/8 where it matters."""
    return _shown(row for row in rows if row["mean_h"] == mean_h and (row["recovery"] == "cpr_full" or row["r"] == R))


def agreement(rows: Sequence[Mapping[str, Any]]) -> str:
    """In how many cells with saves of all rows the PLS is that of the closed form."""
    full = [row for row in rows if row["recovery"] == "cpr_full"]
    near = sum(abs(row["pls_sigmas"]) <= 2 for row in full)
    largest = max((abs(row["pls_sigmas"]) for row in full), default=0.0)
    return (
        f"PLS of saves of all rows: within two standard errors of E[PLS] in {near} of {len(full)} settings, "
        f"at most {largest:.1f} away"
    )


def columns(varied: str) -> dict[str, str]:
    """Of a table in which r or the servers vary."""
    return {
        "recovery": "{recovery}", varied: f"{{{varied}:g}}", "cost %": "{overhead_pct[mean]:.3f}",
        "+- %": "{overhead_pct[standard_error]:.3f}", "least %": "{least_overhead_pct:.3f}",
        "PLS": "{pls[mean]:.4f}", "+-": "{pls[standard_error]:.4f}", "E[PLS]": "{expected_pls:.4f}",
        "accesses lost": "{updates_lost[mean]:.4f}", "written": "{written_tables:.2f}",
    }  # fmt: skip


def _shown(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """In the order of the contestants, E[PLS] for saves of all rows alone."""
    found = [{**row, "expected_pls": row["closed_form_pls"] if row["recovery"] == "cpr_full" else None} for row in rows]
    places = list(emulation.CONTESTANTS)
    return sorted(found, key=lambda row: (places.index(row["recovery"]), row["servers"], row["r"]))
