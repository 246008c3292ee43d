"""What is written to the spool, and how spool records become batches that MLflow accepts.

Plain functions over plain values: no file, no clock, no MLflow. A record is one JSON object with a `kind`:

    job       who writes, in which run; again after every change of membership
    metrics   {"step", "ms", "values"}        one point per value
    params    {"values"}                      at most 100, already flattened to text
    settings  {"names"}                       of all parameters of this launch, after them
    tags      {"values"}
    event     {"event", "step", "message", "data", "unix_s"}
    artifact  {"path", "text"}
    end       {"status", "reason", "ms"}      the last record; status is null unless this process reports for the job

`job`, `settings`, `artifact` and `end` are carried out one by one; runs of the others are packed.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]

# What MLflow takes in one `log_batch`.
MAX_METRICS = 900
MAX_PARAMS = 100
MAX_TAGS = 90
MAX_TOTAL = 1000
SCRIPT = "script."  # before the name of a parameter that the script gives another value than the job has
PAGE_QUERY = "?workflowType=machine_learning"  # without it MLflow opens its pages for language models
_MAX_KEY = 250
_MAX_TEXT = 4000
_ONE_BY_ONE = frozenset({"job", "settings", "artifact", "end", "model"})


@dataclass(frozen=True)
class SpoolLine:
    """One spool record and the file offset just behind it."""

    end: int
    record: Record


@dataclass(frozen=True)
class Point:
    """One value of one metric. Sent twice it is the same point: MLflow's key is (run, key, step, time, value)."""

    key: str
    value: float
    ms: int
    step: int


@dataclass
class LogBatch:
    """What one `log_batch` call carries; `end` is the spool offset it brings us to."""

    end: int
    points: list[Point] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    has_event: bool = False

    def __len__(self) -> int:
        return len(self.points) + len(self.params) + len(self.tags)

    def takes(self, other: LogBatch) -> bool:
        """Whether both together are still within MLflow's limits (params cannot change, so a repeated key waits)."""
        return (
            len(self) + len(other) <= MAX_TOTAL
            and len(self.points) + len(other.points) <= MAX_METRICS
            and len(self.params) + len(other.params) <= MAX_PARAMS
            and len(self.tags) + len(other.tags) <= MAX_TAGS
            and not self.params.keys() & other.params.keys()
        )

    def add(self, other: LogBatch) -> None:
        self.end = other.end
        self.points += other.points
        self.params |= other.params
        self.tags |= other.tags
        self.has_event |= other.has_event


def pack(lines: Sequence[SpoolLine]) -> Iterator[LogBatch | SpoolLine]:
    """Group lines into batches, in order; a record that must be carried out alone comes as its `SpoolLine`."""
    batch: LogBatch | None = None
    for line in lines:
        if line.record.get("kind") in _ONE_BY_ONE:
            if batch is not None:
                yield batch
            batch = None
            yield line
            continue
        one = _as_batch(line)
        if batch is None:
            batch = one
        elif batch.takes(one):
            batch.add(one)
        else:
            yield batch
            batch = one
    if batch is not None:
        yield batch


def halves(batch: LogBatch) -> tuple[LogBatch, LogBatch] | None:
    """Split a refused batch to find what was wrong with it; None when there is nothing left to split."""
    if len(batch) < 2:
        return None
    first, second = LogBatch(batch.end), LogBatch(batch.end)
    n = len(batch) // 2
    for i, point in enumerate(batch.points):
        (first if i < n else second).points.append(point)
    for i, (key, text) in enumerate(batch.params.items(), start=len(batch.points)):
        (first if i < n else second).params[key] = text
    for i, (key, text) in enumerate(batch.tags.items(), start=len(batch.points) + len(batch.params)):
        (first if i < n else second).tags[key] = text
    return first, second


def _as_batch(line: SpoolLine) -> LogBatch:
    record = line.record
    batch = LogBatch(line.end)
    match record.get("kind"):
        case "metrics":
            ms, step = int(record["ms"]), int(record["step"])
            batch.points = [Point(key, float(value), ms, step) for key, value in record["values"].items()]
        case "params":
            batch.params = dict(record["values"])
        case "tags":
            batch.tags = dict(record["values"])
        case "event":
            batch.tags = {f"gba_hvd.event.{record['event']}": f"step {record['step']}: {record['message']}"[:_MAX_TEXT]}
            batch.has_event = True
    return batch


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as MLflow parameters: {"model": {"dim": 8}} -> {"model.dim": "8"}."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[metric_key(name)] = _as_text(value)[:_MAX_TEXT]
    return flat


def _as_text(value: Any) -> str:
    """Numbers and lists as JSON; a path, a date or a function as its own text."""
    if isinstance(value, str):
        return value
    if callable(value) and hasattr(value, "__qualname__"):  # its `str` may have an address, another one in each launch
        return str(value.__qualname__)
    try:
        return json.dumps(value, default=str) if isinstance(value, list | tuple) else json.dumps(value)
    except (TypeError, ValueError):
        return str(value)


def job_params(settings: Mapping[str, Any], of_script: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The parameters of a launch, flat, and the names that the script gives another value than the job has.

    The job's own stay; the script's are there under `SCRIPT` and the name.
    """
    own, given = flatten(settings), flatten(of_script)
    renamed = sorted(name for name, text in given.items() if own.get(name, text) != text)
    moved = {metric_key(f"{SCRIPT}{name}"): given[name] for name in renamed}
    return {**given, **own, **moved}, renamed


def params_records(values: Mapping[str, str]) -> list[Record]:
    """The parameters of a launch, flat, and their names."""
    parts = [{"kind": "params", "values": one} for one in _parts(values, MAX_PARAMS)]
    return [*parts, {"kind": "settings", "names": list(values)}]


def own_run_words(job: str, other: str) -> str:
    return (
        f"the checkpoint is of job {other}, this one is job {job}: it has a run of its own, whose tag "
        f"gba_hvd.continues_run names that of {other}. GBA_HVD_JOB_ID={other} (gba-hvd run --job {other}) continues it"
    )


def tags_records(tags: Mapping[str, str]) -> list[Record]:
    return [{"kind": "tags", "values": one} for one in _parts(tags, MAX_TAGS)]


def metrics_records(step: int, ms: int, values: Mapping[str, float]) -> list[Record]:
    parts = _parts({metric_key(key): value for key, value in values.items()}, MAX_METRICS)
    return [{"kind": "metrics", "step": step, "ms": ms, "values": one} for one in parts]


def _parts(values: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    items = list(values.items())
    return [dict(items[i : i + n]) for i in range(0, len(items), n)]


def metric_key(name: str) -> str:
    """MLflow allows letters, digits and ` _-.:/` in names; anything else becomes `_`."""
    return "".join(c if c.isalnum() or c in "_-.:/ " else "_" for c in name)[:_MAX_KEY]


def merge_events(*logs: Iterable[Record]) -> list[Record]:
    """Several processes' events as one log, by time. An event that two workers report is kept once.

    What is reported again after the job resumed from a checkpoint happened again.
    """
    merged = [event for log in logs for event in log]
    resumed_s = sorted({float(event["unix_s"]) for event in merged if event.get("event") == "resumed"})
    kept: dict[tuple[Any, ...], Record] = {}
    for event in merged:
        n_resumed = bisect(resumed_s, float(event.get("unix_s", math.inf)))
        kept.setdefault((n_resumed, event.get("event"), *_same(event)), event)
    return sorted(kept.values(), key=lambda event: float(event.get("unix_s", math.inf)))


def _same(event: Record) -> tuple[Any, ...]:
    """What two events of a kind have in common where they report the same.

    Every worker reports a switch, each with the seconds it took there; not all know the reason. A checkpoint is
    reported again by a worker that takes over from rank 0, and so is a pause, with the seconds that it measured.
    """
    kind, manifest = event.get("event"), event.get("data", {}).get("manifest")
    if kind == "checkpoint" and manifest:
        return (event["data"].get("saved_step"), manifest)
    if kind in ("training_continues", "ended_in_pause"):
        return (event.get("step"), event.get("data", {}).get("cause"))
    return (event.get("step"), None if kind == "switch" else event.get("message"))
