"""Nothing of a job lives after it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gba_hvd_tools.chaos.job import VARIABLE, ChaosJob
from gba_hvd_tools.chaos.plan import plan_of

REPLACES_WORKERS = "import subprocess\nwhile True:\n    subprocess.run(['sleep', '600'])"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_launcher_that_replaces_workers_is_killed_with_all_of_them(tmp_path: Path) -> None:
    job = ChaosJob(plan_of(1), tmp_path)
    try:
        job.launcher = subprocess.Popen(
            [sys.executable, "-S", "-c", REPLACES_WORKERS],
            env=os.environ | {VARIABLE: str(job.plan_file)},
            start_new_session=True,
        )
        while len(job.processes()) < 2:
            time.sleep(0.01)
        job.kill()
        assert not job.processes() and job.exit_code is not None
    finally:
        job.kill()
        job.remove()
