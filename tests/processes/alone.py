"""One worker without Horovod, in the process of the test: with a real shard memory, keeper and companion server."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd.gba import GbaMode

from .cluster import GRACE_S, wait_for
from .workload import Training


@dataclass(frozen=True)
class Outcome:
    """Everything a job leaves."""

    step: int
    arrays: dict[str, np.ndarray]
    optimizer_arrays: dict[str, np.ndarray]
    samples: dict[str, int]
    modes: set[str]  # of its steps
    switches: list[tuple[str, str, int]]  # from, to, step


class _Watch(gba_hvd.Callback):
    def __init__(self) -> None:
        self.modes: set[str] = set()
        self.switches: list[tuple[str, str, int]] = []

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        self.modes.add(record.mode)

    def on_event(self, event: gba_hvd.Event) -> None:
        assert event.kind != "switch_failed", event.message
        if event.kind == "switch":
            self.switches.append((event.data["from"], event.data["to"], event.step))


def train_alone(folder: Path, plan: dict[str, Any], **gba: Any) -> Outcome:
    """Train as `plan` says. gba: settings of a GBACallback; none: plain allreduce."""
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOROVOD_RANK", "GBA_HVD_JOB_ID", "GBA_HVD_N_SHARDS"):
            patch.delenv(name, raising=False)
        patch.setenv("GBA_HVD_SHARD_DIR", str(folder / "shm"))
        patch.setenv("GBA_HVD_GRACE_S", str(GRACE_S))
        training = Training.of(plan, epoch=0)
        model, optimizer, state = training.model, training.optimizer, training.state
        watch = _Watch()
        state.register_callbacks([watch, *([gba_hvd.GBACallback(**gba)] if gba else [])])

        @gba_hvd.elastic.run
        def train(state: gba_hvd.elastic.TorchState) -> Outcome:
            for state.epoch in range(plan.get("epochs", 2)):
                for batch in gba_hvd.batches(training.dataset, state, seed=1):
                    optimizer.zero_grad()
                    loss = training.loss(batch)
                    loss.backward()
                    optimizer.step(loss=loss)
                    if plan.get("flush") and isinstance(state.engine.mode, GbaMode):
                        state.engine.mode.flush()  # the servers have applied it before the next one is computed
                gba_hvd.evaluate(model, training.dataset, state, batch=64)
            return Outcome(
                state.step, training.arrays(), training.optimizer_arrays(), asdict(state.samples), watch.modes,
                watch.switches,
            )  # fmt: skip

        outcome: Outcome = train(state)
    wait_for(lambda: not list((folder / "shm").glob("gba-hvd-*")), "the end of the shard memory")
    return outcome
