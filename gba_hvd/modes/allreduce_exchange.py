"""Allreduce mode: a step's gradients go between the workers, and every worker applies its part.

One step, on every rank:

    1. pull    rows that live on other hosts, for all micro-batches of the step (only with several hosts)
    2. compute the worker's micro-batches, summing gradients
    3. send    row gradients to the ranks that serve the shards, through memory on a host, and between hosts as they are
               (`whole_rows`) or compressed (`compression.row_exchange`); what arrives is *held*. Where the step is to
               be clipped, each rank then measures what it holds: the squares travel with the commit, so its result has
               the norm, and all ranks find the same factor
    4. commit  one sum of the dense gradients: through memory on a host, and among the leaders of several hosts
               (`shm.host_sum`). It ends only when every rank has entered it, so a rank with its result knows that
               every rank holds its row gradients: from here on the step is decided. Compressed dense gradients go round
               just before it and are held as well (`compression.dense_exchange`)
    5. apply   dense parameters everywhere, rows by the ranks that serve them

A worker that dies before 4 leaves a step that no worker applied; it is computed again. A worker that dies after 4 costs
its own shards at most this step. A survivor that misses the result of 4 still holds its row gradients and applies them
as soon as it learns that the step was decided, and with which factor (`elastic`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gba_hvd.comm.collectives import World, worker_lost
from gba_hvd.comm.groups import Group
from gba_hvd.comm.traffic import Traffic
from gba_hvd.compression.activation_exchange import ActivationExchange
from gba_hvd.compression.dense_exchange import DenseExchange
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.compression.row_exchange import RowExchange
from gba_hvd.embedding.apply_rows import apply_rows, by_row, write_rows
from gba_hvd.embedding.bags import BagLookups
from gba_hvd.embedding.initial_rows import not_assignable
from gba_hvd.embedding.on_device.row_gradients import DeviceRowGrad, RowGrads, SparseRowGrad, on_host
from gba_hvd.embedding.on_device.row_gradients import merge as merge_on_device
from gba_hvd.embedding.on_device.rows import can_apply
from gba_hvd.embedding.row_gradients import (
    Packed,
    PickedRows,
    RowGrad,
    RowSum,
    add_in_order,
    average_over_contributors,
    copied,
    merge,
    unpack,
)
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import GbaError
from gba_hvd.gradients import clipping
from gba_hvd.gradients.dense_gradients import AllSum, DenseGradients
from gba_hvd.modes.whole_rows import WholeRows
from gba_hvd.shm.host_sum import HostSum, WorkerGone
from gba_hvd.shm.outbox import Outbox
from gba_hvd.shm.placement import Placement, WorkerTopology
from gba_hvd.training.commit_fields import CommitFields

_LOOK_AGAIN = 64  # after so many steps: whether something still waits for rows that returned to this host
Part = tuple[RowGrad | DeviceRowGrad, float]  # of a step's gradient, and its weight


@dataclass(frozen=True)
class HeldRows:
    """Row gradients of one step for the shards this rank serves, waiting for the step to be decided.

    own: this rank's gradients for its own shards; remote: what ranks of other hosts sent, by rank. What other ranks of
    this host left is still in their outboxes. scale makes the step's gradient of the sum of all, or of its average.
    n_skipped: steps before this one that were not applied.
    merged: the gradients to apply, per group, once they were asked for
    """

    step: int
    own: Sequence[RowGrad | PickedRows | DeviceRowGrad]
    remote: Mapping[int, Sequence[RowGrad]]
    scale: float
    lr: float
    n_skipped: int = 0
    merged: list[RowGrad] = field(default_factory=list)


class AllreduceExchange:
    """Carries gradients between the workers of one world. A new one after every change of membership.

    Owns `held` and the outboxes (of the ranks of this host, its own among them; none in a world of one); uses, but does
    not own, the world, the tables' memory and the dense gradients.

    host_sum, workers: owned as well; without them Horovod sums the dense gradients of several hosts, and carries rows
    between these
    """

    def __init__(
        self,
        world: World,
        members: WorkerTopology,
        placement: Placement,
        tables: EmbeddingTables,
        outboxes: Mapping[int, Outbox],
        row_average: str = "global",
        dense_exchange: DenseExchange | None = None,
        row_coder: RowCoder | None = None,
        traffic: Traffic | None = None,
        host_sum: HostSum | None = None,
        workers: Group | None = None,
    ) -> None:
        assert tables.memory is not None
        self._world, self._tables, self._memory, self._outboxes = world, tables, tables.memory, outboxes
        self.members, self.placement = members, placement
        self._dense_exchange, self._traffic, self._host_sum = dense_exchange, traffic or Traffic(), host_sum
        self._workers, self._alltoall = workers, world.alltoall if workers is None else workers.alltoall
        self._server = placement.rank
        self._by_contributors = row_average != "global"
        self._dims = [group.dim + self._by_contributors for group in tables.layout.groups]
        self._is_local = np.array(placement.host) == members.order.index(members.hosts[world.rank])
        self._mine = np.flatnonzero(placement.rank == world.rank)
        self._on_this_host = np.flatnonzero(self._is_local)
        self.several_hosts = len(members.order) > 1  # the same on every rank: it decides which collectives are run
        assert self.several_hosts or world.size == 1 or host_sum is not None
        self._over_all = AllSum(partial(world.sum_, "commit"), world.size)
        if host_sum is not None:
            self._over_all = AllSum(self._sum_in_memory_, len(members.order), is_in_ring=world.rank == min(outboxes))
        self._row_coder = row_coder
        # Row gradients stay where the model's device has them: no other worker gets or applies any.
        self.keeps_on_device = world.size == 1 and row_coder is None and not self._by_contributors
        self._whole_rows = WholeRows(tables, self._server, world.size, outboxes, self._dims, self._traffic)
        self.row_exchange: RowExchange | None = None
        if self.several_hosts and row_coder is not None:
            kind = ActivationExchange if row_coder.spec.pools else RowExchange
            self.row_exchange = kind(
                row_coder, world, self._alltoall, tables, self._server, list(outboxes), self._traffic
            )
        self.held: HeldRows | None = None
        # The newest step whose rows this rank has applied, and the newest that all ranks of the host have.
        self._applied = self._awaited = -1
        self.is_in_epoch = False  # a worker without a share of a step closes it as well, and does not leave the loop
        self.resume()

    def resume(self) -> None:
        """Serve this rank's shards, from the start or after an asynchronous mode."""
        self._tables.local = self._is_local if self.several_hosts else None
        self._tables.remote = [None] * len(self._dims)
        self._tables.write_rows, self._tables.await_steps = self.write_rows, self.await_applied
        self._tables.on_device.applies = self.keeps_on_device and can_apply(
            self._tables.layout, self._tables.optimizers
        )
        if self.several_hosts:  # shards come and go: what is registered would keep pages that the file has no more
            self._tables.on_device.close()
        else:
            self._tables.on_device.forget()
        self._memory.claim(self._mine)
        coder = self._row_coder
        # With shards of lost hosts.
        self._has_local_residuals = coder is not None and coder.has_residuals_for(self._is_local)
        if self.row_exchange is not None:
            self.row_exchange.resume()

    def write_rows(self, group_number: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Set rows in every host's memory; all workers have the same ones. A collective, between epochs.

        keys: int64 [n], distinct; values: float32 [n, dim]. Raises GbaError within an epoch.
        """
        if self.is_in_epoch:
            raise not_assignable()
        layout, group = self._tables.layout, self._tables.layout.groups[group_number]
        mine = np.isin(keys % layout.n_shards, self._mine)
        step = int(self._memory.marks().finished[self._mine].max(initial=0))
        missing = write_rows(self._memory, group, keys[mine], values[mine], step)
        self._tables.on_device.forget()
        if self._world.size > 1:
            missing = int(self._world.gather("rows assigned", np.array([missing], dtype=np.int64)).sum())
        if missing:
            raise GbaError(
                f"table {group.tables[0].name!r}: {missing} of {len(keys)} assigned ids found no room; the others have "
                "their rows. Raise its capacity"
            )

    def await_rows(self, step: int) -> None:
        """Return when every row of this host is as after `step`; at once where this worker's device writes them."""
        if self._memory.is_written_by_device:
            return
        try:
            self._memory.wait_finished(self._on_this_host, step, self._tables.config.timeout_s)
        except TimeoutError as error:
            raise worker_lost(str(error)) from error
        self._awaited = max(self._awaited, step)

    def await_applied(self) -> None:
        """`await_rows` of the newest step that this rank has applied: before rows are read between two steps."""
        if self._applied > self._awaited:
            self.await_rows(self._applied)

    def pull(self, keys: Sequence[np.ndarray], whole: bool = False, bags: BagLookups | None = None) -> None:
        """Fetch rows of other hosts: per group the keys this rank will use next. A collective; nothing on one host.

        whole: uncompressed, even where rows are compressed otherwise; no gradients follow. bags: see `EpochRun.bags`
        """
        if not self.several_hosts:
            return
        exchange = self.row_exchange
        if exchange is None or whole:
            self._whole_rows.pull(keys, self._alltoall, returns=not whole)
            return
        with exchange.measured():
            if exchange.compresses:
                exchange.pull(keys, bags)
            else:
                self._whole_rows.pull(keys, exchange.alltoall, returns=True)

    def exchange(self, step: int, parts: Sequence[Sequence[Part]], scale: float, lr: float, n_skipped: int = 0) -> None:
        """Send row gradients (per group, each with its weight) to the ranks that serve them; hold what comes.

        parts: `with_contributors`, where rows are averaged over these. scale: see `HeldRows`
        n_skipped: steps so far that were not applied
        """
        merged = [self._merged_parts(*of) for of in zip(parts, self._dims, strict=True)]
        if self.keeps_on_device:
            self.held = HeldRows(step, merged, {}, scale, lr, n_skipped)
            return
        grads = list(map(on_host, merged))
        exchange, coder = self.row_exchange, self._row_coder
        if coder is not None:
            coder.begin()
            is_coded = exchange is not None and exchange.compresses
            if not is_coded or self._has_local_residuals:
                with nullcontext() if exchange is None else exchange.measured():
                    grads = coder.whole(grads, self._is_local if is_coded else None)
        if self._world.size == 1:
            self.held = HeldRows(step, grads, {}, scale, lr, n_skipped)
            return
        here = sorted(set(self._outboxes) - {self._world.rank})
        packed = Packed.of(grads, self._server, self._world.size, here)
        self._outboxes[self._world.rank].post(step, packed.words, packed.write)
        remote: dict[int, list[RowGrad]] = {}
        if exchange is not None:
            with exchange.measured():
                if exchange.compresses:
                    remote = exchange.send(grads, int(self._by_contributors))
                else:
                    remote = self._whole_rows.send(packed, exchange.alltoall)
        elif self.several_hosts:
            remote = self._whole_rows.send(packed, self._alltoall)
        self.held = HeldRows(step, packed.picked(self._world.rank), remote, scale, lr, n_skipped)

    def apply_ahead(self, rows: RowGrads, step: int, scale: float, lr: float, n_skipped: int) -> None:
        """Begin to apply the gradients of a step's only micro-batch, where that can be undone: in a device's memory.

        What `exchange`, a commit and `apply_held` will do with them, or not. The device does not wait for these.
        """
        device, of_tables = self._tables.on_device.current, self._tables.optimizers
        if not self.keeps_on_device or device is None or any(len(some) > 1 for some in rows):
            return
        ahead: list[tuple[int, SparseRowGrad]] = []
        for group, grad in ((group, grad) for group, some in enumerate(rows) for grad in some):
            is_fused = device.is_fused(group) and device.can_apply(group, of_tables)
            if not (is_fused and isinstance(grad, SparseRowGrad) and grad.has_one_of_each):
                return  # its rows are read when it is applied, by when no others may be changed
            ahead.append((group, grad))
        for group, grad in ahead:
            device.apply_ahead(group, grad, of_tables, scale, lr, step - n_skipped)

    def _merged_parts(self, parts: Sequence[Part], dim: int) -> RowGrad | DeviceRowGrad:
        """One gradient of a group, on the device if all parts are there."""
        if not parts:
            return RowGrad.none(dim, self._tables.counts_accesses)
        on_device = [(grad, weight) for grad, weight in parts if isinstance(grad, DeviceRowGrad)]
        if len(on_device) == len(parts):
            return merge_on_device(on_device)
        return merge([(on_host(grad), weight) for grad, weight in parts])

    def row_squares(self) -> float:
        """The sum of the squares of the gradients of this rank's rows in the step that is held, over all workers.

        A collective on a single host: a rank reads what the others left in their outboxes when all have written. With
        several hosts the `alltoall` of `exchange` implies that.
        """
        assert self.held is not None
        if self._host_sum is not None and not self.several_hosts:
            self._sum_in_memory_(torch.empty(0))
        grads, scale = self._merged(self.held)
        groups = self._tables.layout.groups
        on_device = sum(grad.squares() for grad in grads if isinstance(grad, DeviceRowGrad))
        rows = (
            by_row(self._memory, g, grad) for g, grad in zip(groups, grads, strict=True) if isinstance(grad, RowGrad)
        )
        return (clipping.squares(grad.values for grad in rows) + on_device) * scale**2

    def commit(self, dense: DenseGradients, fields: CommitFields) -> None:
        """Sum the dense gradients and the numbers that travel with them over all ranks. Returning means: decided."""
        exchange = self.row_exchange
        if exchange is not None:
            exchange.write_timing(fields["rows"])
        self._sum_(dense, fields)
        if exchange is not None:
            exchange.read_timings(fields["rows"])

    def _sum_(self, dense: DenseGradients, fields: CommitFields) -> None:
        if self._dense_exchange is not None:
            self._dense_exchange.sum_(self._world, dense, fields["dense"], self._traffic, self._over_all)
            return
        if self._world.size == 1:
            return
        dense.sum_(self._over_all.sum_)
        itemsize = dense.total.element_size()
        self._traffic.both("dense", self._over_all.sent(itemsize * dense.n))
        self._traffic.both("header", self._over_all.sent(itemsize * len(dense.extra)))

    def _sum_in_memory_(self, values: Tensor) -> None:
        assert self._host_sum is not None
        try:
            self._host_sum.sum_(values)
        except WorkerGone as error:
            raise worker_lost(str(error)) from error

    def apply_held(self, factor: float = 1.0) -> None:
        """Apply the held row gradients to the shards this rank serves. factor: what they are multiplied by."""
        held, self.held = self.held, None
        assert held is not None
        if self._dense_exchange is not None:
            self._dense_exchange.settle()
        if self._row_coder is not None:
            self._row_coder.settle()
            if self._has_local_residuals and held.step % _LOOK_AGAIN == 0:
                self._has_local_residuals = self._row_coder.has_residuals_for(self._is_local)
        memory, layout = self._memory, self._tables.layout
        # A shard that has begun this step has had it: from a worker that died, before the step was computed again.
        due = self._mine[memory.marks().begun[self._mine] < held.step]
        number = held.step - held.n_skipped
        memory.begin(due, held.step)
        optimizers, scale = self._tables.optimizers, held.scale * factor
        device, is_by_device = self._tables.on_device.current, False
        try:
            for i, (group, grad) in enumerate(zip(layout.groups, self._to_apply(held, due), strict=True)):
                if isinstance(grad, DeviceRowGrad) and device is not None and device.can_apply(i, optimizers):
                    is_by_device = True
                    device.apply(i, grad, optimizers, scale, held.lr, number)
                    continue
                here = on_host(grad) if isinstance(grad, DeviceRowGrad) else grad
                apply_rows(memory, optimizers, group, here, due, scale=scale, lr=held.lr, number=number, step=held.step)
                self._not_by_device(i, len(due))
            if device is not None and is_by_device:  # (of a world of one: all shards are due)
                device.finish(held.step)
            else:
                memory.finish(due, held.step)
        finally:
            if device is not None and is_by_device:
                memory.written_by_device(device.wait)
        self._applied = held.step

    def _not_by_device(self, group: int, n_due: int) -> None:
        """The CPU has changed rows of the group: copies of the device are outdated.

        n_due: shards that it did. With all, it does so in each step: a part of the model is compiled, say
        """
        on_device = self._tables.on_device
        if on_device.current is not None and on_device.current.has(group) and on_device.current.keeps_copies:
            on_device.forget()
            on_device.applies = n_due < len(self._mine)

    def _to_apply(self, held: HeldRows, due: np.ndarray) -> Sequence[RowGrad | RowSum | DeviceRowGrad]:
        """Per group, the gradients for these shards of this rank."""
        if not (self.keeps_on_device or held.merged or self._by_contributors or len(due) < len(self._mine)):
            return [add_in_order(parts) for parts in self._arrived(held)]
        grads, n_shards = self._merged(held)[0], self._tables.layout.n_shards
        if len(due) == len(self._mine):
            return grads
        return [grad.select(np.isin(grad.keys % n_shards, due)) for grad in map(on_host, grads)]

    def skip_held(self) -> None:
        """The step was decided, and is not applied: rows stay, and so does what waits of compressed gradients."""
        held, self.held = self.held, None
        assert held is not None
        due = self._mine[self._memory.marks().begun[self._mine] < held.step]
        self._memory.begin(due, held.step)
        self._memory.finish(due, held.step)
        self._applied = held.step

    def discard_held(self) -> None:
        """The step was not decided; it will be computed again."""
        self.held = None

    def release_waiters(self) -> None:
        """This rank's world broke: neighbours that wait for its shards need not wait until the time-out."""
        self._memory.release(self._mine)
        self._applied = self._awaited  # nor does this rank wait for theirs
        if self._host_sum is not None:
            self._host_sum.leave()
        self._leave_workers()

    def close(self) -> None:
        """Let go of the outboxes. May be called twice."""
        if self._host_sum is not None:
            self._host_sum.close()
        self._leave_workers()
        for outbox in self._outboxes.values():
            outbox.close()

    def _leave_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def _merged(self, held: HeldRows) -> tuple[Sequence[RowGrad | DeviceRowGrad], float]:
        """Per group, the gradients for this rank's rows, and what they are to be multiplied by."""
        if self.keeps_on_device:
            return cast(Sequence[RowGrad | DeviceRowGrad], held.own), held.scale
        if not held.merged:
            held.merged[:] = [merge([(copied(part), 1.0) for part in parts]) for parts in self._arrived(held)]
            if self._by_contributors:
                held.merged[:] = [average_over_contributors(grad) for grad in held.merged]
        return held.merged, held.scale

    def _arrived(self, held: HeldRows) -> list[list[RowGrad | PickedRows]]:
        """Per group, the row gradients for this rank, in the order of the ranks that sent them."""
        me, counted = self._world.rank, self._tables.counts_accesses
        by_rank: dict[int, Sequence[RowGrad | PickedRows]] = {
            rank: unpack(outbox.message(held.step, me), self._dims, counted)
            for rank, outbox in self._outboxes.items()
            if rank != me
        }
        by_rank |= {me: cast(Sequence[RowGrad | PickedRows], held.own), **held.remote}
        return [list(by_group) for by_group in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)]
