"""When a launch that trained nothing may have nothing to save: what is decided before rows and state are looked at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gba_hvd.checkpoint.resumed_checkpoint import ResumedCheckpoint
from gba_hvd.ps.messages import SaveAbout
from recovery.catalog.chains import Chain, Skipped
from recovery.format.manifest import Blob, Manifest, Section
from recovery.restore import Report
from recovery.restore.restore import Age
from recovery.rows import Schema

ABOUT = SaveAbout(job="shop", mode="allreduce", global_batch=8, micro_batch=4)
SAVED = {"job": "shop", "mode": "allreduce", "global_batch": 8, "micro_batch": 4, "measured": {"save_s": 3.0}}
SCHEMA = Schema((), 2)


def manifest(kind: str = "full", **more: Any) -> Manifest:
    about = {**SAVED, "n_servers": 0, "given": None, "compression": "", "hashed": {}}
    found = Manifest(
        1, 7, kind, None if kind == "full" else "manifests/000001-00000003.json", 7, 0, 0.0, SCHEMA, (), None
    )
    return replace(found, **{"about": {k: v for k, v in about.items() if v not in ("", {}, None, 0)}, **more})


def report(*manifests: Manifest, **more: Any) -> Report:
    chain = Chain(manifests or (manifest(),))
    found = Report(chain, 9, 0, Age(0, 0.0, 0), None, 0.0, None, 0, 0.1, b"state", ())
    return replace(found, **more)


def why(found: Report, **now: Any) -> str:
    newest = found.manifest.name
    asked = {"step": 7, "newest": newest, "schema": SCHEMA, "about": ABOUT, **now}
    return ResumedCheckpoint.of(found).why_save(**asked)


def test_what_was_restored_completely_need_not_be_saved_again() -> None:
    assert why(report()) == ""
    assert why(report(manifest(), manifest("delta"))) == ""


AHEAD = Blob("blobs/000001-00000007/0000", 4, (Section(0, 0, 1, 0, 8, 0, 4, 4, "raw", "0"),))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (report(state=None), "leaves out changes"),
        (report(manifest(), manifest("mfu")), "leaves out changes"),
        (report(skipped=(Skipped("m", "why"),)), "not restored completely"),
        (report(n_lost=1), "not restored completely"),
        (report(without_room={"user": (1, 2)}), "not restored completely"),
        (report(without_filter=("user",)), "not restored completely"),
        (report(manifest(about={**SAVED, "last_gasp": True})), "ahead of its step"),
        (report(manifest(blobs=(AHEAD,))), "ahead of its step"),
    ],
)
def test_what_memory_has_otherwise_than_the_checkpoint_is_saved(found: Report, words: str) -> None:
    assert words in why(found)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"step": 8}, "step 8 was reached"),
        ({"newest": "manifests/000002-00000007.json"}, "the newest checkpoint is manifests/000002-00000007.json"),
        ({"newest": ""}, "the newest checkpoint is damaged"),
        ({"schema": Schema((), 3)}, "another size"),
        ({"about": SaveAbout(job="other", mode="allreduce", global_batch=8, micro_batch=4)}, "are others: job"),
        ({"about": SaveAbout(job="shop", mode="gba", global_batch=8, micro_batch=4)}, "are others: mode"),
    ],
)
def test_a_launch_that_stands_elsewhere_saves(now: dict[str, Any], words: str) -> None:
    assert words in why(report(), **now)
