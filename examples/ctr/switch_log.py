"""Which changes of mode a job went through, and how stale its micro-batches were, for the job's summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gba_hvd.callbacks import Callback, Event


class SwitchLog(Callback):
    """Keeps them through restarts.

    switches: in order, each {"step", "from", "to", "reason", "seconds"}; `seconds` is what changing over took. Into a
    mode with servers also "rule" and "rule_reason": the update rule there, and why it is that one
    """

    def __init__(self) -> None:
        self.switches: list[dict[str, Any]] = []

    def on_event(self, event: Event) -> None:
        if event.kind == "switch":
            names = ("from", "to", "reason", "seconds", "rule", "rule_reason")
            self.switches.append({"step": event.step, **{n: event.data[n] for n in names if n in event.data}})

    def state_dict(self) -> dict[str, Any]:
        return {"switches": self.switches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.switches = list(state["switches"])


def staleness_summary(histogram: Mapping[int, int]) -> dict[str, Any]:
    """mean and max, in steps, and the histogram: how many micro-batches were so stale. None when there were none.

    histogram: staleness -> micro-batches
    """
    counts = {stale: n for stale, n in sorted(histogram.items()) if n}
    n = sum(counts.values())
    return {
        "mean": round(sum(stale * count for stale, count in counts.items()) / n, 4) if n else None,
        "max": max(counts) if n else None,
        "histogram": {str(stale): count for stale, count in counts.items()},
    }
