"""How spool records become batches, and what is decided when MLflow says no."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from gba_hvd.tracking import delivery
from gba_hvd.tracking.delivery import DeliveryAction, decide, may_report
from gba_hvd.tracking.records import (
    MAX_METRICS,
    MAX_TOTAL,
    LogBatch,
    Point,
    SpoolLine,
    flatten,
    halves,
    job_params,
    merge_events,
    metrics_records,
    pack,
    params_records,
)


def lines(*records: dict[str, Any]) -> list[SpoolLine]:
    return [SpoolLine(end, record) for end, record in enumerate(records, start=1)]


def metrics(step: int, n: int = 1) -> dict[str, Any]:
    return {"kind": "metrics", "step": step, "ms": step, "values": {f"m{i}": float(i) for i in range(n)}}


def test_records_that_follow_each_other_travel_together():
    (batch,) = pack(lines(metrics(1), {"kind": "tags", "values": {"a": "1"}}, metrics(2)))
    assert isinstance(batch, LogBatch)
    assert [point.step for point in batch.points] == [1, 2]
    assert (batch.tags, batch.end) == ({"a": "1"}, 3)


def test_no_batch_is_larger_than_mlflow_takes_and_nothing_is_left_out():
    batches = [b for b in pack(lines(*(metrics(k, 40) for k in range(100)))) if isinstance(b, LogBatch)]
    assert all(len(batch.points) <= MAX_METRICS and len(batch) <= MAX_TOTAL for batch in batches)
    assert sum(len(batch.points) for batch in batches) == 4000
    assert [batch.end for batch in batches] == sorted(batch.end for batch in batches)
    assert batches[-1].end == 100


def test_a_record_with_more_values_than_a_batch_takes_is_written_as_several():
    records = metrics_records(7, 0, {f"m{i}": 1.0 for i in range(2000)})
    assert sum(len(record["values"]) for record in records) == 2000
    assert all(len(record["values"]) <= MAX_METRICS for record in records)
    *params, settings = params_records({str(i): str(i) for i in range(250)})
    assert [len(record["values"]) for record in params] == [100, 100, 50]
    assert settings == {"kind": "settings", "names": [str(i) for i in range(250)]}


def test_the_end_is_carried_out_alone_and_after_what_came_before_it():
    kinds = [type(item) for item in pack(lines(metrics(1), {"kind": "end"}, metrics(2)))]
    assert kinds == [LogBatch, SpoolLine, LogBatch]


def test_a_parameter_that_comes_twice_is_not_in_one_batch_twice():
    record = {"kind": "params", "values": {"lr": "1"}}
    assert len(list(pack(lines(record, record)))) == 2


def test_a_refused_batch_is_halved_until_each_value_stands_alone():
    batch = LogBatch(9, [Point(f"m{i}", 0.0, 0, 0) for i in range(5)], {"p": "1"}, {"t": "1", "u": "2"})
    alone: list[LogBatch] = []
    waiting = [batch]
    while waiting:
        part = waiting.pop()
        parts = halves(part)
        if parts is None:
            alone.append(part)
        else:
            waiting += parts
    assert [len(part) for part in alone] == [1] * 8
    assert sorted(key for part in alone for key in (*(p.key for p in part.points), *part.params, *part.tags)) == [
        *("m0", "m1", "m2", "m3", "m4", "p", "t", "u")
    ]


def test_an_event_becomes_a_tag_of_its_kind_and_the_last_one_stays():
    record = {"kind": "event", "event": "membership", "step": 3, "message": "2 -> 1", "data": {}, "unix_s": 0}
    (batch,) = pack(lines(record, {**record, "step": 9, "message": "1 -> 2"}))
    assert isinstance(batch, LogBatch)
    assert batch.tags == {"gba_hvd.event.membership": "step 9: 1 -> 2"}
    assert batch.has_event


def test_nested_settings_become_dotted_parameters_with_names_mlflow_accepts():
    assert flatten({"model": {"dims": [8, 8]}, "lr": 1e-3, "a(b)": "x"}) == {
        "model.dims": "[8, 8]",
        "lr": "0.001",
        "a_b_": "x",
    }


def test_what_argparse_makes_of_a_command_line_is_readable_parameters():
    args = argparse.Namespace(data=Path("/data"), run=flatten, lr=0.1, out=None, dims=[8], when={(1, 2)})
    assert flatten(vars(args)) == {
        "data": "/data", "run": "flatten", "lr": "0.1", "out": "null", "dims": "[8]", "when": "{(1, 2)}"
    }  # fmt: skip


def test_the_scripts_parameters_do_not_overwrite_the_jobs_own():
    own = {"mode": "gba", "global_batch": 512, "tables": {"user": [8, 4]}}
    params, renamed = job_params(own, {"mode": "fast", "global_batch": 512, "tables": {"user": 1}, "seed": 3})
    assert renamed == ["mode", "tables.user"]
    assert params == {
        "mode": "gba", "global_batch": "512", "tables.user": "[8, 4]", "seed": "3",
        "script.mode": "fast", "script.tables.user": "1",
    }  # fmt: skip


def test_the_same_event_reported_by_two_workers_is_kept_once_in_order_of_time():
    early, late = {"event": "started", "step": 0, "message": "m", "unix_s": 1.0}, {"event": "x", "unix_s": 2.0}
    assert merge_events([late, early], [{**early, "unix_s": 1.5}]) == [early, late]


def test_a_checkpoint_that_the_next_rank_0_reports_again_is_kept_once() -> None:
    data = {"manifest": "m-4", "saved_step": 4}
    first = {"event": "checkpoint", "step": 5, "message": "m", "data": data, "unix_s": 1.0}
    again = {**first, "step": 9, "message": "found", "unix_s": 2.0}
    assert merge_events([first], [again]) == [first]
    resumed = {"event": "resumed", "step": 0, "unix_s": 1.5}
    assert merge_events([first], [resumed, again]) == [first, resumed, again], "saved again"


class Refusal(Exception):
    def __init__(self, error_code: str) -> None:
        super().__init__(f"{error_code}: no")
        self.error_code = error_code


@pytest.mark.parametrize(
    ("error", "active", "action"),
    [
        (ConnectionRefusedError("connection refused"), None, DeliveryAction.RETRY),
        (TimeoutError(), None, DeliveryAction.RETRY),
        (Refusal("INTERNAL_ERROR"), True, DeliveryAction.RETRY),
        (Refusal("TEMPORARILY_UNAVAILABLE"), None, DeliveryAction.RETRY),
        (Refusal("PERMISSION_DENIED"), True, DeliveryAction.RETRY),
        (Refusal("RESOURCE_DOES_NOT_EXIST"), None, DeliveryAction.RETRY),
        (Refusal("INVALID_PARAMETER_VALUE"), True, DeliveryAction.DROP),
        (Refusal("RESOURCE_ALREADY_EXISTS"), True, DeliveryAction.DROP),
        (Refusal("INVALID_PARAMETER_VALUE"), False, DeliveryAction.STOP),
        (ModuleNotFoundError("No module named 'mlflow'", name="mlflow"), None, DeliveryAction.STOP),
    ],
)
def test_only_what_mlflow_refuses_for_good_is_dropped(error: Exception, active: bool | None, action: DeliveryAction):
    verdict = decide(error, active)
    assert verdict.action is action
    assert type(error).__name__ in verdict.reason


def test_waiting_grows_and_stays_bounded():
    waits = [delivery.backoff_s(n, ending=False) for n in range(1, 50)]
    assert waits == sorted(waits)
    assert waits[-1] == 30.0
    assert delivery.backoff_s(49, ending=True) == 1.0


@pytest.mark.parametrize(
    ("own", "current", "expected"),
    [
        ("200:h1:7", None, True),
        ("200:h1:7", "200:h1:7", True),
        ("200:h1:7", "100:h2:3", True),
        ("100:h2:3", "200:h1:7", False),
        ("1000:h1:7", "999:h2:3", True),
    ],
)
def test_the_latest_chief_speaks_for_the_run(own: str, current: str | None, expected: bool):
    assert may_report(own, current) is expected
