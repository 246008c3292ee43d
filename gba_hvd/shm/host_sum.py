"""The sum of a vector over the workers of a host, through their memory: what commits a step where a job has one host.

Each worker posts its vector in an outbox of its own, waits until all have posted theirs, and adds them up in the order
of the ranks: so all have the same bits, and a sum is written nowhere but where it is used.

What is decided, and when. A sum is decided when the last worker has posted; the workers' memory says so, and outlives
them. So no survivor of a crash misses the result of a sum that another one has: it finds all vectors, and needs nobody
to add them up. A vector is written over two sums later, see `shm.outbox`: by a worker that has the sum in between, for
which all have posted after they had read.

    a worker dies                        the others
    before its vector is complete        see that it is gone, and that the sum will never be there: `WorkerGone`
    after that                           have the sum; they see that it is gone at the next one

A worker that leaves the world for another reason says so (`leave`), since nobody would see it: it is alive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gba_hvd.errors import GbaError
from gba_hvd.shm.outbox import Outbox
from gba_hvd.shm.shard_memory import is_alive

_LOOK_S = 0.02  # a worker that died wakes nobody
_NOTICE_S = 60.0  # after so long, and then after twice that, and so on, the log says what is waited for
log = logging.getLogger("gba_hvd")


class WorkerGone(GbaError):
    """A worker of this host died, or left the world, before it posted its vector."""


class HostSum:
    """One worker's part. All workers of a world make the same sums in the same order; a new one for every world."""

    def __init__(self, rank: int, outboxes: Mapping[int, Outbox]) -> None:
        """outboxes: by rank, those of all ranks; used for nothing else."""
        self._rank, self._outboxes = rank, dict(sorted(outboxes.items()))
        self._n = 0  # sums so far: steps do not number them, since one that was not applied is computed again

    def sum_(self, values: Tensor) -> None:
        """Sum over the ranks, in place. values: [n], on the CPU, of the same size and dtype everywhere.

        Every worker returns after all have called it. Raises WorkerGone where that will not be.
        """
        self._n += 1
        mine = values.numpy()
        words = np.array([mine.nbytes // 4], dtype=np.int64)
        self._outboxes[self._rank].post(self._n, words, lambda memory: np.copyto(memory.view(mine.dtype), mine))
        for rank in self._outboxes:
            self._await(rank)
        parts = [torch.from_numpy(box.message(self._n, 0).view(mine.dtype)) for box in self._outboxes.values()]
        torch.add(parts[0], parts[1], out=values)
        for part in parts[2:]:
            values.add_(part)

    def leave(self) -> None:
        """This worker makes no more sums; who waits for it learns of that."""
        self._outboxes[self._rank].leave()

    def close(self) -> None:
        """Let go of the memory. May be called twice."""
        self.leave()
        for outbox in self._outboxes.values():
            outbox.close()

    def _await(self, rank: int) -> None:
        """Wait until the rank has posted."""
        box, began_s, notice_s = self._outboxes[rank], time.monotonic(), _NOTICE_S
        while not box.wait_posted(self._n, _LOOK_S):
            has_left = box.has_left
            if has_left or not is_alive(box.pid):
                if box.wait_posted(self._n, 0.0):  # it did so before that
                    return
                how = "left the world" if has_left else "has died"
                raise WorkerGone(f"rank {rank} (process {box.pid}) {how} before its gradients were complete")
            waited_s = time.monotonic() - began_s
            if waited_s > notice_s:
                notice_s *= 2
                log.warning(
                    "rank %d waits for %.0f s for the gradients of rank %d (process %d), which is alive: it computes, "
                    "is stopped, or hangs; py-spy dump --pid %d shows where",
                    self._rank, waited_s, rank, box.pid, box.pid,
                )  # fmt: skip
