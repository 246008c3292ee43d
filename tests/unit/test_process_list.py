"""Processes are found by their environment from the moment they are there."""

from __future__ import annotations

import os
import subprocess

import pytest
from gba_hvd_tools.process_list import others, process


@pytest.mark.slow
def test_a_process_is_found_as_soon_as_it_is_started() -> None:
    """`Popen` returns while the kernel still reads the program: for a moment there is no command line."""
    for _ in range(300):
        with subprocess.Popen(["sleep", "600"], env={"A": "1"}) as started:
            try:
                assert process(started.pid) == (started.pid, b"sleep\x00600\x00", [b"A=1", b""])
            finally:
                started.kill()


def test_who_has_ended_is_none() -> None:
    ended = subprocess.Popen(["true"], env={})
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert process(ended.pid) is None  # a zombie
    ended.wait()
    assert process(ended.pid) is None


def test_others_leave_out_who_asks() -> None:
    pids = [found.pid for found in others()]
    assert os.getppid() in pids and os.getpid() not in pids
