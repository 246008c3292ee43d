"""Random fault schedules: workers and servers are killed and stopped, hosts leave and return, the mode changes.

Whatever happens: the job ends well, every sample is in the account once, the model learned, nothing is left behind.
`GBA_HVD_RANDOM_SCHEDULES=200 pytest tests/processes/test_random_schedules.py` runs that many, with mode shadow in place
of gba if GBA_HVD_RANDOM_MODE says so. In one of three each name is a host of its own, and what travels between them is
compressed: dense gradients and values, rows and their gradients. Update rules take turns. A seed that fails is added to
SEEDS.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gba_hvd.faults import FaultSchedule

from .cluster import NAMES, cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1000)]
EPOCHS, SAMPLES, STEPS = 8, 1000, 88  # 11 steps of 96 samples an epoch
SEEDS = [(2, "gba"), (5, "shadow")]
COMPRESSED: dict[str, Any] = {
    "own_memory_per_name": True,
    "compression": {"name": "dct", "keep": 0.3, "values": "int8", "refresh_every": 20},
    "row_compression": {"name": "dct", "keep": 0.3, "values": "int8"},
}

RULES = [("none", "Adam"), ("gap_aware", "Adam"), ("dana_zero", "momentum"), ("dana_slim", "momentum")]


def seeds() -> list[Any]:
    """(seed, the asynchronous mode)"""
    wanted = int(os.environ.get("GBA_HVD_RANDOM_SCHEDULES", "0"))
    first = int(os.environ.get("GBA_HVD_RANDOM_FIRST", "1"))
    mode = os.environ.get("GBA_HVD_RANDOM_MODE", "gba")
    return [(seed, mode) for seed in range(first, first + wanted)] if wanted else SEEDS


@dataclass(frozen=True)
class Schedule:
    """What happens: faults by step, modes by step, and the step at which one host leaves for a while."""

    faults: FaultSchedule
    switch_at: dict[int, str]
    host_leaves_at: int | None

    def kills(self, step: int) -> int:
        """How many had fallen due when the job was at this step, on hosts that were surely there."""
        until = step if self.host_leaves_at is None else min(step, self.host_leaves_at - 1)
        return sum(fault.kind == "kill" and (fault.at_step or 0) <= until for fault in self.faults.planned)


def draw(seed: int, pace: int = 1) -> Schedule:
    """pace: how many times as many steps the mode makes of an epoch."""
    rng = np.random.default_rng(seed)

    def step() -> int:
        return pace * int(rng.integers(3, STEPS - 15))

    def worker() -> int:
        return int(rng.integers(0, 3))

    faults = FaultSchedule().serve(seconds=0.04)
    for rank in rng.choice(3, size=rng.integers(0, 3), replace=False):  # never all three: somebody must have the state
        faults = faults.kill(worker=int(rank), at_step=step())
    for _ in range(rng.integers(0, 2)):
        faults = faults.stop(worker=worker(), at_step=step(), seconds=float(rng.uniform(0.5, 4)))
    for _ in range(rng.integers(0, 3)):
        faults = faults.kill_server(host=0, at_step=step())
    if rng.random() < 0.3:
        faults = faults.stop_server(host=0, at_step=step(), seconds=float(rng.uniform(0.5, 3)))
    if rng.random() < 0.5:
        faults = faults.slow(worker=worker(), factor=float(rng.uniform(2, 6)), from_step=step())
    for _ in range(rng.integers(0, 3)):
        faults = faults.drop_push(worker=worker(), at_step=step())
    modes = rng.permutation(["gba", "allreduce", "gba", "allreduce"])[: rng.integers(0, 4)]
    switch_at = {step(): str(mode) for mode in modes}
    return Schedule(faults, switch_at, step() if rng.random() < 0.3 else None)


@pytest.mark.parametrize(("seed", "mode"), seeds())
def test_the_account_is_exact_and_nothing_is_left(tmp_path: Path, seed: int, mode: str) -> None:
    compressed = COMPRESSED if seed % 3 == 2 else {}
    plan = draw(seed, pace=6 if mode == "shadow" else 1)
    switch_at = {str(k): mode if v == "gba" else v for k, v in plan.switch_at.items()}
    gba = {"mode": mode if seed % 2 else "allreduce", "switch_at": switch_at, "sync": ("easgd", "ma")[seed // 2 % 2]}
    rule, optimizer = RULES[seed // 3 % len(RULES)] if mode == "gba" else RULES[0]
    gba["rule"], settings = rule, {"dense_optimizer": optimizer, **compressed}
    faults = [fault.entry() for fault in plan.faults.faults]
    environ = {"GBA_HVD_LEASE_S": "3"}
    if compressed:
        environ["GBA_HVD_GRACE_S"] = "60"  # a host whose one worker was killed keeps its rows until that is replaced
    with cluster(tmp_path, environ, gba=gba, fault_schedule=faults, epochs=EPOCHS, **settings) as job:
        job.start_elastic(NAMES)
        if plan.host_leaves_at is not None:
            at = plan.host_leaves_at
            wait_for(lambda: job.last_step() >= at or job.ended, f"step {at}", 240)
            job.set_hosts(NAMES[:2])
            wait_for(lambda: job.last_step() >= at + 10 or job.ended, f"step {at + 10}", 240)
            job.set_hosts(NAMES)
        code = job.wait(300)
        assert code == 0, f"exit code {code}:\n{job.log()}"
        job.assert_nothing_left()
        result = job.result()
        assert "kill" in job.schedule_fired() or not plan.kills(result["step"])  # the faults really happened
        assert result["total"] == EPOCHS * SAMPLES
        assert result["applied"] + result["dropped"] + result["lost"] == result["total"]
        # Of several servers, others may have begun the step that a killed one had not.
        n_torn = job.schedule_fired().count("kill_server") if compressed else 0
        assert result["lost"] <= n_torn * (96 if mode == "gba" else 16)
        assert max(result["aucs"]) > 0.9
