"""The exceptions users may want to catch."""

from __future__ import annotations


class GbaError(Exception):
    """Everything this package raises on purpose."""


class BadInput(GbaError, ValueError):
    """Data or settings that the user can mend; the message says how."""


class NonFiniteGradient(GbaError, ArithmeticError):
    """A loss or gradient was NaN or infinite; the step was not applied."""


class ShardMemoryError(GbaError, OSError):
    """Shard memory cannot be created, opened or written."""


class StateMismatch(GbaError, RuntimeError):
    """Workers of one job disagree about what they train."""
