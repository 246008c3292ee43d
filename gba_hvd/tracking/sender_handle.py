"""The sender as its worker sees it: started outside the launcher's process tree, waited for, asked to hurry, ended.

A launcher that ends a job kills the children of its workers seconds later. A sender among them would die with records
in its hands, so it is no child: the process that is started forks and ends. The sender watches its worker instead
(`Owner`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gba_hvd.tracking.spool import log_path
from recovery.catalog.writer_process import started

_START_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.05

# The sender needs this package's tracking part but not torch, which `import gba_hvd` would bring: seconds and 200 MB.
_START = """
import os, sys, types
pid = os.fork()
if pid:
    print(pid, flush=True)
    os._exit(0)
os.dup2(2, 1)
package = types.ModuleType('gba_hvd'); package.__path__ = [sys.argv.pop(1)]; sys.modules['gba_hvd'] = package
from gba_hvd.tracking.sender_process import main
sys.exit(main())
"""


class SenderProcess:
    """Constructing starts it. Raises OSError or subprocess.SubprocessError when it cannot be started."""

    def __init__(self, spool: Path) -> None:
        package = str(Path(__file__).resolve().parent.parent)
        me = Owner.of(os.getpid())
        command = [sys.executable, "-P", "-c", _START, package, str(spool), "--parent", str(me.pid), str(me.began)]
        # Its own session, so that Ctrl-C reaches it through us only; its own log, because a launcher waits until no
        # process holds a worker's output any more, and the sender may live a few seconds longer than a killed worker.
        with open(os.open(log_path(spool), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
            started = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                check=True, timeout=_START_TIMEOUT_S,
            )  # fmt: skip
        self.pid = int(started.stdout)
        self._process = Owner.of(self.pid)

    def alive(self) -> bool:
        return not self._process.is_gone()

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the condition holds or the process is gone; False when the time is over first."""
        deadline_s = time.monotonic() + timeout_s
        while not until() and self.alive():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def end(self, within_s: float) -> None:
        """Ask it to hurry (SIGTERM); kill it when it does not end in time."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)
                self.wait(lambda: False, within_s)


@dataclass(frozen=True)
class Owner:
    """A process known by its id and the time it began, so that a later one with the same id is not taken for it.

    began: see `writer_process.started`
    """

    pid: int
    began: int

    @classmethod
    def of(cls, pid: int) -> Owner:
        return cls(pid, started(str(pid)))

    def is_gone(self) -> bool:
        """Ended, also when it was not waited for yet (a zombie)."""
        return self.began < 0 or started(str(self.pid)) != self.began
