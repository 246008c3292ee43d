"""Bytes and what compression made of them, on the page that `gba-hvd report` writes. Without such events: nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gba_hvd.tracking import bytes_told

from .report_tables import section

if TYPE_CHECKING:
    from gba_hvd.tracking.story import Story

_MANY = 200  # tensors of a table; the rest is counted
_NEWEST = 5  # decisions


def bytes_of_modes(story: Story) -> str:
    rows = [
        [mode, kind, f"{told['sent']:,}", f"{told['received']:,}"]
        for (mode, kind), told in bytes_told.bytes_by_mode(story.events).items()
    ]
    return section("Bytes on the wires of rank 0", ["mode", "kind", "sent", "received"], rows, "llrr")


def density(story: Story) -> str:
    by_group = bytes_told.row_density(story.events)
    names = ["rows"] if len(by_group) == 1 else [f"rows, group {number}" for number in range(len(by_group))]
    told = {**bytes_told.density(story.events), **dict(zip(names, by_group, strict=True))}
    rows = [[name, f"{share:.2%}"] for name, share in list(told.items())[:_MANY]]
    if len(told) > _MANY:
        rows.append([f"... and {len(told) - _MANY:,} more", ""])
    return section("Density: how much of a gradient was sent last", ["tensor", "share of elements"], rows, "lr")


def decisions(story: Story) -> str:
    told = bytes_told.decisions(story.events)
    rows = [[f"{one.step:,}", one.compressor, one.reason] for one in reversed(told[-_NEWEST:])]
    title = "Compression" + (f", the newest {_NEWEST} of {len(told):,} decisions" if len(told) > _NEWEST else "")
    return section(title, ["step", "compressor", "decision"], rows, "rll")
