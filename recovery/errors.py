"""The exceptions users may want to catch."""

from __future__ import annotations


class RecoveryError(Exception):
    """Everything this package raises on purpose."""


class BadInput(RecoveryError, ValueError):
    """Data or settings that the user can mend; the message says how."""


class StoreError(RecoveryError, OSError):
    """A store could not be read or written, after all retries."""


class NotFound(StoreError):
    """The store has no object of this name."""


class Damaged(RecoveryError):
    """Bytes are not those that were saved: an object is missing, short, altered, or in another's place."""


class Fenced(RecoveryError):
    """Another writer has taken over this place; what this one would write must not be believed."""
