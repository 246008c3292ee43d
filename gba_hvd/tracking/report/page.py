"""The report as HTML: from a story to one page with pictures, styles and tables inside, no scripts.

Which facts and tables there are is decided here; how they look, in `templates/`. Nothing of a story is trusted: Jinja2
escapes every text. A section with nothing to show is left out. Tables that most readers do not need are folded.
"""

from __future__ import annotations

import base64
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gba_hvd.tracking.gauges import dropped_words
from gba_hvd.tracking.plots import DARK, MODE_COLOURS, NARROW, WIDE, draw_plots, marked, shaded
from gba_hvd.tracking.records import flatten
from gba_hvd.tracking.report import glossary, next_steps, overview, timeline, traffic
from gba_hvd.tracking.report.tables import Cell, Table, breakable, date, table
from gba_hvd.tracking.run_history import asynchronous_modes, by_mode
from recovery.printable import printable

if TYPE_CHECKING:
    from gba_hvd.tracking.run_history import RunHistory

_PICTURES = {
    "learning_curves": "Learning curves",
    "throughput": "Throughput and workers",
    "workers": "Pace of every worker: lower is faster",
    "vocabulary": "Ids that hashed tables have rows for, on the chief's host",
    "rounds": "Rounds that keep the replicas of the dense parameters together, as rank 0 saw them",
    "gain": "How many times as fast as allreduce gba is: measured for the mode at hand, else predicted",
    "staleness": "Staleness, and what it cost",
}
_WITHOUT_EVENTS = ("staleness",)  # pictures in which no events are drawn
_STATUS = {"FINISHED": "good", "RUNNING": "busy", "not ended": "busy"}
_MANY = 100  # values of a description


def page(story: RunHistory) -> str:
    """The whole document."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined,
        finalize=_shown, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    templates.filters["breakable"] = breakable
    facts = {
        "What trained": overview.what_trained(story),
        "How well": overview.how_well(story),
        "What went wrong": overview.what_went_wrong(story),
        "What it cost": overview.cost(story),
    }
    first = [overview.warnings(story), timeline.recoveries(story), timeline.switches(story), overview.epochs(story)]
    folded = [
        _modes(story), timeline.decisions(story), _staleness(story), _dense_ages(story), _gaps(story), _account(story),
        traffic.bytes_of_modes(story), traffic.density(story), traffic.decisions(story), timeline.checkpoints(story),
        timeline.events(story), _data(story), _parameters(story),
    ]  # fmt: skip
    return templates.get_template("report.html").render(
        story=story,
        status_kind=_STATUS.get(story.status, "bad"),
        headline=overview.headline(story),
        times=_times(story),
        overview=facts,
        next_steps=next_steps.next_steps(story),
        first=[one for one in first if one is not None],
        pictures=_pictures(story),
        folded=[one for one in folded if one is not None],
        words=glossary.words_of(story),
        written=date(time.time() * 1000),
    )


def _shown(value: object) -> object:
    """What a template writes; what it has escaped already is of a type of its own."""
    return printable(value) if type(value) is str else value


def _times(story: RunHistory) -> list[str]:
    facts = [f"job {story.job_id}"] if story.job_id else []
    if story.started_ms is not None:
        facts.append(f"started {date(story.started_ms)}")
        if took := overview.time_of(story):
            facts.append(f"took {took}")
    return facts


def _pictures(story: RunHistory) -> list[dict[str, str]]:
    """Each for a window and for a phone, with its caption, which explains grounds and lines where there are any."""
    drawn: dict[str, dict[str, str]] = {}
    for size, width in (("wide", WIDE), ("narrow", NARROW)):
        with tempfile.TemporaryDirectory(prefix="gba-hvd-") as folder:
            for file in draw_plots(story.history, story.events, "", Path(folder), form="svg", width=width):
                svg = _light_and_dark(file.read_text())
                drawn.setdefault(file.stem, {})[size] = base64.b64encode(svg.encode()).decode()
    extra = [" The ground shows the mode."] if shaded(story.history, story.events) else []
    lines = [" Upright lines show what happened."] if marked(story.events) else []
    return [
        {"title": title, "caption": f"{title}.{''.join(extra + lines * (name not in _WITHOUT_EVENTS))}", **drawn[name]}
        for name, title in _PICTURES.items()
        if name in drawn
    ]


def _light_and_dark(svg: str) -> str:
    """A picture whose colours follow the reader's setting, `prefers-color-scheme`."""
    names = {colour: f"--c{number}" for number, colour in enumerate(DARK)}
    for colour, name in names.items():
        svg = svg.replace(colour, f"var({name})")
    light = "".join(f"{name}:{colour};" for colour, name in names.items())
    dark = "".join(f"{name}:{DARK[colour]};" for colour, name in names.items())
    style = f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    head, defs, rest = svg.partition("<defs>")
    return f"{head}{style}{defs}{rest}"


def _modes(story: RunHistory) -> Table | None:
    modes = by_mode(story)
    if len(modes) < 2:
        return None
    total = sum(one.steps for one in modes)
    rows = [
        [Cell(one.mode, colour=MODE_COLOURS.get(one.mode, "#eeeeee")), f"{one.steps:,}", f"{one.steps / total:.1%}",
         str(one.visits), "-" if one.samples_per_s is None else f"{one.samples_per_s:,.0f}"]
        for one in modes
    ]  # fmt: skip
    note = "samples/s: without the pauses after losses of workers and for workers that came."
    columns = ["mode", "steps", "share of steps", "times entered", "samples/s"]
    return table("Time in each mode", columns, rows, "lrrrr", note=note)


def _account(story: RunHistory) -> Table | None:
    account = story.account
    if not account:
        return None
    total = max(1, account["total"])
    words = {
        "applied": "part of an optimizer step",
        "dropped": dropped_words(story.dropped_for) or "left out on purpose",
        "lost": "gone with a failure",
        "total": "every sample of the epochs that were trained",
    }
    rows = [[name, f"{account[name]:,}", f"{account[name] / total:.2%}", text] for name, text in words.items()]
    return table("Where every sample went", ["", "samples", "share", ""], rows, "lrrl")


def _staleness(story: RunHistory) -> Table | None:
    return _histogram("Staleness", story.staleness, _of_several_modes(story))


def _dense_ages(story: RunHistory) -> Table | None:
    return _histogram(
        "Age of the dense values that gradients were computed with", story.dense_ages, _of_several_modes(story)
    )


def _of_several_modes(story: RunHistory) -> str:
    """What a reader of a histogram over the whole job is to know of it; empty where one mode made it."""
    modes = asynchronous_modes(story)
    if len(modes) < 2:
        return ""
    return (
        f"Of {', '.join(modes)} together, which are not recorded apart. A step differs between them: in gba and bsp "
        "it is a global batch, in the others one push, or one of each worker."
    )


def _gaps(story: RunHistory) -> Table | None:
    """How far the dense values have moved since gradients were computed: `gba_hvd.ps.partition.gaps`."""
    rows = [
        [f"{rank}", f"{gap.pushes:,}", f"{gap.mean:.3g}", f"{gap.mean_in_steps:.2f}"]
        for rank, gap in story.gaps.items()
    ]
    return table("Gap by worker", ["worker", "gradients", "mean gap (RMS)", "mean gap in usual steps"], rows, "rrrr")


def _histogram(title: str, histogram: Mapping[int, int], note: str = "") -> Table | None:
    total, most = sum(histogram.values()), max(histogram.values(), default=1)
    rows = [
        [f"{steps}", f"{n:,}", f"{n / total:.2%}", Cell(bar=round(100 * n / most, 1))] for steps, n in histogram.items()
    ]
    return table(title, ["steps", "micro-batches", "share", ""], rows, "rrrl", note=note)


def _parameters(story: RunHistory) -> Table | None:
    if not story.first_params:
        return table("Parameters", ["name", "value"], sorted(story.params.items()), "ll")
    names = sorted({*story.params, *story.first_params})
    rows = [[name, story.params.get(name, "not set any more"), story.first_params.get(name, "")] for name in names]
    marked = [i for i, (name, *_) in enumerate(rows) if name in story.first_params]
    note = "The job was launched again with other settings, which are marked."
    return table("Parameters", ["name", "value", "at the first launch"], rows, "lll", marked, note)


def _data(story: RunHistory) -> Table | None:
    """The job's description of its data."""
    values = list(flatten(story.data).items())
    rows = [[name, value] for name, value in values[:_MANY]]
    if len(values) > _MANY:
        rows.append([f"... and {len(values) - _MANY:,} more", ""])
    return table("Data", ["name", "value"], rows, "ll")
