"""Bytes on the wires of all workers, in allreduce mode: each commit carries what every worker counted since its last.

In asynchronous modes the coordinator keeps the account, see `comm.traffic`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gba_hvd.comm.traffic import NOTHING, Traffic, added
from gba_hvd.training.commit_fields import StepParticipant
from gba_hvd.training.job_state import Progress


class TrafficAccount(StepParticipant):
    """One worker's part. `progress` receives the sums."""

    name, order = "traffic", 2

    def __init__(self, traffic: Traffic, progress: Progress) -> None:
        self._traffic, self._progress = traffic, progress

    def n_fields(self) -> int:
        return len(NOTHING)

    def before_commit(self, fields: Tensor) -> None:
        fields.copy_(torch.tensor(self._traffic.report(), dtype=fields.dtype))

    def after_commit(self, agreed: Sequence[float]) -> None:
        """float32 has 24 bits: the bytes of one step are exact up to 16 MiB, beyond that to 7 digits."""
        self._traffic.settle()
        account, mode = self._progress.traffic, self._traffic.mode
        a, b, c, d, e, f = map(round, agreed)
        account[mode] = added(account.get(mode, NOTHING), (a, b, c, d, e, f))
