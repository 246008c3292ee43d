"""Renews the claim on the checkpoint location while the workers of the job live.

The worker that claimed renews the claim as well (`checkpoint.claim_renewal`): this covers its death. The lease
is the job's, not this server's: it is renewed only while workers send heartbeats. A server that does not
commit (part above 0) only remembers the claim.
"""

from __future__ import annotations

import logging
import threading
import time

from gba_hvd.ps.messages import DelegateClaim
from recovery.catalog import claims
from recovery.errors import BadInput, RecoveryError
from recovery.storage.open import open_store

log = logging.getLogger("gba_hvd.ps")
_SILENT_S = 5.0  # without a heartbeat of any worker


class ClaimKeepalive:
    """Its thread starts with the first claim that this server has to renew. `close()` may be called twice.

    held: the newest claim, with what a save under it needs
    """

    def __init__(self) -> None:
        self.held: DelegateClaim | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._last_seen_s = time.monotonic()

    def worker_seen(self) -> None:
        self._last_seen_s = time.monotonic()

    def hold(self, request: DelegateClaim) -> None:
        """Renew this claim from now on. The same claim again changes nothing."""
        self.worker_seen()
        if self.held is not None and _identity(self.held) == _identity(request):
            return
        self.held = request
        if self._thread is None and not request.part:
            self._thread = threading.Thread(target=self._renew, name="claim", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """timeout_s: a store that hangs must not keep the process."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _renew(self) -> None:
        of: DelegateClaim | None = None
        while True:
            if of is not self.held and self.held is not None:
                of, is_first = self.held, True
                claim, store = of.claim, open_store(of.settings.url, **of.settings.storage_options)
            assert of is not None
            if self._ended.wait(claim.lease_s / 3):
                return
            if time.monotonic() - self._last_seen_s > _SILENT_S or of.part:
                continue
            try:
                if is_first:  # a server before this one may have renewed it
                    claim, is_first = claims.after_renewals(store, claim), False
                claim = claims.renew(store, claim)
            except (BadInput, RecoveryError, OSError):
                log.warning("the claim on %s was not renewed", store.url, exc_info=True)


def _identity(request: DelegateClaim) -> tuple[str, int, int]:
    return request.claim.nonce, request.part, request.n_parts
