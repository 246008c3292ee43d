"""What is waited for is logged once a step of a start takes long."""

from __future__ import annotations

import logging
import threading

import pytest

from gba_hvd.comm import slow_step


class Seen(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines, self.came = list[str](), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.came.set()


@pytest.mark.parametrize(("first_s", "n_lines"), [(0.01, 1), (100.0, 0)])
def test_only_a_slow_step_is_logged(monkeypatch: pytest.MonkeyPatch, first_s: float, n_lines: int) -> None:
    seen, log = Seen(), logging.getLogger("gba_hvd")
    monkeypatch.setattr(slow_step, "FIRST_S", first_s)
    log.addHandler(seen)
    try:
        with slow_step.noting_slow("s3://b/j to list its checkpoints"):
            assert seen.came.wait(60) if n_lines else not seen.came.is_set()
    finally:
        log.removeHandler(seen)
    assert [line.partition(",")[0] for line in seen.lines] == n_lines * ["waiting for s3://b/j to list its checkpoints"]
