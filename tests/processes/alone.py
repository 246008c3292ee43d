"""One worker without Horovod, in the process of the test: with a real shard memory, keeper and companion server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import gba_hvd

from .cluster import GRACE_S, PATIENCE_S, wait_for
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
    scaler: dict[str, Any] | None = None
    norms: tuple[float, ...] = ()  # of every step's gradient before clipping, as callbacks received them


class Watch(gba_hvd.Callback):
    def __init__(self) -> None:
        self.modes: set[str] = set()
        self.switches: list[tuple[str, str, int]] = []
        self.norms: list[float] = []

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        self.modes.add(record.mode)
        self.norms += record.grad_norms

    def on_event(self, event: gba_hvd.Event) -> None:
        assert event.kind not in ("switch_failed", "dense_settings_not_followed"), event.message
        if event.kind == "switch":
            self.switches.append((event.data["from"], event.data["to"], event.step))


@contextlib.contextmanager
def alone_in(folder: Path, server_s: float = 60.0) -> Iterator[None]:
    """Settings of one job in this process; its memory is gone at the end."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOROVOD_RANK", "GBA_HVD_JOB_ID", "GBA_HVD_N_SHARDS"):
            patch.delenv(name, raising=False)
        patch.setenv("GBA_HVD_SHARD_DIR", str(folder / "shm"))
        patch.setenv("GBA_HVD_GRACE_S", str(GRACE_S))
        # A worker that is not scheduled for a while is not to lose its leases: it would compute a micro-batch twice.
        patch.setenv("GBA_HVD_ALIVE_S", "100")
        patch.setenv("GBA_HVD_SERVER_S", str(server_s))
        yield
    wait_for(lambda: not list((folder / "shm").glob("gba-hvd-*")), "the end of the shard memory")


@contextlib.contextmanager
def job_alone(folder: Path, plan: dict[str, Any], **gba: Any) -> Iterator[tuple[Training, Watch]]:
    """What to train, for one job. gba: settings of a GBACallback; none: allreduce."""
    folder.mkdir(parents=True)
    with alone_in(folder):
        training, watch = Training.of(plan, epoch=0), Watch()
        settings = {"wait_s": PATIENCE_S, **gba}  # modes begin at the step that they are due at
        training.state.register_callbacks([watch, *([gba_hvd.GBACallback(**settings)] if gba else [])])
        yield training, watch


def outcome_of(training: Training, watch: Watch) -> Outcome:
    """As it stands; before the job's memory is gone."""
    return Outcome(
        training.state.step, training.arrays(), training.optimizer_arrays(), asdict(training.state.samples),
        watch.modes, watch.switches, None if training.scaler is None else training.scaler.state_dict(),
        tuple(watch.norms),
    )  # fmt: skip


def train_alone(folder: Path, plan: dict[str, Any], **gba: Any) -> Outcome:
    """Train as `plan` says."""
    with job_alone(folder, plan, **gba) as (training, watch):
        model, optimizer = training.model, training.optimizer

        @gba_hvd.elastic.run
        def train(state: gba_hvd.elastic.TorchState) -> Outcome:
            for state.epoch in range(plan.get("epochs", 2)):
                for batch in gba_hvd.batches(training.dataset, state, seed=1):
                    optimizer.zero_grad()
                    loss = training.loss(batch)
                    training.backward(loss, [state.epoch, batch.index] in plan.get("overflows", ()))
                    training.step(loss)
                    if plan.get("flush") and state.engine.mode.servers is not None:
                        state.engine.mode.servers.flush()  # the servers have applied it before the next one is computed
                evaluated = nn.Sequential(model, nn.Sigmoid()) if plan.get("evaluate") == "probabilities" else model
                gba_hvd.evaluate(evaluated, training.dataset, state, batch=64)
            return outcome_of(training, watch)

        outcome: Outcome = train(training.state)
        return outcome
