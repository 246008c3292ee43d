"""A seed's schedule: the job's size and settings, and faults with their times in steps. The same seed, the same plan.

Faults of `gba_hvd.faults` happen in the workers (`inside`), all others come from this tool (`outside`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd.embedding.row_gradients import ROW_AVERAGES
from gba_hvd.errors import BadInput
from gba_hvd.faults import FaultSchedule

GLOBAL_BATCH, MICRO_BATCH, SAMPLES, EPOCHS = 96, 16, 1000, 5
STEPS = EPOCHS * -(-SAMPLES // GLOBAL_BATCH)
SERVE_S = 0.04  # every micro-batch takes at least so long, so that faults fall between things
CHECKPOINT_S = 3.0

# kind -> what it does, for `chaos show` and the documentation
INSIDE = {
    "kill": "SIGKILL to a worker",
    "stop": "SIGSTOP to a worker, SIGCONT later",
    "kill_server": "SIGKILL to a host's server",
    "stop_server": "SIGSTOP to a host's server, SIGCONT later",
    "drop_push": "a push is not sent",
    "delay_push": "a push is sent late",
}
LASTING = {"slow": "a worker's micro-batches take several times as long"}
OUTSIDE = {
    "stop_server_in_switch": "SIGSTOP to a server while a change of mode is in flight",
    "host_leaves": "the launcher's list of hosts lacks one for some steps",
    "remove_file": "a file of the job's folder is gone",
    "truncate_file": "a file of the job's folder is cut to half",
    "full_memory": "the file system of the shard memory is full for a while",
    "full_disk": "the file system of the checkpoints is full for a while",
    "store_503": "the checkpoint store answers nothing but errors for a while",
    "store_loses": "the store says that it wrote, and did not",
    "store_stale": "the store lists what was there some time ago",
    "store_slow": "each call of the store takes half a second longer",
    "tracking_hangs": "the tracking server accepts connections and never answers",
    "tracking_500": "the tracking server answers 500",
    "tracking_away": "no server listens at the tracking address",
    "network_delay": "everything between two hosts arrives late",
    "network_loss": "pieces between two hosts arrive much later, as after a retransmission",
    "network_cut": "nothing passes between two hosts for a while",
    "network_reset": "all connections between two hosts break",
    "neighbour": "other processes leave each of the job's a tenth of a core, in bursts",
}
KINDS = {**INSIDE, **LASTING, **OUTSIDE}
# rule -> optimizers of the plan that it goes with; of what `--rule` may name
RULES = {
    "none": ("SGD", "momentum", "Adagrad", "Adam"),
    "look_ahead": ("momentum", "Adam"),
    "gap_aware": ("Adam",),
    "dana_zero": ("momentum",),
    "dana_slim": ("momentum",),
}
REPLAYED_RULES = ("none", "look_ahead")
MAY_FAIL = ("remove_file", "truncate_file", "full_memory")  # the job may end, if it says why
STORE = ("store_503", "store_loses", "store_stale", "store_slow")
TRACKING = ("tracking_hangs", "tracking_500", "tracking_away")
NETWORK = ("network_delay", "network_loss", "network_cut", "network_reset")


@dataclass(frozen=True)
class FaultPlan:
    """One schedule.

    workers: at the start, 1 to 3, each under a host name of its own. apart: each name has its own memory and server, so
    that it is a host. mode: at the start; switch_at: step -> mode. inside, outside: faults, JSON values.
    tracking: None, "good", or one of the kinds `tracking_*`. replay: the job writes a trace that is computed again.
    rule, row_average: as of `GBACallback` and `DistributedOptimizer`. hashed: users are in a hashed table
    data: "log", "parquet" (files), "shards" (that are read in sequence, of unknown length). readers: processes that
    read, of each worker. features: items seen before share the table of items
    """

    seed: int
    workers: int
    mode: str
    switch_at: dict[str, str]
    apart: bool
    compressed: bool
    rule: str
    optimizer: str
    row_optimizer: str
    sync: str
    n_shards: int
    inside: list[dict[str, Any]]
    outside: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: str | None = None  # None, "folder", "store"
    tracking: str | None = None
    replay: bool = False
    row_average: str = "global"
    hashed: bool = False
    data: str = "log"
    readers: int = 0
    features: bool = False

    @classmethod
    def load(cls, path: Path) -> FaultPlan:
        """From a file with what `gba-hvd chaos show --json` prints. Raises BadInput."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(**values)
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(f"{path} is no schedule ({error}): gba-hvd chaos show --json SEED prints one") from error

    @property
    def needs_mounts(self) -> list[str]:
        """Kinds of its faults that need a small file system of their own."""
        return [fault["kind"] for fault in self.outside if fault["kind"] in ("full_memory", "full_disk")]

    @property
    def may_fail(self) -> bool:
        return any(fault["kind"] in MAY_FAIL for fault in self.outside)

    @property
    def kinds(self) -> list[str]:
        """Kinds of all faults, one entry for each."""
        tracking = [self.tracking] if self.tracking in TRACKING else []
        return [
            *(f["kind"] for f in self.inside if f["kind"] != "serve"),
            *(f["kind"] for f in self.outside),
            *tracking,
        ]


def plan_of(seed: int, mode: str = "", rule: str = "") -> FaultPlan:
    """mode: the asynchronous mode to use; by default most schedules use gba, some shadow.

    rule: the update rule, one of RULES; by default drawn. Raises BadInput for a rule with mode "shadow"
    """
    if mode == "shadow" and rule not in ("", "none"):
        raise BadInput(f"mode 'shadow' uses no rule, got {rule!r}: leave the rule out, or choose mode 'gba'")
    plan = _drawn(seed, mode or ("gba" if rule not in ("", "none") else ""))
    return plan if not rule or rule == plan.rule else _with_rule(plan, rule)


def _with_rule(plan: FaultPlan, rule: str) -> FaultPlan:
    """The same faults with another rule, and with an optimizer that the rule goes with."""
    fitting = RULES[rule]
    optimizer = plan.optimizer if plan.optimizer in fitting else fitting[plan.seed % len(fitting)]
    is_replayed = not plan.apart and rule in REPLAYED_RULES and "shadow" not in (plan.mode, *plan.switch_at.values())
    return replace(plan, rule=rule, optimizer=optimizer, replay=is_replayed, hashed=plan.hashed and not is_replayed)


def _drawn(seed: int, mode: str) -> FaultPlan:
    rng = np.random.default_rng([seed, 20])
    draw = _Draw(rng)
    asynchronous = mode or ("shadow" if rng.random() < 0.2 else "gba")
    starts_asynchronous, n_switches = bool(rng.random() < 0.5), int(rng.integers(0, 4))
    # Shadow makes a step of each micro-batch.
    pace = 6 if asynchronous == "shadow" and (starts_asynchronous or n_switches) else 1
    workers = int(rng.choice([1, 2, 3], p=[0.1, 0.3, 0.6]))
    apart = workers > 1 and rng.random() < 0.33
    compressed = apart and rng.random() < 0.6
    rule, optimizer = "none", str(rng.choice(["SGD", "momentum", "Adagrad", "Adam"]))
    if asynchronous == "gba" and rng.random() < 0.3:
        rule, optimizer = draw.one(("gap_aware", "Adam"), ("dana_zero", "momentum"), ("dana_slim", "momentum"))
    now, switch_at = starts_asynchronous, {}
    for at in sorted({draw.step(pace) for _ in range(n_switches)}):
        now = not now
        switch_at[str(at)] = asynchronous if now else "allreduce"
    inside = _inside(draw, workers, pace)
    checkpoints = draw.one(None, "folder", "store", "folder")
    tracking = draw.one(None, None, None, "good", *TRACKING) if rng.random() < 0.6 else None
    changes = [0] * starts_asynchronous + [int(at) for at in switch_at]
    outside = _outside(draw, workers, pace, apart, checkpoints, changes)
    if any(fault["kind"] == "full_disk" for fault in outside):
        checkpoints = "folder"
    replay = not apart and rule == "none" and asynchronous == "gba"
    if asynchronous == "gba" and rule == "none" and optimizer in RULES["look_ahead"]:
        # Of numbers of its own: what a seed's schedule had before this rule stays as it is.
        rule = "look_ahead" if np.random.default_rng([seed, 21]).random() < 0.5 else "none"
    hashed = not replay and np.random.default_rng([seed, 22]).random() < 0.5  # of numbers of its own, too
    of_data = _Draw(np.random.default_rng([seed, 23]))  # of numbers of its own, too
    data, features = of_data.one("log", "log", "parquet", "shards"), of_data.rng.random() < 0.3
    readers = int(of_data.one(0, 0, 1, 2))
    if pace > 1 and not starts_asynchronous:
        switch_at, inside, outside = _in_steps(switch_at, inside, outside, pace)
    return FaultPlan(
        seed, workers, asynchronous if starts_asynchronous else "allreduce", switch_at, apart, compressed, rule,
        optimizer, str(rng.choice(["SGD", "Adagrad", "RowAdagrad", "Adam"])), draw.one("easgd", "ma"),
        int(rng.choice([1, 3, 4])), inside, outside, checkpoints, tracking, replay,
        draw.one(*ROW_AVERAGES), hashed, data, readers, features,
    )  # fmt: skip


def _in_steps(
    switch_at: Mapping[str, str], inside: Sequence[Mapping[str, Any]], outside: Sequence[Mapping[str, Any]], pace: int
) -> tuple[dict[str, str], list[dict[str, Any]], list[dict[str, Any]]]:
    """The same, of a job that begins in allreduce mode, where a step is `pace` of the micro-batches that were drawn."""
    switches = [(int(at), mode) for at, mode in switch_at.items()]

    def step_of(drawn: int) -> int:
        step, since, mode = 0, 0, "allreduce"
        for at, then in [*switches, (drawn, "")]:
            until = min(at, drawn)
            step += (until - since) // (pace if mode == "allreduce" else 1)
            since, mode = until, then
        return step

    def moved(faults: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{k: step_of(v) if k in ("at_step", "from_step") else v for k, v in fault.items()} for fault in faults]

    return {str(step_of(at)): mode for at, mode in switches}, moved(inside), moved(outside)


class _Draw:
    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def step(self, pace: int) -> int:
        return pace * int(self.rng.integers(3, STEPS - 12))

    def seconds(self, least: float, most: float) -> float:
        return round(float(self.rng.uniform(least, most)), 2)

    def one(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]


def _inside(draw: _Draw, workers: int, pace: int) -> list[dict[str, Any]]:
    rng, faults = draw.rng, FaultSchedule().serve(seconds=SERVE_S)
    # Never all of them: one must have the state.
    for rank in rng.choice(workers, size=min(workers - 1, int(rng.integers(0, 3))), replace=False):
        faults = faults.kill(worker=int(rank), at_step=draw.step(pace))
    for _ in range(int(rng.integers(0, 2))):
        faults = faults.stop(worker=int(rng.integers(workers)), at_step=draw.step(pace), seconds=draw.seconds(0.5, 6))
    for _ in range(int(rng.integers(0, 3))):
        faults = faults.kill_server(host=0, at_step=draw.step(pace))
    if rng.random() < 0.3:
        faults = faults.stop_server(host=0, at_step=draw.step(pace), seconds=draw.seconds(0.5, 4))
    if rng.random() < 0.4:
        factor = round(float(rng.uniform(2, 5)), 1)
        faults = faults.slow(worker=int(rng.integers(workers)), factor=factor, from_step=draw.step(pace))
    for _ in range(int(rng.integers(0, 3))):
        faults = faults.drop_push(worker=int(rng.integers(workers)), at_step=draw.step(pace))
    if rng.random() < 0.2:
        faults = faults.delay_push(worker=int(rng.integers(workers)), at_step=draw.step(pace), seconds=0.5)
    return [fault.entry() for fault in faults.faults]


def _outside(
    draw: _Draw, workers: int, pace: int, apart: bool, checkpoints: str | None, changes: list[int]
) -> list[dict[str, Any]]:
    """changes: steps at which the mode changes."""
    rng = draw.rng
    found: list[dict[str, Any]] = []

    def add(kind: str, **more: Any) -> None:
        found.append({"kind": kind, "at_step": draw.step(pace), **more})

    if changes and rng.random() < 0.35:
        add("stop_server_in_switch", seconds=draw.seconds(0.5, 4), after_s=draw.seconds(0, 0.05))
        found[-1]["at_step"] = draw.one(*changes)
    if workers == 3 and rng.random() < 0.25:
        add("host_leaves", steps=10 * pace)
    if rng.random() < 0.12:
        add(draw.one("remove_file", "truncate_file"), which=round(float(rng.random()), 3))
    elif rng.random() < 0.12:
        add("full_memory", seconds=draw.seconds(1, 4))
    if checkpoints == "folder" and rng.random() < 0.25:
        add("full_disk", seconds=draw.seconds(3, 8))
    if checkpoints == "store":
        add(draw.one(*STORE), seconds=draw.seconds(3, 8))
    if apart and changes:  # in allreduce alone hosts talk by Horovod, which knows no proxy
        add(draw.one(*NETWORK), seconds=draw.seconds(0.5, 5))
    if rng.random() < 0.15:
        add("neighbour", seconds=draw.seconds(4, 8))
    return found
