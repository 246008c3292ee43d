"""The modes where every worker trains a replica of the dense part: `shadow`, and `easgd`, `ma`, `bmuf`.

Between two synchronisations a worker steps its replica alone, as in local SGD.

What a worker and the servers send each other, and what each crash leaves behind, is in `ps.worker.replica_worker`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor

from gba_hvd.callbacks import Event
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.modes.parameter_server import ParameterServerMode
from gba_hvd.ps.worker.replica_worker import ReplicaWorker
from gba_hvd.training.mode import MicroBatch


class ModelAveragingMode(ParameterServerMode):
    """`ParameterServerMode` with a replica; its threads (`hogwild`) may share it."""

    servers: ReplicaWorker

    def _refresh_dense_(self) -> None:
        self._engine.model.parameter_watch.forget()  # rounds write beside the training
        self.servers.refresh_dense_()

    def take_dense_state(self, leaving: bool, ended: bool = True) -> None:
        super().take_dense_state(leaving, ended)
        if self.servers.late_for is None:
            return
        engine, (epoch, self.servers.late_for) = self._engine, (self.servers.late_for, None)
        text = (
            f"this worker submitted its replica of epoch {epoch} when the mean was made already: what it learned since "
            f"its last round is lost. Others wait {engine.model.tables.config.lease_s:.0f} s (lease_s) for a worker "
            "that lives, and for none that is silent"
        )
        data = {"of_epoch": epoch, "rank": self.servers.contact.rank}
        engine.emit(Event("replica_late", engine.progress.step, text, data, level="warning"), only_here=True)

    # --- threads that share the replica ------------------------------------------------------------------------------

    @property
    def await_threads(self) -> Callable[[], None]:
        """Returns when no thread computes; called before anybody looks at the complete replica."""
        return self.servers.await_threads

    @await_threads.setter
    def await_threads(self, wait: Callable[[], None]) -> None:
        self.servers.await_threads = wait

    def hand_to_thread(self) -> MicroBatch:
        return self._engine.detach_micro_batch()

    def submit_from_thread(self, micro: MicroBatch, loss: Tensor | float | None, dense: DenseGradients) -> str:
        assert micro.lease is not None
        grads = self._engine.take_gradients(micro, loss, dense)
        self.servers.push(
            micro.lease, grads.rows_on_host, grads.loss, grads.seconds, grads.not_finite, self._before_push(), dense
        )
        return grads.not_finite

    def fail_leases(self, error: BaseException) -> None:
        leases = self._leases  # the training thread may end them meanwhile
        if leases is not None:
            leases.fail(error)

    def leave_loop(self) -> None:
        if self.servers.replica.is_open:
            with contextlib.suppress(Exception):  # a failure here is raised where the servers are asked next
                self.take_dense_state(leaving=False, ended=False)
