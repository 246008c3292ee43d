"""The books of compressed gradients in a real job: one random projection of every vector, which all sums respect.

A worker notes what it brings to each commit, what all took from it, and the residual it had before; at the end what is
left. So no gradient can vanish or count twice without a change of the projections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gba_hvd.compression import dense_push
from gba_hvd.compression.dense_exchange import DenseExchange
from gba_hvd.compression.dense_push import DensePush
from gba_hvd.modes.allreduce_exchange import AllreduceExchange

if TYPE_CHECKING:
    from .cluster import Cluster


class Books:
    """The worker's side."""

    def __init__(self, engine: Any, note: Callable[..., None], die: Callable[[str, int], None]) -> None:
        self._engine, self._note = engine, note
        weights = np.random.default_rng(0).normal(size=engine.model.dense.n)
        commit = AllreduceExchange.commit

        def projected(vector: np.ndarray) -> float:
            return float(vector.astype(np.float64) @ weights)

        def noting(exchange: AllreduceExchange, dense: Any, fields: Any) -> None:
            brought = projected(dense.total[: dense.n].numpy())
            rest = projected(engine.model.compression.feedback.residual)
            facts = {"step": engine.progress.step + 1, "world": engine.progress.restarts, "rank": engine.world.rank}
            note(brings=brought, rest=rest, **facts)
            die("before commit", engine.progress.step + 1)
            commit(exchange, dense, fields)
            note(takes=projected(dense.total[: dense.n].numpy()), **facts)

        AllreduceExchange.commit = noting  # type: ignore[method-assign]
        state = DenseExchange.state

        def noting_state(exchange: DenseExchange, world: Any) -> dict[str, Any]:
            note(saves=projected(exchange.feedback.residual), step=engine.progress.step)
            return state(exchange, world)

        DenseExchange.state = noting_state  # type: ignore[method-assign]
        self._projected = projected
        frames = DensePush.frames

        def noting_frames(coder: DensePush, flat: np.ndarray) -> list[Any]:
            pushed, sent = projected(flat), np.zeros_like(flat)
            made = frames(coder, flat)
            for frame, places in zip(made, coder._slices, strict=True):
                sizes = [at.stop - at.start for at in places]
                part = dense_push.read(frame.data, sizes, frame.whole) if frame.coded else frame.data
                ends = np.cumsum([0, *(at.stop - at.start for at in places)])
                for at, start, stop in zip(places, ends[:-1], ends[1:], strict=True):
                    sent[at] = part[start:stop]
            note(pushed=pushed, arrives=projected(sent))
            return made

        DensePush.frames = noting_frames  # type: ignore[method-assign]

    def close(self) -> None:
        self._note(left=self._projected(self._engine.model.compression.feedback.residual))


def assert_balanced(
    job: Cluster, tolerance: float = 1e-4, least_waiting: float = 0.01, residual_lost: bool = False, began: float = 0.0
) -> None:
    """All gradients of decided steps were applied, wait at a worker that lived, or went with one that died.

    began: what waited when the job began.
    """
    world_of = {line["committed"]: line["world"] for line in job.notes("committed")}
    takes = {line["step"]: line["takes"] for line in job.notes("takes") if world_of.get(line["step"]) == line["world"]}
    brings = {
        (line["step"], line["pid"]): line["brings"]
        for line in job.notes("brings")
        if world_of.get(line["step"]) == line["world"]
    }
    ended = {line["pid"]: line["left"] for line in job.notes("left")}
    died = {line["pid"]: line["rest"] for line in job.notes("brings") if line["pid"] not in ended}
    assert bool(died) == residual_lost
    pushes = job.notes("pushed")
    gradients = sum(brings.values()) + sum(line["pushed"] for line in pushes)
    sent = sum(takes.values()) + sum(line["arrives"] for line in pushes)
    assert takes or pushes
    waits = sum(ended.values()) + sum(died.values())
    assert sum(map(abs, (*ended.values(), *died.values()))) > least_waiting, "nothing waits: there was nothing to lose"
    np.testing.assert_allclose(sent + waits, gradients + began, atol=tolerance)
