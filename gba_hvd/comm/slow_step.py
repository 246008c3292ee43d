"""One line in the log where one step of a start takes long, with what is waited for."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

FIRST_S = 5.0
log = logging.getLogger("gba_hvd")


@contextlib.contextmanager
def noting_slow(what: str) -> Iterator[None]:
    """what: is waited for, e.g. "s3://bucket/job to list its checkpoints"."""
    line = "waiting for %s, for %.0f s so far: training starts when it answers, or ends with its error"
    timer = threading.Timer(FIRST_S, log.warning, (line, what, FIRST_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
