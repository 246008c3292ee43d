"""A server without sockets: the ledger that hands out work and decides steps, and the part that applies them.

Both are the code of real servers, as are the weights, the rule, the row optimizer and the files; what a coordinator
does between them is done here at once. Owns a temporary folder with the shard memory and the dense part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd.embedding.row_gradients import RowGrad, pack_by_owner, with_contributors
from gba_hvd.epoch import EpochPlan, SampleAccount
from gba_hvd.errors import GbaError, NonFiniteGradient
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.coordinator.ledger import Ledger
from gba_hvd.ps.coordinator.weighed_step import row_damping, weighed
from gba_hvd.ps.messages import Apply, Endpoint, Enter, JobPosition, LeaseGrant, Measure, NotFinite
from gba_hvd.ps.partition.partition import Partition
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.update_rules import damps, rule_class
from recovery import state_codec

from .tasks import SimulatedTask

_NO_LIMIT = 1 << 50  # bytes of pushes that wait for their step


class SimulatedServer:
    """A context manager; entering makes the folder, leaving removes it.

    optimizer: as of `torch_optimizers.spec_of`; its groups have equal parts of the dense values
    """

    def __init__(
        self, task: SimulatedTask, cut: EpochPlan, discipline: Discipline, rule: str, optimizer: dict[str, Any],
        workers: int,
        row_average: str = "global",
        rule_settings: Mapping[str, float | bool] | None = None,
    ) -> None:  # fmt: skip
        self._task, self._cut, self._rule, self._optimizer = task, cut, rule, optimizer
        self._rule_settings = dict(rule_settings or {})
        self._workers = list(range(workers))
        self._discipline, self._row_average = discipline, row_average
        self._lrs = [float(group["lr"]) for group in optimizer["groups"]]
        self.ledger = Ledger(cut, discipline, epoch=0, steps_done=0, step=0, account=SampleAccount())
        for worker in self._workers:
            self.ledger.join(worker)
        self.diverged = ""  # why nothing more is applied

    def __enter__(self) -> SimulatedServer:
        self._folder = tempfile.TemporaryDirectory(prefix="gba-hvd-simulated-")
        folder, layout = Path(self._folder.name), self._task.layout
        with open(folder / "shards", "wb") as file:
            file.truncate(layout.n_bytes)
        self.memory = ShardMemory.attach(folder, layout)
        for shard in range(layout.n_shards):
            self.memory.init_shard(shard, 0)
        self._task.use(self.memory)
        n_groups = len(self._optimizer["groups"])
        tensors = [(f"dense {group}", [len(self._task.start) // n_groups], group) for group in range(n_groups)]
        enter = Enter(
            generation=1, servers=[Endpoint(0, 0, "", 0, 0)], me=0, shard_servers=[0] * layout.n_shards,
            position=JobPosition(), n_samples=self._cut.n_samples, global_batch=self._cut.global_batch,
            micro_batch=self._cut.micro_batch, discipline=vars(self._discipline).copy(), row_average=self._row_average,
            row_lr=self._task.row_optimizer.lr, lrs=self._lrs, tensors=tensors,
            optimizer=self._optimizer, workers=[(worker, worker, 0, 0) for worker in self._workers], rule=self._rule,
            rule_settings=self._rule_settings,
        )  # fmt: skip
        frames = [self._task.start.tobytes(), state_codec.encode([{} for _ in tensors])]
        optimizer = self._task.row_optimizer
        self.part = Partition.begin(enter, frames, folder / "dense", self.memory, optimizer, _NO_LIMIT)
        self._to_me = np.zeros(layout.n_shards, np.int32)
        return self

    def __exit__(self, *_: object) -> None:
        self.part.close()
        self.memory.close()
        self._folder.cleanup()

    def lease(self, worker: int, request: int) -> LeaseGrant | None:
        found = self.ledger.lease(worker, request)
        return found if isinstance(found, LeaseGrant) else None

    def push(self, worker: int, lease: LeaseGrant, dense: np.ndarray, rows: Sequence[RowGrad], dense_step: int) -> int:
        """A push arrives; what it completes is applied. Returns how many steps that were."""
        if self._row_average != "global":
            rows = [with_contributors(grad) for grad in rows]
        message = pack_by_owner(rows, self._to_me, 1)[0]
        frames = [bytearray(dense.tobytes()), bytearray(message.tobytes())]
        try:
            self.part.push(lease.micro, lease.serial, frames, dense_step, worker)
        except NotFinite as error:
            self.diverged = str(error)
            return 0
        self.ledger.accept(worker, lease.micro, lease.serial, values_step=dense_step)
        before = self.ledger.step
        while not self.diverged and (plan := self.ledger.next_step()) is not None:
            sums = weighed(plan, self._cut.micro_batch, self._discipline, self._row_average)
            if damps(self._rule) and sums.members:
                asked = Measure(1, plan.step, sums.members, sums.scale, sums.dropped, sums.n_micro, damping=True)
                self.ledger.damp(row_damping(plan, self.part.measure(asked).damping or []))
                plan = self.ledger.decided or plan
                sums = weighed(plan, self._cut.micro_batch, self._discipline, self._row_average)
            living = self._workers if rule_class(self._rule).knows_workers else []
            oldest = self.ledger.oldest_serial
            row_lr = self._task.row_optimizer.lr
            applied = self.part.apply(
                Apply(
                    1,
                    plan.step,
                    sums.members,
                    sums.scale,
                    row_lr,
                    self._lrs,
                    oldest,
                    living,
                    dropped=sums.dropped,
                    n_micro=sums.n_micro,
                )
            )
            if applied.failed and NonFiniteGradient.__name__ not in applied.failed:
                raise GbaError(applied.failed)
            self.diverged = applied.failed
            self.ledger.applied(plan.step)
        return self.ledger.step - before
