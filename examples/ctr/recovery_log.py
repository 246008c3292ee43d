"""The outcome of a job's checkpoints, and what was restored from them: kept in OUT/recovery.jsonl, for the summary.

A file, because only the chief gets events of checkpoints: when it is lost the next one continues to write, and so does
the chief of a job that was started again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gba_hvd.callbacks import Callback, Event, Job

_KEPT = ("checkpoint", "checkpoint_failed", "resumed", "rows_restored", "rows_lost")
_OF_CHOICE = ("strategy", "strategy_reason", "overhead_full", "overhead_partial", "samples_redone")
_OF_LAST = ("saved_step", "kind", "n_bytes", "url", "manifest")


class RecoveryLog(Callback):
    """Writes the file; a line for each event that is kept. Started over with a job that begins at step 0."""

    def __init__(self, out: Path) -> None:
        self.file = out / "recovery.jsonl"
        self._chief = False

    def on_job(self, job: Job) -> None:
        self._chief = job.is_chief

    def on_event(self, event: Event) -> None:
        if not self._chief:
            return
        if event.kind == "started" and event.step == 0:
            self.file.unlink(missing_ok=True)
        if event.kind in _KEPT:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps({"event": event.kind, "step": event.step, "data": dict(event.data)}) + "\n"
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(line)

    def events(self) -> list[dict[str, Any]]:
        """Everything so far, of all chiefs."""
        return read_events(self.file)


def read_events(file: Path) -> list[dict[str, Any]]:
    """The whole lines of such a file; none when there is no file yet."""
    try:
        whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in whole.splitlines()]


def recovery_summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """checkpoints: how many were saved and how many failed, and the newest; recoveries: each with

    kind: `resumed` (the whole job resumed from a checkpoint, or rolled back to one), `rows_restored` or
        `rows_lost` (of a lost host)
    step: at which the job resumed; rows_restored, rows_lost: rows; pls: portion of lost samples, None if not known;
        pls_total: by all recoveries so far
    strategy, strategy_reason, overhead_full, overhead_partial: of a lost host, the choice between full and partial
        recovery, and what each was expected to cost; samples_redone: trained again after full recovery
    """
    saved = [event["data"] for event in events if event["event"] == "checkpoint"]
    last = {name: saved[-1].get(name) for name in _OF_LAST} if saved else None
    recoveries = []
    for event in events:
        data = event["data"]
        is_duplicate = event["event"] == "rows_lost" and data.get("rows_restored")  # beside `rows_restored`
        if event["event"] in ("resumed", "rows_restored", "rows_lost") and not is_duplicate:
            rows = {name: data.get(name, 0) for name in ("rows_restored", "rows_lost")}
            portions = {name: data.get(name) for name in ("pls", "pls_total")}
            choice = {name: data[name] for name in _OF_CHOICE if name in data}
            recoveries.append({"kind": event["event"], "step": event["step"], **rows, **portions, **choice})
    failed = sum(event["event"] == "checkpoint_failed" for event in events)
    return {"checkpoints": {"count": len(saved), "failed": failed, "last": last}, "recoveries": recoveries}
