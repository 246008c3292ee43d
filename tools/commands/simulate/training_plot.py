"""The picture of `gba-hvd simulate training`: loss over micro-batches, a panel for each number of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...picture import INK, picture, plain

_COLOURS = ("#333333", "#2c6fbb", "#c0392b", "#2e8b57", "#e08e0b", "#8e44ad")
_A_ROW = 3


@dataclass(frozen=True)
class TrainingLine:
    """Runs of one number of workers and one rule.

    gap, gap_in_steps: means over all pushes, as of `gba_hvd.ps.partition.gaps`; gap_by_worker: both, of each
    loss, scores: medians over the seeds (scores: of the task, where it converged); all else is of the first
    """

    workers: int
    rule: str
    loss: float
    losses: list[float]
    staleness_mean: float
    staleness_max: int
    lag_mean: float
    gap: float
    gap_in_steps: float
    gap_by_worker: dict[int, tuple[float, float]]
    dropped_share: float
    speed: float
    steps: int
    scores: dict[str, float]
    curve: list[tuple[float, int, float]]
    why: str


def draw(lines: Sequence[TrainingLine], title: str, file: Path) -> None:
    """Write it; the name's ending says the format. Raises BadInput when it cannot be written."""
    counts = list(dict.fromkeys(line.workers for line in lines))
    names = list(dict.fromkeys(line.rule for line in lines))
    n_rows = -(-len(counts) // _A_ROW)
    with picture(file, 4.2 * min(len(counts), _A_ROW), 3.4 * n_rows) as figure:
        panels = figure.subplots(n_rows, min(len(counts), _A_ROW), sharey=True, squeeze=False).ravel()
        for panel, n in zip(panels, counts, strict=False):
            for line in (line for line in lines if line.workers == n):
                shown = [(done, loss) for _, done, loss in line.curve if math.isfinite(loss) and loss > 0]
                label = f"{line.rule}: diverged" if line.why else line.rule
                colour = _COLOURS[names.index(line.rule) % len(_COLOURS)]
                panel.plot(*zip(*shown, strict=True), color=colour, linewidth=1.4, label=label)
            panel.set_title(f"{n:,} workers", fontsize=10, color=INK)
            panel.set_yscale("log")
            panel.set_xlabel("micro-batches")
        plain(panels[: len(counts)], 8)
        for panel in panels[len(counts) :]:
            panel.set_visible(False)
        panels[0].set_ylabel("loss")
        figure.suptitle(title, fontsize=11, color=INK, parse_math=False)
