"""The picture of `gba-hvd bench quality-days`: gradient norms by mode, and AUC by day against sync."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from ...picture import picture, plain
from ..harness.measure import Row
from .chains import MODES, SYNC, by_seed, norms_by_mode

COLOURS = dict(zip(MODES, ("#333333", "#2f8f5b", "#c0392b", "#2c6fbb", "#d1761c", "#8e44ad"), strict=True))


def draw(rows: Sequence[Row], file: Path) -> None:
    """Write it; the name's ending says the format."""
    with picture(file, 10, 4, letters=9) as figure:
        from matplotlib.ticker import LogLocator

        norms, days = figure.subplots(1, 2)
        for mode, counts in norms_by_mode(rows).items():
            bins = range(min(counts) - 1, max(counts) + 2)
            n = sum(counts.values())
            edges = [2.0 ** (number / 8) for number in bins]
            shares = [100 * counts.get(number, 0) / n for number in bins]
            norms.step(edges, shares, where="post", color=COLOURS[mode], linewidth=1.5, label=f"{mode}: {n:,} steps")
        norms.set_xscale("log")
        norms.xaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
        norms.xaxis.set_major_formatter("{x:g}")
        norms.xaxis.set_minor_formatter("{x:g}")
        norms.set_xlabel("2-norm of a step's gradient, bins of 1/8 octave")
        norms.set_ylabel("% of the steps")
        sync = dict(by_seed(rows, "from_sync", SYNC))
        for mode in MODES:
            mine = {seed: some for seed, some in by_seed(rows, "from_sync", mode) if seed in sync}
            if mine:
                numbers = [int(row["day"]) for row in next(iter(mine.values()))]
                found = [
                    mean(some[i]["auc"] - sync[seed][i]["auc"] for seed, some in mine.items())
                    for i in range(len(numbers))
                ]
                days.plot(numbers, found, "o-", color=COLOURS[mode], linewidth=1.5, markersize=4, label=mode)
                days.set_xticks(numbers)
        days.set_xlabel("day (synchronous before; tested on the day after)")
        days.set_ylabel("AUC less that of sync, mean of the seeds")
        plain((norms, days))
