"""Random schedules of `gba-hvd chaos`: workers, servers, hosts, stores, networks and disks fail, the mode changes.

Whatever happens, its oracle finds nothing: the job ends as it should, every sample is in the account once, checkpoints
are young, nobody waits without a word, the model learned, nothing is left behind, and an independent computation from
the trace arrives at the same model. `GBA_HVD_RANDOM_SCHEDULES=200 pytest tests/processes/test_random_schedules.py` runs
that many, from seed GBA_HVD_RANDOM_FIRST on, with mode shadow in place of gba if GBA_HVD_RANDOM_MODE says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools.chaos.plan import FaultPlan, plan_of
from gba_hvd_tools.chaos.run import run_plan

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1000)]

# As `gba-hvd chaos show --json SEED` prints them: schedules that failed once, and some of every sort.
SCHEDULES = sorted((Path(__file__).parent / "schedules").glob("*.json"))
MORE = sorted((Path(__file__).parent / "schedules" / "more").glob("*.json"))


FIXED = [FaultPlan.load(path) for path in (*SCHEDULES, *MORE)]


def schedules() -> list[Any]:
    wanted = int(os.environ.get("GBA_HVD_RANDOM_SCHEDULES", "0"))
    first = int(os.environ.get("GBA_HVD_RANDOM_FIRST", "1"))
    mode = os.environ.get("GBA_HVD_RANDOM_MODE", "")  # drawn where empty
    if wanted:
        return [pytest.param(plan_of(seed, mode), id=str(seed)) for seed in range(first, first + wanted)]
    few = [pytest.param(FaultPlan.load(path), id=path.stem) for path in SCHEDULES]
    return few + [pytest.param(FaultPlan.load(path), id=path.stem, marks=pytest.mark.variant) for path in MORE]


@pytest.mark.parametrize("plan", schedules())
def test_the_oracle_finds_nothing_wrong(tmp_path: Path, plan: FaultPlan) -> None:
    outcome = run_plan(plan, tmp_path / "job")
    if outcome.skipped:  # of all seeds; those in the folder need no file system of their own
        assert plan.needs_mounts
        return
    log = "\n".join(text for _, _, text in outcome.record.words[-60:])
    assert not outcome.wrong, f"{outcome.wrong}\n{log}"
    fired = {fault["kind"] for fault in outcome.record.fired}
    assert fired or not plan.kinds  # faults really happened
    if plan in FIXED:  # of each kind that needs no push and no worker of a certain rank, at least one
        assert fired >= {"kill", "kill_server", "stop_server", "host_leaves", "store_503"} & set(plan.kinds)
    if plan.replay and outcome.record.exit_code == 0:
        assert outcome.record.replay is not None
