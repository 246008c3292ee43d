"""What the benchmark of an idle launcher starts and adds up. No launch of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gba_hvd_tools.bench import launcher


@pytest.mark.slow
def test_cpu_time_of_processes_that_have_ended_counts():
    before_s = launcher.cpu_s(os.getpid())
    burn = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert launcher.cpu_s(os.getpid()) - before_s >= 0.29  # ticks of 10 ms


@pytest.mark.parametrize("kind", launcher.DISCOVERIES)
def test_each_kind_of_discovery_finds_the_one_slot(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher.measure, "console_script", lambda name: f"/bin/{name}")
    words = launcher.variant(kind, tmp_path).command
    script = words[words.index("--host-discovery-script") + 1]
    assert subprocess.run(script, shell=True, check=True, capture_output=True, text=True).stdout == "localhost:1\n"
