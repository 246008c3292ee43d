"""Learning rates and optimizer settings of the newest step that any worker has reported, for the next `Apply`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gba_hvd.ps.messages import Enter, GroupSetting, LeaseRequest, PushDone
from gba_hvd.ps.validation import check_rates, check_settings


class NewestRates:
    """dense: of each parameter group. row: of the tables. settings: as of `Apply`."""

    def __init__(self, enter: Enter) -> None:
        self.dense, self.row = list(enter.lrs), enter.row_lr
        self.settings: list[dict[str, GroupSetting]] = []
        self._groups = enter.optimizer.get("groups", ())
        self._at = enter.position.epoch, enter.position.step

    def check(self, request: LeaseRequest | PushDone) -> None:
        """Raises ProtocolError."""
        check_rates(request.lrs, len(self.dense) + 1)
        check_settings(request.settings, self._groups)

    def take(self, epoch: int, request: LeaseRequest | PushDone) -> None:
        """As a worker had them after a step, unless newer ones are known.

        A worker that came late sends what was changed since: the changes before that stay.
        """
        if (epoch, request.lrs_step) < self._at:
            return
        *self.dense, self.row = request.lrs
        self._at = epoch, request.lrs_step
        if request.settings:
            known = self.settings or [{} for _ in request.settings]
            self.settings = [{**old, **new} for old, new in zip(known, request.settings, strict=True)]

    def state(self) -> dict[str, Any]:
        return {"lrs": [*self.dense, self.row], "lrs_key": list(self._at), "settings": self.settings}

    def resume(self, state: Mapping[str, Any]) -> None:
        *self.dense, self.row = state["lrs"]
        self._at = state["lrs_key"][0], state["lrs_key"][1]
        self.settings = msgspec.convert(state.get("settings", []), list[dict[str, GroupSetting]])
