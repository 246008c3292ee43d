"""A worker's part in the modes where every worker trains a replica of its own: `shadow`, and `easgd`, `ma`, `bmuf`.

    lease -> rows read in place -> loss.backward -> rows are pushed, the user's optimizer steps the replica, at once
                                                     beside it: rounds that pull the replicas together (`sync_thread`)

Leases, rows and the account are those of mode `async`: every push is a step. Nothing of the dense part is pushed, and
nothing is read before a micro-batch. The servers hold the central copy, which serves those that have no replica of the
present: evaluations within an epoch, late joiners, checkpoints.

The replicas become one where the model is used: at an epoch's end, and when the mode is left. Each worker

    1. closes   its replica: rounds leave it alone
    2. submits  the replica and the optimizer's state, to all servers
    3. reports  to the coordinator, which answers when every living worker has reported
    4. exports  from the servers, whose copy becomes the mean of the submitted replicas at the first of these requests

so all workers have the same values from there on, and the central copy is these. What each crash leaves behind:

    a worker before 2   the mean is that of the others; what it learned since its last round is gone
    a worker in 2       its replica counts at the servers that have it
    a worker after 2    its replica counts
    a worker that left  counts with what it submitted then; after a restart of server 0 the others wait for it as long
      its loop early    as for a micro-batch
    a server before 4   its successor has what is submitted to it; if nothing, its copy is that of the last round
    a server after 4    the mean is in a file of its own: its successor answers with it

`phase` orders this: 2 x the number of the segment (`epoch.run_number`) within it, one more at its end. A server ignores
what is of a phase that is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd.averaging.algorithms import Averaging
from gba_hvd.averaging.replica import Replica, ReplicaSnapshot, is_finite
from gba_hvd.averaging.sync_thread import SyncThread
from gba_hvd.comm.collectives import World
from gba_hvd.comm.traffic import Traffic
from gba_hvd.compression.dense_push import Frame
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.epoch import run_number
from gba_hvd.errors import NonFiniteGradient
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.ps import messages
from gba_hvd.ps.client import Reply
from gba_hvd.ps.worker.replies import request, wait_reply
from gba_hvd.ps.worker.session import DenseState, PsSession
from gba_hvd.ps.worker.worker import PsWorker
from recovery import state_codec


class ReplicaWorker(PsWorker):
    """One worker's replica and its rounds, beside what every asynchronous mode has.

    optimizer: the user's, whose state is submitted; step_dense: steps it on the dense parameters
    is_elastic: a world that no longer works can be formed again
    """

    def __init__(
        self, session: PsSession, worker: int, rank: int, host: int, pid: int, tables: EmbeddingTables,
        dense: DenseGradients, timeout_s: float, *, averaging: Averaging, world: World,
        optimizer: torch.optim.Optimizer, step_dense: Callable[[], None], is_elastic: bool,
        row_coder: RowCoder | None = None, traffic: Traffic | None = None,
    ) -> None:  # fmt: skip
        super().__init__(session, worker, rank, host, pid, tables, dense, timeout_s, None, row_coder)
        self.replica = Replica(self._dense)
        self.rounds = SyncThread(
            averaging, self.replica, self, broken=self._world_is_broken, diverged=self._replica_diverged,
            traffic=traffic,
        )  # fmt: skip
        self._elasticity, self._world, self._is_elastic = averaging.elasticity, world, is_elastic
        self._optimizer, self._step_dense = optimizer, step_dense
        self._epoch = self._run = 0  # and the number of its segment
        self._diverged = False
        self.await_threads: Callable[[], None] = lambda: None  # set by those who have several share the replica
        self._left_well = True  # no round of this worker is left in Horovod's world
        self.late_for: int | None = None  # the epoch whose mean was made without this worker's replica, until reported

    def start(self) -> None:
        super().start()
        self.rounds.start(self._world)

    def close(self, finished: bool = True) -> None:
        self.rounds.stop(timeout_s=0.0)
        super().close(finished)  # a round that waits for a server is freed by this
        self.rounds.stop()

    def drain_metrics(self) -> tuple[dict[str, float], list[str]]:
        metrics = self.rounds.drain_metrics()
        return {} if metrics is None else asdict(metrics), self.rounds.dropped()

    def before_world_leaves(self) -> None:
        self.rounds.before_world_leaves()

    def after_world_forms(self, world: World) -> None:
        self.rounds.after_world_forms(world)

    # --- micro-batches -----------------------------------------------------------------------------------------------

    def ask(
        self, epoch: int, segment: int, order: int, n_samples: int, lrs: Sequence[float], lrs_step: int,
        stop: Callable[[], bool], settings: Sequence[dict[str, messages.GroupSetting]] = (),
    ) -> messages.LeaseReply:  # fmt: skip
        self._epoch, self._run = epoch, run_number(epoch, segment)
        return super().ask(epoch, segment, order, n_samples, lrs, lrs_step, stop, settings)

    def refresh_dense_(self) -> int:
        """Before a micro-batch: the first one of an epoch finds the central copy, all others what this worker made."""
        if not self.replica.is_open:
            self.rounds.none_begun()
            values = self._central_copy()
            self.rounds.begin_with(values)
            self.replica.open(2 * self._run, values)
        self.rounds.begin_micro()
        self.model_step = self.position.step
        return self.model_step

    def push(
        self, lease: messages.LeaseGrant, rows: Sequence[Sequence[RowGrad]], loss: float | None, seconds: float,
        refused: str, drop: bool = False, dense: DenseGradients | None = None,
    ) -> str:  # fmt: skip
        """Send the row gradients and step the replica; in the foreground, every so often, wait for a round.

        A push that is to be lost steps nothing: its micro-batch is computed again, and counts then.
        dense: the gradients of one of several threads that share the replica (`hogwild`); None: those of the mode
        """
        found = super().push(lease, rows, loss, seconds, refused, drop)
        step_dense = self._step_dense if dense is None else partial(self._step_with, dense)
        step = None if refused or drop else self.replica.step(step_dense)
        self.rounds.end_micro(step, self._tables.config.lease_s)
        return found

    def _step_with(self, dense: DenseGradients) -> None:
        self._dense.take_over_(dense)
        self._step_dense()
        self._dense.zero_()

    def quiesce(self) -> None:
        self.await_threads()

    def _dense_frames(self) -> list[Frame]:
        """Nothing dense goes with a push."""
        return [Frame(np.empty(0, dtype=np.float32)) for _ in self.session.servers]

    # --- looked at from outside --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluation_values(self) -> Iterator[None]:
        """Evaluations within an epoch use the central copy; the worker then resumes training its replica."""
        self.quiesce()
        self._publish_if_alone()
        own = self.replica.close()
        if own is None:  # between epochs all have the same values
            yield
            return
        try:
            self.replica.overwrite_(self._central_copy())
            yield
        finally:
            self.replica.open(own.phase, own.values)

    def before_save(self) -> None:
        """A checkpoint has the central copy, and the optimizer's state of the worker that asks for it."""
        self.quiesce()
        self._publish_if_alone()
        if self.replica.is_open:
            self._to_servers(None, self._states(), 2 * self._run)

    def export(self, leaving: bool, ended: bool = True) -> dict[int, DenseState]:
        """The mean of all replicas, by the four steps above.

        ended False: this worker alone leaves the epoch's loop. It submits what it has and resumes from the central
        copy; the others do not wait for it. Should it come back to the epoch, what it submits then counts instead.
        """
        phase = 2 * self._run + (not leaving)
        own = self.replica.close()
        if own is not None and not is_finite(own.values):
            self._replica_diverged()
        self._raise_failure()
        if not ended:
            if own is not None:
                self._to_servers(own.values if self.rounds.single_worker else None, self._states(), own.phase)
                self._submit(own.values, phase, early=True)
            request(self.client, 0, messages.ReplicaSubmitted(self.worker, self.session.generation, phase, early=True))
            return super().export(leaving)
        if own is not None and self._submit(own.values, phase):
            self.late_for = self._epoch
        submitted = messages.ReplicaSubmitted(self.worker, self.session.generation, phase)
        patience_s = self._tables.config.lease_s + self._timeout_s
        wait_reply(self.client.send(0, submitted, timeout_s=patience_s))
        exported = self._exported(messages.Export(self.session.generation, leaving, phase))
        if leaving:
            self._left_well = self.rounds.stop(together=True)
        return exported

    def all_left_together(self, world: World) -> bool:
        """Whether no round of any worker is left in Horovod's world; the same answer for all. A collective.

        Each waits for the end of its rounds for a while from a moment of its own, so they may find different things.
        """
        is_well = self._left_well or not self.rounds.are_collective
        return bool(world.gather("mode left", np.array([is_well], dtype=np.int64)).all())

    def rescue(self, timeout_s: float) -> dict[int, DenseState]:
        self.replica.close()  # rounds mix nothing in any more
        return super().rescue(timeout_s)

    def _submit(self, values: Tensor, phase: int, early: bool = False) -> bool:
        """To all servers. Returns whether it was too late for the mean of one of them."""
        body, states = messages.SubmitReplica(self.worker, self.session.generation, phase, early), self._states()
        replies = self._send_all([(body, [part, states[s]]) for s, part in enumerate(self._split(values))])
        return any(isinstance(reply.body, messages.ReplicaAccepted) and reply.body.late for reply in replies)

    # --- the central copy, for the thread of the rounds --------------------------------------------------------------

    def blend(self, copy: ReplicaSnapshot, number: int) -> Tensor:
        body = messages.Blend(self.worker, self.session.generation, number, copy.phase, self._elasticity)
        replies = self._send_all([(body, [part]) for part in self._split(copy.values)])
        parts = [np.frombuffer(reply.frames[0], dtype=np.float32) for reply in replies]
        return torch.from_numpy(self._parts.joined(parts))

    def publish(self, copy: ReplicaSnapshot, values: Tensor) -> None:
        self._to_servers(values, None, copy.phase)

    # -----------------------------------------------------------------------------------------------------------------

    def _publish_if_alone(self) -> None:
        copy = self.replica.copy() if self.rounds.single_worker else None
        if copy is not None:
            self._to_servers(copy.values, None, copy.phase)

    def _to_servers(self, values: Tensor | None, states: Sequence[bytes] | None, phase: int) -> None:
        body = messages.Publish(self.session.generation, phase)
        parts: Sequence[Any] = [b""] * len(self._parts) if values is None else self._split(values)
        self._send_all([(body, [part, b"" if states is None else states[s]]) for s, part in enumerate(parts)])

    def _send_all(self, messages: Sequence[tuple[Any, Sequence[Any]]]) -> list[Reply]:
        """To each server its own."""
        futures = [self.client.send(s, body, frames) for s, (body, frames) in enumerate(messages)]
        return [wait_reply(future) for future in futures]

    def _states(self) -> list[bytes]:
        """The state of this worker's optimizer, for each server that of its tensors."""
        of, parameters = self._optimizer.state, self._dense.parameters
        return [state_codec.encode([dict(of.get(parameters[t], {})) for t in part]) for part in self._parts.tensors]

    def _central_copy(self) -> Tensor:
        """float32 [n], as the servers have it now."""
        return torch.from_numpy(self._values.as_served())

    def _split(self, values: Tensor) -> list[np.ndarray]:
        """What of float32 [n] is whose, for each server."""
        return self._parts.split(values.numpy())

    def _world_is_broken(self, why: str) -> None:
        if self._is_elastic:
            self.contact.hosts_updated = True  # the coordinator learns of it, and all form the world again
        else:
            self.abandon(why)

    def _replica_diverged(self) -> None:
        self._diverged = True

    def _raise_failure(self) -> None:
        if self._diverged:
            raise NonFiniteGradient(
                f"the replica of rank {self.contact.rank} is not finite any more, after {self.replica.n_steps} local "
                "steps; no worker received it. Lower the learning rate, or look at the data"
            )
        super()._raise_failure()
