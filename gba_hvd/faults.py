"""Faults on purpose: slow workers, kills, stops and lost pushes, at planned steps of a real job.

A schedule is data: from a JSON file or built call by call. What comes when is decided without a clock (`service`,
`due`); `carry_out` and `push_fault` act. A fault that fires once does so once in the job, however often its worker
restarts: the one who fires it first leaves a file in `folder`, which is also how a test learns that it really happened.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd.callbacks import Callback
from gba_hvd.errors import BadInput, GbaError
from recovery.catalog.writer_process import started

# kind -> (keys it must have, keys it may have)
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "serve": (("seconds",), ()),
    "slow": (("worker", "factor"), ("from_step", "to_step")),
    "gamma": ((), ("worker", "shape", "factor", "seed", "from_step", "to_step")),
    "kill": (("worker", "at_step"), ()),
    "stop": (("worker", "at_step", "seconds"), ()),
    "raise": (("worker", "at_step"), ()),
    "kill_server": (("host", "at_step"), ()),
    "stop_server": (("host", "at_step", "seconds"), ()),
    "drop_push": (("worker", "at_step"), ()),
    "delay_push": (("worker", "at_step", "seconds"), ()),
}
_SERVER = ("kill_server", "stop_server")
_PUSH = ("drop_push", "delay_push")
_LASTING = ("serve", "slow", "gamma")
_WHOLE = ("worker", "host", "at_step", "from_step", "to_step", "seed")


class InjectedFault(GbaError, RuntimeError):
    """Raised in a worker because a fault schedule says so."""


@dataclass(frozen=True)
class Fault:
    """One planned fault. `kind` says which of the other fields count; those that do not keep their default.

    serve:                   an emulated accelerator: every micro-batch of every worker takes at least `seconds`
    slow:                    micro-batches of `worker` take `factor` times as long, 1 or more
    gamma:                   `factor` times a draw from Gamma(shape, 1/shape), mean 1; worker None: all workers
      both while from_step <= step < to_step; to_step None: to the end
    kill, stop, raise:       SIGKILL to `worker`; SIGSTOP, and SIGCONT `seconds` later; an exception in it
    kill_server, stop_server the same to the server of host number `host`
    drop_push, delay_push:   a push of `worker` is not sent; is sent `seconds` late
      all these once, as soon as the job is at `at_step` or beyond
    """

    kind: str
    worker: int | None = None
    host: int = 0
    at_step: int = 0
    from_step: int = 0
    to_step: int | None = None
    factor: float = 1.0
    shape: float = 100.0
    seed: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        must, may = _keys_of(self.kind)
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if name not in (*must, *may):
                if value != default:
                    raise _unknown_key(self.kind, name)
            elif value is None:
                if name in must:
                    raise BadInput(f"a fault of kind {self.kind!r} needs {name!r}")
            else:
                _check(self.kind, name, value)
        if self.kind == "slow" and self.factor < 1:
            raise BadInput(f"slow: factor must be 1 or more, {self.factor:g} would make worker {self.worker} faster")
        if self.to_step is not None and self.to_step <= self.from_step:
            raise BadInput(f"{self.kind}: to_step {self.to_step} must be beyond from_step {self.from_step}")

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Fault:
        """From one entry of a JSON file, e.g. {"kind": "slow", "worker": 3, "factor": 5}."""
        if not isinstance(entry, Mapping) or "kind" not in entry:
            raise BadInput(f'a fault must be an object with a "kind" ({", ".join(_KINDS)}), got {entry!r}')
        must, may = _keys_of(entry["kind"])
        for key in entry:
            if key not in ("kind", *must, *may):
                raise _unknown_key(entry["kind"], key)
        missing = [key for key in must if key not in entry]
        if missing:
            raise BadInput(
                f"a fault of kind {entry['kind']!r} needs {' and '.join(map(repr, missing))}, got {dict(entry)}"
            )
        return cls(**entry)

    def entry(self) -> dict[str, Any]:
        """As `of` takes it."""
        must, may = _KINDS[self.kind]
        values = asdict(self)
        given = [name for name in may if values[name] != _DEFAULTS[name]]
        return {"kind": self.kind, **{name: values[name] for name in (*must, *given)}}

    @property
    def fires_once(self) -> bool:
        return self.kind not in _LASTING

    @property
    def words(self) -> str:
        """A lasting fault in a few words, such as `worker 2 takes 6 times as long from step 100 until 400`."""
        if self.kind == "serve":
            return f"every micro-batch takes at least {self.seconds:g} s"
        who = "every worker" if self.worker is None else f"worker {self.worker}"
        until = "to the end" if self.to_step is None else f"until {self.to_step:,}"
        drawn = f", times draws from Gamma({self.shape:g})" if self.kind == "gamma" else ""
        return f"{who} takes {self.factor:g} times as long{drawn} from step {self.from_step:,} {until}"

    def is_on(self, rank: int, step: int) -> bool:
        """Whether a lasting fault slows this worker at this step."""
        hit = self.worker is None or self.worker == rank
        return hit and self.from_step <= step and (self.to_step is None or step < self.to_step)


_DEFAULTS = {f.name: f.default for f in fields(Fault) if f.default is not MISSING}


@dataclass(frozen=True)
class Firing:
    """That a fault happened: in or to which process, at which step. pid 0: it died before reporting."""

    fault: Fault
    pid: int
    step: int
    unix_s: float


class FaultSchedule(Callback):
    """Planned faults, and the record of those that fired.

        faults = FaultSchedule(folder="/tmp/faults").kill(worker=1, at_step=3).drop_push(worker=2, at_step=5)
        state.register_callbacks([..., faults])
        ...
        assert faults.fired == faults.planned

    Every building call returns a new schedule. `folder` is shared by all workers of a host and read after the job; a
    new job needs a new one. Without it firings are known to this process only. `clock` is the time written there.
    """

    def __init__(
        self, faults: Iterable[Fault] = (), folder: str | Path | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.faults = tuple(faults)
        self.folder = None if folder is None else Path(folder)
        self._clock = clock
        self._known: dict[int, Firing] = {}

    @classmethod
    def load(cls, path: str | Path) -> FaultSchedule:
        """From {"faults": [{"kind": ..., ...}, ...], "folder": "..."}; `folder` may be left out."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise BadInput(f"cannot read a fault schedule from {path}: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("faults"), list):
            raise BadInput(f'{path}: expected {{"faults": [...]}}, got {str(data)[:80]}')
        for key in data:
            if key not in ("faults", "folder"):
                raise BadInput(f'{path}: {key!r} is not known, beside "faults" there may be "folder"')
        if not isinstance(data.get("folder"), str | None):
            raise BadInput(f'{path}: "folder" must be a path, got {data["folder"]!r}')
        faults = []
        for number, entry in enumerate(data["faults"]):
            try:
                faults.append(Fault.of(entry))
            except BadInput as error:
                raise BadInput(f"{path}, fault {number}: {error}") from error
        return cls(faults, data.get("folder"))

    def dump(self, path: str | Path) -> None:
        """Write what `load` reads."""
        data: dict[str, Any] = {"faults": [fault.entry() for fault in self.faults]}
        if self.folder is not None:
            data["folder"] = str(self.folder)
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    def record_in(self, folder: str | Path) -> None:
        """Where to record firings from now on."""
        self.folder = Path(folder)

    # Building

    def serve(self, seconds: float) -> FaultSchedule:
        """Emulate an accelerator: every micro-batch of every worker takes at least `seconds`."""
        return self._and("serve", seconds=seconds)

    def slow(self, worker: int, factor: float, from_step: int = 0, to_step: int | None = None) -> FaultSchedule:
        """Micro-batches of this worker take `factor` times as long, from `from_step` until before `to_step`."""
        return self._and("slow", worker=worker, factor=factor, from_step=from_step, to_step=to_step)

    def gamma(
        self,
        worker: int | None = None,
        shape: float = 100.0,
        factor: float = 1.0,
        seed: int = 0,
        from_step: int = 0,
        to_step: int | None = None,
    ) -> FaultSchedule:
        """Multiply service times by `factor` times draws from Gamma(shape, 1/shape), mean 1; None: all workers."""
        return self._and(
            "gamma", worker=worker, shape=shape, factor=factor, seed=seed, from_step=from_step, to_step=to_step
        )

    def kill(self, worker: int, at_step: int) -> FaultSchedule:
        """Send SIGKILL to the worker of this rank when the job is at `at_step`, once."""
        return self._and("kill", worker=worker, at_step=at_step)

    def stop(self, worker: int, at_step: int, seconds: float) -> FaultSchedule:
        """Send SIGSTOP to the worker of this rank at `at_step`, and SIGCONT `seconds` later, once."""
        return self._and("stop", worker=worker, at_step=at_step, seconds=seconds)

    def raise_(self, worker: int, at_step: int) -> FaultSchedule:
        """Raise `InjectedFault` in the worker of this rank at `at_step`, once."""
        return self._and("raise", worker=worker, at_step=at_step)

    def kill_server(self, host: int, at_step: int) -> FaultSchedule:
        """Send SIGKILL to the companion server of host number `host` at `at_step`, once."""
        return self._and("kill_server", host=host, at_step=at_step)

    def stop_server(self, host: int, at_step: int, seconds: float) -> FaultSchedule:
        """Send SIGSTOP to the companion server of host number `host` at `at_step`, SIGCONT `seconds` later, once."""
        return self._and("stop_server", host=host, at_step=at_step, seconds=seconds)

    def drop_push(self, worker: int, at_step: int) -> FaultSchedule:
        """In an asynchronous mode: do not send one push of the worker of this rank, at `at_step`; its lease expires."""
        return self._and("drop_push", worker=worker, at_step=at_step)

    def delay_push(self, worker: int, at_step: int, seconds: float) -> FaultSchedule:
        """In an asynchronous mode: send one push of the worker of this rank `seconds` late, at `at_step`."""
        return self._and("delay_push", worker=worker, at_step=at_step, seconds=seconds)

    def _and(self, kind: str, **values: Any) -> FaultSchedule:
        return FaultSchedule((*self.faults, Fault(kind, **values)), self.folder, clock=self._clock)

    # What comes when

    def service(self, rank: int, step: int, seconds: float, micro: int | None = None) -> float:
        """Seconds to sleep after a micro-batch that took `seconds`.

        `micro` is its index in the epoch, by which gamma draws (the same for the same seed, rank and index); without
        it they go by the step. With `serve`, the emulated time is what is multiplied, and the micro-batch's own time
        passes within it.
        """
        factor = 1.0
        for fault in self.faults:
            if fault.kind == "slow" and fault.is_on(rank, step):
                factor *= fault.factor
            elif fault.kind == "gamma" and fault.is_on(rank, step):
                rng = np.random.default_rng([fault.seed, rank, step if micro is None else micro])
                factor *= fault.factor * rng.gamma(fault.shape, 1 / fault.shape)
        emulated_s = max((fault.seconds for fault in self.faults if fault.kind == "serve"), default=seconds)
        return max(0.0, emulated_s * factor - seconds)

    def due(self, rank: int, step: int) -> list[Fault]:
        """What to `carry_out` now: faults of this worker, and of servers, whose step has come, not fired yet."""
        return [
            fault
            for number, fault in self._open(step)
            if fault.kind not in _PUSH and (fault.kind in _SERVER or fault.worker == rank) and not self._firing(number)
        ]

    @property
    def planned(self) -> list[Fault]:
        """The faults that fire once; `lasting` has the others."""
        return [fault for fault in self.faults if fault.fires_once]

    @property
    def lasting(self) -> list[Fault]:
        """`serve`, `slow` and `gamma`, which hold for many micro-batches and leave no record in `folder`."""
        return [fault for fault in self.faults if not fault.fires_once]

    @property
    def fired(self) -> list[Fault]:
        """Those of `planned` that have fired, in planned order."""
        return [firing.fault for firing in self.firings]

    @property
    def firings(self) -> list[Firing]:
        """What happened so far, in planned order."""
        numbers = (number for number, fault in enumerate(self.faults) if fault.fires_once)
        return [firing for number in numbers if (firing := self._firing(number)) is not None]

    # Acting

    def carry_out(self, fault: Fault, server_pids: Mapping[int, int] | None = None, step: int | None = None) -> bool:
        """Make a fault from `due` happen in this process, or to a server. Whether it did: it may have fired already.

        server_pids: process of the server by host number, those of this host only; the fault of a server that is not
        there, or has no living process just now, stays due.
        Raises InjectedFault for kind "raise". Kind "kill" does not return.
        """
        if fault not in self.faults or not fault.fires_once or fault.kind in _PUSH:
            raise BadInput(f"{fault} is not one of this schedule's to carry out: take it from due()")
        pid = os.getpid()
        if fault.kind in _SERVER:
            pid = (server_pids or {}).get(fault.host, 0)
            if pid == 0 or started(str(pid)) < 0:
                return False
        # Recorded first: it cannot be done after a kill.
        if self._claim(fault, pid, step) is None:
            return False
        if fault.kind == "raise":
            raise InjectedFault(f"fault schedule: worker {fault.worker} raises at step {fault.at_step}")
        if fault.kind in ("stop", "stop_server"):
            _continue_later(pid, fault.seconds)
        try:
            os.kill(pid, signal.SIGKILL if fault.kind in ("kill", "kill_server") else signal.SIGSTOP)
        except ProcessLookupError:
            return True  # it ended between our look and the signal: as good as killed
        return True

    def push_fault(self, rank: int, step: int) -> Fault | None:
        """What to do to the push that this worker is about to send; None: send it. Counts as fired with this call."""
        for number, fault in self._open(step):
            if fault.kind in _PUSH and fault.worker == rank and not self._firing(number):
                return self._claim(fault, os.getpid(), step)
        return None

    def _open(self, step: int) -> list[tuple[int, Fault]]:
        return [
            (number, fault)
            for number, fault in enumerate(self.faults)
            if fault.fires_once and fault.at_step <= step and number not in self._known
        ]

    def _claim(self, fault: Fault, pid: int, step: int | None) -> Fault | None:
        """Record one firing of `fault`; None when all its occurrences in the schedule have fired."""
        for number, planned in enumerate(self.faults):
            if planned != fault or self._firing(number):
                continue
            firing = Firing(fault, pid, fault.at_step if step is None else step, self._clock())
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                try:
                    fd = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                except FileExistsError:  # another worker was first
                    continue
                try:
                    os.write(fd, json.dumps({**asdict(firing), "fault": fault.entry()}).encode())
                finally:
                    os.close(fd)
                self._known[number] = firing  # who made the file carries it out, also if another thread has read it
                return fault
            if self._known.setdefault(number, firing) is firing:
                return fault
        return None

    def _firing(self, number: int) -> Firing | None:
        if number not in self._known and self.folder is not None:
            try:
                text = self._path(number).read_text(encoding="utf-8")
            except FileNotFoundError:
                return None
            fault = self.faults[number]
            if not text:  # made a moment ago, or by a process that died just then
                return Firing(fault, 0, fault.at_step, 0.0)
            record = json.loads(text)
            if Fault.of(record["fault"]) != fault:
                raise BadInput(
                    f"{self._path(number)} records {record['fault']}, but here fault {number} is {fault.entry()}: "
                    "the folder was left by another schedule, give this job an empty one"
                )
            self._known[number] = Firing(fault, record["pid"], record["step"], record["unix_s"])
        return self._known.get(number)

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"fault-{number:03d}-{self.faults[number].kind}.json"


def _keys_of(kind: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind]
    near = get_close_matches(str(kind), _KINDS, n=1)
    raise BadInput(
        f"no fault is of kind {kind!r}: " + (f"did you mean {near[0]!r}?" if near else f"{', '.join(_KINDS)}")
    )


def _unknown_key(kind: str, key: object) -> BadInput:
    must, may = _KINDS[kind]
    near = get_close_matches(str(key), (*must, *may), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join((*must, *may))}"
    return BadInput(f"a fault of kind {kind!r} has no {key!r}: {hint}")


def _check(kind: str, name: str, value: object) -> None:
    if name in _WHOLE:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadInput(f"{kind}: {name} must be a whole number, not negative, got {value!r}")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadInput(f"{kind}: {name} must be a positive number, got {value!r}")


# Waits until the process has stopped, then for the given time, then continues it; ends early when the process does.
_WATCH = """
import os, signal, sys, time
if os.fork():
    os._exit(0)
pid, born, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def state():
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0] if fields[19] == born else None
deadline = time.monotonic() + 30
while state() not in ("T", "t", None) and time.monotonic() < deadline:
    time.sleep(0.01)
until = time.monotonic() + seconds
while state() in ("T", "t"):
    left = until - time.monotonic()
    if left <= 0:
        os.kill(pid, signal.SIGCONT)
        break
    time.sleep(min(left, 0.1))
"""


def _continue_later(pid: int, seconds: float) -> None:
    """Start a process, outside the launcher's tree, that continues `pid` once it has been stopped so long."""
    born = started(str(pid))
    if born < 0:
        return
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", _WATCH, str(pid), str(born), str(seconds)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, check=True, timeout=30,
    )  # fmt: skip
