"""A part of a step's dense gradient is summed over the hosts while backward computes the rest.

Backward completes the gradients of the last parameters first. When those of the `DenseGradients.second_half` are there,
in the worker's last micro-batch of the step, their sum begins. It ends as the step's commit begins, which sums the
first half and the numbers that travel along. So nothing is decided earlier than without it.

What backward accumulated need not be what `optimizer.step()` finds: a loop may call `backward` several times for a
micro-batch, or clip `p.grad`. Each worker compares, and the commit says whether any of them has found a difference; if
so the differences are summed as well, which is the commit then, and in this world no sum begins early any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from gba_hvd.comm.collectives import worker_lost
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.shm.host_sum import HostSum, SumThroughLeaders, WorkerGone

LEAST_BYTES = 1 << 21  # of the whole gradient: each operation costs some tenths of a millisecond


@contextmanager
def worker_gone_is_lost() -> Iterator[None]:
    """Turn `WorkerGone` of this host into what Horovod raises."""
    try:
        yield
    except WorkerGone as error:
        raise worker_lost(str(error)) from error


def open_early_sum(dense: DenseGradients, sums: HostSum | None) -> EarlySum | None:
    """The same on all workers; none on a single host, on a GPU, or where it would not pay."""
    pays = dense.total.device.type == "cpu" and dense.n * dense.total.element_size() >= LEAST_BYTES
    if not (isinstance(sums, SumThroughLeaders) and pays and dense.second_half[1] > 0):
        return None
    return EarlySum(dense, sums)


class EarlySum:
    """One worker's part, in one world. All workers call `sum_` for every step; what is called before is each one's own.

    sent: [n], the second half of what `dense.total` was to become, when the sum began
    """

    def __init__(self, dense: DenseGradients, sums: SumThroughLeaders) -> None:
        self._dense, self._sums = dense, sums
        self._first, self._at = dense.second_half
        self._sent = dense.total.new_empty(dense.n - self._at)
        self._has_begun, self._weight = False, 0.0
        self._missing: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, number))
            for number, parameter in enumerate(dense.parameters)
        ]

    def expect(self, weight: float) -> None:
        """The micro-batch that is handed out is this worker's last of the step. weight: of its gradient in the sum."""
        self._weight, self._missing = weight, set(range(self._first, len(self._dense.parameters)))

    def forget(self) -> None:
        """None is expected."""
        self._weight = 0.0

    def close(self) -> None:
        """No more sums. May be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def sum_(self, add_up: Callable[[Tensor], None], changed: Tensor, n_bad: Tensor) -> bool:
        """Sum `dense.total` and the numbers over the workers. A collective. Whether it was as sent, on all of them.

        add_up: sums in place; its last call is the step's commit. changed, n_bad: of the numbers, [1] each
        """
        dense, at = self._dense, self._at
        late = dense.total[at : dense.n]
        self.forget()
        with worker_gone_is_lost():
            if not self._has_begun:
                self._sent.copy_(late)
                self._sums.begin(self._sent)
            self._has_begun = False
            difference = None if torch.equal(late, self._sent) else late - self._sent
            changed.fill_(float(difference is not None))
            self._sums.end(late)
        rest = torch.cat([dense.total[:at], dense.extra])
        add_up(rest)
        dense.total[:at].copy_(rest[:at])
        dense.extra.copy_(rest[at:])
        if float(changed) == 0.0 or float(n_bad) > 0.0:  # a step whose gradients are not finite ends here
            return True
        difference = torch.zeros_like(late) if difference is None else difference
        add_up(difference)
        late.add_(difference)
        return False

    def _accumulated(self, number: int, _: Tensor) -> None:
        """Backward has added to the gradient of this parameter."""
        if not self._weight:
            return
        self._missing.discard(number)
        with worker_gone_is_lost():
            if self._has_begun:
                self._sums.advance()
            elif not self._missing:
                self._dense.add_up_second_half(self._weight, self._sent)
                self._has_begun = True
                self._sums.begin(self._sent, waits=False)
