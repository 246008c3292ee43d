"""A record in which all is as it should be: each test of the oracle breaks one thing of it."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from gba_hvd_tools.chaos.oracle import Record
from gba_hvd_tools.chaos.plan import plan_of


@pytest.fixture
def record() -> Record:
    """Sixty steps, one a second, a checkpoint every three; one fault."""
    plan = asdict(plan_of(1)) | {"tracking": "good", "apart": False, "replay": True}
    return Record(
        plan,
        started=1000.0,
        ended=1072.0,
        exit_code=0,
        result={"total": 5000, "applied": 4900, "dropped": 100, "lost": 0, "finite": True, "aucs": [0.7, 0.95]},
        total=5000,
        steps=[(1010.0 + k, k) for k in range(1, 61)],
        words=[(1010.0, "info", "started"), (1071.0, "info", "finished")],
        ends=["FINISHED", "FINISHED"],
        fired=[{"kind": "kill", "step": 8, "time": 1018.0}],
        checkpoints=[1013.0 + 3 * k for k in range(20)],
        checkpoint_s=3.0,
        tracked="FINISHED",
        replay={"replayed": True, "steps": 60, "worst": 1e-7},
    )
