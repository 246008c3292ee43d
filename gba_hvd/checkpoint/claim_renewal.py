"""Renews the job's claim in the worker that claimed, from the claim on, until it is released or replaced.

The server of the chief's host renews it, too (`ps.partition.claim_keepalive`), and has reasons not to: it is started
after all rows are there, imports for long on a busy machine, and may be killed. This worker may be killed as well, and
the others train on. So each renews with numbers of its own, and the claim expires only when both have stopped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from recovery.catalog import claims
from recovery.errors import BadInput, RecoveryError
from recovery.storage.store import Store

log = logging.getLogger("gba_hvd")
_SERIES = "w"  # the server has the numbers without a letter
_CLOSE_S = 2.0  # a store that hangs must not keep this process


class ClaimRenewal:
    """Constructing starts its thread; `close()` may be called twice."""

    def __init__(self, claim: claims.Claim, opened: Callable[[], Store]) -> None:
        self.claim = claim
        self._opened, self._ended = opened, threading.Event()
        self._thread = threading.Thread(target=self._renew, name="gba-hvd claim", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(_CLOSE_S)

    def _renew(self) -> None:
        store: Store | None = None
        claim = self.claim
        while not self._ended.wait(claim.lease_s / 3):
            try:
                store = store or self._opened()
                claim = claims.renew(store, claim, _SERIES)
            except (BadInput, RecoveryError, OSError) as error:  # saves fail as well, and are reported
                log.info("the claim %s was not renewed: %s", claim.name, error)
