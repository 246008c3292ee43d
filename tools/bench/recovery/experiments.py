"""Which settings CPR's experiments on accuracy train, and their tables: AUC over PLS, r, N_emb, time between failures.

One thing varies in each; everything else is as in `accuracy`'s comparison, but for the failures of the curve: it has 16
in the job, so that the portion lost is near its expectation in a single run, and so that more can be lost than the two
of 28 hours lose when nothing was ever saved (PLS .125).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

from recovery.schedule.formulas import expected_pls_of_job, interval_for_pls_s

from ...picture import INK, picture, plain
from . import emulation
from .accuracy import PRIORITY, AccuracySetting, R, by_log, means_of
from .grid import RS, SERVERS

_COLOURS = {"cpr_full": "#2c6fbb", "cpr_mfu": "#c0392b"}
_NAMES = {"cpr_full": "all rows at each save", "cpr_mfu": "MFU, r = 1/8"}

CURVE_H = 3.5  # hours between failures
CURVE = (0.8, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125)  # target PLS; the interval is 56 hours times it: few saves first
OTHERS_H = 14
MEANS_H = (28, 14, 8)
NONE = AccuracySetting("none")
EXPERIMENTS: dict[str, list[AccuracySetting]] = {
    "pls": [
        NONE,
        *(AccuracySetting(name, CURVE_H, target_pls=pls) for name in ("cpr_full", "cpr_mfu") for pls in CURVE),
    ],
    "r": [NONE, *(AccuracySetting(name, OTHERS_H, r) for r in RS for name in PRIORITY)],
    "servers": [
        NONE,
        *(AccuracySetting(name, OTHERS_H, servers=n) for n in SERVERS for name in ("cpr_full", "cpr_mfu", "cpr_ssu")),
    ],
    "mtbf": [
        NONE,
        *(AccuracySetting(name, mean_h) for mean_h in MEANS_H for name in ("cpr_full", "cpr_mfu", "cpr_ssu")),
    ],
}
TITLES = {
    "pls": ("target PLS", f"portion of lost samples, {CURVE_H:g} h between failures"),
    "r": ("r", f"share of the rows of a save, {OTHERS_H} h between failures"),
    "servers": ("N_emb", f"servers, {OTHERS_H} h between failures"),
    "mtbf": ("hours", "hours between failures"),
}
_VARIES = {"pls": "target_pls", "r": "r", "servers": "servers", "mtbf": "mean_h"}
COLUMNS = {
    "recovery": "{recovery}", "seeds": "{seeds}", "AUC": "{auc:.5f}", "vs none": "{vs_none:+.5f}", "+-": "{error:.5f}",
    "worst": "{vs_none_worst:+.5f}", "failures": "{failures:.0f}", "PLS": "{pls:.4f}", "E[PLS]": "{expected_pls:.4f}",
}  # fmt: skip


def table(experiment: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By data set and length: a line for each setting, means over the seeds that it and `none` both have."""
    found: dict[str, list[dict[str, Any]]] = {}
    for title, of_log in by_log(rows).items():
        whole = {row["seed"]: row["auc"] for row in of_log if row["strategy"] == "none"}
        lines = []
        for setting in EXPERIMENTS[experiment]:
            some = [row for row in of_log if row["seed"] in whole and _is(row, setting)]
            if some and setting != NONE:
                apart = [row["auc"] - whole[row["seed"]] for row in some]
                error = stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None
                lines.append(
                    {
                        "recovery": setting.strategy,
                        "varied": getattr(setting, _VARIES[experiment]),
                        "error": error,
                        "expected_pls": expected_pls(setting),
                        **means_of(some, whole),
                    }
                )
        if lines:
            found[title] = lines
    return found


def expected_pls(setting: AccuracySetting) -> float | None:
    """E[PLS] of saves of all rows in a job of this length; the number of failures is given here."""
    if setting.strategy != "cpr_full":
        return None
    between_s = 3600.0 * emulation.HOURS / round(emulation.HOURS / setting.mean_h)
    every_s = interval_for_pls_s(setting.target_pls, setting.servers, 3600.0 * setting.mean_h)
    return expected_pls_of_job(every_s, between_s, setting.servers, 3600.0 * emulation.HOURS)


def slope(lines: Sequence[Mapping[str, Any]], recovery: str) -> float:
    """AUC lost per PLS: least squares through the origin, over the settings of a curve."""
    mine = [line for line in lines if line["recovery"] == recovery]
    return -float(sum(line["pls"] * line["vs_none"] for line in mine) / sum(line["pls"] ** 2 for line in mine))


def no_more_than(worst: float, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which settings lose more AUC than this in the mean."""
    return [f"{line['recovery']} at {line['varied']:g}" for line in lines if line["vs_none"] < -worst]


def _is(row: Mapping[str, Any], setting: AccuracySetting) -> bool:
    """Where r is nothing to a strategy, rows have the default."""
    wanted = setting if setting.strategy in PRIORITY else replace(setting, r=R)
    return all(row[name] == getattr(wanted, name) for name in ("strategy", "mean_h", "r", "servers", "target_pls"))


def draw(found: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """A panel for each data set. AUC lost over PLS, of `table`. Raises BadInput where it cannot be written."""
    with picture(file, 5.2 * len(found), 3.6) as figure:
        for panel, (title, lines) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
            for name, colour in _COLOURS.items():
                mine = [line for line in lines if line["recovery"] == name]
                pls, lost = [line["pls"] for line in mine], [-line["vs_none"] for line in mine]
                panel.errorbar(
                    pls, lost, yerr=[line["error"] or 0.0 for line in mine], color=colour, marker="o", markersize=4,
                    linewidth=1.4, elinewidth=0.8, capsize=2, label=_NAMES[name],
                )  # fmt: skip
            panel.axhline(0, color=INK, linewidth=0.8)
            panel.set_title(f"{title}; {CURVE_H:g} h between failures", fontsize=10, color=INK)
            panel.set_xlabel("portion of lost samples (PLS)")
        plain(figure.axes, 8)
        figure.axes[0].set_ylabel("AUC lost against no failure")
