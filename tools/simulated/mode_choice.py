"""Mode `auto` on a virtual clock: how fast a cluster is in allreduce, in gba, and where `GBACallback` chooses.

The callback is the real one; simulated are the workers. Each micro-batch takes its worker's service time, times what
else runs there at that moment, times a gamma draw. In allreduce all wait for the slowest and then exchange; in gba each
pushes and continues. Nothing here sleeps, and the same seed gives the same run.

`Informed` is a bound: what a policy that knows how fast both modes are would lose, since it must wait to see a change.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from gba_hvd import GBACallback
from gba_hvd.epoch import shares
from gba_hvd.switching.measurements import PushReadings
from gba_hvd.switching.policy import LOST_S, Options

from ..bench.harness.emulated_accelerators import LOAD_BY_HOUR, SEVERITY, SLOW_HOST, SLOW_LINK_S, Stopped

TICK_S = 0.25  # the state of a cluster is constant for so long
MODES = ("allreduce", "gba")
_WARM_UP_MIN = 2  # minutes of a run in which it may be slower


@dataclass(frozen=True)
class Cluster:
    """What a job runs on. Arrays are by tick, `TICK_S` each, and end with the run.

    service_s: a micro-batch of each worker with nothing else there; n_micro: M
    slow:      float [workers, ticks], times as long as that
    exchange_s, serve_s: float [ticks], of an allreduce step after its last micro-batch, and of a push in gba
    shape:     of the gamma law of times; gba_takes: times as long in gba as the same micro-batch takes in allreduce,
               which shows there only: workers that do not wait compete for cores
    switch_s:  of a switch, beside the drain
    stopped:   workers that are stopped and continued all the time
    """

    name: str
    service_s: tuple[float, ...]
    n_micro: int
    slow: np.ndarray = field(repr=False)
    exchange_s: np.ndarray = field(repr=False)
    serve_s: np.ndarray = field(repr=False)
    shape: float = 400.0
    gba_takes: float = 1.0
    switch_s: float = 0.15
    seed: int = 0
    stopped: tuple[Stopped, ...] = ()

    @property
    def seconds(self) -> float:
        return float(self.slow.shape[1] * TICK_S)


@dataclass(frozen=True)
class Switch:
    at_s: float
    to: str
    is_trial: bool
    reason: str


@dataclass(frozen=True)
class ModeRun:
    """curve: (seconds, micro-batches done) at each step, from (0, 0) on"""

    curve: np.ndarray = field(repr=False)
    switches: tuple[Switch, ...]

    def done_at(self, at_s: Sequence[float] | np.ndarray) -> np.ndarray:
        """Micro-batches done by then; between two steps in proportion to time."""
        found: np.ndarray = np.interp(at_s, self.curve[:, 0], self.curve[:, 1])
        return found


@dataclass(frozen=True)
class Comparison:
    """Mode auto beside the two fixed modes on one cluster.

    share:       of the better fixed mode's micro-batches over the whole run
    worst_minute: the least of these shares in a minute after the first two, against the mode that was better in that
                 minute, and against the one that was better over the whole run
    needless:    switches to the mode that was the slower one over the stay that followed
    """

    name: str
    seconds: float
    allreduce: float
    gba: float
    auto: float
    share: float
    worst_minute: float
    worst_of_run: float
    switches: tuple[Switch, ...]
    needless: int

    @property
    def needless_per_h(self) -> float:
        return self.needless * 3600 / self.seconds


class Informed(GBACallback):
    """Sees a run of each mode beside its own, up to now, and switches when the other one is a second of work ahead."""

    def __init__(self, fixed: Mapping[str, ModeRun], now_s: Callable[[], float]) -> None:
        super().__init__()
        self._fixed, self._now_s, self._seen_s, self._lost_s = fixed, now_s, 0.0, 0.0

    def measured_allreduce(self, *_: object, **__: object) -> None: ...

    def measured_async(self, *_: object, **__: object) -> None: ...

    def mode_request(self, step: int, current: str) -> tuple[str, str] | None:
        other = "gba" if current == "allreduce" else "allreduce"
        span = [self._seen_s, self._now_s()]
        done = {mode: float(np.diff(run.done_at(span))[0]) for mode, run in self._fixed.items()}
        if done[current] > 0:
            ahead = done[other] / done[current] - Options.enter_gain
            self._lost_s = max(0.0, self._lost_s + ahead * (span[1] - span[0]))
        self._seen_s = span[1]
        return (other, f"{LOST_S:g} s of work ahead") if self._lost_s >= LOST_S else None

    def switched(self, mode: str, step: int) -> None:
        self._seen_s, self._lost_s = self._now_s(), 0.0


def compare(cluster: Cluster, trial_budget: float | None = None, informed: bool = False) -> Comparison:
    """One run of each. Rates are micro-batches/s. informed: `Informed` chooses the mode, not the callback."""
    fixed = {mode: _Run(cluster, mode, None).run() for mode in MODES}
    callback = GBACallback() if trial_budget is None else GBACallback(trial_budget=trial_budget)
    choosing = _Run(cluster, "allreduce", callback)
    if informed:
        choosing.callback = Informed(fixed, lambda: choosing.now_s)
    auto = choosing.run()
    total = {mode: float(run.done_at([cluster.seconds])[0]) for mode, run in fixed.items()}
    done = float(auto.done_at([cluster.seconds])[0])
    edges = np.arange(_WARM_UP_MIN * 60.0, cluster.seconds + 1e-9, 60.0)
    by_minute = {mode: np.diff(run.done_at(edges)) for mode, run in fixed.items()}
    ours, better = np.diff(auto.done_at(edges)), max(total, key=total.__getitem__)
    return Comparison(
        cluster.name, cluster.seconds, total["allreduce"] / cluster.seconds, total["gba"] / cluster.seconds,
        done / cluster.seconds, done / total[better],
        float((ours / np.maximum(by_minute["allreduce"], by_minute["gba"])).min()),
        float((ours / by_minute[better]).min()), auto.switches, _needless(auto.switches, fixed, cluster.seconds),
    )  # fmt: skip


def _needless(switches: Sequence[Switch], fixed: dict[str, ModeRun], end_s: float) -> int:
    found = 0
    for switch, until_s in zip(switches, [*(s.at_s for s in switches), end_s][1:], strict=True):
        stay = {mode: float(np.diff(run.done_at([switch.at_s, until_s]))[0]) for mode, run in fixed.items()}
        found += int(stay[switch.to] < max(stay.values()) * 0.99)  # a tie is no mistake
    return found


class _Run:
    """The clock, and a mode at a time. Without a callback the mode stays."""

    def __init__(self, cluster: Cluster, mode: str, callback: GBACallback | None) -> None:
        self._cluster, self._mode, self.callback = cluster, mode, callback
        self.now_s, self._step, self._done = 0.0, 0, 0
        self._curve, self._switches = [(0.0, 0.0)], list[Switch]()
        rng = np.random.default_rng([cluster.seed, 1])
        self._jitter = (rng.gamma(cluster.shape, 1 / cluster.shape, 1 << 14)).tolist()
        self._drawn = 0
        self._last_tick = int(cluster.slow.shape[1]) - 1
        self._slow = (cluster.slow * np.array(cluster.service_s)[:, None]).tolist()
        self._stopped = {one.worker: one for one in cluster.stopped}
        self._exchange_s, self._serve_s = cluster.exchange_s.tolist(), cluster.serve_s.tolist()

    def run(self) -> ModeRun:
        part = {"allreduce": self._allreduce, "gba": self._gba}
        while self.now_s < self._cluster.seconds:
            to, reason = part[self._mode]()
            if to == self._mode:
                break
            assert self.callback is not None
            self.now_s += self._cluster.switch_s
            is_trial = self.callback.last is not None and self.callback.last.is_trial
            self._switches.append(Switch(self.now_s, to, is_trial, reason))
            self._mode = to
            self.callback.switched(to, self._step)
        return ModeRun(np.array(self._curve), tuple(s for s in self._switches if s.at_s < self._cluster.seconds))

    def _takes_s(self, worker: int, at_s: float) -> float:
        self._drawn = (self._drawn + 1) & 0x3FFF
        return float(self._slow[worker][self._tick(at_s)]) * float(self._jitter[self._drawn])

    def _tick(self, at_s: float) -> int:
        return min(int(at_s / TICK_S), self._last_tick)

    def _stepped(self) -> None:
        self._step += 1
        self._curve.append((self.now_s, float(self._done)))

    def _allreduce(self) -> tuple[str, str]:
        cluster, callback = self._cluster, self.callback
        share = shares(cluster.n_micro, len(cluster.service_s))
        while self.now_s < cluster.seconds:
            took = []
            for worker, n in enumerate(share):
                at_s = self.now_s
                for _ in range(n):
                    at_s = self._end_s(worker, at_s, self._takes_s(worker, at_s))
                took.append(at_s - self.now_s)
            step_s = self._exchanged_s(self.now_s + max(took), self._exchange_s[self._tick(self.now_s)]) - self.now_s
            self.now_s += step_s
            self._done += cluster.n_micro
            self._stepped()
            if callback is not None:
                each = [t / n if n else 0.0 for t, n in zip(took, share, strict=True)]
                callback.measured_allreduce(self._step, each, step_s, cluster.n_micro)
                request = callback.mode_request(self._step, "allreduce")
                if request is not None:
                    return request
        return "allreduce", ""

    def _gba(self) -> tuple[str, str]:
        cluster, callback, readings = self._cluster, self.callback, PushReadings()
        n_workers, read_step, read_s = len(cluster.service_s), self._step, self.now_s
        counts, newest, computed, pushed = [0] * n_workers, [0.0] * n_workers, [0.0] * n_workers, 0
        started = [self.now_s] * n_workers
        due = [(self._cycle_end_s(w, self.now_s), w) for w in range(n_workers)]
        heapq.heapify(due)
        wanted: tuple[str, str] | None = None
        while due and (wanted or self.now_s < cluster.seconds):
            self.now_s, worker = heapq.heappop(due)
            serve_s = self._serve_s[self._tick(started[worker])]
            counts[worker], newest[worker] = counts[worker] + 1, self.now_s - started[worker] - serve_s
            computed[worker] += newest[worker]
            self._done, pushed = self._done + 1, pushed + 1
            if pushed % cluster.n_micro == 0:
                self._stepped()
            if wanted is not None:
                continue  # drained: it gets no other lease
            if callback is not None and worker == 0 and self._step > read_step:
                read_step = self._step
                seconds, n_pushed, is_known = readings.take(
                    [(w, w, counts[w], newest[w]) for w in range(n_workers)], list(enumerate(computed))
                )
                elapsed_s, read_s = self.now_s - read_s if is_known else 0.0, self.now_s
                callback.measured_async(
                    self._step, seconds, cluster.n_micro, serve_s, n_pushed=n_pushed, elapsed_s=elapsed_s,
                    done=readings.done,
                )  # fmt: skip
                wanted = callback.mode_request(self._step, "gba")
                if wanted is not None:
                    continue
            started[worker] = self.now_s
            heapq.heappush(due, (self._cycle_end_s(worker, self.now_s), worker))
        return wanted or ("gba", "")

    def _cycle_end_s(self, worker: int, at_s: float) -> float:
        takes_s = self._takes_s(worker, at_s) * self._cluster.gba_takes
        return self._end_s(worker, at_s, takes_s + float(self._serve_s[self._tick(at_s)]))

    def _end_s(self, worker: int, at_s: float, running_s: float) -> float:
        stopped = self._stopped.get(worker)
        return at_s + running_s if stopped is None else stopped.end_s(at_s, running_s)

    def _exchanged_s(self, begins_s: float, exchange_s: float) -> float:
        """When an exchange is done: all workers run in it, so that it takes longer while one is stopped."""
        ends_s = (stopped.end_s(begins_s, exchange_s) for stopped in self._cluster.stopped)
        return max(ends_s, default=begins_s + exchange_s)


# --- clusters ---------------------------------------------------------------------------------------------------------


def scenarios(seconds: float = 1800.0, seed: int = 0) -> dict[str, Cluster]:
    """By name: four workers of 50 ms (throttled: 2), M = 8; what happens to them begins after three minutes."""
    n_ticks, n = int(seconds / TICK_S), 4
    rng = np.random.default_rng([seed, 7])
    begins = slice(int(180 / TICK_S), None)
    even = np.ones((n, n_ticks))
    make = partial(_steady, n_ticks=n_ticks, seed=seed)

    def changed(worker: int | slice, when: slice, factor: float) -> np.ndarray:
        slow = even.copy()
        slow[worker, when] *= factor
        return slow

    visit = slice(n_ticks // 3, 2 * n_ticks // 3)
    day = np.ones((n, n_ticks))
    for hour, ticks in enumerate(np.array_split(np.arange(n_ticks), len(LOAD_BY_HOUR))):
        for worker in range(n):
            day[worker, ticks] = 1 + LOAD_BY_HOUR[hour] * SEVERITY[(worker + hour // 6) % n]
    link = make("slow_link", even, exchange_s=0.006, serve_s=0.004)
    link.exchange_s[visit] += SLOW_LINK_S  # of dense gradients, once a step; a push carries as much
    link.serve_s[visit] += SLOW_LINK_S
    return {
        "none": make("none", even),
        "straggler_5x": make("straggler_5x", changed(n - 1, begins, 5.0)),
        # A CPU quota of half a core: several steps run in each period, and one waits until the next begins.
        "throttled": replace(
            make("throttled", even, exchange_s=0.002, serve_s=0.001, gba_takes=1.5),
            service_s=(0.002,) * n,
            stopped=(Stopped(n - 1, period_s=0.1, stopped_s=0.05),),
        ),
        "gamma": make("gamma", even, shape=100.0),
        "come_and_go": make("come_and_go", changed(n - 1, visit, 5.0)),
        "noise": make("noise", bursts(rng, n, n_ticks, share=0.5, on_s=1.0, off_s=2.0), shape=100.0),
        "day": make("day", day, shape=100.0),
        "slow_host_of_two": make("slow_host_of_two", changed(slice(n // 2, n), begins, SLOW_HOST)),
        "slow_link": link,
        # Dearer by what no prediction knows, so that the job is in allreduce when a worker becomes slow, and returns.
        "gba_dearer": make("gba_dearer", changed(n - 1, visit, 5.0), gba_takes=1.15),
    }


def _steady(
    name: str, slow: np.ndarray, *, n_ticks: int, seed: int, exchange_s: float = 0.008, serve_s: float = 0.002,
    shape: float = 400.0, gba_takes: float = 1.0,
) -> Cluster:  # fmt: skip
    return Cluster(
        name, (0.05,) * len(slow), 8, slow, np.full(n_ticks, exchange_s), np.full(n_ticks, serve_s), shape, gba_takes,
        seed=seed,
    )  # fmt: skip


def bursts(
    rng: np.random.Generator, n_workers: int, n_ticks: int, share: float, on_s: float, off_s: float
) -> np.ndarray:
    """float [workers, ticks]: in bursts, others take that share of a worker's core; lengths are exponential."""
    slow = np.ones((n_workers, n_ticks))
    for worker in range(n_workers):
        at_s, is_on = 0.0, False
        while at_s < n_ticks * TICK_S:
            takes_s = rng.exponential(on_s if is_on else off_s)
            if is_on:
                slow[worker, int(at_s / TICK_S) : int((at_s + takes_s) / TICK_S) + 1] = 1 / (1 - share)
            at_s, is_on = at_s + takes_s, not is_on
    return slow


def random_cluster(seed: int, seconds: float = 3600.0) -> Cluster:
    """Drawn: 2 to 8 workers, M, service, jitter, costs of both modes, and up to three things that happen."""
    rng = np.random.default_rng([seed, 11])
    n_ticks, n = int(seconds / TICK_S), int(rng.choice([2, 3, 4, 6, 8]))
    n_micro = n * int(rng.choice([1, 2, 4]))
    service_s = float(np.exp(rng.uniform(np.log(0.08), np.log(0.4))))
    means = np.clip(rng.gamma(1 / 0.1**2, 0.1**2, n), 0.6, 1.6) if rng.random() < 0.5 else np.ones(n)
    exchange_s = np.full(n_ticks, service_s * rng.uniform(0.02, 0.3))
    serve_s = np.full(n_ticks, service_s * rng.uniform(0.01, 0.2))
    slow = np.ones((n, n_ticks))
    for event in rng.choice(["straggler", "host", "load", "noise", "link", "nothing"], int(rng.integers(1, 4))):
        begin, end = np.sort(rng.integers(0, n_ticks, 2))
        when = slice(int(begin), max(int(end), int(begin) + int(120 / TICK_S)))
        if event == "straggler":
            slow[rng.integers(n), when] *= rng.uniform(1.2, 6)
        elif event == "host":
            slow[n // 2 :, when] *= rng.uniform(1.1, 3)
        elif event == "load":
            hills = 0.5 - 0.5 * np.cos(np.linspace(0, 2 * np.pi * rng.integers(1, 4), n_ticks))
            slow *= 1 + hills * rng.uniform(0, 3, n)[:, None]
        elif event == "noise":
            on_s = rng.uniform(0.3, 5)
            slow *= bursts(rng, n, n_ticks, rng.uniform(0.2, 0.7), on_s, on_s * rng.uniform(0.5, 5))
        elif event == "link":
            exchange_s[when] += service_s * rng.uniform(0, 1)
            serve_s[when] += service_s * rng.uniform(0, 0.5)
    return Cluster(
        f"cluster {seed}", tuple((service_s * means).tolist()), n_micro, slow, exchange_s, serve_s,
        float(rng.choice([25.0, 100.0, 400.0])), float(rng.uniform(0.97, 1.2)), float(rng.uniform(0.1, 0.4)), seed,
    )  # fmt: skip
