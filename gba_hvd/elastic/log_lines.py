"""Lines of the log, with the time of day, for scripts that set up no logging.

Python shows warnings of such a script without any format. Where the script, or who imports it, has set up logging, at
any time, the package's records go there and nowhere else.
"""

from __future__ import annotations

import logging
import sys

from recovery.printable import printable
from recovery.redaction import redacted

FORMAT = "%(asctime)s %(levelname)s %(message)s"
_LEVELS = {"gba_hvd": logging.INFO, "recovery": logging.NOTSET}  # by logger; NOTSET: warnings, as of the root logger


class _Line(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(redacted(record.message))
        return super().formatMessage(record)


class _OwnLines(logging.StreamHandler):  # type: ignore[type-arg]
    """On standard error, until the logger has another handler, or one above it."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        super().__init__()
        self.setFormatter(_Line(FORMAT))
        self._logger, self._level, self._is_over = logger, level, False
        logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._logger.handlers) > 1 or logging.getLogger().handlers:
            if not self._is_over and self._logger.level == self._level:
                self._logger.setLevel(logging.NOTSET)  # which records there are is decided above, too
            self._is_over = True
        elif sys.stderr is not None:
            self.stream = sys.stderr  # which may have been replaced
            super().emit(record)


def show_log_lines() -> None:
    """From now on. Does nothing where logging is set up, by the script or by an earlier call."""
    for name, level in _LEVELS.items():
        logger = logging.getLogger(name)
        if not logger.hasHandlers() and logger.level == logging.NOTSET:
            logger.addHandler(_OwnLines(logger, level))
