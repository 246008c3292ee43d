"""Bytes on the wire and what compression made of them, from the events `traffic` and `compression`.

Bytes are of all workers, as the newest event has them; shares and decisions are of one worker, the chief. What is of
steps that were done again is left out. Pure functions over plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gba_hvd.tracking.records import Record
from gba_hvd.tracking.recovery_records import events_in_force


@dataclass(frozen=True)
class TrafficSummary:
    """A decision of a compressor: what it did from a step on, and why.

    compress: anything; bypassed: tensors that are not
    """

    step: int
    compressor: str
    reason: str
    compress: bool = True
    bypassed: tuple[str, ...] = ()


def bytes_by_mode(events: Iterable[Record]) -> dict[tuple[str, str], dict[str, int]]:
    """Bytes of the whole job and all workers: (mode, kind) -> {"sent": bytes, "received": bytes}."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for name, n_bytes in _newest_traffic(events).get("all_workers", {}).items():
        direction, _, rest = name.partition("_")
        mode, _, kind = rest.rpartition("_")  # modes such as hop_bs have a _ of their own
        found.setdefault((mode, kind), {"sent": 0, "received": 0})[direction] = int(n_bytes)
    return found


def density(events: Iterable[Record]) -> dict[str, float]:
    """The share of each dense tensor's elements that was sent when it was last compressed."""
    return {str(name): float(share) for name, share in _newest_traffic(events).get("density", {}).items()}


def row_density(events: Iterable[Record]) -> list[float]:
    """The same for gradients of rows, by group of tables; empty where none was selected."""
    shares = [float(share) for share in _newest_traffic(events).get("row_density", ())]
    return shares if any(shares) else []


def decisions(events: Iterable[Record]) -> list[TrafficSummary]:
    """What compressors decided, the oldest first."""
    return [
        TrafficSummary(
            int(e.get("step", 0)), str(data.get("compressor", "")), str(e.get("message", "")),
            bool(data.get("compress", True)), tuple(data.get("bypassed", ())),
        )
        for e in _of(events, "compression")
        for data in [e.get("data", {})]
    ]  # fmt: skip


def _newest_traffic(events: Iterable[Record]) -> Mapping[str, Any]:
    newest = _of(events, "traffic")
    return newest[-1].get("data", {}) if newest else {}


def _of(events: Iterable[Record], kind: str) -> list[Record]:
    return [event for event in events_in_force(events) if event.get("event") == kind]
