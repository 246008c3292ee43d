"""`ProgressLine`: what a person sees of a running job, from one worker.

On a terminal one line is rewritten in place; in a pipe or file (horovodrun prefixes every line with the rank) a plain
line appears every few seconds. Events stand on lines of their own; warnings are in the log, and here by their kinds.
When training fails, its cause comes first.
"""

from __future__ import annotations

import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from gba_hvd.callbacks import Callback, Event, Job, StepRecord
from gba_hvd.errors import BadInput
from gba_hvd.tracking import gauges
from gba_hvd.tracking.epochs import BestEpoch, chooser
from gba_hvd.tracking.gauges import DROPPED, STALENESS_MEAN, staleness_words, whole_numbers
from gba_hvd.tracking.open_warnings import ends, is_over_at_once
from gba_hvd.tracking.recovery_records import ENDED, PAUSE_WORDS, is_recovery, place_of
from recovery.printable import printable
from recovery.redaction import redacted

# Every worker reports these; they follow from a cause another worker reports.
_CONSEQUENCES = frozenset({"HorovodInternalError", "HostsUpdatedInterrupt", "WorkersAvailableException", "WorldLost"})
_WORDS = {
    "FINISHED": "finished", "FAILED": "failed", "KILLED": "interrupted", "NOT_SAVED": "trained to the end, NOT SAVED"
}  # fmt: skip
_COUNTERS = ("bytes_sent_", "bytes_received_", gauges.BYTES_SENT, gauges.BYTES_RECEIVED)
# an event reports these, with units; here they would hide what was measured
# The end of the lines has these; a switch has its reason.
_NO_LINES = ("finished", "interrupted", "failed", "decision", "auto_stayed", "memory_not_kept", ENDED)
# Of level "info", and the summary has them: they matter once the job has ended, the second where it is to be resumed.
_NOTED = ("auto_stayed", "memory_not_kept")
_BESIDE_ACCOUNT = ("left_early", "restarts", "dropped_for", "staleness", "lags", "pauses", "lasted_s", "warnings")
_ACCOUNT = ("samples_total", "samples_applied", "samples_dropped", "samples_lost")


class ProgressLine(Callback):
    """Progress of the job on rank 0's output; errors of any rank.

    total_steps: for the percentage and the time left; default `Job.settings["total_steps"]` when it is there.
    every_s: how often a plain line appears (on a terminal the line is renewed 4 times a second).
    Each line but those of the closing summary and of an error begins with the time of day.
    The closing summary takes the account of samples from the data of the last event that has it
    (`samples_total`, `samples_applied`, `samples_dropped`, `samples_lost`, `restarts`, `dropped_for`, and in
    asynchronous modes `staleness` and `lags`; `lasted_s`: the time of the launch; `pauses`: of each its cause, its
    seconds and the step that ended it; `warnings`: of the job, those that an earlier rank 0 reported included).
    """

    shows_events = True

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        every_s: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._stream = stream
        self._clock = clock
        out = stream or sys.stdout
        self._terminal = out is not None and out.isatty()
        self._every_s = 0.25 if self._terminal else every_s
        self._job: Job | None = None
        self._record: StepRecord | None = None
        self._epoch: int | None = None
        self._rate = Rate()
        self._epochs = BestEpoch()  # of all metrics
        self._gauges: dict[str, float] = {}
        self._readings = gauges.Readings()
        self._account: dict[str, Any] = {}
        self._switches: list[str] = []
        self._newest_saved = ""
        self._recoveries: list[str] = []
        self._resumes: list[str] = []  # a launch that begins so may follow one that ended well
        self._warnings: dict[tuple[str, str], Warned] = {}  # by kind, and mode where it is of one; the newest
        self._hanging: list[Event] = []  # of each worker that lives and does nothing
        self._notes: dict[str, Event] = {}  # by kind, those of `_NOTED`
        self._memberships = 0
        self._lost_worker = False  # and no world has formed since
        self._interrupted = ""  # by whom
        self._stopped_early = self._continued_by = ""
        self._started_s = clock()
        self._first_step = self._resumed_step = 0
        self._first_step_s: float | None = None
        self._next_s = 0.0
        self._open = False  # the line on the terminal has no newline yet
        self._ended = False

    def on_job(self, job: Job) -> None:
        if self._job is None:  # where the time in the report begins, too
            self._started_s = self._clock()
        if self._ended:  # the job continues in this process
            self._ended, self._interrupted, self._stopped_early, self._continued_by = False, "", "", ""
        else:
            self._memberships += 1
        self._job = job
        self._rate = Rate()

    def on_step(self, record: StepRecord) -> None:
        now = self._clock()
        if self._first_step_s is None:
            self._first_step_s, self._first_step = now, record.step
        if record.mode == ("allreduce" if self._record is None else self._record.mode):  # where every job begins
            self._rate.add(record)
        else:
            self._rate = Rate()  # of the mode that was entered; its first record has the time that entering took
        self._record, self._epoch = record, record.epoch
        if self._reports() and now >= self._next_s:
            self._next_s = now + self._every_s
            self._show(now)

    def on_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        metrics = {key: value for key, value in metrics.items() if not key.startswith(_COUNTERS)}
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        if numbers:
            self._epochs.add(step, self._epoch, numbers)
        if self._reports() and metrics:
            self._print(_timed(f"step {step:,}  {_numbers(metrics)}"))

    def on_event(self, event: Event) -> None:
        if event.kind == gauges.EVENT:
            self._gauges |= self._readings.take(event.data)
            return
        self._account |= {key: event.data[key] for key in (*_ACCOUNT, *_BESIDE_ACCOUNT) if key in event.data}
        if event.kind == "resumed":
            if "from_step" not in event.data:  # else it rolled back, and was not launched again
                self._resumed_step = event.step
            self._first_step_s = None  # the time that is left is reckoned from here
            self._readings.begin(event.data)
        if event.kind in ("worker_lost", "membership"):
            self._lost_worker = event.kind == "worker_lost"
        if event.kind == "interrupted":
            self._interrupted = event.message
        if event.kind in _NOTED and event.level == "info":
            self._notes[event.kind] = event
        if event.kind == "stopped_early":
            self._stopped_early = event.message
        if event.data.get("goes_on"):
            self._continued_by = str(event.data["goes_on"])
        if event.kind == "switch":
            self._switches.append(f"{event.data.get('to', '?')} at step {event.step:,}")
        if event.kind == "checkpoint":
            self._newest_saved = f"of step {event.data.get('saved_step', event.step):,}, {place_of(event.data)}"
        if is_recovery(event.kind, event.data):
            is_launch = event.kind == "resumed" and "from_step" not in event.data
            (self._resumes if is_launch else self._recoveries).append(recovery_words(event))
        self._hanging = [one for one in self._hanging if not ends(one.kind, one.data, event.kind, event.data)]
        if event.kind == "worker_hangs":
            self._hanging.append(event)
        for warned in self._warnings.values():
            one = warned.event
            if warned.over is None and ends(one.kind, one.data, event.kind, event.data, one.step):
                warned.over = event.step
        if event.level == "warning":  # the log has its text
            over = event.step if is_over_at_once(event.kind, event.data) else None
            self._warnings[event.kind, str(event.data.get("mode", ""))] = Warned(event, over)
            self._end_line()
        elif self._reports() and event.kind not in _NO_LINES and not event.data.get("found"):
            self._print(_timed(_tagged(event)))

    def on_end(self, status: str, error: BaseException | None) -> None:
        if self._ended:
            return
        self._ended = True
        if self._job is None and type(error).__name__ in _CONSEQUENCES:
            return  # no world had formed: the worker that failed has the word
        reports_error = self._reports() or type(error).__name__ not in _CONSEQUENCES
        if status in ("FAILED", "NOT_SAVED") and error is not None and reports_error:
            for line in failure_lines(error, self._job, self._record):
                self._print(line)
        if self._reports():
            for line in self._summary(status):
                self._print(line)

    def _reports(self) -> bool:
        return self._job is None or self._job.is_chief

    def _show(self, now: float) -> None:
        assert self._record is not None
        total = self._total_steps
        if total is None and self._job is not None:
            total = self._job.settings.get("total_steps")
        left_s = None
        done = self._record.step - self._first_step
        if total and done > 0 and self._first_step_s is not None:
            left_s = (total - self._record.step) * (now - self._first_step_s) / done
        metrics = self._epochs.newest.values if self._epochs.newest is not None else {}
        line = progress_line(self._record, self._rate.take(), metrics, total, left_s, self._gauges, len(self._hanging))
        if standing := [kind.replace("_", " ") for (kind, _), warned in self._warnings.items() if warned.over is None]:
            line += f"  warnings: {', '.join(dict.fromkeys(standing))}"
        line = _timed(line)
        if not self._terminal:
            self._print(line)
            return
        width = shutil.get_terminal_size().columns - 1
        self._write(f"\r\x1b[K{line[:width]}")
        self._open = True

    def _summary(self, status: str) -> list[str]:
        word = _WORDS.get(status, status.lower())
        steps = self._record.step if self._record else 0
        restarts = int(self._account.get("restarts", max(0, self._memberships - 1))) + self._lost_worker
        times = f"{restarts or 'no'} change{'s' * (restarts > 1)} of workers"
        word += f" {self._interrupted}" if status == "KILLED" and self._interrupted else ""
        if self._job is not None and self._job.name:
            word = f"{self._job.name}: {word}"
        lasted = _duration(self._account.get("lasted_s") or self._clock() - self._started_s)
        if 0 < self._resumed_step <= steps:
            lasted = f"all launches, {steps - self._resumed_step:,} of them in this one's {lasted}"
        lines = [f"{word}: {steps:,} step{'s' * (steps != 1)} in {lasted}, {times}"]
        lines += [line for line in (self._stopped_early, self._continued_by) if line]
        if all(key in self._account for key in _ACCOUNT):
            total, applied, dropped, lost = (int(self._account[key]) for key in _ACCOUNT)
            why = gauges.dropped_words(self._account.get("dropped_for", {}))
            why = f" ({why})" if why else ""
            lines.append(f"samples: {applied:,} applied + {dropped:,} dropped{why} + {lost:,} lost = {total:,}")
        elif self._record is not None:
            lines.append(f"samples: {self._record.samples_applied:,} applied")
        if left_early := self._account.get("left_early"):
            lines.append(str(left_early))
        if self._switches:
            lines.append(f"switches: {', '.join(self._switches)}")
        if self._newest_saved:
            lines.append(f"newest checkpoint: {self._newest_saved}")
        lines += self._resumes
        if self._recoveries:
            lines.append(f"recoveries: {'; '.join(self._recoveries)}")
        if pauses := self._account.get("pauses"):
            lines.append(pause_words(pauses, is_resumed=self._resumed_step > 0))
        if staleness := whole_numbers(self._account.get("staleness")):
            lines.append(f"staleness: {staleness_words(staleness)}")
        by_values = self._job is not None and self._job.settings.get("staleness_of") == "values"
        if by_values and (ages := whole_numbers(self._account.get("lags"))):
            lines.append(f"age of dense values, which decides what is dropped: {staleness_words(ages)}")
        lines += [warned.words for warned in self._warnings.values()]
        lines += self._other_warnings()
        is_to_be_noted = {"auto_stayed": True, "memory_not_kept": status != "FINISHED"}
        lines += [f"note: {_tagged(event)}" for kind, event in self._notes.items() if is_to_be_noted[kind]]
        newest, best = self._epochs.newest, self._epochs.best
        if newest is not None:
            lines.append(f"last: {newest.name}: {_numbers(newest.values)}")
        if best is not None and (by := chooser(best.values)):
            lines.append(f"best: {best.name}, by {by.words}: {_numbers(best.values)}")
        return lines

    def _other_warnings(self) -> list[str]:
        """What another rank 0 or an earlier launch warned of and still holds, and how many there were in all."""
        of_the_job = self._account.get("warnings")
        if not of_the_job:
            return []
        own = {kind for kind, _ in self._warnings}
        others = [one for one in of_the_job["standing"] if one[0] not in own]
        lines = [f"warning: {_tagged(Event(kind, step, message))}" for kind, step, message in others]
        n, over = of_the_job["n"], of_the_job["over"]
        if n > len(self._warnings) + len(others):
            over_words = f", {over:,} of them over" if over else ""
            lines.append(
                f"warnings: {n:,} in the job so far{over_words}; the newest of each kind is above, all are logged"
            )
        return lines

    # These travel with the elastic state: a new rank 0 continues with them.

    def state_dict(self) -> dict[str, Any]:
        return {**self._epochs.state_dict(), "switches": list(self._switches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epochs.load_state_dict(state)
        self._switches = list(state.get("switches", self._switches))  # checkpoints of older versions have none

    def _end_line(self) -> None:
        if self._open:
            self._write("\n")
            self._open = False

    def _print(self, line: str) -> None:
        line = printable(redacted(line))
        self._write(("\r\x1b[K" if self._open else "") + line + "\n")
        self._open = False

    def _write(self, text: str) -> None:
        stream = self._stream or sys.stdout
        if stream is None:  # its descriptor was closed when Python started, as by `>&-`
            return
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):
            pass  # the reader is gone, or the disk is full; training continues


@dataclass
class Warned:
    """over: the step since which the warning does not hold any more, see `open_warnings`."""

    event: Event
    over: int | None

    @property
    def words(self) -> str:
        over = f", over since step {self.over:,}" if self.over is not None else ""
        return f"warning{over if self.over != self.event.step else ', over'}: {_tagged(self.event)}"


def _timed(line: str) -> str:
    return f"{time.strftime('%H:%M:%S')} {line}"


def _tagged(event: Event) -> str:
    return f"[{event.kind.replace('_', ' ')}] step {event.step:,}: {event.message}"


class Rate:
    """Samples per second over the steps since it was last asked."""

    def __init__(self) -> None:
        self._samples, self._seconds = 0, 0.0

    def add(self, record: StepRecord) -> None:
        self._samples += record.samples
        self._seconds += record.seconds

    def take(self) -> float | None:
        rate = self._samples / self._seconds if self._seconds > 0 else None
        self._samples, self._seconds = 0, 0.0
        return rate


def progress_line(
    record: StepRecord,
    rate: float | None,
    metrics: Mapping[str, float],
    total_steps: int | None,
    left_s: float | None,
    readings: Mapping[str, float],
    n_inactive: int,
) -> str:
    """`step 1,200/5,000 (24%)  epoch 1  loss 0.4312  auc 0.7812  45.2k samples/s  2 workers  allreduce  1m20s left`

    In asynchronous modes the mode is followed by staleness and drops: `gba, staleness 0.42, 64 samples dropped`, and
    workers may hang: `2 workers, 1 not active`.
    """
    step = f"step {record.step:,}"
    if total_steps:
        step += f"/{total_steps:,} ({100 * record.step // total_steps}%)"
    parts = [step, f"epoch {record.epoch}"]
    if record.loss is not None:
        parts.append(f"loss {record.loss:.4f}")
    parts += [f"{key} {_number(value)}" for key, value in metrics.items() if "auc" in key.lower()][:1]
    if rate is not None:
        parts.append(f"{_short(rate)} samples/s")
    inactive = f", {n_inactive} not active" if n_inactive else ""
    parts.append(f"{record.workers} worker{'s' * (record.workers != 1)}{inactive}")
    parts.append(record.mode if record.mode == "allreduce" else _asynchronous(record.mode, readings))
    if left_s is not None:
        parts.append(f"{_duration(left_s)} left")
    return "  ".join(parts)


def _asynchronous(mode: str, readings: Mapping[str, float]) -> str:
    parts = [mode]
    if STALENESS_MEAN in readings:
        parts.append(f"staleness {readings[STALENESS_MEAN]:.2f}")
    if readings.get(DROPPED):
        parts.append(f"{readings[DROPPED]:,.0f} samples dropped")
    return ", ".join(parts)


def recovery_words(event: Event) -> str:
    """`step 120: 340 rows restored, PLS 0.0012 (0.0030 so far)`, or `resumed at step 120: 340 rows restored`.

    With the choice, where there was one: `partial recovery`, or `full recovery, 288 samples trained again`.
    """
    data = event.data
    parts = [f"{data.get('rows_restored', 0):,} rows restored" if not data.get("from_memory") else "all from memory"]
    if data.get("rows_lost"):
        parts.append(f"{data['rows_lost']:,} lost")
    if data.get("strategy"):
        parts.append(f"{data['strategy']} recovery")
    if data.get("samples_redone"):
        parts.append(f"{data['samples_redone']:,} samples trained again")
    if data.get("pls") is not None:
        so_far = f" ({data['pls_total']:.4f} so far)" if data.get("pls_total") is not None else ""
        parts.append(f"PLS {data['pls']:.4f}{so_far}")
    return f"{'resumed at ' if event.kind == 'resumed' else ''}step {event.step:,}: {', '.join(parts)}"


def pause_words(pauses: Iterable[tuple[str, float, int | None]], *, is_resumed: bool) -> str:
    """`training stood still for 22.6 s: 0.8 s after a loss of workers (before step 3,282), 21.8 s to let ...`

    pauses: (cause, seconds, the step that ended it, None: the job ended first). is_resumed: launches before had some
    """
    by_cause: dict[str, list[tuple[float, int | None]]] = {}
    for cause, seconds, step in pauses:
        by_cause.setdefault(cause, []).append((seconds, step))
    parts = [
        f"{sum(seconds for seconds, _ in some):.1f} s {PAUSE_WORDS[cause]} ({_ended_by([step for _, step in some])})"
        for cause, some in by_cause.items()
    ]
    total_s = sum(seconds for some in by_cause.values() for seconds, _ in some)
    launches = " in all launches" * is_resumed
    return f"training stood still for {total_s:.1f} s{launches}: {', '.join(parts)}"


def _ended_by(steps: Sequence[int | None]) -> str:
    known = [f"{step:,}" for step in steps if step is not None]
    parts = [f"before step {' and '.join(known)}"] if known else []
    return " and ".join(parts + ["at the end"] * (None in steps))


def failure_lines(error: BaseException, job: Job | None, record: StepRecord | None) -> list[str]:
    """The cause in the first line, where and when below it. A refused input says itself what is wrong."""
    root = error
    while root.__cause__ is not None and not isinstance(root, BadInput):
        root = root.__cause__
    lines = [f"error: {type(root).__name__}: {root}", *(f"  {note}" for note in getattr(root, "__notes__", ()))]
    frames = traceback.extract_tb(root.__traceback__)
    if frames:
        lines.append(f"  in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}")
    if root is not error:
        lines.append(f"  which led to {type(error).__name__}: {error}")
    if job is not None:
        lines.append(f"  on rank {job.rank} of {job.size}, host {job.host}, job {job.job_id}")
    if record is not None:
        lines.append(f"  after step {record.step:,}, epoch {record.epoch}")
    return lines


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}" if abs(value) >= 1000 else f"{value:.4f}"


def _numbers(values: Mapping[str, float]) -> str:
    """AUC first, as it is what jobs are compared by."""
    first = sorted(values, key=lambda key: "auc" not in key.lower())
    return "  ".join(f"{key} {_number(values[key])}" for key in first)


def _short(rate: float) -> str:
    if rate >= 1e6:
        return f"{rate / 1e6:.2f}M"
    return f"{rate / 1e3:.1f}k" if rate >= 1e3 else f"{rate:.0f}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
