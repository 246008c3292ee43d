"""Signals that come while something is not to be done in part."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from gba_hvd.training.uninterrupted import uninterrupted


def test_all_signals_are_delivered_at_the_end() -> None:
    came: list[int] = []

    def end(number: int, frame: Any) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, end)

    @uninterrupted()
    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert not came

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
