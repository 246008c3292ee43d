"""Other work on purpose: as much as was asked for, and nothing of it stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gba_hvd_tools.bench.harness import noise
from gba_hvd_tools.bench.harness.core_load import pause_s
from gba_hvd_tools.bench.harness.measure import RunFailed
from gba_hvd_tools.bench.harness.noise import Noise
from gba_hvd_tools.bench.harness.resumable import earlier

from gba_hvd.errors import BadInput


def test_a_pause_makes_up_for_a_burst_that_had_the_core_alone_or_shared_it() -> None:
    assert pause_s(cpu_s=0.5, wall_s=0.5, share=0.25) == pytest.approx(1.5)
    assert pause_s(cpu_s=0.5, wall_s=1.5, share=0.25) == pytest.approx(0.5)
    assert pause_s(cpu_s=0.5, wall_s=9.0, share=0.25) == 0.0


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_leaves_nothing_is_refused(share: float) -> None:
    with pytest.raises(BadInput, match="share of each core"):
        Noise(share)


def test_results_with_and_without_noise_are_not_mixed(tmp_path: Path) -> None:
    """Those from before the setting had no noise."""
    for share, others, same in ((0.3, (0.0, 0.2), 0.3), (0.0, (0.3,), 0.0), (None, (0.3,), 0.0)):
        file = tmp_path / f"{share}.json"
        settings = {"steps": 3} if share is None else {"steps": 3, **noise.setting(share)}
        file.write_text(json.dumps({"rows": [], "settings": settings}))
        assert earlier(file, (), {"steps": 3, **noise.setting(same)})["rows"] == []
        for other in others:
            with pytest.raises(RunFailed, match="noise: "):
                earlier(file, (), {"steps": 3, **noise.setting(other)})


def test_without_a_share_nothing_runs() -> None:
    with Noise(0.0) as noise:
        assert noise.pids == []


@pytest.mark.processes
def test_it_runs_on_each_core_and_ends_with_its_block() -> None:
    with Noise(0.1) as noise:
        pids = noise.pids
        assert len(pids) == len(os.sched_getaffinity(0))
        assert all(_runs(str(pid)) for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.processes
def test_it_ends_when_its_parent_is_killed() -> None:
    script = "import time\nfrom gba_hvd_tools.bench.harness.noise import Noise\n"
    script += "with Noise(0.1) as noise:\n    print(*noise.pids, flush=True)\n    time.sleep(600)\n"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = parent.stdout.readline().split()
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 60
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids and not any(_runs(pid) for pid in pids)


def _runs(pid: str) -> bool:
    """A process that nobody has waited for is over, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
