"""Bytes and what compression made of them, in the report. Without such events: nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gba_hvd.tracking import traffic_summary
from gba_hvd.tracking.report.tables import Table, table
from recovery.units import size

if TYPE_CHECKING:
    from gba_hvd.tracking.run_history import RunHistory

_MANY = 200  # tensors of a table; the rest is counted
_NEWEST = 5  # decisions


def bytes_of_modes(story: RunHistory) -> Table | None:
    rows = [
        [mode, kind, size(n_bytes["sent"]), size(n_bytes["received"])]
        for (mode, kind), n_bytes in traffic_summary.bytes_by_mode(story.events).items()
        if n_bytes["sent"] or n_bytes["received"]
    ]
    return table("Bytes on the wires of all workers", ["mode", "kind", "sent", "received"], rows, "llrr")


def density(story: RunHistory) -> Table | None:
    by_group = traffic_summary.row_density(story.events)
    names = ["rows"] if len(by_group) == 1 else [f"rows, group {number}" for number in range(len(by_group))]
    shares = {**traffic_summary.density(story.events), **dict(zip(names, by_group, strict=True))}
    rows = [[name, f"{share:.2%}"] for name, share in list(shares.items())[:_MANY]]
    if len(shares) > _MANY:
        rows.append([f"... and {len(shares) - _MANY:,} more", ""])
    title, note = "Density: how much of a gradient was sent when it was last compressed", ""
    if any(not one.compress or one.bypassed for one in traffic_summary.decisions(story.events)):
        note = "Compression was bypassed, for a time or up to the end: the decisions are in the table Compression."
    return table(title, ["tensor", "share of elements"], rows, "lr", note=note)


def decisions(story: RunHistory) -> Table | None:
    decided = traffic_summary.decisions(story.events)
    rows = [[f"{one.step:,}", one.compressor, one.reason] for one in reversed(decided[-_NEWEST:])]
    title = "Compression" + (f", the newest {_NEWEST} of {len(decided):,} decisions" if len(decided) > _NEWEST else "")
    return table(title, ["step", "compressor", "decision"], rows, "rll")
