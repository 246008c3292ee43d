"""A real Horovod job of two processes on this machine, for `gba-hvd doctor`: what it runs and how it is ended."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from ..signals import stop

PROBE = """
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((4,), 1.0 + hvd.rank()), op=hvd.Sum)
assert hvd.size() == 2 and total.tolist() == [3.0] * 4, (hvd.size(), total)
hvd.shutdown()
"""


def loopback_job(launcher: Path, python: str) -> list[str]:
    """The command that reduces over two processes and the loopback interface, and fails if the sum is wrong."""
    return [str(launcher), "--gloo", "-np", "2", "-H", "localhost:2", "--network-interface", "lo", python, "-c", PROBE]


def run_group(command: list[str], timeout_s: float) -> tuple[int | None, str]:
    """Run a command and all it starts; (exit status or None when it took too long, its output)."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(child)
        output.seek(0)
        return status, output.read()
