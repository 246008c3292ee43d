"""The first part of the page that `gba-hvd report` writes: what trained, how well, what happened, what it cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gba_hvd.tracking import traffic_summary
from gba_hvd.tracking.epochs import chooser
from gba_hvd.tracking.gauges import ELP, mean_staleness
from gba_hvd.tracking.open_warnings import over_since
from gba_hvd.tracking.plots import THROUGHPUT, WORKERS

from .tables import Table, duration, size, table

if TYPE_CHECKING:
    from gba_hvd.tracking.records import Record
    from gba_hvd.tracking.run_history import RunHistory

# What a job may call them; the first that is there counts.
_MODEL = ("model.kind", "model.name", "model", "model_name", "architecture")
_DATA = ("data.dir", "data.preset", "data.name", "data", "dataset", "dataset.name")
_MORE = {
    "widths": ("model.hidden", "hidden"), "dropout": ("model.dropout", "dropout"),
    "embedding columns": ("embedding.dim",), "rows": ("row_optimizer", "embedding.optimizer"),
    "dense learning rate": ("dense.lr", "dense_lr", "lr", "learning_rate"), "global batch": ("global_batch",),
    "micro-batch": ("micro_batch",), "mode": ("mode",), "seed": ("seed",),
}  # fmt: skip
_FAILURES = (
    "worker_lost", "rows_lost", "rows_restored", "resumed", "membership", "switch_failed", "checkpoint_failed",
    "failed", "refused", "shard_steps_missed", "residual_lost",
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    name: str
    value: str
    kind: str = ""  # "bad" stands out


def what_trained(story: RunHistory) -> list[Fact]:
    facts = [Fact("name", story.title), Fact("model", _param(story, _MODEL)), Fact("data", _param(story, _DATA))]
    facts += [Fact(name, _param(story, keys)) for name, keys in _MORE.items()]
    workers = [point.value for point in story.history.get(WORKERS, ())]
    if workers:
        low, high = min(workers), max(workers)
        facts.append(Fact("workers", f"{high:.0f}" if low == high else f"{low:.0f} to {high:.0f}"))
    return [fact for fact in facts if fact.value]


def how_well(story: RunHistory) -> list[Fact]:
    best = story.best
    if best is None:
        return [Fact("best epoch", "not known: no metric of a validation set was reported")]
    by = chooser(best.values)
    assert by is not None
    first = [by[0], *(name for name in sorted(best.values, key=_test_first) if name != by[0])]
    return [Fact("best epoch", f"{best.name}, by {by[0]}"), *(Fact(name, f"{best.values[name]:.5f}") for name in first)]


def _test_first(name: str) -> tuple[bool, str]:
    return not name.startswith("test"), name


def epochs(story: RunHistory) -> Table | None:
    """A row for each step at which quality was measured; metrics of one step stand together."""
    measured, best = story.measured, story.best
    names = list(dict.fromkeys(name for one in measured for name in one.values))
    times = story.epoch_seconds
    rows = [
        [
            one.name if one.epoch is not None else "-",
            f"{one.step:,}",
            duration(times[one.step]) if one.step in times else "-",
            *(f"{one.values[name]:.5f}" if name in one.values else "-" for name in names),
        ]
        for one in measured
    ]
    marked = [i for i, one in enumerate(measured) if best is not None and one.step == best.step]
    note = "The best epoch by validation is marked; its test figures are the ones to quote." if marked else ""
    return table("Epochs", ["epoch", "step", "time", *names], rows, "lrr" + "r" * len(names), marked, note)


def warnings(story: RunHistory) -> Table | None:
    rows = [
        [
            f"{event.get('step', 0):,}", str(event.get("event", "")).replace("_", " "),
            "" if over is None else f"since step {over:,}", str(event.get("message", "")),
        ]
        for event, over in zip(story.events, over_since(story.events), strict=True)
        if event.get("level") == "warning"
    ]  # fmt: skip
    return table("Warnings", ["step", "kind", "over", "what did not happen, why, and what to do"], rows, "rlll")


def _warnings(story: RunHistory) -> list[Record]:
    return [event for event in story.events if event.get("level") == "warning"]


def what_happened(story: RunHistory) -> list[Fact]:
    """Counts; the sentences are in the tables below."""
    n_warnings, n_switches = len(_warnings(story)), len(story.events_of("switch"))
    failures = [event for event in story.events_of(*_FAILURES) if event.get("level") != "warning"]
    n_over = sum(over is not None for over in over_since(story.events))
    words = f"{n_warnings:,}" + (f", {n_over:,} of them over" if n_over else "") if n_warnings else "none"
    facts = [Fact("warnings", words, "bad" if n_warnings > n_over else "")]
    facts += [Fact("end", str(event.get("message", ""))) for event in story.events_of("stopped_early")]
    facts.append(Fact("switches of mode", f"{n_switches:,}" if n_switches else "none"))
    for event in story.events_of("mode_missed"):
        facts.append(Fact("mode", str(event.get("message", "")).partition(". ")[0], "bad"))
    kinds = [str(event["event"]).replace("_", " ") for event in failures]
    words = ", ".join(f"{kind} x {kinds.count(kind)}" for kind in dict.fromkeys(kinds)) or "none"
    facts.append(Fact("failures, changes of workers", words))
    if story.checkpoints:
        facts.append(Fact("checkpoints", f"{len(story.checkpoints):,}"))
    if story.staleness:
        facts.append(Fact("staleness, mean", f"{mean_staleness(story.staleness):.2f} steps"))
    return facts


def cost(story: RunHistory) -> list[Fact]:
    facts = []
    if story.started_ms is not None and story.ended_ms is not None:
        facts.append(Fact("time", duration((story.ended_ms - story.started_ms) / 1000)))
    facts.append(Fact("global steps", f"{story.n_steps:,}"))
    if times := list(story.epoch_seconds.values()):
        facts.append(Fact("time per epoch, median", duration(sorted(times)[len(times) // 2])))
    rates = sorted(point.value for point in story.history.get(THROUGHPUT, ()) if math.isfinite(point.value))
    if rates:
        facts.append(Fact("samples/s, median", f"{rates[len(rates) // 2]:,.0f}"))
    by_mode = traffic_summary.bytes_by_mode(story.events).values()
    if by_mode:
        facts.append(Fact("sent by all workers", size(sum(one["sent"] for one in by_mode))))
        facts.append(Fact("received by all workers", size(sum(one["received"] for one in by_mode))))
    if (elp := story.last(ELP)) is not None:
        facts.append(Fact("samples computed on at once (ELP)", f"{elp:,.0f}"))
    if account := story.account:
        for name in ("dropped", "lost"):
            share = account[name] / max(1, account["total"])
            text = f"{account[name]:,} ({share:.2%})" if account[name] else "none"
            facts.append(Fact(f"samples {name}", text, "bad" if account[name] and name == "lost" else ""))
    return facts


def _param(story: RunHistory, keys: tuple[str, ...]) -> str:
    values = (story.params.get(key, "") for key in keys)
    return next((value for value in values if value not in ("", "null", '""', "{}")), "")
