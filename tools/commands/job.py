"""`gba-hvd ps`, `gba-hvd status` and `gba-hvd switch`: a look at running jobs, and asking one for another mode.

Which job is meant, whom to ask and how the answer is shown. What is true, the companion server says; of a job that has
none, and in `ps`, its board does (`gba_hvd.shm.job_board`). All run on a host of the job, by the user who started it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gba_hvd.errors import BadInput
from gba_hvd.mode_names import SETTINGS, any_of, known_mode
from gba_hvd.ps.coordinator.recent_pace import PACE_S
from gba_hvd.shm import job_board
from gba_hvd.shm.job_board import ENDING
from recovery.printable import one_line, printable

from ..health_words import health_facts, moment
from ..running_jobs import (
    ask_status,
    ask_switch,
    bases_of,
    find_job,
    job_to_change,
    report_of,
    running_jobs,
    user_name,
    with_name,
)
from ..step_time_words import step_time_facts, times_of
from ..terminal import print_line, print_table

_LOOK_AGAIN_S = 0.2
_LONG_S = 5.0  # without a push of a worker


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ps = subparsers.add_parser(
        "ps",
        help="the jobs of this user on this host",
        description="List the running jobs of this user on this host: in the folder for shard memory and, unless --dir "
        "names one, in all others that are in use.",
    )
    ps.add_argument("--json", action="store_true", help="print a JSON list of jobs")
    ps.add_argument("--dir", type=Path, help="only jobs whose shards lie here")
    ps.set_defaults(run=run_ps)
    status = subparsers.add_parser(
        "status",
        help="what a running job is doing: mode, step, workers, staleness, switches",
        description="Show what a job on this host is doing.",
    )
    status.add_argument("of", nargs="?", metavar="JOB", help="its id or its name (default: the only job on this host)")
    status.add_argument("--json", action="store_true", help="print the report as one JSON object")
    status.set_defaults(run=run_status)
    switch = subparsers.add_parser(
        "switch",
        help="ask a running job for another mode",
        description="Ask a job for another mode. It changes at its next step boundary, keeps its hyper-parameters and "
        "loses no sample. It stays there until another mode is asked for: `auto` lets it decide by its measurements. "
        "Without --job only the place where shards lie is searched; where other jobs run elsewhere, one must be "
        "named.",
    )
    switch.add_argument("mode", metavar="MODE", help=any_of(SETTINGS))
    switch.add_argument("--reason", default="", help="kept in the log and in MLflow")
    switch.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="wait so long until it is done (default: 60; 0: only ask)"
    )
    switch.set_defaults(run=run_switch)
    for parser in (status, switch):
        parser.add_argument("--job", metavar="JOB", help="its id or its name (default: the only job on this host)")
        parser.add_argument(
            "--dir",
            type=Path,
            help="look only here (default: GBA_HVD_SHARD_DIR, else /dev/shm, where shards lie, then in all other "
            "folders in use)",
        )
        parser.add_argument(
            "--timeout", type=float, default=10.0, metavar="S", help="wait so long for an answer (default: 10)"
        )


def run_ps(args: argparse.Namespace) -> int:
    listed = running_jobs(bases_of(args))
    if args.json:
        print(json.dumps(listed, indent=2))
    elif not listed:
        print_line(f"no job of this user runs on this host{f' in {args.dir}' if args.dir else ''}")
    else:
        print_jobs(listed)
    return 0


def run_status(args: argparse.Namespace) -> int:
    report = report_of(find_job(bases_of(args), args.job if args.of is None else args.of), args.timeout)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0


def run_switch(args: argparse.Namespace) -> int:
    mode = known_mode(args.mode)
    folder = job_to_change(args)
    _refuse_without_callback(folder)
    before = ask_status(folder, args.timeout)
    ask_switch(folder, mode, args.reason or f"asked for by {user_name()} at {time.strftime('%H:%M:%S')}", args.timeout)
    stays = before["mode"] == mode
    print_line(f"job {before['job']}: asked for {mode}; it is in {before['mode']} {'already' if stays else 'now'}")
    awaited = [] if mode == "auto" or stays else inactive_workers(before)
    for line in awaited:
        print_line(line, flush=True)
    if mode == "auto" or args.wait <= 0:
        return 0
    after = _wait_for(folder, mode, args.wait, args.timeout, with_a_step=bool(awaited))
    if after is None:
        print_line(f"still not in {mode} after {args.wait:g} s; `gba-hvd status` says more", file=sys.stderr)
        now = ask_status(folder, args.timeout)
        for line in inactive_workers(now) if "by_worker" in now else inactive_workers(before, args.wait):
            print_line(line, file=sys.stderr)
        return 1
    at = f" at step {after['step']:,}" if "step" in after else ""
    held = ", and stays there until another mode or auto is asked for" if stays else ""
    print_line(f"job {before['job']}: in {mode}{at}{held}")
    return 0


def _refuse_without_callback(folder: Path) -> None:
    """Raises BadInput where no server would receive a request for another mode."""
    shown = job_board.read(folder)
    if shown is not None and not shown["switchable"]:
        raise BadInput(
            f"job {with_name(folder)} cannot be switched: it was started without a gba_hvd.GBACallback, so it is in "
            "allreduce mode and stays there; start it with gba_hvd.GBACallback() among its callbacks"
        )


def _wait_for(
    folder: Path, mode: str, wait_s: float, timeout_s: float, with_a_step: bool = False
) -> dict[str, Any] | None:
    """What the server reports once the job is in the mode; None: it is not within that time.

    with_a_step: and has made a step in it. The servers leave a mode with the first worker, which may wait for others
    """
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        report = ask_status(folder, timeout_s)
        is_in_it = report["mode"] == mode and report.get("setting", mode) == mode  # where the workers report it
        if is_in_it and (not with_a_step or (job_board.read(folder) or report).get("mode") == mode):
            return report
        time.sleep(_LOOK_AGAIN_S)
    return None


def inactive_workers(report: Mapping[str, Any], since_s: float = 0.0) -> list[str]:
    """A sentence for each worker that lives and does nothing: all workers leave an asynchronous mode together.

    since_s: how old the report is
    """
    hosts = {worker["pid"]: worker.get("host") for worker in report.get("by_worker") or ()}
    return [
        f"rank {rank}{f' on {hosts[pid]}' if hosts.get(pid) else ''} (process {pid}) has not been active for "
        f"{seconds + since_s:.0f} s, and the switch waits for it. It may come back; else end it there with "
        f"`kill -9 {pid}`: the launcher of an elastic job starts another worker, a job without one ends"
        for rank, pid, seconds in report.get("hanging") or ()
    ]


# --- how it is shown -------------------------------------------------------------------------------------------------


def mode_words(report: Mapping[str, Any]) -> str:
    """`allreduce`, and what was asked for in its place."""
    mode, asked = str(report.get("mode", "-")), report.get("asked")
    if mode == ENDING:
        return "ending: the training is over, what is left is saved and reported"
    if not asked or asked == mode:
        return mode
    why = "its server is not up yet" if report.get("waits_for_servers") else "not entered yet"
    return f"{mode} ({asked} asked for, {why})"


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a report says of the whole job, as (word, sentence)."""
    from gba_hvd.tracking.gauges import staleness_words, whole_numbers

    lines = [("mode", mode_words(report))]
    if "started_unix_s" in report:
        started = moment(report["started_unix_s"])
        lines.append(("started", f"{started}, as {report['command']}" if report.get("command") else started))
    if report.get("container"):
        lines.append(("processes", f"of {report['container']}: their numbers mean nothing here"))
    if report.get("wanted") not in (None, "", "auto", report.get("mode")):  # those two are no way to go
        why = f": {report['reason']}" if report.get("reason") else ""
        lines.append(("on the way to", f"{report['wanted']}{why}"))
    if "step" in report:
        epoch = f", epoch {report['epoch']}" if "epoch" in report else ""
        of = f" of {report['steps_of_epoch']:,}" if report.get("steps_of_epoch") else " of it"
        within = f" (step {report['steps_done']:,}{of})" if "steps_done" in report else ""
        lines.append(("step", f"{report['step']:,}{epoch}{within}"))
    if "workers" in report:
        lines.append(("workers", str(report["workers"])))
    lines += step_time_facts(report, time.time())
    if "samples_per_s" in report:
        lines.append(("speed", f"{report['samples_per_s']:,.0f} samples/s applied in the last {PACE_S:.0f} s"))
    if isinstance(report.get("loss"), float):
        lines.append(("loss", f"{report['loss']:.4f}"))
    if report.get("samples_applied") and "account" not in report:
        lines.append(("samples", f"{report['samples_applied']:,} applied"))
    account = report.get("account") or {}
    if account:
        lines.append(("samples", _account_words(account)))
    for table, found in (report.get("vocabulary") or {}).items():
        lines.append((f"ids of {table}", _vocabulary_words(found)))
    lines += health_facts(report, time.time()) + _servers(report)
    staleness = whole_numbers(report.get("staleness"))
    if staleness:
        lines.append(("staleness", staleness_words(staleness)))
    shown = {"under_way": "in flight", "reissued": "reissued", "refused": "refused"}
    counts = [f"{report[key]:,} {label}" for key, label in shown.items() if report.get(key)]
    if counts:
        lines.append(("micro-batches", ", ".join(counts)))
    lines += [("refused", text) for text in report.get("refused_gradients") or ()]
    if report.get("switchable") is False:
        lines.append(("switching", "none: the job has no gba_hvd.GBACallback"))
    if report.get("last_decision"):
        at = f" (at step {report['decided_at_step']:,})" if "decided_at_step" in report else ""
        lines.append(("last decision", f"{report['last_decision']}{at}"))
    elif report.get("decided_elsewhere") and report.get("setting") == "auto":
        lines.append(("last decision", "rank 0 decides: `gba-hvd status` on its host has the reason"))
    return lines + _requests(report)


def _servers(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line for each companion server of the host that is asked."""
    servers = report.get("servers_here") or ()
    words = ["server" if len(servers) == 1 else f"server {one['server']}" for one in servers]
    return [(word, _server_words(one)) for word, one in zip(words, servers, strict=True)]


def _server_words(server: Mapping[str, Any]) -> str:
    n, at = server["n_restarts"], moment(server["started_unix_s"])
    again = f"again at {at}: {n:,} before it died" if n else f"at {at}"
    return f"process {server['pid']} on this host, started {again}"


def _account_words(account: Mapping[str, int]) -> str:
    from gba_hvd.epoch import SampleAccount
    from gba_hvd.tracking.gauges import dropped_words

    known = SampleAccount(**{name: account.get(name, 0) for name in ("dropped", "not_finite", "overflowed")})
    why = dropped_words(known.dropped_for)
    parts = [f"{account.get(name, 0):,} {name}" for name in ("applied", "dropped", "lost")]
    parts[1] += f" ({why})" if why else ""
    return f"{' + '.join(parts)} = {account.get('total', 0):,}"


def _requests(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What this host's server, or the coordinator, was asked for, and when."""
    texts, moments = report.get("decisions") or (), report.get("decided_unix_s") or ()
    when = [f" (at {moment(unix_s)})" for unix_s in moments] if len(moments) == len(texts) else [""] * len(texts)
    return [("decided", f"{text}{at}") for text, at in zip(texts, when, strict=True)]


def _vocabulary_words(found: Mapping[str, Any]) -> str:
    words = f"{found['size']:,} of {found['capacity']:,} rows taken on this host, {found['evicted']:,} evicted"
    turned_away = f", {found['no_room']:,} times no room" if found["no_room"] else ""
    return f"{words}{turned_away}; {found['missed_share']:.1%} of lookups without a row"


def workers(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By rank: {"rank", "seconds", and in asynchronous modes "pid", "silent_s", "idle_s", "micro_batches"}.

    In allreduce mode as of `times_of`.
    """
    if report.get("by_worker"):
        return [{**worker, "seconds": worker["seconds_per_micro_batch"]} for worker in report["by_worker"]]
    if times := times_of(report):
        return times
    return [{"rank": rank, "seconds": seconds} for rank, seconds in report.get("rates") or ()]


def row_of(job: Mapping[str, Any], now_s: float) -> list[str]:
    """name, job, mode, started, step, last step, workers, folder."""
    step = f"{job['step']:,}" if "step" in job else "-"
    if "steps_done" in job:
        step += f" (epoch {job['epoch']}: {job['steps_done']:,} of {job['steps_of_epoch']:,})"
    ago = f"{max(0.0, now_s - job['step_unix_s']):,.0f} s ago" if job.get("epoch") is not None else "-"
    workers, hosts = job.get("workers"), job.get("hosts")
    on = "-" if workers is None else f"{workers}" + (f" on {hosts} hosts" if hosts and hosts > 1 else "")
    started = moment(job["started_unix_s"]) if "started_unix_s" in job else "-"
    return [job["name"] or "-", job["job"], mode_words(job).partition(":")[0], started, step, ago, on, job["dir"]]


def print_jobs(jobs: Sequence[Mapping[str, Any]]) -> None:
    headings, now_s = ("name", "job", "mode", "started", "step", "last step", "workers", "folder"), time.time()
    print_table(headings, [row_of(job, now_s) for job in jobs], left=range(len(headings)))


def print_report(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False) if is_terminal else Console(highlight=False, soft_wrap=True, width=240)
    name = f" ({report['name']})" if report.get("name") else ""
    console.print(one_line(f"job {report['job']}{name}"), style="bold", markup=False)
    lines = Table.grid(padding=(0, 2))
    for word, sentence in facts(report):
        lines.add_row(escape(one_line(word)), escape(printable(sentence)), style="bold" if word == "mode" else None)
    console.print(lines)
    rows = [_of_a_step(one) if "computing_s" in one else _of_leases(one) for one in workers(report)]
    if rows:
        print_table(list(rows[0]), [list(row.values()) for row in rows])


def _of_leases(worker: Mapping[str, Any]) -> dict[str, str]:
    seconds = worker["seconds"]
    return {
        "rank": str(worker["rank"]),
        "ms per micro-batch": f"{1000 * seconds:,.1f}" if seconds else "-",
        "micro-batches/s lately": _pace(worker),
        "done": f"{worker['micro_batches']:,}" if "micro_batches" in worker else "-",
        "last active": f"{worker['idle_s']:.1f} s ago" if "idle_s" in worker else "-",
        "last seen": f"{worker['silent_s']:.1f} s ago" if "silent_s" in worker else "-",
        "process": str(worker.get("pid", "-")),
    }


def _pace(worker: Mapping[str, Any]) -> str:
    """Of the last seconds, pauses included."""
    if "micro_batches_per_s" not in worker:
        return "-"
    ago = f", none for {worker['pushed_s']:,.0f} s" if worker["pushed_s"] > _LONG_S else ""
    return f"{worker['micro_batches_per_s']:,.1f}{ago}"


def _of_a_step(worker: Mapping[str, Any]) -> dict[str, str]:
    """Where workers step together."""
    return {
        "rank": str(worker["rank"]),
        "ms per micro-batch": f"{1000 * worker['seconds']:,.1f}" if worker["seconds"] else "-",
        "micro-batches of a step": f"{worker['micro_batches']:,.4g}",
        "ms computing": f"{1000 * worker['computing_s']:,.1f}",
        "ms waiting for batches": f"{1000 * worker['reading_s']:,.1f}",
        "process": str(worker.get("pid", "-")),
    }
