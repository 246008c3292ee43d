"""The best epoch so far, as metrics whose newest value is the one to rank runs by: `best_valid_auc`, `best_epoch`.

MLflow sorts runs by the newest value of a metric, and the newest epoch need not be the best one. Which epoch is best is
decided in `epochs`. Kept by every worker, of what all of them report. No file, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gba_hvd.tracking.epochs import BEST, BestEpoch, is_quality

BEST_EPOCH, BEST_STEP = f"{BEST}epoch", f"{BEST}step"


class BestMetrics:
    """Takes note of scores as they are reported; `values` are those of the best epoch."""

    def __init__(self) -> None:
        self._epochs = BestEpoch()
        self._of_script: set[str] = set()  # names that the script reports itself

    def add(self, step: int, epoch: int | None, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns what is to be recorded: nothing, unless the best epoch is another one, or has more scores."""
        self._of_script |= {name for name in metrics if name.startswith(BEST)}
        scores = {name: value for name, value in metrics.items() if is_quality(name)}
        return self.values if scores and self._epochs.add(step, epoch, scores) else {}

    @property
    def step(self) -> int | None:
        """At which the best scores were reported."""
        return None if self._epochs.best is None else self._epochs.best.step

    @property
    def values(self) -> dict[str, float]:
        """By name, without those of the script's own. Empty before a validation metric was reported."""
        if (best := self._epochs.best) is None:
            return {}
        found = {f"{BEST}{name}": value for name, value in best.values.items()} | {BEST_STEP: float(best.step)}
        if best.epoch is not None:
            found[BEST_EPOCH] = float(best.epoch)
        return {name: value for name, value in found.items() if name not in self._of_script}

    def state_dict(self) -> dict[str, Any]:
        return self._epochs.state_dict() | ({"of_script": sorted(self._of_script)} if self._of_script else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epochs.load_state_dict(state)
        self._of_script = {str(name) for name in state.get("of_script", ())}
