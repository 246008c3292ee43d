"""A worker's slot with the launcher of an elastic job: whether it may take part in the next world.

Horovod's launcher identifies workers by host and number on the host, not by process. A worker that was cut off while
the others formed a world without it could come back, ask for its rank, and pass for a worker that the launcher starts
or even for the survivor that it waits for. So each worker leaves its mark in the launcher's key-value store when it has
been let into a world, and looks for it before it asks for a place in the next one. The launcher empties the store when
it forms a world, which it does only when every worker of the last one has asked, or was evicted. Decided here: a mark
that is gone, or another's, means that this worker was evicted (fencing). It ends; its host may send a new one.

What a crash leaves: a mark that no worker looks for. Before the mark is left there is no world to come back from.
"""

from __future__ import annotations

import http.client
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gba_hvd.errors import LauncherUnreachable, WorkerEvicted

_SCOPE = "gba_hvd"
_REQUEST_S, _PAUSE_S = 3.0, 0.2


def may_continue(mark: str, found: str | None) -> tuple[bool, str]:
    """Whether the worker that left `mark` may ask for a place in the next world, and why. found: None is nothing."""
    if found == mark:
        return True, "the launcher has formed no world since"
    if found is None:
        return False, "the launcher has formed a world without it"
    return False, "another worker has its place"


@dataclass(frozen=True)
class LauncherStore:
    """The launcher's key-value store, through which workers also find each other."""

    address: str
    port: int

    @staticmethod
    def of(environ: Mapping[str, str] = os.environ) -> LauncherStore | None:
        """As Horovod's launcher names it when it starts a worker; None: this process has no launcher."""
        address, port = (environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}", "") for name in ("ADDR", "PORT"))
        return LauncherStore(address, int(port)) if address and port else None

    def ask(self, method: str, path: str, body: bytes | None = None) -> str | None:
        """What the store has at `path`, if anything; raises OSError."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=_REQUEST_S)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            words = answer.read().decode("ascii", errors="replace")
        except http.client.HTTPException as error:  # cut off in the middle of an answer
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if answer.status not in (200, 404):
            raise OSError(f"it answered with status {answer.status}")
        return words if answer.status == 200 else None


class LauncherSlot:
    """One worker's. Does nothing where there is no elastic launcher. Not thread-safe.

    environ: as Horovod's launcher sets it when it starts the worker
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self.mark = clock, secrets.token_hex(8)
        self._launcher = LauncherStore.of(environ) if environ.get("HOROVOD_ELASTIC") == "1" else None
        slot = environ.get("HOROVOD_SLOT", environ.get("HOROVOD_LOCAL_RANK", ""))  # a worker's local rank may change
        self._path = f"/{_SCOPE}/{environ.get('HOROVOD_HOSTNAME', '')}:{slot}"
        self._taken = False

    def register(self) -> None:
        """This worker was let into a world.

        Raises OSError when the launcher cannot be reached, WorkerEvicted when another worker has left its mark here:
        this one stood still while the launcher formed a world without it.
        """
        if self._launcher is None:
            return
        found = self._ask("GET")
        if found not in (None, self.mark):
            raise WorkerEvicted(
                f"this worker was evicted while it was away: {may_continue(self.mark, found)[1]}. It ends"
            )
        self._ask("PUT", self.mark.encode())
        self._taken = True

    def verify(self, timeout_s: float) -> None:
        """Before this worker asks to be let into the next world. Good for one time: asking makes the mark void.

        Raises WorkerEvicted when it must not, LauncherUnreachable when the launcher was not reached for `timeout_s`.
        """
        if self._launcher is None or not self._taken:
            return
        deadline = self._clock() + timeout_s
        while True:
            try:
                allowed, why = may_continue(self.mark, self._ask("GET"))
            except OSError as error:
                if self._clock() > deadline:
                    at = f"{self._launcher.address}:{self._launcher.port}"
                    raise LauncherUnreachable(
                        f"the launcher at {at} was not reached for {timeout_s:g} s ({error}): this host is "
                        "cut off, or the launcher has ended. This worker ends; the others continue without it"
                    ) from error
                time.sleep(_PAUSE_S)
                continue
            if not allowed:
                raise WorkerEvicted(
                    f"this worker was evicted while it was away: {why}. It ends, and nothing of its state is used; "
                    "the launcher may start a new one here"
                )
            self._taken = False
            return

    def _ask(self, method: str, body: bytes | None = None) -> str | None:
        """What the launcher's store has; raises OSError."""
        assert self._launcher is not None
        return self._launcher.ask(method, self._path, body)
