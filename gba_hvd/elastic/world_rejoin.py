"""Membership in asynchronous modes: Horovod's world is formed again in the background while the worker computes.

The coordinator counts changes of membership (a worker died, Horovod found new hosts) and every heartbeat's answer says
the count. A worker that stands for an older one shuts Horovod down and initialises it again, in this thread: the driver
starts replacements only when all survivors have done so. Late joiners then meet the survivors' threads in
`membership.join`, learn where the servers are, and ask for leases. The training threads take no part.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from gba_hvd.comm.collectives import World, current_world, initialise_again
from gba_hvd.comm.launcher_slot import LauncherSlot
from gba_hvd.comm.world_formation import Forming
from gba_hvd.errors import LauncherUnreachable, WorkerEvicted
from gba_hvd.ps.worker.worker import PsWorker

log = logging.getLogger("gba_hvd")
_LOOK_S = 0.1
_TRY_AGAIN_S, _TRY_AGAIN_AT_MOST_S = 0.5, 8.0


class WorldRejoin:
    """Start with `start()`; `stop()` waits for an attempt in flight (at most so long) and may be called twice.

    number: the membership that the present world stands for; meet: what all ranks of a new world run, returns the
    number they agree on; slot: this worker's; timeout_s: longest wait for the launcher, each time; forming: receives
    how long a world takes to form (`meet` ends that).
    """

    def __init__(
        self,
        mode: PsWorker,
        number: int,
        meet: Callable[[World], int],
        slot: LauncherSlot,
        timeout_s: float,
        forming: Forming,
    ) -> None:
        self.number, self._mode, self._meet, self._slot, self._timeout_s = number, mode, meet, slot, timeout_s
        self._forming = forming
        self.n_formed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gba-hvd membership", daemon=True)

    def start(self) -> None:
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            self._thread.start()

    def stop(self, timeout_s: float | None = None, waits: Callable[[], None] = lambda: None) -> bool:
        """Whether the thread has ended: not where the launcher forms no world, as Horovod cannot be interrupted in it.

        waits: called now and then meanwhile
        """
        self._stop.set()
        if threading.current_thread() is self._thread:
            return False
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._thread.is_alive() and (deadline is None or time.monotonic() < deadline):
            self._thread.join(_LOOK_S)
            waits()
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s = _TRY_AGAIN_S
        while not self._stop.wait(_LOOK_S):
            while self._mode.position.membership_epoch > self.number and not self._stop.is_set():
                self._forming.begin()
                try:
                    # What is received from here on may concern a host that has no place in the world that forms now.
                    self._mode.contact.acknowledged_membership = self._mode.position.membership_epoch
                    self._slot.verify(self._timeout_s)
                    self._mode.before_world_leaves()
                    initialise_again(self._forming)
                    self._slot.register()
                    world = current_world()
                    self.number = self._meet(world)
                    self.n_formed += 1
                    self._mode.after_world_forms(world)
                    pause_s = _TRY_AGAIN_S
                except (WorkerEvicted, LauncherUnreachable) as error:
                    self._mode.abandon(str(error))
                    return
                except Exception as error:
                    self._forming.broke_up(error)
                    log.warning("the world was not formed (%s: %s); trying again", type(error).__name__, error)
                    if "has been removed" in str(error):  # this host has no place in the job any more
                        self._mode.abandon(str(error))
                        return
                    self._stop.wait(pause_s)
                    pause_s = min(2 * pause_s, _TRY_AGAIN_AT_MOST_S)
