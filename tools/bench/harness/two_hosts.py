"""Two virtual hosts for one launch of a contestant, and the link between them, which a scenario may slow down.

Each launch has hosts of its own, so that nothing of it is left when they end: no process, link or shared memory.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ...virtual_hosts import VirtualHosts, VirtualHostsError, missing
from . import measure
from .emulated_accelerators import SlowLink
from .measure import Variant

DESK, HOSTS = "desk", ("h1", "h2")  # the launcher runs on the desk
_POLL_S = 0.1
# So little passes at once, and so much may wait, that what is sent takes its time by the rate and is not dropped.
_BURST_BYTES, _QUEUE_MS = 4_000, 1_000.0


def require(scenarios: str) -> None:
    """Raise RunFailed where hosts cannot be made."""
    if reason := missing():
        raise measure.RunFailed(
            f"{scenarios}: runs on two virtual hosts, which this machine cannot have: {reason}. They need root, "
            "iproute2 (ip, tc), util-linux and openssh-server; run as root, or leave the scenario out"
        )


def result_of(
    variant: Variant, more: list[Any], folder: Path, timeout_s: float, link: SlowLink | None = None
) -> measure.Row:
    """`measure.result_of` with the launcher on the desk. Raises RunFailed, also if the link was not slow.

    variant: of workers on `HOSTS`; its chief makes the file `--started`. The result gets `link_changes_s`, the seconds
    after it at which the link became slow, and fast again.
    """
    started = folder / "started"
    started.unlink(missing_ok=True)
    with _hosts(folder) as lab:
        limits = LinkLimits(lab, link, started)
        popen = partial(lab.popen, DESK)
        row: measure.Row = measure.result_of(
            variant, [*more, "--started", started], folder, timeout_s, popen=popen, wait=limits.wait
        )
    if link is not None and len(limits.changes_s) != 2:
        raise measure.RunFailed(
            f"{variant.name}: the link was to be slow from {link.from_s:.0f} s to {link.to_s:.0f} s, and changed at "
            f"{limits.changes_s} s; the run ended too early, run it again on a less busy machine"
        )
    return row | ({} if link is None else {"link_changes_s": limits.changes_s})


@contextlib.contextmanager
def _hosts(folder: Path) -> Iterator[VirtualHosts]:
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-", dir=folder))
        try:
            lab = stack.enter_context(VirtualHosts(Path(place) / "lab", (DESK, *HOSTS)))
        except VirtualHostsError as error:
            raise measure.RunFailed(str(error)) from error
        yield lab


class LinkLimits:
    """Waits for a launch, and limits the hosts' links when it is time. link: None limits nothing

    started: the file whose time is the scenario's second 0
    """

    def __init__(self, lab: VirtualHosts, link: SlowLink | None, started: Path) -> None:
        self._lab, self._link, self._started = lab, link, started
        self.changes_s: list[float] = []

    def wait(self, process: subprocess.Popen[bytes], timeout_s: float) -> int:
        """As Popen.wait."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._link is not None and self._started.exists():
                self.at(time.time() - self._started.stat().st_mtime, self._link)
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise

    def at(self, at_s: float, link: SlowLink) -> None:
        """Limit, or lift the limit, if it is time."""
        is_slow = len(self.changes_s) % 2 == 1
        if is_slow != (link.from_s <= at_s < link.to_s):
            self._lab.limit(None if is_slow else link.rate, _BURST_BYTES, _QUEUE_MS)
            self.changes_s.append(round(at_s, 1))
