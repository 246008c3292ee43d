"""Code of the script between two epochs that the others wait for, in modes with servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gba_hvd.elastic import TorchState


@contextlib.contextmanager
def others_wait(state: TorchState) -> Iterator[None]:
    """The other workers begin no epoch while the body runs, however long it takes, so the model stands still.

        for state.epoch in range(state.epoch, 10):
            for batch in gba_hvd.batches(dataset, state): ...
            with gba_hvd.others_wait(state):
                ndcg = my_ndcg(model)

    On any workers, between two epochs. The body must not wait for another worker, as a collective does: that worker
    waits for the body. Without it, in modes with servers, others wait `GBA_HVD_LEASE_S` (60 s) for code of the script.
    Within an epoch, or where that time is over already, others train: the event `others_trained`, a warning, reports
    it. In allreduce mode nothing is done: there all wait at the next step for this worker in any case.
    """
    mode = state.engine.mode
    with contextlib.nullcontext() if mode is None else mode.others_wait():
        yield
