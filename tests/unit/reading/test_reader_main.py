"""How a reader process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

_READS = """
import os, socket
from gba_hvd.reading import reader_main

reader_main._read = lambda *_: None
control, end = socket.socketpair()
pid = reader_main._fork(control, end.detach(), os.open(os.devnull, os.O_RDONLY), 0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.slow
def test_a_reader_ends_well_where_the_job_has_no_standard_streams() -> None:
    call = ["sh", "-c", '"$@" >&- 2>&-', "sh", sys.executable, "-c", _READS]
    assert subprocess.run(call, check=False, timeout=60).returncode == 0
