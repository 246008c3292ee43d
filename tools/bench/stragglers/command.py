"""`gba-hvd bench gba`: speed with stragglers, side by side: every mode of ours, plain Horovod, and a torch RPC server.

Four workers with emulated accelerators (`emulated_accelerators.py`) train one small click model (`small_ctr.py`) on the
same samples in the same order. A run lasts a fixed time; the rest of its epoch is then trained without emulation and
not timed, so every AUC is that of the same samples. Runs of the contestants alternate. Dropped samples do not count as
trained. `load` is the machine's 1-minute load average after a run, the contestant's own processes included.

Where `auto`, `allreduce` and `gba` are measured for 4 minutes and more, auto's share of the better fixed mode over the
whole run is printed, and the worst minute after the first two, against the mode that was better in it, as by
`gba-hvd simulate auto`.

Two scenarios run on two virtual hosts of two workers each, which only root can make (iproute2, openssh-server). They
are not among the default ones. `slow_host_of_two`: the workers of one host take twice as long in the second half of
the time. `slow_link`: in the middle third `tc` limits the link so that what a step exchanges takes 50 ms longer.

Rows in the result file are kept and their runs not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gba_hvd.mode_names import SHARED_MODES

from ..harness import auto_by_minute, measure, noise, resumable, two_hosts
from ..harness import emulated_accelerators as emulated
from ..harness.measure import Row, Subparsers, Variant

MODES = ("allreduce", "auto", *SHARED_MODES)
PEERS = {
    "horovod": "plain Horovod, dense gradient of one table for all fields, HOROVOD_CYCLE_TIME=3",
    "torch_rpc": "batch-update parameter server on torch.distributed.rpc, pulls and pushes of touched rows",
}
SCENARIOS = ("none", "straggler_5x", "throttled", "gamma", "come_and_go")
TWO_HOST_SCENARIOS = ("slow_host_of_two", "slow_link")
ONE_HOST = "torch_rpc"  # its launcher knows no other host
COLUMNS = ("samples_per_s", "ideal_share", "auc", "dropped", "dropped_share", "staleness_mean", "staleness_max", "load")
KEY = ("scenario", "mode", "run")
TIMEOUT_S = 300.0  # for one run, beyond its measured time


def add_parser(subparsers: Subparsers) -> None:
    does = "all modes and their peers, with stragglers"
    parser = measure.add_benchmark(subparsers, "gba", does, __doc__, run, help="rows in it are kept")
    parser.add_argument("--service-ms", type=float, default=50.0, help="time of a micro-batch on the emulated device")
    seconds = (
        "measured time of the steady scenarios; come_and_go takes 7 times as long, and it and those on two hosts at "
        "least 700 times --service-ms (35 s with 50)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help=seconds)
    parser.add_argument("--runs", type=int, default=1, help="launches of each contestant in each scenario")
    noise.add_option(parser)
    measure.add_chosen(parser, "--modes", (*MODES, *PEERS), "MODE")
    measure.add_chosen(
        parser, "--scenarios", (*SCENARIOS, *TWO_HOST_SCENARIOS), "SCENARIO", default=list(SCENARIOS),
        help=f"{', '.join(SCENARIOS)}; on two virtual hosts: {', '.join(TWO_HOST_SCENARIOS)}",
    )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One launch."""

    scenario: str
    mode: str
    run: int

    def __str__(self) -> str:
        return f"{self.scenario}, {self.mode}, run {self.run + 1}"


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    measure.require_at_least(args, runs=1)
    service_s = args.service_ms / 1000
    scenarios = emulated.scenarios(service_s, args.seconds)
    chosen = [scenarios[name] for name in args.scenarios]
    contestants = {n_hosts: launched(args.modes, n_hosts) for n_hosts in {one.n_hosts for one in chosen}}
    if asked := [one.name for one in chosen if one.n_hosts > 1]:
        two_hosts.require(", ".join(asked))
        if ONE_HOST in args.modes:
            print(f"{ONE_HOST} is not run in {', '.join(asked)}: its launcher knows one host")
    commands = {v.name if n == 1 else f"{v.name}, {n} hosts": str(v) for n, some in contestants.items() for v in some}
    about: dict[str, Any] = {}

    def more(rows: list[Row]) -> dict[str, Any]:
        found = measure.by_groups(rows, "scenario", "mode", COLUMNS)
        return {
            "commands": {**results.before.get("commands", {}), **commands},
            **about,
            **headline(found, rows),
            "scenarios": found,
        }

    results = resumable.Results(args.out, KEY, settings(args, scenarios), more)
    about["bayes_auc"] = results.before.get("bayes_auc")
    planned = [
        Run(one.name, contestant.name, n)
        for one in chosen for n in range(args.runs) for contestant in contestants[one.n_hosts]
    ]  # fmt: skip
    waiting = results.waiting(planned)
    with noise.Noise(args.noise), tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        if waiting:
            launches = Launches(Path(scratch), service_s, args.seconds, chosen)
            about["bayes_auc"] = launches.bayes_auc

            def launch(one: Run) -> None:
                scenario = scenarios[one.scenario]
                launches.run(scenario, results.rows, variant(one.mode, scenario.n_hosts), one.run)

            results.run_each(waiting, launch)
    found = measure.by_groups(results.rows, "scenario", "mode", COLUMNS)
    show(found, headline(found, results.rows), noise.beside(args.noise))
    return results.end()


def headline(found: Mapping[str, Mapping[str, Mapping[str, float]]], rows: Sequence[Row]) -> dict[str, Any]:
    by_minute = auto_by_minute.compared(rows)
    return emulated.headline(found) | ({"auto_by_minute": by_minute} if by_minute else {})


def settings(args: argparse.Namespace, scenarios: Mapping[str, emulated.Scenario]) -> dict[str, Any]:
    """What all rows of a file have in common. samples: what is held out follows them, so that it depends on them."""
    return {
        **emulated.SETTINGS, "peers": PEERS, **noise.setting(args.noise),
        "service_s": args.service_ms / 1000, "measured_s": args.seconds,
        "samples": n_samples([scenarios[name] for name in args.scenarios]),
        "scenarios": {name: described(scenarios[name]) for name in (*SCENARIOS, *TWO_HOST_SCENARIOS)},
    }  # fmt: skip


def launched(names: Sequence[str], n_hosts: int) -> list[Variant]:
    """The contestants that can run on so many hosts."""
    return [variant(name, n_hosts) for name in names if n_hosts == 1 or name != ONE_HOST]


def variant(name: str, n_hosts: int = 1) -> Variant:
    """How a contestant is launched, short of the arguments that all workers take."""
    hosts = 1 if n_hosts == 1 else two_hosts.HOSTS
    if name == "torch_rpc":
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={emulated.N_WORKERS + 1}")
        env = {"OMP_NUM_THREADS": "1", "TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        return Variant(name, (sys.executable, "-W", "ignore", *launcher, "-m", f"{__package__}.torch_rpc"), env)
    if name == "horovod":
        return measure.horovodrun(name, emulated.N_WORKERS, "bench.stragglers.plain_horovod", hosts=hosts)
    return measure.horovodrun(name, emulated.N_WORKERS, "bench.stragglers.ours", "--mode", name, hosts=hosts)


class Launches:
    """Runs on the same prepared samples. Owns the files in `folder`."""

    def __init__(
        self, folder: Path, service_s: float, measured_s: float, scenarios: Sequence[emulated.Scenario],
        timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        from ..harness import small_ctr  # here, because it imports torch

        self._folder, self._service_s, self._measured_s, self._timeout_s = folder, service_s, measured_s, timeout_s
        small_ctr.write(folder / "data", n_samples(scenarios))
        self.bayes_auc: float = json.loads((folder / "data" / "about.json").read_text())["bayes_auc"]

    def run(self, scenario: emulated.Scenario, rows: list[Row], contestant: Variant, number: int) -> Row:
        """One launch; its row is added to `rows`. Raises RunFailed."""
        arguments = ["--data", self._folder / "data", "--scenario", scenario.name]
        arguments += ["--service-s", self._service_s, "--measured-s", self._measured_s]
        timeout_s = scenario.end_s + self._timeout_s
        if scenario.n_hosts > 1:
            found = two_hosts.result_of(contestant, arguments, self._folder, timeout_s, scenario.link)
        else:
            found = measure.result_of(contestant, arguments, self._folder, timeout_s)
        load = os.getloadavg()[0]
        row = {"scenario": scenario.name, "mode": contestant.name, "run": number, "load": load, **found}
        rows.append(row)
        print(
            f"{scenario.name:13s} run {number + 1}  {contestant.name:10s} {row['samples_per_s']:9,.0f} samples/s  "
            f"{row['ideal_share']:.3f} of the ideal  AUC {row['auc']:.4f}  load {load:.1f}",
            flush=True,
        )
        measured_s = scenario.end_s - scenario.warmup_s
        for switch in (one for one in row.get("switches", ()) if one["at_s"] <= measured_s):
            print(f"    {switch['at_s']:.0f} s: {switch['reason']}", flush=True)
        return row


def n_samples(scenarios: Sequence[emulated.Scenario]) -> int:
    """Those of the longest epoch."""
    return max(one.n_micro() for one in scenarios) * emulated.MICRO_BATCH


def described(scenario: emulated.Scenario) -> dict[str, Any]:
    """JSON values from which a reader can draw the scenario."""
    about = asdict(scenario)
    about["slow"] = [slow | {"to_s": None if slow["to_s"] == float("inf") else slow["to_s"]} for slow in about["slow"]]
    rate = scenario.ideal_rate(scenario.warmup_s, scenario.end_s) * emulated.MICRO_BATCH
    return {**about, "ideal_samples_per_s": rate, "samples": scenario.n_micro() * emulated.MICRO_BATCH}


def show(found: Mapping[str, Mapping[str, Mapping[str, float]]], headline: Mapping[str, Any], beside: str = "") -> None:
    """Print a table for each scenario, and the ratios."""
    columns = {
        "mode": "{mode}", "samples/s": "{samples_per_s:,.0f}", "of the ideal": "{ideal_share:.3f}", "AUC": "{auc:.4f}",
        "dropped": "{dropped_share:.2%}", "staleness": "{staleness_mean:.2f}", "largest": "{staleness_max:.0f}",
    }  # fmt: skip
    for scenario, modes in found.items():
        table = [{"mode": mode, **row} for mode, row in modes.items()]
        measure.print_figures(f"{scenario}, {emulated.N_WORKERS} workers{beside}", columns, table)
    for name, value in headline.items():
        if name != "auto_by_minute":
            print(f"{name}: {json.dumps(value)}")
    auto_by_minute.show(headline.get("auto_by_minute", {}))
