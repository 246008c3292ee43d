"""The description of a run in MLflow, Markdown: the report's first part, for readers of the run's page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gba_hvd.tracking.report import next_steps, overview

if TYPE_CHECKING:
    from gba_hvd.tracking.run_history import RunHistory

OWN = "Written by gba-hvd"  # begins the last line, which shows that no person wrote it
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!&])")


def run_note(story: RunHistory, report: str) -> str:
    """report: the address of the report within MLflow's pages"""
    parts = [_plain(overview.headline(story))]
    parts.append(f"**[The whole report]({report})**: curves by mode, switches, failures, checkpoints, parameters.")
    facts = {"How well": overview.how_well(story), "What went wrong": overview.what_went_wrong(story)}
    for title, some in facts.items():
        parts.append(f"**{title}**: " + "; ".join(f"{_plain(one.name)}: {_plain(one.value)}" for one in some))
    steps = [
        f"{number}. {_plain(one.text)}" + (f" `{one.command.replace('`', '')}`" if one.command else "")
        for number, one in enumerate(next_steps.next_steps(story), start=1)
    ]
    parts.append("**What to do next**\n\n" + "\n".join(steps))
    parts.append(f"*{OWN} when the job ended; a description of your own stays.*")
    return "\n\n".join(parts)


def _plain(text: str) -> str:
    """A text that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
