"""The page that `gba-hvd report` writes: from a story to HTML with pictures, styles and tables inside, no scripts.

Nothing of a story is trusted: every text is escaped. A section with nothing to say is left out.
"""

from __future__ import annotations

import base64
import math
import tempfile
import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from gba_hvd.tracking.gauges import mean_staleness
from gba_hvd.tracking.plots import MODE_COLOURS, THROUGHPUT, WORKERS, draw_plots
from gba_hvd.tracking.story import by_mode

from . import report_bytes, report_timeline
from .report_tables import Html, date, duration, section

if TYPE_CHECKING:
    from gba_hvd.tracking.story import Story

_CAPTIONS = {
    "throughput": "Throughput and workers. The ground shows the mode, dashed lines what happened.",
    "learning_curves": "Learning curves.",
    "workers": "Pace of every worker: lower is faster.",
    "rounds": "Rounds that keep the replicas of the dense parameters together, as rank 0 saw them.",
    "staleness": "Staleness, and what it cost.",
}


def page(story: Story) -> str:
    """The whole document."""
    pictures = _pictures(story)
    parts = [
        _head(story),
        _tiles(story),
        pictures.get("throughput"),
        report_timeline.switches(story),
        _modes(story),
        pictures.get("learning_curves"),
        pictures.get("workers"),
        pictures.get("rounds"),
        pictures.get("staleness"),
        _staleness(story),
        _account(story),
        report_bytes.bytes_of_modes(story),
        report_bytes.density(story),
        report_bytes.decisions(story),
        report_timeline.recoveries(story),
        report_timeline.checkpoints(story),
        report_timeline.events(story),
        _parameters(story),
        f"<footer>{escape(story.source)} &middot; written {date(time.time() * 1000)} by gba-hvd report</footer>",
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n<title>{escape(story.title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style></head>\n'
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


# --- parts -----------------------------------------------------------------------------------------------------------


def _head(story: Story) -> str:
    facts = [f"job {story.job_id}"] if story.job_id else []
    if story.started_ms is not None:
        facts.append(f"started {date(story.started_ms)}")
        if story.ended_ms is not None:
            facts.append(f"took {duration((story.ended_ms - story.started_ms) / 1000)}")
    kind = {"FINISHED": "good", "RUNNING": "busy"}.get(story.status, "bad")
    reason = f'<p class="reason">{escape(story.reason)}</p>' if story.reason else ""
    return (
        f'<header><h1>{escape(story.title)} <span class="badge {kind}">{escape(story.status.lower())}</span></h1>'
        f"<p>{escape(' · '.join(facts))}</p>{reason}</header>"
    )


def _tiles(story: Story) -> str:
    account, staleness = story.account, story.staleness
    tiles: list[tuple[str, str]] = [("global steps", f"{story.n_steps:,}")]
    rates = [point.value for point in story.history.get(THROUGHPUT, ()) if math.isfinite(point.value)]
    if rates:
        tiles.append(("samples/s, median", f"{sorted(rates)[len(rates) // 2]:,.0f}"))
    qualities = [key for key in story.history if "auc" in key.lower() and not key.startswith("system/")]
    for key in qualities[:2]:
        best = max(point.value for point in story.history[key])
        tiles.append((f"{key}, best", f"{best:.4f}"))
    workers = [point.value for point in story.history.get(WORKERS, ())]
    if workers:
        low, high = min(workers), max(workers)
        tiles.append(("workers", f"{high:.0f}" if low == high else f"{low:.0f} to {high:.0f}"))
    if story.spans and (story.events_of("switch") or story.spans[-1].mode != "allreduce"):
        tiles.append(("switches of mode", str(len(story.events_of("switch")))))
    if account:
        share = account["dropped"] / max(1, account["total"])
        tiles.append(("samples dropped", f"{share:.2%}" if account["dropped"] else "none"))
        tiles.append(("samples lost", f"{account['lost']:,}" if account["lost"] else "none"))
    if story.checkpoints:
        tiles.append(("checkpoints", f"{len(story.checkpoints):,}"))
    if story.recoveries:
        tiles.append(("recoveries", f"{len(story.recoveries):,}"))
    if staleness:
        tiles.append(("staleness, mean", f"{mean_staleness(staleness):.2f}"))
    return '<section class="tiles">' + "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles
    ) + "</section>"  # fmt: skip


def _pictures(story: Story) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="gba-hvd-") as folder:
        files = draw_plots(story.history, story.events, "", Path(folder), form="svg")
        drawn = {file.stem: base64.b64encode(file.read_bytes()).decode() for file in files}
    return {
        name: f'<figure><img alt="{escape(_CAPTIONS[name])}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(_CAPTIONS[name])}</figcaption></figure>"
        for name, data in drawn.items()
    }


def _modes(story: Story) -> str:
    modes = by_mode(story)
    if len(modes) < 2:
        return ""
    total = sum(one.steps for one in modes)
    rows = [
        [Html(f'<i style="background:{MODE_COLOURS.get(one.mode, "#eee")}"></i> {escape(one.mode)}'),
         f"{one.steps:,}", f"{one.steps / total:.1%}", str(one.visits),
         "-" if one.samples_per_s is None else f"{one.samples_per_s:,.0f}"]
        for one in modes
    ]  # fmt: skip
    return section("Time in each mode", ["mode", "steps", "share", "times entered", "samples/s"], rows, "lrrrr")


def _account(story: Story) -> str:
    account = story.account
    if not account:
        return ""
    total = max(1, account["total"])
    words = {
        "applied": "part of an optimizer step",
        "dropped": "too stale when they arrived, left out on purpose",
        "lost": "gone with a failure",
        "total": "every sample of the epochs that were trained",
    }
    rows = [[name, f"{account[name]:,}", f"{account[name] / total:.2%}", text] for name, text in words.items()]
    return section("Where every sample went", ["", "samples", "share", ""], rows, "lrrl")


def _staleness(story: Story) -> str:
    histogram = story.staleness
    if not histogram:
        return ""
    total, most = sum(histogram.values()), max(histogram.values())
    rows: list[list[str]] = [
        [f"{steps}", f"{n:,}", f"{n / total:.2%}", Html(f'<u style="width:{100 * n / most:.1f}%"></u>')]
        for steps, n in histogram.items()
    ]
    return section("Staleness", ["steps", "micro-batches", "share", ""], rows, "rrrl")


def _parameters(story: Story) -> str:
    rows = [[key, value] for key, value in sorted(story.params.items())]
    return section("Parameters", ["name", "value"], rows, "ll")


_STYLE = """
:root { color-scheme: light; --ink: #222b36; --soft: #6b7785; --line: #e3e8ee; --blue: #2c6fbb; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 32px 20px 48px; }
header p { margin: 2px 0; color: var(--soft); }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 8px; }
.badge { font-size: 13px; font-weight: 600; padding: 2px 10px; border-radius: 10px; vertical-align: 4px; }
.good { background: #d9f0e0; color: #1d6b3a; } .busy { background: #dbe8f7; color: #1f5592; }
.bad { background: #f8dcd8; color: #9b2c1f; }
header .reason { color: #9b2c1f; overflow-wrap: anywhere; }
section, figure { background: #fff; border: 1px solid var(--line); border-radius: 8px; margin: 18px 0 0;
  padding: 16px 18px; overflow-x: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 14px 10px; }
.tiles b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; line-height: 1.3; }
.tiles span { color: var(--soft); font-size: 13px; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: 13px; margin-top: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 13px; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; width: 1%; padding-left: 12px; }
td i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; border: 1px solid #c4ccd5;
  vertical-align: -1px; margin-right: 4px; }
td u { display: block; height: 12px; margin-top: 5px; background: var(--blue); border-radius: 2px; min-width: 1px; }
footer { color: var(--soft); font-size: 12px; margin-top: 22px; overflow-wrap: anywhere; }
@media print { body { background: #fff; } section, figure { break-inside: avoid; } }
"""
