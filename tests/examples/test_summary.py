"""OUT/summary.json, from events as a job emits them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ctr.config import JobConfig, load
from ctr.summary import JobSummary
from gba_hvd.callbacks import Event

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "configs" / "synthetic.yaml"


def config() -> JobConfig:
    return load(str(CONFIG), [])


def written(summary: JobSummary) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(summary.file.read_text())
    return read


def test_a_warning_that_is_over_says_since_when(tmp_path: Path) -> None:
    summary = JobSummary(tmp_path, config())
    summary.on_event(Event("server_missing", 3, "no server yet", {"waiting": ["mode gba"]}, level="warning"))
    summary.on_event(Event("rows_lost", 4, "5 rows are lost", level="warning"))
    assert [one["over_at_step"] for one in written(summary)["warnings"]] == [None, None]
    other = JobSummary(tmp_path, config())  # a new chief
    other.load_state_dict(summary.state_dict())
    other.on_event(Event("switch", 9, "", {"from": "allreduce", "to": "gba"}))
    assert [(one["kind"], one["over_at_step"]) for one in written(other)["warnings"]] == [
        ("server_missing", 9),
        ("rows_lost", None),
    ]


def test_an_early_stop_is_kept(tmp_path: Path) -> None:
    summary = JobSummary(tmp_path, config())
    summary.write()
    assert written(summary)["stopped_early"] is None
    summary.on_event(Event("stopped_early", 9, "stopped early: no gain"))
    summary.on_end("FINISHED", None)
    assert written(summary)["stopped_early"] == "stopped early: no gain"
