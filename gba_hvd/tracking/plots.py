"""The pictures a run ends with: learning curves, throughput with modes and changes marked, workers, rounds, delays.

Nothing is shown by colour alone: lines differ in their dashes too, modes stand by name in the picture, and kinds of
events have signs of their own. Lines have the colours of Okabe and Ito, which the colour-blind can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gba_hvd.extras import extra
from gba_hvd.mode_names import MODES
from gba_hvd.tracking import gauges
from gba_hvd.tracking.epochs import BEST
from gba_hvd.tracking.records import Point, Record
from gba_hvd.tracking.recovery_records import events_in_force, pointers

LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"  # before clipping, where it is asked for
THROUGHPUT = "train/samples_per_s"
WORKERS = "workers"
DENSE_LR = "dense_lr"  # parameter: at the start; metric: where a schedule moves it and the script does not log it
SCRIPT_LRS = ("lr", "learning_rate")  # metrics by which a script logs it
MODE = "mode"  # index into mode_names.MODES
_BLUE, _RED, _GREEN, _PURPLE, _ORANGE, _SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
_INK, _GRID, _PAPER = "#333333", "#dddddd", "#ffffff"
_COLOURS = (_BLUE, _RED, _GREEN, _PURPLE, _ORANGE, _SKY)
_DASHES = ("-", "--", "-.", ":")
_MARKED = {
    "worker_lost": (_RED, "x"), "rows_lost": (_RED, "v"), "switch_failed": (_RED, "s"), "membership": (_INK, "o"),
    "rows_restored": (_GREEN, "P"), "resumed": (_GREEN, "D"),
}  # fmt: skip
# The ground of each mode: on light paper, and on dark.
_SHADES = {
    "#dfe7ef": "#2a333d", "#cfe8d5": "#20402c", "#f6e3c5": "#4a3a1c", "#f3d0cb": "#4b2a26",
    "#e6d6ec": "#3d2b45", "#d3ebe7": "#20413c", "#d5dcf5": "#2b3355", "#ece8c4": "#42401f",
    "#f2d9e6": "#472a3a", "#dcecd0": "#30421f",
}  # fmt: skip
MODE_COLOURS = dict(zip(MODES, _SHADES, strict=True))
_OTHER_MODE = "#eeeeee"
# What each colour is on a dark ground; those that are not here stay.
DARK = _SHADES | {
    _INK: "#d5dce4", _GRID: "#36414d", _PAPER: "#1b222a", _BLUE: "#5fb0e6", _RED: "#ff8f45", _GREEN: "#35c79b",
    _PURPLE: "#e29ac3", _OTHER_MODE: "#333b44",
}  # fmt: skip
_LEAST_TO_CLIP = 20  # values
WIDE, NARROW = 9.0, 4.4  # inches: for a window, for a phone

History = Mapping[str, Sequence[Point]]


@dataclass(frozen=True)
class ModeSpan:
    """Steps (first, last] spent in one mode."""

    first: int
    last: int
    mode: str


def _is_quality(key: str) -> bool:
    return "auc" in key.lower() and not key.startswith(("system/", BEST))


def mode_spans(points: Sequence[Point], events: Sequence[Record]) -> list[ModeSpan]:
    """When the job was in which mode, from the points of the metric `mode` and the events of its switches.

    A point has the mode of the steps before it, an event the exact step of a change; an event that was lost with a
    worker is made up for by the points. Steps before the first launch in the events are not of this run.
    """
    reported = [(point.step, 0, MODES[int(point.value)]) for point in points if 0 <= point.value < len(MODES)]
    last = max((step for step, _, _ in reported), default=0)
    events = events_in_force(events)
    for event in events:
        if event.get("event") == "switch":
            reported.append((int(event.get("step", 0)), 1, str(event.get("data", {}).get("to"))))
            last = max(last, reported[-1][0])
    spans: list[ModeSpan] = []
    begun = min((int(event.get("step", 0)) for event in events if event.get("event") == "started"), default=0)
    mode, before = None, begun
    for step, is_change, now in sorted(reported):
        if mode is None and is_change:
            mode = next((str(e["data"].get("from")) for e in events if e.get("event") == "switch"), now)
        if mode is not None and now != mode:
            changed = step if is_change else before
            if changed > begun:
                spans.append(ModeSpan(begun, changed, mode))
            begun = changed
        mode, before = now, step
    if mode is not None and last > begun:
        spans.append(ModeSpan(begun, last, mode))
    return spans


@dataclass(frozen=True)
class _Sheet:
    """What a picture is drawn on."""

    title: str
    width: float = WIDE

    @property
    def is_narrow(self) -> bool:
        return self.width < WIDE


def draw_plots(
    history: History, events: Sequence[Record], title: str, folder: Path, form: str = "png", width: float = WIDE
) -> list[Path]:
    """Write the pictures there is something to show in, as `png` or `svg`. Needs matplotlib. width: in inches

    learning_curves, throughput; in runs that measured it also workers (their pace), vocabulary (of hashed tables),
    rounds of replicas, gain (predicted in mode "auto") and staleness
    """
    sheet = _Sheet(title, width)
    rounds, vocabularies = _recorded(history, _ROUNDS), _vocabularies(history)
    drawn: list[tuple[str, bool, Callable[[Path], Path]]] = [
        (
            "learning_curves",
            any((key == LOSS or _is_quality(key)) and points for key, points in history.items()),
            lambda file: _learning_curves(history, events, sheet, file),
        ),
        ("throughput", bool(history.get(THROUGHPUT)), lambda file: _throughput(history, events, sheet, file)),
        ("workers", bool(_paces(history)), lambda file: _workers(history, events, sheet, file)),
        ("rounds", bool(rounds), lambda file: _each(rounds, history, events, sheet, file)),
        ("gain", bool(history.get(gauges.GAIN)), lambda file: _gain(history, events, sheet, file)),
        ("vocabulary", bool(vocabularies), lambda file: _each(vocabularies, history, events, sheet, file)),
        (
            "staleness",
            bool(history.get(gauges.STALENESS_MEAN) or last_staleness(events)),
            lambda file: _staleness(history, events, sheet, file),
        ),
    ]
    return [draw(folder / f"{name}.{form}") for name, has_data, draw in drawn if has_data]


def last_staleness(events: Sequence[Record], key: str = "staleness") -> dict[int, int]:
    """The newest histogram of the whole job that an event carries: {steps: micro-batches}. key: or `lags`."""
    reported = [event["data"][key] for event in events if event.get("data", {}).get(key)]
    return gauges.whole_numbers(reported[-1]) if reported else {}


def _learning_curves(history: History, events: Sequence[Record], sheet: _Sheet, file: Path) -> Path:
    qualities = [key for key in history if _is_quality(key) and history[key]]
    figure, axes = _figure(sheet, rows=1 + bool(qualities and history.get(LOSS)))
    upper = axes[0]
    if history.get(LOSS):
        steps, values = _xy(history[LOSS])
        upper.plot(steps, values, color=_BLUE, alpha=0.3, linewidth=0.8)
        upper.plot(steps, _smooth(values), color=_BLUE, linewidth=1.6, label="smoothed")
        upper.set_ylabel("training loss")
    for number, key in enumerate(qualities, start=1):
        steps, values = _xy(history[key])
        axes[-1].plot(steps, values, marker="o", markersize=3.5, label=key, **_line(number))
        axes[-1].set_ylabel("AUC")
        axes[-1].ticklabel_format(axis="y", useOffset=False)
    _ground(axes, history, events, sheet)
    if qualities and axes[-1] is not upper:
        axes[-1].legend(loc="lower right", frameon=False, labelcolor=_INK, fontsize=9)
    return _save(figure, axes, file)


def _line(number: int) -> dict[str, Any]:
    """How the nth of several lines looks: no two have the same colour and dashes."""
    dashes = _DASHES[(number + number // len(_COLOURS)) % len(_DASHES)]
    return {"color": _COLOURS[number % len(_COLOURS)], "linestyle": dashes, "linewidth": 1.4}


def _throughput(history: History, events: Sequence[Record], sheet: _Sheet, file: Path) -> Path:
    workers = history.get(WORKERS)
    figure, axes = _figure(sheet, rows=1 + bool(workers))
    steps, values = _xy(history[THROUGHPUT])
    axes[0].plot(steps, values, color=_BLUE, linewidth=1.4)
    axes[0].set_ylabel("samples/s")
    axes[0].set_ylim(bottom=0)
    axes[0].yaxis.set_major_formatter("{x:,.0f}")
    if (top := ceiling(values)) is not None:
        axes[0].set_ylim(top=top)
        above = [(step, value) for step, value in zip(steps, values, strict=True) if value > top]
        axes[0].plot([step for step, _ in above], [top] * len(above), "^", color=_BLUE, markersize=5, clip_on=False)
        most = max(value for _, value in above)
        axes[0].set_ylabel(
            f"samples/s\n{len(above):,} {'values' if len(above) > 1 else 'value'} above, up to {most:,.0f}"
        )
    if workers:
        steps, counts = _xy(workers)
        axes[-1].step(steps, counts, where="post", color=_GREEN, linewidth=1.6)
        axes[-1].set_ylabel("workers")
        axes[-1].set_ylim(0, max(counts) + 1)
        axes[-1].yaxis.get_major_locator().set_params(integer=True)
    _ground(axes, history, events, sheet)
    return _save(figure, axes, file)


def _workers(history: History, events: Sequence[Record], sheet: _Sheet, file: Path) -> Path:
    figure, axes = _figure(sheet, rows=1)
    paces = _paces(history)
    for number, (rank, points) in enumerate(sorted(paces.items())):
        steps, values = _xy(points)
        axes[0].plot(steps, values, label=f"worker {rank}" if len(paces) <= 16 else None, **_line(number))
    axes[0].set_ylabel("ms per micro-batch")
    axes[0].set_ylim(bottom=0)
    _ground(axes, history, events, sheet)
    return _save(figure, axes, file)


def _each(panels: Sequence[_Panel], history: History, events: Sequence[Record], sheet: _Sheet, file: Path) -> Path:
    figure, axes = _figure(sheet, rows=len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        _over_time(axis, panel, history)
    _ground(axes, history, events, sheet)
    return _save(figure, axes, file)


def _gain(history: History, events: Sequence[Record], sheet: _Sheet, file: Path) -> Path:
    names = {gauge: gauge.removeprefix(gauges.PREFIX).split("_")[0] for gauge in gauges.RATES.values()}
    rates = _recorded(history, [_Panel("samples/s, as decided by", names, form="{x:,.0f}")])
    figure, axes = _figure(sheet, rows=1 + len(rates))
    _over_time(axes[0], _Panel("gba over allreduce", {gauges.GAIN: None}, form="{x:,.2f}"), history)
    axes[0].axhline(1.0, color=_INK, linewidth=0.8)
    for axis, panel in zip(axes[1:], rates, strict=True):
        _over_time(axis, panel, history)
    _ground(axes, history, events, sheet)
    return _save(figure, axes, file)


def _staleness(history: History, events: Sequence[Record], sheet: _Sheet, file: Path) -> Path:
    histogram, panels = last_staleness(events), _recorded(history, [*_DELAYS, *_gaps(history)])
    figure, axes = _figure(sheet, rows=len(panels) + bool(histogram), shared=False)
    for axis, panel in zip(axes, panels, strict=False):
        _over_time(axis, panel, history)
        _shade_modes([axis], history, events)
        _legend_above(axis, sheet)
        axis.set_xlabel("global step")
    if histogram:
        total = sum(histogram.values())
        bars = axes[-1].bar(list(histogram), [100 * n / total for n in histogram.values()], color=_BLUE)
        axes[-1].bar_label(bars, labels=[f"{n:,}" for n in histogram.values()], fontsize=8, color=_INK)
        axes[-1].set_ylabel("% of micro-batches")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return _save(figure, axes, file, "staleness of a micro-batch (steps)" if histogram else "global step")


@dataclass(frozen=True)
class _Panel:
    label: str
    lines: Mapping[str, str | None]  # gauge: what the legend calls it
    counts: bool = False  # so far in the job
    form: str = "{x:,.1f}"  # of what does not count


_DELAYS = (
    _Panel("staleness (steps)", {gauges.STALENESS_MEAN: "mean", gauges.STALENESS_MAX: "largest"}),
    _Panel("age of dense values (steps)", {gauges.DENSE_AGE_MEAN: "mean", gauges.DENSE_AGE_MAX: "largest"}),
    _Panel("samples so far", {gauges.DROPPED: "dropped", gauges.LOST: "lost"}, counts=True),
    _Panel("micro-batches so far", {gauges.REFUSED: "refused", gauges.REISSUED: "handed out again"}, counts=True),
    _Panel("samples at once (ELP)", {gauges.ELP: None}, counts=True),
)
_ROUNDS = (
    _Panel("rounds/s", {gauges.ROUNDS["rounds_per_s"]: None}),
    _Panel("local steps a round", {gauges.ROUNDS["steps_per_round"]: None}),
    _Panel("spread of replicas", {gauges.ROUNDS["spread"]: None}, form="{x:.1e}"),
    _Panel("rounds dropped so far", {gauges.ROUNDS["rounds_dropped"]: None}, counts=True),
)


def _gaps(history: History) -> list[_Panel]:
    """A line for each worker; no legend names more than 16."""
    panels = []
    kinds = ((gauges.GAP, "gap", "{x:.1e}"), (gauges.GAP_IN_STEPS, "gap (usual steps)", "{x:,.1f}"))
    for kind, label, form in kinds:
        ranks = sorted(rank for key in history if (rank := gauges.rank_of(key, kind)) is not None)
        names = {f"{kind}{rank}": f"worker {rank}" if len(ranks) <= 16 else None for rank in ranks}
        panels.append(_Panel(label, names, form=form))
    return panels


def _vocabularies(history: History) -> list[_Panel]:
    """A line for each hashed table."""
    kinds = (
        ("size", "ids with a row", True), ("missed_share", "share of lookups without a row", False),
        ("evicted", "evicted so far", True), ("no_room", "found no room so far", True),
    )  # fmt: skip
    panels = []
    for kind, label, counts in kinds:
        keys = sorted(key for key in history if key.startswith(gauges.VOCABULARY) and key.endswith(f"/{kind}"))
        lines = {key: key.removeprefix(gauges.VOCABULARY).removesuffix(f"/{kind}") for key in keys}
        panels.append(_Panel(label, lines, counts, "{x:.2f}"))
    return _recorded(history, panels)


def _recorded(history: History, panels: Sequence[_Panel]) -> list[_Panel]:
    return [panel for panel in panels if any(_is_recorded(history, key) for key in panel.lines)]


def _over_time(axis: Any, panel: _Panel, history: History) -> None:
    for number, (key, label) in enumerate(panel.lines.items()):
        if _is_recorded(history, key):
            steps, values = _xy(history[key])
            drawstyle = "steps-post" if panel.counts else "default"
            axis.plot(steps, values, label=label, drawstyle=drawstyle, **_line(number))
    axis.set_ylabel(panel.label)
    axis.set_ylim(bottom=0)
    axis.yaxis.get_major_locator().set_params(integer=panel.counts)
    axis.yaxis.set_major_formatter("{x:,.0f}" if panel.counts else panel.form)


def _is_recorded(history: History, key: str) -> bool:
    return any(point.value for point in history.get(key, ()))


def _paces(history: History) -> dict[int, Sequence[Point]]:
    ranked = {gauges.rank_of(key): points for key, points in history.items() if points}
    return {rank: points for rank, points in ranked.items() if rank is not None}


def shaded(history: History, events: Sequence[Record]) -> bool:
    """Whether modes are drawn as colours of the ground: when there was more than allreduce."""
    return any(span.mode != "allreduce" for span in mode_spans(history.get(MODE, ()), events))


def marked(events: Sequence[Record]) -> bool:
    """Whether events are drawn as lines."""
    return any(str(event.get("event")) in _MARKED for event in events)


def _ground(axes: Sequence[Any], history: History, events: Sequence[Record], sheet: _Sheet) -> None:
    """Modes, events and checkpoints behind the curves, and a legend of all."""
    _shade_modes(axes, history, events)
    _mark_events(axes, events)
    _mark_checkpoints(axes[0], events)
    _legend_above(axes[0], sheet)


def _shade_modes(axes: Sequence[Any], history: History, events: Sequence[Record]) -> None:
    """Colour the ground by mode, when there was more than allreduce; the names are in the first picture."""
    spans = mode_spans(history.get(MODE, ()), events)
    if not shaded(history, events):
        return
    whole = spans[-1].last - spans[0].first
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(low, high + 0.1 * (high - low))  # room for the names
    for span in spans:
        colour = MODE_COLOURS.get(span.mode, _OTHER_MODE)
        for axis in axes:
            axis.axvspan(span.first, span.last, color=colour, alpha=0.8, linewidth=0, zorder=0)
        share = (span.last - span.first) / whole
        axes[0].text(
            (span.first + span.last) / 2, 0.98, span.mode, transform=axes[0].get_xaxis_transform(), ha="center",
            va="top", fontsize=8, color=_INK, rotation=90 if share < 0.015 * len(span.mode) else 0, clip_on=True,
        )  # fmt: skip


def _mark_events(axes: Sequence[Any], events: Sequence[Record]) -> None:
    """A line at each step with events, and on it a sign for each kind."""
    kinds: dict[int, list[str]] = {}
    for event in events:
        if (kind := str(event.get("event"))) in _MARKED:
            kinds.setdefault(int(event.get("step", 0)), []).append(kind)
    for step in kinds:
        for axis in axes:
            axis.axvline(step, color=_INK, linestyle="--", linewidth=0.9)
    for kind, (colour, sign) in _MARKED.items():
        at = [
            (step, 0.88 - 0.08 * list(dict.fromkeys(some)).index(kind)) for step, some in kinds.items() if kind in some
        ]
        if at:
            steps, heights = zip(*at, strict=True)
            axes[0].plot(
                steps, heights, transform=axes[0].get_xaxis_transform(), marker=sign, markersize=6, color=colour,
                linestyle="", label=kind.replace("_", " "),
            )  # fmt: skip


def _mark_checkpoints(axis: Any, events: Sequence[Record]) -> None:
    """A triangle at each saved step, at the lower edge."""
    steps = sorted({one["step"] for one in pointers(events)})
    if steps:
        axis.plot(
            steps, [0.0] * len(steps), transform=axis.get_xaxis_transform(), marker="^", markersize=5, color=_INK,
            linestyle="", clip_on=False, label="checkpoint",
        )  # fmt: skip


def _legend_above(axis: Any, sheet: _Sheet) -> None:
    """Over the picture, where it hides no curve."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        axis.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0, 1),
            ncols=min(2 if sheet.is_narrow else 8, len(labels)), frameon=False, fontsize=9, labelcolor=_INK,
            borderaxespad=0.2, columnspacing=1.4, handlelength=2.6,
        )  # fmt: skip


def _figure(sheet: _Sheet, rows: int, shared: bool = True) -> tuple[Any, list[Any]]:
    with extra("plots", "matplotlib", "plots need"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(sheet.width, 0.9 + 2.5 * rows), layout="constrained", facecolor=_PAPER)
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, 1, sharex=shared, squeeze=False)[:, 0])
    if sheet.title:
        figure.suptitle(sheet.title, fontsize=11, color=_INK, parse_math=False)  # a name may have a $
    return figure, axes


def _save(figure: Any, axes: list[Any], file: Path, across: str = "global step") -> Path:
    for axis in axes:
        axis.set_facecolor("none")
        axis.grid(color=_GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["bottom", "left"]].set_color(_INK)
        axis.tick_params(colors=_INK)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.label.set_color(_INK)
        axis.margins(x=0.01)
    axes[-1].set_xlabel(across, color=_INK)
    figure.savefig(file, dpi=130)
    return file


def _xy(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    """Steps and values, at most about 4,000 of them: more than a picture can show."""
    thin = points[:: max(1, len(points) // 4000)]
    return [point.step for point in thin], [point.value for point in thin]


def ceiling(values: Sequence[float]) -> float | None:
    """Where a picture of these ends, so that a few odd ones do not flatten the others; None: it shows all."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < _LEAST_TO_CLIP:
        return None
    usual = finite[int(0.98 * (len(finite) - 1))]
    return 1.3 * usual if finite[-1] > 2 * usual > 0 else None


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean over about a twentieth of the curve around each value; what is not finite is left out."""
    reach = max(1, len(values) // 40)
    smooth = []
    for i in range(len(values)):
        near = [value for value in values[max(0, i - reach) : i + reach + 1] if math.isfinite(value)]
        smooth.append(sum(near) / len(near) if near else math.nan)
    return smooth
