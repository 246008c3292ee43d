"""Emulated accelerators: when a micro-batch is done, by scenario and time, and what a run of such workers measured.

Every worker computes its small model for real and then sleeps until the micro-batch has taken its service time, so that
a few cores carry several workers whose speed is known exactly. Time decides, not steps: a worker that is slow for ten
seconds is slow for ten seconds in any mode. When the time is over no worker sleeps any more, and the
rest of the epoch is trained as fast as it goes: all contestants see the same samples once, and all end cleanly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

N_WORKERS = 4
MICRO_BATCH = 256  # B, samples
N_MICRO = 8  # M, micro-batches of a global step
SETTINGS = {"workers": N_WORKERS, "micro_batch": MICRO_BATCH, "global_batch": N_MICRO * MICRO_BATCH}
GAMMA_SHAPE = 100.0  # service times of mean 1 and standard deviation 0.1
SPARE = 1.02  # micro-batches beyond what the ideal could do in the time
SLOW_HOST = 2.0  # times as long for each micro-batch of the workers of one host
SLOW_LINK_S = 0.05  # that a slow link adds to an exchange of gradients
SLOW_LINK_BYTES = 175_000  # of such an exchange, each way: rows, their gradients and dense gradients of a step


@dataclass(frozen=True)
class Slow:
    """One worker takes `factor` times as long for micro-batches that begin in [from_s, to_s)."""

    worker: int
    factor: float
    from_s: float = 0.0
    to_s: float = float("inf")


@dataclass(frozen=True)
class Stopped:
    """One worker stands still at the end of every period, as a container with a CPU quota does."""

    worker: int
    period_s: float
    stopped_s: float

    def end_s(self, begins_s: float, running_s: float) -> float:
        """When work is done that begins then, and takes so long without stops."""
        runs_s = self.period_s - self.stopped_s
        if not running_s:
            return begins_s
        periods, within_s = divmod(begins_s, self.period_s)
        more, left_s = divmod(min(within_s, runs_s) + running_s, runs_s)
        return (periods + more) * self.period_s + left_s


@dataclass(frozen=True)
class SlowLink:
    """Each host sends, and receives, no more than `rate` in [from_s, to_s)."""

    rate: str
    from_s: float
    to_s: float


@dataclass(frozen=True)
class Scenario:
    """What the accelerators do. Speed is measured in [warmup_s, end_s] after the first micro-batch."""

    name: str
    service_s: float
    warmup_s: float
    end_s: float
    slow: tuple[Slow, ...] = ()
    gamma: bool = False
    n_workers: int = N_WORKERS
    stopped: tuple[Stopped, ...] = ()
    n_hosts: int = 1
    link: SlowLink | None = None

    def mean_service_s(self, worker: int, at_s: float) -> float:
        """Expected seconds for a micro-batch that this worker begins at `at_s`, without stops.

        0 when the emulation is over.
        """
        if at_s >= self.end_s:
            return 0.0
        factor = 1.0
        for slow in self.slow:
            if slow.worker == worker and slow.from_s <= at_s < slow.to_s:
                factor *= slow.factor
        return self.service_s * factor

    def end_s_of(self, worker: int, begins_s: float, running_s: float) -> float:
        """When this worker has done work that takes so long without stops."""
        for stopped in self.stopped:
            if stopped.worker == worker:
                return stopped.end_s(begins_s, running_s)
        return begins_s + running_s

    def ideal_rate(self, from_s: float, to_s: float) -> float:
        """sum_w 1 / t_w, its mean over the time: micro-batches/s of workers that never wait."""
        changes = {edge for slow in self.slow for edge in (slow.from_s, slow.to_s) if from_s < edge < to_s}
        edges = [from_s, *sorted(changes), to_s]
        runs = {one.worker: 1 - one.stopped_s / one.period_s for one in self.stopped}
        done = 0.0
        for start, end in pairwise(edges):
            times = (self.mean_service_s(w, start) / runs.get(w, 1.0) for w in range(self.n_workers))
            done += (end - start) * sum(1 / seconds for seconds in times)
        return done / (to_s - from_s)

    def n_micro(self) -> int:
        """Micro-batches of the epoch: whole steps, a little more than the ideal could do while it is emulated."""
        return -(-int(self.ideal_rate(0.0, self.end_s) * self.end_s * SPARE) // N_MICRO) * N_MICRO


def even(service_s: float, measured_s: float, n_workers: int) -> Scenario:
    """So many equal workers."""
    warm = 75 * service_s
    return Scenario("none", service_s, warm, warm + measured_s, n_workers=n_workers)


# A day of a shared cluster: how busy it is, hour by hour, from 0 (ours alone) to 1; two peaks and a quiet night.
LOAD_BY_HOUR = (.1, 0, 0, 0, 0, .1, .3, .6, .8, 1, 1, .9, .7, .8, 1, 1, .9, .7, .8, 1, .9, .6, .4, .2)  # fmt: skip
# At full load micro-batches of the workers take 1 plus this times as long. Every six hours others are hit hardest.
SEVERITY = (0.5, 1.0, 2.0, 4.0)


def cluster_day(service_s: float, day_s: float) -> Scenario:
    """24 hours of changing load in `day_s` seconds, after a warm-up without load."""
    warm, hour_s = 75 * service_s, day_s / len(LOAD_BY_HOUR)
    slow = tuple(
        Slow(
            worker,
            1 + load * SEVERITY[(worker + hour // 6) % N_WORKERS],
            warm + hour * hour_s,
            warm + (hour + 1) * hour_s,
        )
        for hour, load in enumerate(LOAD_BY_HOUR)
        for worker in range(N_WORKERS)
        if load
    )
    return Scenario("cluster_day", service_s, warm, warm + day_s, slow)


def scenarios(service_s: float, measured_s: float) -> dict[str, Scenario]:
    """All by name. `measured_s`: seconds of the steady ones that count, and of the day; `come_and_go` takes longer.

    The straggler starts fast, so that an automatic mode has something to notice; that is over before speed is measured.
    On two hosts things happen in the measured time, which is 700 service times at least: one host is slow in its second
    half, the link in its middle third, as much as in `gba-hvd simulate auto`.
    """
    last = N_WORKERS - 1
    warm = 75 * service_s
    straggler = Slow(last, 5.0, from_s=warm)
    cycle = max(7 * measured_s, 700 * service_s)
    visit = Slow(last, 5.0, from_s=warm + cycle / 3, to_s=warm + 2 * cycle / 3)
    long = max(measured_s, 700 * service_s)
    slow_host = tuple(Slow(worker, SLOW_HOST, warm + long / 2) for worker in range(N_WORKERS // 2, N_WORKERS))
    rate = f"{8 * SLOW_LINK_BYTES / SLOW_LINK_S / 1e6:g}mbit"
    slow_link = SlowLink(rate, warm + long / 3, warm + 2 * long / 3)
    return {
        "none": even(service_s, measured_s, N_WORKERS),
        # 100 services: the 10 slow steps of allreduce in which a decision matures and is carried out.
        "straggler_5x": Scenario(
            "straggler_5x", service_s, warm + 100 * service_s, warm + 100 * service_s + measured_s, (straggler,)
        ),
        "throttled": Scenario(
            "throttled", service_s, warm, warm + measured_s, stopped=(Stopped(last, 3 * service_s, 1.5 * service_s),)
        ),
        "gamma": Scenario("gamma", service_s, warm, warm + measured_s, gamma=True),
        "come_and_go": Scenario("come_and_go", service_s, warm, warm + cycle, (visit,)),
        "cluster_day": cluster_day(service_s, measured_s),
        "slow_host_of_two": Scenario("slow_host_of_two", service_s, warm, warm + long, slow_host, n_hosts=2),
        "slow_link": Scenario("slow_link", service_s, warm, warm + long, n_hosts=2, link=slow_link),
    }


class Accelerator:
    """One worker's: `begin()` a micro-batch, compute it for real, `wait()` until its service time is over.

    Each thread of the worker has one of its own, of the same speed. started: a file made as the first one begins
    """

    def __init__(
        self,
        scenario: Scenario,
        worker: int,
        *,
        seed: int = 0,
        started: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scenario, self.worker = scenario, worker
        self._draws = np.random.default_rng([seed, worker])
        self._clock, self._sleep = clock, sleep
        self._start: float | None = None
        self._started = started
        self._of_thread = threading.local()

    @property
    def at_s(self) -> float:
        """Seconds since the first micro-batch began; 0 before it."""
        return 0.0 if self._start is None else self._clock() - self._start

    def begin(self) -> None:
        if self._start is None:
            self._start = self._clock()
            if self._started is not None:
                self._started.touch()
        self._of_thread.began = self.at_s

    def wait(self, n_micro: int = 1) -> None:
        """Sleep until the n micro-batches begun together have taken their time."""
        began: float = self._of_thread.began
        takes = self.scenario.mean_service_s(self.worker, began) * n_micro
        if self.scenario.gamma:
            takes *= self._draws.gamma(GAMMA_SHAPE * n_micro, 1 / (GAMMA_SHAPE * n_micro))
        left = self.scenario.end_s_of(self.worker, began, takes) - self.at_s
        if left > 0:
            self._sleep(left)


class EmulatedProgress:
    """What the chief saw, step by step, within the measured time."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._seen: list[tuple[float, int, int]] = []

    @property
    def is_measured(self) -> bool:
        """Whether what happens now is within the measured time."""
        return self._accelerator.scenario.warmup_s <= self._accelerator.at_s <= self._accelerator.scenario.end_s

    @property
    def measured_at_s(self) -> float:
        """Seconds since the measured time began; below 0 before it."""
        return self._accelerator.at_s - self._accelerator.scenario.warmup_s

    def note(self, samples_applied: int, samples_dropped: int = 0) -> None:
        """A step is done; both counts since the start of the job."""
        if self.is_measured:
            self._seen.append((self._accelerator.at_s, samples_applied, samples_dropped))

    def result(self, micro_batch: int) -> dict[str, Any]:
        """samples_per_s (applied ones), by_minute, ideal_share, dropped, dropped_share.

        by_minute: samples_per_s of each whole minute. Raises ValueError without two steps.
        """
        scenario, (first, *_, last) = self._accelerator.scenario, self._two_or_more()
        (start, applied, dropped), (end, applied_then, dropped_then) = first, last
        rate = (applied_then - applied) / (end - start)
        gone = dropped_then - dropped
        return {
            "samples_per_s": rate,
            "ideal_share": rate / (micro_batch * scenario.ideal_rate(scenario.warmup_s, scenario.end_s)),
            "dropped": gone,
            "dropped_share": gone / (gone + applied_then - applied),
            "measured_s": end - start,
            "by_minute": self._rates(np.arange(scenario.warmup_s, scenario.end_s + 1e-9, 60.0)),
        }

    def samples_per_s(self, n_parts: int) -> list[float]:
        """The rate of applied samples in each of `n_parts` equal parts of the measured time.

        Between two steps it is taken as constant. Raises ValueError without two steps.
        """
        scenario = self._accelerator.scenario
        return self._rates(np.linspace(scenario.warmup_s, scenario.end_s, n_parts + 1))

    def _rates(self, edges: np.ndarray) -> list[float]:
        at_s, applied, _ = np.array(self._two_or_more()).T
        ends = np.interp(edges, at_s, applied)
        # The first and the last part have no step at their outer edge: their rate is over the time that is covered.
        covered_s = np.diff(np.clip(edges, at_s[0], at_s[-1]))
        return [float(n / s) if s > 0 else 0.0 for n, s in zip(np.diff(ends), covered_s, strict=True)]

    def _two_or_more(self) -> list[tuple[float, int, int]]:
        if len(self._seen) < 2:
            raise ValueError(f"{len(self._seen)} steps in the measured time, 2 are the least: measure for longer")
        return self._seen


def staleness(histogram: Mapping[int, int]) -> dict[str, float]:
    """Mean and largest staleness of the pushes counted by staleness; 0 for a mode that has none."""
    n = sum(histogram.values())
    if not n:
        return {"staleness_mean": 0.0, "staleness_max": 0}
    return {
        "staleness_mean": sum(int(stale) * count for stale, count in histogram.items()) / n,
        "staleness_max": max(int(stale) for stale, count in histogram.items() if count),
    }


def headline(scenarios: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """The ratios people ask for; without those whose modes did not run.

    scenarios: name -> mode -> columns
    """

    def ratio(name: str, mode: str, against: Sequence[str]) -> float | None:
        speed = {m: columns["samples_per_s"] for m, columns in scenarios.get(name, {}).items()}
        if mode not in speed or any(other not in speed for other in against):
            return None
        return speed[mode] / max(speed[other] for other in against)

    found = {
        "gba_vs_allreduce": ratio("straggler_5x", "gba", ["allreduce"]),
        "gba_vs_horovod": ratio("straggler_5x", "gba", ["horovod"]),
        "gba_vs_torch_rpc": ratio("straggler_5x", "gba", ["torch_rpc"]),
        "gba_ideal_share": scenarios.get("straggler_5x", {}).get("gba", {}).get("ideal_share"),
        "auto_vs_allreduce_without_straggler": ratio("none", "auto", ["allreduce"]),
        "auto_vs_better_mode": {
            name: value for name in scenarios if (value := ratio(name, "auto", ["allreduce", "gba"])) is not None
        },
    }
    return {name: value for name, value in found.items() if value not in (None, {})}
