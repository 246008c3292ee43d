"""Which servers of a host died and were started again, as the files say in which each names its process.

Any worker of the host starts a server again, in every mode; the host leader reports it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gba_hvd.ps import launch
from gba_hvd.shm.process_state import is_alive

_LOOK_S = 0.5


@dataclass(frozen=True)
class Restart:
    """A server of this host died, and was started again. before, now: its processes"""

    server: int
    before: int
    now: int


class ServerRestarts:
    """On a host leader. Belongs to the training thread; it looks at most every half second, once it knows all servers.

    n_servers: of this host
    """

    def __init__(self, folder: Path, n_servers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._pids = [0] * n_servers  # 0: none was alive yet
        self._looked_s = -math.inf

    def since_last(self) -> list[Restart]:
        """Those since it was asked last. The first process that is found alive is no restart."""
        if all(self._pids) and self._clock() - self._looked_s < _LOOK_S:
            return []
        self._looked_s = self._clock()
        return [one for server in range(len(self._pids)) if (one := self._look(server)) is not None]

    def _look(self, server: int) -> Restart | None:
        before, now = self._pids[server], launch.pid_of(self._folder, server)
        if now is None or now == before or not is_alive(now):
            return None
        self._pids[server] = now
        return Restart(server, before, now) if before else None
