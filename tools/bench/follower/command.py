"""`gba-hvd bench follower`: how soon a served model has what a running job learned, and what that costs the job.

Elastic workers train the DLRM of `bench allreduce`, with ids by Zipf's law and element-wise Adagrad, and save what
changed every --every-s seconds to a folder. Another process of this machine serves the model: a `Follower` applies what
is saved, while --requests-per-s requests of 64 samples are answered.

lag     of a changed row: from when the step that changed it was applied, on the first worker that noted it, until the
        follower had applied an update of that step or a later one. All steps change rows by as many lookups, so shares
        of steps are shares of changes.
cost    samples/s of the job alone, while it saves (published), and while a follower reads that (followed): alternating
        launches, medians; not decided where runs of the job alone differ by more than what the goal is away.
        Beside it the processor time that this takes, which differs less between equal launches: the companion server's
        share of the cores, and what the workers take more for a sample.
kills   --kills N: the follower, the companion server or a worker, drawn at random, gets SIGKILL at a random moment. The
        next kill waits until the victim has a successor, and the follower has a later step than when it died. Then
        everything is compared, bit for bit: the state after each update with what its checkpoint has, the answer of
        each request with those of all checkpoints, and the last checkpoint with the state that the job ended with.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gba_hvd
from recovery.errors import NotFound
from recovery.storage.open import open_store
from recovery.storage.rename import replace_file
from recovery.storage.store import age_of, manifest_names

from ..harness import measure
from ..harness.elastic_job import ElasticJob, discovery, elastic_variant, memory_folder
from ..harness.measure import NAMES, Row, Subparsers, Variant
from . import analysis
from .served_model import ServedModel

VARIANTS = ("alone", "published", "followed")
VICTIMS = ("follower", "server", "worker")
LAG_GOAL_S, COST_GOAL = 15.0, 0.01
_EVERYTHING = 1_000_000  # checkpoints that are kept: what was served is compared with them


def add_parser(subparsers: Subparsers) -> None:
    does = "how soon a served model has what a running job learned, what that costs, and what kills change"
    parser = measure.add_benchmark(subparsers, "follower", does, __doc__, run)
    measure.add_chosen(parser, "--variants", VARIANTS, "NAME", help=", ".join(VARIANTS))
    parser.add_argument("--rows", type=int, default=1_000_000, help="of all 26 tables, of 16 numbers")
    parser.add_argument("--workers", type=int, default=2, choices=range(1, len(NAMES) + 1), help="of the job")
    parser.add_argument("--every-s", type=float, default=5.0, metavar="SECONDS", help="between two checkpoints")
    parser.add_argument(
        "--look-s", type=float, default=1.0, metavar="SECONDS", help="between two looks of the follower"
    )
    parser.add_argument("--requests-per-s", type=float, default=20.0, help="that the follower answers")
    parser.add_argument("--warm-s", type=float, default=10.0, metavar="SECONDS", help="of training before the measured")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training that are measured")
    parser.add_argument("--runs", type=int, default=3, help="launches of each variant; 0: kills only")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="in one more launch; 0: none")
    measure.add_chosen(parser, "--victims", VICTIMS, "NAME", help=", ".join(VICTIMS))
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--timeout", type=float, default=180, metavar="SECONDS", help="for anything that is waited for")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    check(args)
    about = measure.machine()
    rows: list[Row] = []
    killed: dict[str, Any] = {}
    try:
        with memory_folder() as memory, memory_folder(None) as disk:
            launches = Launches(memory, disk, args)
            for number in range(args.runs):
                for name in args.variants:
                    rows.append(launches.measured(name, number))
            if args.kills:
                killed = launches.kills()
    finally:  # what was measured before a failure is kept
        settings = {k: v for k, v in vars(args).items() if k not in ("out", "run", "benchmark", "command")}
        found = headline(rows)
        whole = {"machine": about, "settings": settings, **found, "kills": killed, "rows": rows}
        if rows or killed:
            measure.write_json(args.out, whole)
            show(found, killed)
    return 1 if killed.get("flaws") else 0


def check(args: argparse.Namespace) -> None:
    """Raise RunFailed for what would otherwise fail after minutes."""
    measure.require_positive(args, "every_s", "look_s", "requests_per_s", "seconds", "timeout")
    measure.require_at_least(args, runs=0, kills=0, warm_s=0, rows=26)  # one of each table
    if not args.runs and not args.kills:
        raise measure.RunFailed("--runs 0 without --kills leaves nothing to do")
    if args.kills and args.workers == 1 and "worker" in args.victims:
        raise measure.RunFailed("a job of one worker does not survive its death: use --victims follower server")


class Launches:
    """Jobs of this benchmark, each with a folder of its own below `memory` and `disk`."""

    def __init__(self, memory: Path, disk: Path, args: argparse.Namespace) -> None:
        self._memory, self._disk, self._args = memory, disk, args
        script, n = discovery(disk, args.workers), args.workers
        flags = ("--rows", str(args.rows), "--workers", str(n))
        module = "bench.follower.worker"
        self._variant = elastic_variant("follower", script, module, *flags, workers=n, least=max(1, n - 1))

    def measured(self, variant: str, number: int) -> Row:
        """One launch of a variant. Raises RunFailed."""
        from .workload import MICRO_BATCH

        args, name = self._args, f"{variant}-{number}"
        row: Row = {"variant": variant, "run": number}
        with ExitStack() as stack:
            job, notes, url = self._job(stack, name, saves=variant != "alone", keep_last=3)
            if variant == "followed":
                served = self._served(stack, job, name, url)
                served.start()
                job.wait("the first update", args.timeout, lambda: served.check() and served.updates())
            first_s = job.wait("a step", args.timeout, lambda: min(analysis.steps_in(notes).values(), default=None))
            began_s = max(first_s + args.warm_s, time.monotonic())
            until_s = began_s + args.seconds
            wait_until(job, began_s)
            measured = CpuTime(workers_of(job, notes)), CpuTime(servers_of(job))
            wait_until(job, until_s)
            of_workers, of_server = (one.since() for one in measured)
            steps = analysis.steps_in(notes)
            if variant == "followed":
                last = max(step for step, at in steps.items() if at <= until_s)
                job.wait("its last step", args.timeout, lambda: served.check() and served.updates()[-1]["step"] >= last)
                row |= lag_columns(steps, served.updates(), began_s, until_s)
        row["samples_per_s"] = analysis.samples_per_s(steps, began_s, until_s, args.workers * MICRO_BATCH)
        row["worker_cpu_us"] = 1e6 * of_workers / (row["samples_per_s"] * args.seconds)
        row["server_cpu_share"] = of_server / (args.seconds * len(os.sched_getaffinity(0)))
        lag = f", lag p95 {row['p95_s']:.1f} s" if "p95_s" in row else ""
        print(f"run {number + 1}  {variant:10s} {row['samples_per_s']:,.0f} samples/s{lag}", flush=True)
        return row

    def kills(self) -> dict[str, Any]:
        """One launch with kills, and what was wrong with what was served. Raises RunFailed."""
        from .published import published

        args, rng = self._args, random.Random(self._args.seed)
        done: list[dict[str, Any]] = []
        with ExitStack() as stack:
            job, notes, url = self._job(stack, "kills", saves=True, keep_last=_EVERYTHING)
            served = self._served(stack, job, "kills", url, "--digests")
            served.start()
            job.wait("the first update", args.timeout, lambda: served.check() and served.updates())
            job.wait("all workers", args.timeout, lambda: len(workers_of(job, notes)) == args.workers)
            for number in range(args.kills):
                wait_until(job, time.monotonic() + rng.uniform(0, 2 * args.every_s))
                done.append(self._kill(rng, job, notes, served))
                one = done[-1]
                print(f"kill {number + 1}  {one['victim']:10s} {one['fresh_s']:5.1f} s until a later step", flush=True)
            end_training(notes)
            job.wait_end(args.timeout)
            served.end(manifest_names(open_store(url))[-1], args.timeout)
            updates, answers = served.updates(), served.answers()
            trained = (notes / "digest").read_text()
        flaws = analysis.flaws_of(list(published(url, args.rows)), updates, answers, trained)
        full_loads = analysis.full_loads(updates, lambda name: (age_of(name) or (-1,))[0])
        return {
            "kills": done, "updates": len(updates), "full_loads": full_loads, "requests": sum(answers.values()),
            "answers": len(answers), "flaws": flaws,
        }  # fmt: skip

    def _kill(self, rng: random.Random, job: ElasticJob, notes: Path, served: ServedModel) -> dict[str, Any]:
        """Kill one process, and wait until its successor works and the follower has a later step."""
        args, victim = self._args, rng.choice(self._args.victims)
        step = max(analysis.steps_in(notes))
        before = workers_of(job, notes) | servers_of(job)
        killed_s = time.monotonic()
        if victim == "follower":
            served.kill()
            served.start()
        else:
            alive = servers_of(job) if victim == "server" else workers_of(job, notes)
            os.kill(rng.choice(sorted(alive)), signal.SIGKILL)
            find = partial(servers_of, job) if victim == "server" else partial(workers_of, job, notes)
            job.wait(f"another {victim}", args.timeout, lambda: find() - before)

        def is_fresh() -> bool:
            newest = served.check() and served.updates()[-1]
            return newest["at"] > killed_s and newest["step"] > step  # type: ignore[index,no-any-return]

        job.wait("a later step", args.timeout, is_fresh)
        return {"victim": victim, "step": step, "fresh_s": served.updates()[-1]["at"] - killed_s}

    def _job(self, stack: ExitStack, name: str, *, saves: bool, keep_last: int) -> tuple[ElasticJob, Path, Path]:
        """(the running job, its notes, where it saves)"""
        memory, notes, url = self._memory / name, self._disk / name / "notes", self._disk / name / "checkpoints"
        memory.mkdir()
        notes.mkdir(parents=True)
        words: list[object] = ["--notes", notes]
        if saves:
            words += ["--url", url, "--every-s", self._args.every_s, "--keep-last", keep_last]
        variant = Variant(name, self._variant.command, self._variant.env)
        return stack.enter_context(ElasticJob(variant, memory, words)), notes, url

    def _served(self, stack: ExitStack, job: ElasticJob, name: str, url: Path, *flags: str) -> ServedModel:
        """The process that serves, not started; its model is exported from one of the first checkpoints."""
        args, folder = self._args, self._disk / name
        job.wait("a checkpoint", args.timeout, lambda: export(url, folder / "model", args.rows))
        words = ["--url", url, "--model", folder / "model", "--rows", args.rows, "--look-s", args.look_s]
        words += ["--requests-per-s", args.requests_per_s, *flags]
        return stack.enter_context(ServedModel(folder / "served", words))


class CpuTime:
    """Processor seconds of some processes. Raises RunFailed when one of them has ended."""

    def __init__(self, pids: set[int]) -> None:
        import psutil

        try:
            self._processes = [psutil.Process(pid) for pid in pids]
        except psutil.NoSuchProcess as error:
            raise measure.RunFailed(f"a process of the job has ended: {error}") from error
        self._before = self._taken()

    def since(self) -> float:
        """Of all of them together, from when this was made."""
        return self._taken() - self._before

    def _taken(self) -> float:
        import psutil

        try:
            return sum(sum(process.cpu_times()[:2]) for process in self._processes)
        except psutil.NoSuchProcess as error:
            raise measure.RunFailed(f"a process of the job has ended: {error}") from error


def wait_until(job: ElasticJob, at_s: float) -> None:
    """Raises RunFailed when the job ends before."""
    job.wait("the time", math.inf, lambda: time.monotonic() > at_s)


def export(url: Path, to: Path, n_rows: int) -> bool:
    """The model of the newest checkpoint; False where there is none yet, or it was deleted meanwhile."""
    from . import workload

    if not manifest_names(open_store(url)):
        return False
    try:
        gba_hvd.export_model(url, to, build=workload.BUILD, arguments=workload.arguments(n_rows))
    except NotFound:
        return False
    return True


def workers_of(job: ElasticJob, notes: Path) -> set[int]:
    """Live workers that have trained a step."""
    return {int(path.name) for path in notes.iterdir() if path.name.isdigit() and path.stat().st_size} & job.pids()


def servers_of(job: ElasticJob) -> set[int]:
    """The live companion server."""
    from gba_hvd.ps import launch

    found = {launch.pid_of(settings.parent, 0) for settings in job.folder.glob("*/ps.json")}
    return {pid for pid in found if pid is not None} & job.pids()


def end_training(notes: Path) -> None:
    """Two epochs from now: no worker has begun the last one, so all learn of it in time."""
    from .workload import EPOCH_STEPS

    replace_file(notes / "last-epoch", str(max(analysis.steps_in(notes)) // EPOCH_STEPS + 2))


# --- what was found --------------------------------------------------------------------------------------------------


def lag_columns(
    steps: Mapping[int, float], updates: Sequence[Mapping[str, Any]], began_s: float, until_s: float
) -> dict[str, Any]:
    found = [update for update in updates if update["at"] >= began_s]
    return {
        **analysis.spread(analysis.lags(steps, updates, began_s, until_s)),
        "updates": len(found),
        "update_bytes": median(update["n_bytes"] for update in found),
        "update_s": median(update["seconds"] for update in found),
        "blocked_s": max(update["blocked_s"] for update in found),
    }


def headline(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians over the runs: samples/s by variant, what of it is lost; lag, its maximum over all; and the goals."""
    speeds = {name: value for (name,), value in measure.medians(rows, ("variant",), "samples_per_s").items()}
    cost = {
        name: 1 - speed / speeds["alone"] for name, speed in speeds.items() if "alone" in speeds and name != "alone"
    }
    followed = [row for row in rows if "p95_s" in row]
    found: dict[str, Any] = {"samples_per_s": speeds, "cost": cost, "lag": {}, "goals": {}}
    if followed:
        found["lag"] = {
            name: median(row[name] for row in followed) for name in ("p50_s", "p95_s", "update_bytes", "update_s")
        }
        found["lag"] |= {name: max(row[name] for row in followed) for name in ("max_s", "blocked_s")}
        found["goals"]["lag, p95, s"] = goal(found["lag"]["p95_s"], LAG_GOAL_S)
    for name in cost:
        found["goals"][f"cost, {name}"] = goal(cost[name], COST_GOAL, spread_of(rows, "samples_per_s"))
    of_server, of_samples = (
        {name: value for (name,), value in measure.medians(rows, ("variant",), column).items()}
        for column in ("server_cpu_share", "worker_cpu_us")
    )
    if "published" in cost:
        more = of_samples["published"] / of_samples["alone"] - 1
        found["processor_time"] = {"server": of_server["published"], "workers": more}
        noise = spread_of(rows, "worker_cpu_us")
        found["goals"]["processor time of saving"] = goal(of_server["published"] + more, COST_GOAL, noise)
    return found


def spread_of(rows: Sequence[Row], column: str) -> float | None:
    """By what share equal launches differ: those of the job alone; None: there is only one."""
    values: list[float] = [row[column] for row in rows if row["variant"] == "alone"]
    return None if len(values) < 2 else (max(values) - min(values)) / median(values)


def goal(value: float, most: float, noise: float | None = 0.0) -> dict[str, Any]:
    """noise: by how much equal runs differ, None: not known; is_met is None where that may decide."""
    is_met = None if noise is None or noise > abs(value - most) else value <= most
    return {"value": value, "goal": most, "noise": noise, "is_met": is_met}


def show(found: Mapping[str, Any], killed: Mapping[str, Any]) -> None:
    if speeds := found["samples_per_s"]:
        lost = {name: f"{share:.1%}" for name, share in found["cost"].items()}
        lines = [[name, f"{speed:,.0f}", lost.get(name, "-")] for name, speed in speeds.items()]
        measure.print_table("training, medians", ["the job", "samples/s", "lost"], lines)
    if lag := found["lag"]:
        print(
            f"from a row's change until it is served: p50 {lag['p50_s']:.1f} s, p95 {lag['p95_s']:.1f} s, longest "
            f"{lag['max_s']:.1f} s; an update of {lag['update_bytes'] / 1e6:.1f} MB takes {lag['update_s']:.2f} s, "
            f"requests wait for it at most {1000 * lag['blocked_s']:.0f} ms"
        )
    if took := found.get("processor_time"):
        print(
            f"saving: the server takes {took['server']:.2%} of the cores, a sample {took['workers']:+.1%} of a worker's"
        )
    for name, one in found["goals"].items():
        differ = "with one run" if one["noise"] is None else f"equal runs differ by {one['noise']:.0%}"
        verdict = {True: "met", False: "missed", None: f"not decided, {differ}"}
        print(f"{name}: {one['value']:.3f}, goal {one['goal']:g}: {verdict[one['is_met']]}")
    if killed:
        victims, fresh = [one["victim"] for one in killed["kills"]], [one["fresh_s"] for one in killed["kills"]]
        print(
            f"{len(victims)} kills ({', '.join(f'{victims.count(name)} {name}' for name in VICTIMS)}): a later step is "
            f"served after {median(fresh):.1f} s, at the longest {max(fresh):.1f} s; {killed['updates']} updates and "
            f"{killed['requests']:,} requests compared, {len(killed['flaws']) or 'no'} flaws"
        )
        for what, which in killed["flaws"].items():
            print(f"  {what}: {which}")
