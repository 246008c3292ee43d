"""The first part of the report: in one sentence, then what trained, how well, what went wrong, what it cost.

A reader who has seen neither the project nor the job understands this part. What to do next is in `next_steps`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gba_hvd.tracking import traffic_summary
from gba_hvd.tracking.epochs import chooser
from gba_hvd.tracking.gauges import ELP, mean_staleness
from gba_hvd.tracking.open_warnings import over_since
from gba_hvd.tracking.plots import THROUGHPUT, WORKERS
from gba_hvd.tracking.recovery_records import (
    PAUSE_WORDS,
    PAUSES,
    cause_of,
    is_failure,
    lost_the_job,
    superseded_words,
)
from gba_hvd.tracking.report.tables import Table, counted, duration, table, time_of_day
from gba_hvd.tracking.run_history import asynchronous_modes, by_mode, changes_of_workers
from gba_hvd.tracking.run_summary import mean_rate, mode_seconds
from recovery.units import size

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
_OTHER_FAILURES = (
    "checkpoint_failed", "refused", "shard_steps_missed", "residual_lost", "switch_failed", "server_restarted",
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    name: str
    value: str
    kind: str = ""  # "bad" and "good" stand out


def headline(story: RunHistory) -> str:
    """What happened, in two or three sentences."""
    model, data = _param(story, _MODEL), _data(story)
    what = f"{model or 'A model'}{f' on {data}' if data else ''}: {counted(story.n_steps, 'step')}"
    if workers := _workers(story):
        what += f", {workers} worker{'' if workers == '1' else 's'}"
    if took := time_of(story):
        what += f", {took}"
    modes = [one.mode for one in by_mode(story)]
    what += f", in the modes {' and '.join(modes)}." if len(modes) > 1 else "."
    best = story.best
    if best is not None and (by := chooser(best.values)) is not None:
        what += f" The best {by.name} is {best.values[by.name]:.4f}, in {best.name}."
    if n_lost := story.n_workers_lost:
        what += f" {counted(n_lost, 'worker')} {'was' if n_lost == 1 else 'were'} lost."
    what += _came_back(story)
    bad = [fact for fact in what_went_wrong(story) if fact.kind == "bad"]
    if bad:
        what += f" What went wrong: {', '.join(f'{fact.name} ({fact.value})' for fact in bad[:3])}."
    elif story.status == "FINISHED":
        what += " Nothing went wrong that still holds."
    return what


def _came_back(story: RunHistory) -> str:
    """A sentence for rows of lost hosts, one for rows of a job that was lost as a whole; empty without either."""
    text = ""
    of_hosts = [one for one in story.failures if not lost_the_job(one)]
    of_the_job = [one for one in story.failures if lost_the_job(one)]
    for some, cause in (
        (of_hosts, "after a host was lost"),
        (
            [one for one in of_the_job if one["launch_before"] == "lost"],
            "when the job was launched again after a failure",
        ),
        (
            [one for one in of_the_job if one["launch_before"] != "lost"],
            "when the job was launched again; the launch before has no end on record",
        ),
    ):
        if n_rows := sum(int(one["rows_restored"] or 0) for one in some):
            text += f" {counted(n_rows, 'row')} came back from a checkpoint {cause}."
    return text


def what_trained(story: RunHistory) -> list[Fact]:
    facts = [Fact("name", story.title), Fact("model", _param(story, _MODEL)), Fact("data", _data(story))]
    facts += [Fact(f"samples, {part}", f"{n:,}") for part, n in _samples(story).items()]
    facts += [Fact(name, _param(story, keys)) for name, keys in _MORE.items()]
    facts.append(Fact("workers", _workers(story)))
    if n_switches := len(story.events_of("switch")):
        facts.append(Fact("changes of mode", f"{n_switches:,}"))
    elif stayed := story.events_of("auto_stayed"):
        facts.append(Fact("changes of mode", f"none: {stayed[-1].get('message', '')}"))
    if (logged := story.logged_model) is not None:
        better = story.better_than_logged
        facts.append(Fact("saved model", _name_of(logged), "" if better else "good"))
        facts.append(Fact("better than the saved model", better))
        facts.append(Fact("its address", str(logged["model_uri"])))
    return [fact for fact in facts if fact.value]


def _name_of(logged: Mapping[str, object]) -> str:
    version = logged.get("version")
    of_version = f", version {version}" if version else ""
    step = logged.get("model_step")
    return f"{logged.get('name') or 'model'}{of_version}" + (f", of step {step:,}" if isinstance(step, int) else "")


def how_well(story: RunHistory) -> list[Fact]:
    best = story.best
    if best is None:
        return [Fact("best epoch", "not known: no metric of a validation set was reported")]
    by = chooser(best.values)
    assert by is not None
    first = [by.name, *(name for name in sorted(best.values, key=_test_first) if name != by.name)]
    values = [Fact(name, f"{best.values[name]:.5f}") for name in first]
    kept = story.kept_best
    where = []
    if kept is not None:
        name = "best checkpoint" if kept.unsaved is None else "best checkpoint that is saved"
        where = [Fact(name, f"{kept.words}, saved at step {kept.saved_step:,}: {kept.place}")]
    return [Fact("best epoch", f"{best.name}, by {by.words}"), *values, *where]


def _test_first(name: str) -> tuple[bool, str]:
    return not name.startswith("test"), name


def epochs(story: RunHistory) -> Table | None:
    """A row for each step at which quality was measured; metrics of one step and epoch stand together."""
    measured, best = story.measured, story.best
    names = list(dict.fromkeys(name for one in measured for name in one.values))
    times = story.measurement_seconds
    rows = [
        [
            one.name if one.epoch is not None else "-",
            f"{one.step:,}",
            duration(times[one.step, one.epoch]) if (one.step, one.epoch) in times else "-",
            *(f"{one.values[name]:.5f}" if name in one.values else "-" for name in names),
        ]
        for one in measured
    ]
    marked = [i for i, one in enumerate(measured) if best is not None and one.is_of(best.step, best.epoch)]
    quote = "; its test figures are the ones to quote."
    others = ". Where each launch adds an epoch with data of its own, epochs do not compare."
    note = f"The best epoch by validation is marked{others if story.adds_an_epoch else quote}" if marked else ""
    return table("Epochs", ["epoch", "step", "time", *names], rows, "lrr" + "r" * len(names), marked, note)


def warnings(story: RunHistory) -> Table | None:
    """A row for each; warnings of one kind and reason that are over at once are one row, with the words of the last."""
    alike: dict[tuple[str, int | None, str], list[Record]] = {}
    for event, over in zip(story.events, over_since(story.events), strict=True):
        if event.get("level") == "warning":
            alike.setdefault((str(event.get("event", "")), over, _reason(event)), []).append(event)
    rows = [
        [
            _from_to([f"{one.get('step', 0):,}" for one in same]), kind.replace("_", " "), _times(same),
            "" if over is None else f"since step {over:,}", str(same[-1].get("message", "")),
        ]
        for (kind, over, _), same in alike.items()
    ]  # fmt: skip
    headings = ["step", "kind", "when", "over", "what did not happen, why, and what to do"]
    return table("Warnings", headings, rows, "rllll")


def _reason(event: Record) -> str:
    """Without its numbers where it is given beside the words: they are of a step, a time or an address."""
    data = event.get("data", {})
    if why := data.get("why"):
        return f"{re.sub(r'[0-9]+', '', str(why))} {data.get('rank', '')}"
    return str(event.get("message", ""))


def _times(same: Sequence[Record]) -> str:
    found = _from_to([time_of_day(float(one["unix_s"])) for one in same if "unix_s" in one])
    return found if len(same) == 1 else f"{len(same):,} times, {found}" if found else f"{len(same):,} times"


def _from_to(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else f"{values[0]} to {values[-1]}" if values else ""


def open_warnings(story: RunHistory) -> list[Record]:
    """Those that still hold."""
    return [
        event
        for event, over in zip(story.events, over_since(story.events), strict=True)
        if event.get("level") == "warning" and over is None
    ]


def what_went_wrong(story: RunHistory) -> list[Fact]:
    """Counts; the sentences are in the tables below."""
    facts = []
    if story.status in ("FAILED", "KILLED"):
        facts.append(Fact("end", story.reason or f"the job was {story.status.lower()}", "bad"))
    facts += [Fact("end", str(event.get("message", ""))) for event in story.events_of("stopped_early")]
    n_warnings, n_open = len(story.warnings), len(open_warnings(story))
    n_over = n_warnings - n_open
    words = f"{n_warnings:,}" + (f", {n_over:,} of them over" if n_over else "") if n_warnings else "none"
    facts.append(Fact("warnings", words, "bad" if n_open else ""))
    for event in story.events_of("mode_missed"):
        facts.append(Fact("mode", str(event.get("message", "")).partition(". ")[0], "bad"))
    n_lost = story.n_workers_lost
    n_changes = changes_of_workers(story.events)
    facts.append(Fact("workers lost", f"{n_lost:,}" if n_lost else "none"))
    if n_fewer := story.n_workers_fewer:
        facts.append(Fact("workers that left, or died in an asynchronous mode", f"{n_fewer:,}"))
    if n_changes:
        facts.append(Fact("changes of workers", f"{n_changes:,}"))
    facts += _pauses(story)
    facts += _recovered(story)
    kinds = [str(event["event"]).replace("_", " ") for event in story.events_of(*_OTHER_FAILURES)]
    if kinds:
        words = ", ".join(f"{kind} x {kinds.count(kind)}" for kind in dict.fromkeys(kinds))
        facts.append(Fact("other failures", words))
    account = story.account
    for name in ("dropped", "lost") if account else ():
        share = account[name] / max(1, account["total"])
        text = f"{account[name]:,} ({share:.2%})" if account[name] else "none"
        facts.append(Fact(f"samples {name}", text, "bad" if account[name] and name == "lost" else ""))
    return facts


def _pauses(story: RunHistory) -> list[Fact]:
    """How long training stood still in all, and for what."""
    by_cause: dict[str, list[float]] = {}
    for event in story.events_of(*PAUSES):
        by_cause.setdefault(cause_of(event["data"]), []).append(float(event["data"]["seconds"]))
    if not by_cause:
        return []
    parts = [
        f"{' + '.join(duration(seconds) for seconds in some)} {PAUSE_WORDS[cause]}" for cause, some in by_cause.items()
    ]
    total_s = sum(sum(some) for some in by_cause.values())
    return [Fact("training stood still", f"{duration(total_s)}: {', '.join(parts)}")]


def _recovered(story: RunHistory) -> list[Fact]:
    recoveries = story.failures
    counts = ("rows_restored", "rows_lost")
    total = {name: sum(int(one[name] or 0) for one in recoveries) for name in counts}
    total["samples_redone"] = sum(int(one["samples_redone"] or 0) for one in story.recoveries)
    facts = [Fact("recoveries", f"{len(recoveries):,}")] if recoveries else []
    after_interruptions = [one for one in story.recoveries if one["launch_before"] == "interrupted"]
    if n_continued := sum(not is_failure(one) for one in after_interruptions):
        facts.append(Fact("launches after an interruption, not counted as recoveries", f"{n_continued:,}"))
    back = [one for one in story.recoveries if one["launch_before"] == "went further" and not is_failure(one)]
    if back:
        facts.append(
            Fact("launches from an earlier step than was finished, not counted as recoveries", f"{len(back):,}")
        )
    if total["rows_restored"]:
        facts.append(Fact("rows back from a checkpoint", f"{total['rows_restored']:,}"))
    if total["rows_lost"]:
        facts.append(Fact("rows that started over", f"{total['rows_lost']:,}", "bad"))
    if story.pls is not None and recoveries:
        facts.append(Fact("portion of lost samples (PLS)", f"{story.pls:.5f}"))
    if total["samples_redone"]:
        facts.append(Fact("samples trained again", f"{total['samples_redone']:,}"))
    if words := superseded_words(story.resumes, story.applied):
        facts.append(Fact("superseded points, which curves in MLflow still have", words))
    return facts


def cost(story: RunHistory) -> list[Fact]:
    facts = []
    if took := time_of(story):
        facts.append(Fact("time", f"{took}, from the first world of workers to the end of training"))
    facts.append(Fact("global steps", f"{story.n_steps:,}"))
    if times := story.epoch_seconds:
        facts.append(Fact("time per epoch, median", duration(sorted(times)[len(times) // 2])))
    rates = sorted(point.value for point in story.history.get(THROUGHPUT, ()) if math.isfinite(point.value))
    if rates:
        facts.append(Fact("samples/s, median", f"{rates[len(rates) // 2]:,.0f}"))
    if (mean := mean_rate(story)) is not None:
        facts.append(Fact("samples/s, mean of all steps", f"{mean:,.0f}"))
    if len(in_modes := mode_seconds(story)) > 1:
        facts.append(Fact("time in each mode", ", ".join(f"{duration(s)} in {mode}" for mode, s in in_modes.items())))
    by_kind = traffic_summary.bytes_by_mode(story.events).values()
    if by_kind:
        facts.append(Fact("sent by all workers", size(sum(one["sent"] for one in by_kind))))
        facts.append(Fact("received by all workers", size(sum(one["received"] for one in by_kind))))
    if checkpoints := story.checkpoints:
        n_bytes = sum(int(one["bytes"] or 0) for one in checkpoints)
        facts.append(Fact("checkpoints", f"{len(checkpoints):,}" + (f", {size(n_bytes)}" if n_bytes else "")))
    if story.staleness:
        together = ", all asynchronous modes together" if len(asynchronous_modes(story)) > 1 else ""
        facts.append(Fact("staleness, mean", f"{mean_staleness(story.staleness):.2f} steps{together}"))
    if (elp := story.last(ELP)) is not None:
        facts.append(Fact("samples computed on at once (ELP)", f"{elp:,.0f}"))
    return facts


def _param(story: RunHistory, keys: tuple[str, ...]) -> str:
    values = (story.params.get(key, "") for key in keys)
    return next((value for value in values if value not in ("", "null", '""', "{}")), "")


def _data(story: RunHistory) -> str:
    """By its parameter; else the kind that its description has."""
    kinds = {str(one["kind"]) for one in story.data.values() if isinstance(one, Mapping) and one.get("kind")}
    return _param(story, _DATA) or str(story.data.get("name") or story.data.get("kind") or ", ".join(sorted(kinds)))


def _samples(story: RunHistory) -> dict[str, int]:
    """By part of the data, where its description has numbers of samples."""
    found = {name: one.get("samples") for name, one in story.data.items() if isinstance(one, Mapping)}
    return {name: n for name, n in found.items() if isinstance(n, int)}


def _workers(story: RunHistory) -> str:
    workers = [point.value for point in story.history.get(WORKERS, ())]
    if not workers:
        return ""
    low, high = min(workers), max(workers)
    return f"{high:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def time_of(story: RunHistory) -> str:
    """`12.0 s`, or `1 min 04 s in 6 launches`; empty where it is not known.

    Of each launch from its first world of workers to the end of training, as the log has it.
    """
    if (seconds := story.seconds) is None:
        return ""
    n = len(story.launches)
    return duration(seconds) + (f" in {n:,} launches" if n > 1 else "")
