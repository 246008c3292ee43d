"""Ctrl-C and SIGTERM wait for the end of what must not be done in part, such as a step that is being applied."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)  # the last one ends the time for a last checkpoint


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What a signal's handler in Python does happens at the end; a signal that ends the process ends it at once.

    For what does not wait for others: nothing but SIGKILL interrupts it. In threads other than the main one, which no
    handler interrupts, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        came.append(number)

    handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _deliver(came)


def _deliver(numbers: list[int]) -> None:
    """All of them, also where the handler of one raises."""
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _deliver(numbers[1:])
