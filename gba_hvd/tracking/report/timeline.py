"""What happened to a job, in the report: switches, checkpoints, recoveries, other events.

Events of steps that were done again, because the job resumed from a checkpoint, stay, and are named superseded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from gba_hvd.tracking import gauges
from gba_hvd.tracking.plots import THROUGHPUT
from gba_hvd.tracking.recovery_records import is_event_superseded, is_failure, lost_the_job, place_of
from gba_hvd.tracking.report.tables import Table, duration, figure, table
from recovery.units import size

if TYPE_CHECKING:
    from gba_hvd.tracking.records import Record
    from gba_hvd.tracking.run_history import RunHistory

_MANY = 200  # events of a table; the rest is counted
_MANY_CHECKPOINTS = 20  # the newest
_MANY_DECISIONS = 50  # the newest
_SUPERSEDED = "superseded: the job resumed from an earlier checkpoint; "


def switches(story: RunHistory) -> Table | None:
    rows = []
    done_at = [int(event.get("step", 0)) for event in story.events_of("switch")]
    for event in story.events_of("switch", "switch_failed"):
        data = event.get("data", {})
        done = event["event"] == "switch"
        seconds = f"{float(data['seconds']):.3f}" if "seconds" in data else "-"
        rows.append([
            f"{event.get('step', 0):,}", str(data.get("from", "allreduce")), str(data.get("to", "?")), seconds,
            *(_predicted_and_achieved(story, event, done_at) if done else ("-", "-")),
            (_SUPERSEDED if is_event_superseded(event, story.resumes) else "")
            + (str(data.get("reason") or event.get("message", "")) if done else f"failed: {event.get('message', '')}"),
        ])  # fmt: skip
    note = 'Predicted by the decision of mode "auto" to switch, "-" for switches that were asked for; '
    note += "achieved: the median from there to the next switch, samples/s."
    headings = ["step", "from", "to", "seconds", "predicted", "achieved", "reason"]
    return table("Switches", headings, rows, "rllrrrl", note=note)


def _predicted_and_achieved(story: RunHistory, switch: Record, done_at: Sequence[int]) -> tuple[str, str]:
    """Samples/s of the mode that was entered; "-" where mode "auto" did not decide it, or too little was seen."""
    step, data = int(switch.get("step", 0)), switch.get("data", {})
    to, reason = str(data.get("to", "")), str(data.get("reason", ""))
    decided = [event for event in story.events_of("decision") if _asks_for(event, to, reason, step)]
    predicted = decided[-1].get("data", {}).get(f"{to}_samples_per_s") if decided else None
    end = min((at for at in done_at if at > step), default=math.inf)
    points = story.history.get(gauges.RATES.get(f"{to}_samples_per_s", "") if decided else THROUGHPUT, ())
    seen = [point.value for point in points if step < point.step <= end]
    achieved = figure(median(seen), ",.0f") if seen else "-"
    if seen and isinstance(predicted, int | float) and predicted > 0:
        achieved += f" ({median(seen) / predicted:.2f}x)"
    return figure(predicted, ",.0f"), achieved


def _asks_for(decision: Record, mode: str, reason: str, until_step: int) -> bool:
    """Whether it is the decision that a switch carried out."""
    data, why = decision.get("data", {}), str(decision.get("message", "")).removeprefix(f"to {mode}").lstrip(": ")
    is_switch = data.get("kind") in ("switch", "trial") and data.get("mode") == mode
    return is_switch and int(decision.get("step", 0)) <= until_step and bool(why) and why in reason


def decisions(story: RunHistory) -> Table | None:
    """Of mode "auto": those that another reason was given for than for the one before.

    Rates of the mode that the job was in are measured, those of the other one predicted.
    """
    decided = story.events_of("decision")
    rows = []
    for event in decided[-_MANY_DECISIONS:]:
        data = event.get("data", {})
        superseded = _SUPERSEDED if is_event_superseded(event, story.resumes) else ""
        rows.append([
            f"{event.get('step', 0):,}", str(data.get("mode", "")), figure(data.get("gain"), ".2f"),
            *(figure(data.get(name), ",.0f") for name in gauges.RATES), superseded + str(event.get("message", "")),
        ])  # fmt: skip
    title = 'Decisions of mode "auto"'
    title += f", the newest {len(rows)} of {len(decided):,}" if len(decided) > len(rows) else ""
    return table(title, [
        "step", "mode", "gba over allreduce", "allreduce, samples/s", "gba, samples/s", "reason"
    ], rows, "rlrrrl")  # fmt: skip


def recoveries(story: RunHistory) -> Table | None:
    rows = [
        [f"{one['step']:,}", _what_was_lost(one), figure(one["rows_restored"], ",.0f"),
         figure(one["rows_lost"], ",.0f"), figure(one["age"], ",.0f"), figure(one["pls"], ".5f"),
         figure(one["pls_total"], ".5f"), figure(one["pls_expected"], ".5f"), figure(one["target_pls"], ".5f"),
         figure(one["samples_redone"], ",.0f"), str(one["manifest"] or ""),
         str(one["strategy_reason"] or "")]
        for one in story.recoveries
        if is_failure(one) or lost_the_job(one) is None or one["launch_before"] in _ASKED_FOR
    ]  # fmt: skip
    headings = ["step", "what was lost", "rows restored", "rows lost", "age, steps", "PLS", "PLS so far"]
    headings += ["PLS expected", "target PLS"]
    note = "PLS, the portion of lost samples: how much training of all the lost rows had, and have no longer. "
    note += "Age: of rows that came back; of a job that was launched again, the steps that are made again. "
    note += "The target is for the end of the job, and what is expected is of partial recovery at the present interval."
    return table(
        "Recoveries", [*headings, "samples redone", "from", "full or partial"], rows, "rlrrrrrrrrll", note=note
    )


_ASKED_FOR = ("interrupted", "went further")


def _what_was_lost(recovery: Record) -> str:
    """A job whose workers all rolled back lost a host; one that resumed otherwise was lost itself, where that is known.

    Of a resume after a launch that ended well only rows are shown that did not come back.
    """
    if recovery["launch_before"] == "finished" and not recovery["strategy"]:
        return "resumed"
    if recovery["launch_before"] == "interrupted" and not recovery["strategy"] and not recovery["rows_lost"]:
        return "nothing: it was interrupted (Ctrl-C or SIGTERM)"
    if recovery["launch_before"] == "went further" and not recovery["strategy"] and not recovery["rows_lost"]:
        return "nothing: the launch before had finished, at a later step"
    if recovery["launch_before"] == "no end" and not recovery["strategy"]:
        return "the whole job: the launch before has no end on record"
    return {True: "the whole job", False: "a lost host", None: "resumed"}[lost_the_job(recovery)]


def checkpoints(story: RunHistory) -> Table | None:
    saved = story.checkpoints
    rows = [
        [
            f"{one['step']:,}",
            str(one["kind"]),
            size(one["bytes"]) if isinstance(one["bytes"], int | float) else "-",
            figure(one["seconds"], ",.2f"),
            place_of(one),
        ]
        for one in reversed(saved[-_MANY_CHECKPOINTS:])
    ]
    title = "Checkpoints" + (f", the newest {_MANY_CHECKPOINTS} of {len(saved):,}" if len(saved) > len(rows) else "")
    return table(title, ["step", "kind", "size", "seconds", "where"], rows, "rlrrl")


def events(story: RunHistory) -> Table | None:
    first, resumes = story.started_ms, story.resumes
    rows = []
    shown = _folded([event for event in story.events if _is_shown(event)])
    for event in shown[:_MANY]:
        at = "-" if first is None or "unix_s" not in event else duration(float(event["unix_s"]) - first / 1000)
        kind = str(event.get("event", "")).replace("_", " ")
        superseded = _SUPERSEDED if is_event_superseded(event, resumes) else ""
        rows.append([at, f"{event.get('step', 0):,}", kind, superseded + str(event.get("message", ""))])
    if len(shown) > _MANY:
        rows.append(["", "", "", f"... and {len(shown) - _MANY:,} more"])
    return table("Membership, recovery and other events", ["after", "step", "what", "message"], rows, "rrll")


def _is_shown(event: Record) -> bool:
    """Warnings, switches and decisions have tables of their own."""
    return event.get("event") not in ("switch", "switch_failed", "decision") and event.get("level") != "warning"


def _folded(events: Sequence[Record]) -> list[Record]:
    """Several checkpoints with nothing between them as one, so that they do not drown the others."""
    folded: list[Record] = []
    for kind, run in itertools.groupby(events, key=lambda event: event.get("event")):
        entries = list(run)
        if kind == "checkpoint" and len(entries) > 2:
            n_bytes = sum(int(event.get("data", {}).get("n_bytes", 0)) for event in entries)
            text = f"{len(entries):,} checkpoints until step {entries[-1].get('step', 0):,}: {n_bytes / 1e6:,.1f} MB"
            entries = [{**entries[0], "message": text}]
        folded += entries
    return folded
