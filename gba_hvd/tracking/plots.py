"""The pictures a run ends with: learning curves, and throughput with every change of membership marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gba_hvd.tracking.records import Point, Record

LOSS = "train/loss"
THROUGHPUT = "train/samples_per_s"
WORKERS = "workers"
_MARKED = {"membership": "#8a6d3b", "worker_lost": "#c0392b", "rows_lost": "#c0392b", "mode": "#2c6fbb"}
_INK, _GRID = "#333333", "#dddddd"
_COLOURS = ("#2c6fbb", "#d1761c", "#2f8f5b", "#8e44ad")

History = Mapping[str, Sequence[Point]]


def is_plotted(key: str) -> bool:
    return key in (LOSS, THROUGHPUT, WORKERS) or _is_quality(key)


def _is_quality(key: str) -> bool:
    return "auc" in key.lower() and not key.startswith("system/")


def draw_plots(history: History, events: Sequence[Record], title: str, folder: Path) -> list[Path]:
    """Write `learning_curves.png` and `throughput.png` as far as there is something to show. Needs matplotlib."""
    files = []
    if history.get(LOSS) or any(_is_quality(key) and points for key, points in history.items()):
        files.append(_learning_curves(history, title, folder / "learning_curves.png"))
    if history.get(THROUGHPUT):
        files.append(_throughput(history, events, title, folder / "throughput.png"))
    return files


def _learning_curves(history: History, title: str, file: Path) -> Path:
    qualities = [key for key in history if _is_quality(key) and history[key]]
    figure, axes = _figure(title, rows=1 + bool(qualities and history.get(LOSS)))
    upper = axes[0]
    if history.get(LOSS):
        steps, values = _xy(history[LOSS])
        upper.plot(steps, values, color=_COLOURS[0], alpha=0.3, linewidth=0.8)
        upper.plot(steps, _smooth(values), color=_COLOURS[0], linewidth=1.6, label="smoothed")
        upper.set_ylabel("training loss")
    for key, colour in zip(qualities, _COLOURS[1:] * len(qualities), strict=False):
        steps, values = _xy(history[key])
        axes[-1].plot(steps, values, color=colour, marker="o", markersize=3.5, linewidth=1.4, label=key)
        axes[-1].set_ylabel("AUC")
    if qualities:
        axes[-1].legend(loc="lower right", frameon=False)
    return _save(figure, axes, file)


def _throughput(history: History, events: Sequence[Record], title: str, file: Path) -> Path:
    workers = history.get(WORKERS)
    figure, axes = _figure(title, rows=1 + bool(workers))
    steps, values = _xy(history[THROUGHPUT])
    axes[0].plot(steps, values, color=_COLOURS[0], linewidth=1.4)
    axes[0].set_ylabel("samples/s")
    axes[0].set_ylim(bottom=0)
    axes[0].yaxis.set_major_formatter("{x:,.0f}")
    if workers:
        steps, counts = _xy(workers)
        axes[-1].step(steps, counts, where="post", color=_COLOURS[2], linewidth=1.6)
        axes[-1].set_ylabel("workers")
        axes[-1].set_ylim(0, max(counts) + 1)
        axes[-1].yaxis.get_major_locator().set_params(integer=True)
    named: set[str] = set()
    for event in events:
        kind = str(event.get("event"))
        if kind in _MARKED:
            for axis in axes:
                label = kind.replace("_", " ") if axis is axes[0] and kind not in named else None
                axis.axvline(event.get("step", 0), color=_MARKED[kind], linestyle="--", linewidth=1.1, label=label)
            named.add(kind)
    if named:
        axes[0].legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none")
    return _save(figure, axes, file)


def _figure(title: str, rows: int) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6 + 2.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    figure.suptitle(title, fontsize=11, color=_INK)
    return figure, axes


def _save(figure: Any, axes: list[Any], file: Path) -> Path:
    for axis in axes:
        axis.grid(color=_GRID, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.label.set_color(_INK)
    axes[-1].set_xlabel("global step")
    figure.savefig(file, dpi=130)
    return file


def _xy(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    """Steps and values, at most about 4,000 of them: more than a picture can show."""
    thin = points[:: max(1, len(points) // 4000)]
    return [point.step for point in thin], [point.value for point in thin]


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean over about a twentieth of the curve around each value; what is not finite is left out."""
    reach = max(1, len(values) // 40)
    smooth = []
    for i in range(len(values)):
        near = [value for value in values[max(0, i - reach) : i + reach + 1] if math.isfinite(value)]
        smooth.append(sum(near) / len(near) if near else math.nan)
    return smooth
