"""The sum of a vector over all workers, through the memory of their hosts: what commits a step.

On one host (`HostSum`) each worker posts its vector in an outbox of its own, waits until all have posted theirs, and
adds them up in the order of the ranks: so all have the same bits, and a sum is written nowhere but where it is used.

What is decided, and when. A sum is decided when the last worker has posted; the workers' memory says so, and outlives
them. So no survivor of a crash misses the result of a sum that another one has: it finds all vectors, and adds them
up itself. A vector is written over two sums later, see `shm.outbox`: by a worker that has the sum in between, for
which all have posted after they had read.

    a worker dies                        the others
    before its vector is complete        see that it is gone, and that the sum will never be there: `WorkerGone`
    after that                           have the sum; they see that it is gone at the next one

A worker that leaves the world for another reason says so (`leave`): it lives, so others would not see it. One that is
stopped, by a signal or a debugger, for as long as Horovod waits for an answer counts as gone.

With several hosts (`SumThroughLeaders`) a host's leader adds its neighbours' vectors to its own, the leaders sum what
they have, and each posts the result for its neighbours. A worker that has the result knows that all workers had posted;
other leaders, and neighbours of a leader, may not have it.

    a leader dies                        its neighbours                      the other hosts
    before it has summed                 `WorkerGone`                        lose the connection; none has the result
    while the leaders sum                `WorkerGone`                        some may have the result, the others lose
                                                                             the connection
    before it has posted the result      `WorkerGone`, without the result    have it
    after that                           have it                             have it

A neighbour that dies before it has posted is missed by its leader, which leaves. A leader that leaves without having
died ends the sum of the leaders, or, if it had begun its part, may leave its result to the others.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gba_hvd.errors import GbaError
from gba_hvd.shm.outbox import Outbox
from gba_hvd.shm.process_state import is_alive, is_stopped

_LOOK_S = 0.02  # a worker that died wakes no other
_LONG_LOOK_S = 1.0  # between two looks; where it is longer, this worker was stopped as well
_NOTICE_S = 60.0  # after so long, and then after twice that, and so on, the log says what is waited for
log = logging.getLogger("gba_hvd")


class WorkerGone(GbaError):
    """A worker of this host died, left the world, or was stopped, before it posted its vector."""


class HostSum:
    """One worker's part. All workers of a world make the same sums in the same order; a new one for every world."""

    _awaited = "its gradients were complete"

    def __init__(self, rank: int, outboxes: Mapping[int, Outbox]) -> None:
        """outboxes: by rank, those of all ranks; used for nothing else."""
        self._rank, self._outboxes = rank, dict(sorted(outboxes.items()))
        self._patience_s = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))  # for a stopped worker
        self._n = 0  # sums so far: steps do not number them, since one that was not applied is computed again

    def sum_(self, values: Tensor) -> None:
        """Sum over the ranks, in place. values: [n], on the CPU, of the same size and dtype everywhere.

        Every worker returns after all have called it, on several hosts if n > 0. Raises WorkerGone where some worker
        never will; after that, and after any other exception, this worker has left.
        """
        if self._outboxes[self._rank].has_left:
            raise WorkerGone(f"rank {self._rank}, this worker, left the world when a sum failed")
        self._n += 1
        try:
            self._exchange(values)
        except BaseException:  # the others would wait for the sum that this worker takes for the next one
            self.leave()
            raise

    def leave(self) -> None:
        """This worker makes no more sums; it wakes those that wait for it."""
        self._outboxes[self._rank].leave()

    def close(self) -> None:
        """Leave, and remove this worker's file. May be called twice."""
        self.leave()
        for outbox in self._outboxes.values():
            outbox.close()

    def _exchange(self, values: Tensor) -> None:
        self._post(values)
        self._await(self._outboxes)
        parts = self._posted(self._outboxes, values)
        torch.add(parts[0], parts[1], out=values)
        for part in parts[2:]:
            values.add_(part)

    def _post(self, values: Tensor) -> None:
        mine = values.numpy()
        words = np.array([mine.nbytes // 4], dtype=np.int64)
        self._outboxes[self._rank].post(self._n, words, lambda memory: np.copyto(memory.view(mine.dtype), mine))

    def _await(self, ranks: Iterable[int]) -> None:
        """Wait until these ranks have posted."""
        missing = list(ranks)
        stopped_s = dict.fromkeys(missing, 0.0)  # as far as this worker ran meanwhile
        began_s, notice_s = time.monotonic(), _NOTICE_S
        looked_s = began_s
        while missing := [rank for rank in missing if not self._outboxes[rank].wait_posted(self._n, 0.0)]:
            if self._outboxes[missing[0]].wait_posted(self._n, _LOOK_S):
                continue
            now_s = time.monotonic()
            for rank in missing:
                more_s = min(now_s - looked_s, _LONG_LOOK_S)
                stopped_s[rank] = stopped_s[rank] + more_s if is_stopped(self._outboxes[rank].pid) else 0.0
                self._refuse_gone(rank, stopped_s[rank])
            looked_s = now_s
            if now_s - began_s > notice_s:
                notice_s *= 2
                self._report(missing, now_s - began_s)

    def _refuse_gone(self, rank: int, stopped_s: float) -> None:
        box = self._outboxes[rank]
        if box.has_left:
            how = "left the world"
        elif not is_alive(box.pid):
            how = "has died"
        elif stopped_s > self._patience_s:
            how = f"has been stopped for {stopped_s:.0f} s"
        else:
            return
        if not box.wait_posted(self._n, 0.0):  # else it posted before that
            raise WorkerGone(f"rank {rank} (process {box.pid}) {how} before {self._awaited}")

    def _report(self, missing: list[int], waited_s: float) -> None:
        who = ", ".join(f"rank {rank} (process {self._outboxes[rank].pid})" for rank in missing)
        log.warning(
            "rank %d has waited %.0f s for the gradients of %s, alive: computing, or hanging; `py-spy dump --pid %d` "
            "(pip install py-spy) shows where. In an elastic job the others continue when it is killed",
            self._rank, waited_s, who, self._outboxes[missing[0]].pid,
        )  # fmt: skip

    def _posted(self, ranks: Iterable[int], like: Tensor) -> list[Tensor]:
        dtype = like.numpy().dtype
        return [torch.from_numpy(self._outboxes[rank].message(self._n, 0).view(dtype)) for rank in ranks]


class Leaders(Protocol):
    """What connects the leaders of all hosts."""

    def sum_(self, values: Tensor) -> None:
        """Sum over the leaders, in place."""

    def close(self) -> None:
        """This one makes no more sums. May be called twice."""


class SumThroughLeaders(HostSum):
    """The same with several hosts."""

    def __init__(self, rank: int, outboxes: Mapping[int, Outbox], leaders: Leaders | None) -> None:
        """outboxes: of the ranks of this host, the lowest of which leads it; leaders: None on other ranks."""
        super().__init__(rank, outboxes)
        self._leader, *self._neighbours = self._outboxes
        self._leaders = leaders
        assert (leaders is not None) == (rank == self._leader)
        if leaders is None:
            self._awaited = "it posted the sum of all hosts' gradients"

    def leave(self) -> None:
        super().leave()
        if self._leaders is not None:
            self._leaders.close()

    def _exchange(self, values: Tensor) -> None:
        if self._leaders is None:
            self._post(values)
            self._await([self._leader])
            values.copy_(self._posted([self._leader], values)[0])
            return
        self._await(self._neighbours)
        for part in self._posted(self._neighbours, values):
            values.add_(part)
        self._leaders.sum_(values)
        if self._neighbours:
            self._post(values)  # there is room: `Outbox.create`

    def _report(self, missing: list[int], waited_s: float) -> None:
        if self._leaders is not None:
            super()._report(missing, waited_s)
            return
        log.warning(
            "rank %d has waited %.0f s for the sum of all hosts' gradients from rank %d (process %d), whose log shows "
            "what that one waits for", self._rank, waited_s, self._leader, self._outboxes[self._leader].pid,
        )  # fmt: skip
