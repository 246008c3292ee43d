"""What a summary says of the norms of steps."""

from __future__ import annotations

import json
import math

import pytest

from ctr.norm_log import NormLog
from gba_hvd.callbacks import StepRecord


def record(epoch: int, mode: str, *norms: float) -> StepRecord:
    return StepRecord(9, epoch, 8, 72, 0.1, 2, mode, None, norms[-1] if norms else None, norms)


def test_norms_are_counted_by_epoch_and_mode():
    log = NormLog()
    log.on_step(record(0, "allreduce", 1.0))
    log.on_step(record(0, "gba", 1.0, 4.0))
    log.on_step(record(0, "gba", 1.01))
    log.on_step(record(1, "gba", 0.5))
    log.on_step(record(1, "gba"))
    assert [(one["epoch"], one["mode"], one["steps"]) for one in log.norms] == [
        (0, "allreduce", 1), (0, "gba", 3), (1, "gba", 1)
    ]  # fmt: skip
    assert log.norms[1]["mean"] == pytest.approx((1.0 + 4.0 + 1.01) / 3)
    assert log.norms[1]["histogram"] == {"0": 2, "16": 1}
    assert log.norms[2]["histogram"] == {"-8": 1}


def test_a_norm_that_has_no_bin_is_not_counted():
    log = NormLog()
    log.on_step(record(0, "gba", 0.0, math.nan, math.inf))
    assert log.norms == []


def test_a_replacement_knows_the_norms_before_it():
    before, after = NormLog(), NormLog()
    before.on_step(record(0, "gba", 1.0))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    after.on_step(record(0, "gba", 2.0))
    assert after.norms[0]["steps"] == 2 and before.norms[0]["steps"] == 1
