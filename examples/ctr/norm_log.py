"""How large the gradients of global steps were, by epoch and mode, for the job's summary.

There are norms where steps are clipped (`train.max_norm`); a limit that no step reaches measures and clips nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gba_hvd.callbacks import Callback, StepRecord

BINS_PER_OCTAVE = 8  # bin b has the norms from 2 ** (b / 8) to 2 ** ((b + 1) / 8), which differ by 9 %


class NormLog(Callback):
    """Keeps them through restarts.

    norms: in order, each {"epoch", "mode", "steps", "mean", "histogram"}: 2-norms of gradients before clipping, and the
        histogram as text of a bin -> steps. Norms that are 0 or not finite are not counted.
    """

    def __init__(self) -> None:
        self.norms: list[dict[str, Any]] = []

    def on_step(self, record: StepRecord) -> None:
        known = [norm for norm in record.grad_norms if norm > 0 and math.isfinite(norm)]
        if not known:
            return
        last = self.norms[-1] if self.norms else {}
        if (last.get("epoch"), last.get("mode")) != (record.epoch, record.mode):
            last = {"epoch": record.epoch, "mode": record.mode, "steps": 0, "mean": 0.0, "histogram": {}}
            self.norms.append(last)
        counts = last["histogram"]
        for norm in known:
            last["steps"] += 1
            last["mean"] += (norm - last["mean"]) / last["steps"]
            of_norm = str(math.floor(BINS_PER_OCTAVE * math.log2(norm)))
            counts[of_norm] = counts.get(of_norm, 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self.norms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.norms = list(state["norms"])
