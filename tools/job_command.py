"""`gba-hvd status` and `gba-hvd switch`: a look at a running job, and asking it for another mode.

Which job is meant, whom to ask and how the answer is shown; what is true, the companion server says. Both commands run
on a host of the job, by the user who started it: the key lies in the job's folder there.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gba_hvd.ps.client import Client

_PREFIX = "gba-hvd-"
_LOOK_AGAIN_S = 0.2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = subparsers.add_parser(
        "status",
        help="what a running job is doing: mode, step, workers, staleness, switches",
        description="Show what a job on this host is doing.",
    )
    status.add_argument("--json", action="store_true", help="print the server's report as one JSON object")
    status.set_defaults(run=run_status)
    switch = subparsers.add_parser(
        "switch",
        help="ask a running job for another mode",
        description="Ask a job for another mode. It changes at its next step boundary, keeps its hyper-parameters and "
        "loses no sample. `auto` lets it decide by its measurements.",
    )
    switch.add_argument("mode", metavar="MODE", help="allreduce, gba, bsp, async, hop_bs, hop_bw or auto")
    switch.add_argument("--reason", default="", help="kept in the log and in MLflow")
    switch.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="wait so long until it is done (60; 0: only ask)"
    )
    switch.set_defaults(run=run_switch)
    for parser in (status, switch):
        parser.add_argument("--job", metavar="ID", help="default: the only job on this host")
        parser.add_argument("--dir", type=Path, help="where shards lie (default: GBA_HVD_SHARD_DIR, else /dev/shm)")
        parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="wait so long for an answer (10)")


def run_status(args: argparse.Namespace) -> int:
    report = ask_status(find_job(_shard_dir(args), args.job), args.timeout)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0


def run_switch(args: argparse.Namespace) -> int:
    from gba_hvd.switching import known_mode

    mode = known_mode(args.mode)
    folder = find_job(_shard_dir(args), args.job)
    before = ask_status(folder, args.timeout)
    if before["mode"] == mode and not before.get("wanted"):
        print(f"job {before['job']} is in {mode} already")
        return 0
    ask_switch(folder, mode, args.reason or f"asked for by {_user()} at {time.strftime('%H:%M:%S')}", args.timeout)
    print(f"job {before['job']}: asked for {mode}; it is in {before['mode']} now")
    if mode == "auto" or args.wait <= 0:
        return 0
    after = _wait_for(folder, mode, args.wait, args.timeout)
    if after is None:
        print(f"still not in {mode} after {args.wait:g} s; `gba-hvd status` tells more", file=sys.stderr)
        return 1
    print(f"job {before['job']}: in {mode}" + (f" at step {after['step']:,}" if "step" in after else ""))
    return 0


# --- which job -------------------------------------------------------------------------------------------------------


def find_job(base: Path, job_id: str | None) -> Path:
    """The folder of the job `job_id` on this host, or of the only one.

    Raises BadInput when there is none, or when there are several to choose from.
    """
    from gba_hvd.errors import BadInput
    from gba_hvd.shard.memory import job_folder

    running = {path.name.removeprefix(_PREFIX): path for path in _jobs(base)}
    if job_id is None:
        if len(running) == 1:
            return next(iter(running.values()))
        if running:
            raise BadInput(f"{len(running)} jobs run on this host, name one with --job: {', '.join(sorted(running))}")
        raise BadInput(
            f"no job runs here: {base} holds no live folder {_PREFIX}*; run this on a host of the job, as its user, "
            "and name the folder with --dir if the job has another GBA_HVD_SHARD_DIR"
        )
    if job_id in running:
        return running[job_id]
    near = get_close_matches(job_id, running, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"running here: {', '.join(sorted(running)) or 'none'}"
    dead = job_folder(base, job_id).is_dir()
    what = "has no living worker on this host" if dead else f"does not run here ({base})"
    raise BadInput(f"job {job_id!r} {what}; {hint}")


def _jobs(base: Path) -> Iterator[Path]:
    """Folders of jobs that have a living worker. Another user's cannot be looked into: they are left out."""
    for path in sorted(base.glob(f"{_PREFIX}*")):
        try:
            fd = os.open(path / "alive", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # every living worker holds it shared
        except BlockingIOError:
            yield path
        finally:
            os.close(fd)


def _shard_dir(args: argparse.Namespace) -> Path:
    from gba_hvd.config import Config

    return Config.from_env(shard_dir=args.dir).shard_dir


# --- whom to ask -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contact:
    """The server that knows most: the coordinator in an asynchronous mode, else this host's first server.

    here: number of this host's memory, as the servers count
    """

    endpoint: Any
    here: int


def contact(folder: Path, timeout_s: float) -> Contact:
    """Whom to ask about the job of this folder. Raises BadInput when the job has no servers at all."""
    import msgspec

    from gba_hvd.errors import BadInput
    from gba_hvd.ps import process
    from gba_hvd.ps.protocol import Enter

    if not (folder / "ps.json").exists():
        raise BadInput(
            f"job {folder.name.removeprefix(_PREFIX)!r} has no companion server: it was started without a "
            "gba_hvd.GBACallback (or has only just begun), so it is in allreduce mode and stays there"
        )
    try:
        session = msgspec.msgpack.decode((folder / "ps-0.session").read_bytes())
    except FileNotFoundError:
        session = None
    if session is None or session["idle"]:
        here = process.endpoint(folder, 0, 0, timeout_s)
        return Contact(here, 0)
    enter = msgspec.convert(session["enter"], Enter)
    return Contact(enter.servers[0], enter.servers[enter.me].host)


@contextmanager
def connection(folder: Path, timeout_s: float) -> Iterator[Client]:
    """A client whose server 0 is the one to ask."""
    from gba_hvd.ps.client import Client

    asked = contact(folder, timeout_s)
    job = json.loads((folder / "ps.json").read_text())["job"]
    client = Client(job, (folder / "key").read_bytes(), [asked.endpoint], asked.here, folder, timeout_s)
    client.start()
    try:
        yield client
    finally:
        client.close()


def ask_status(folder: Path, timeout_s: float) -> dict[str, Any]:
    """What the server reports: plain values; `mode` is always there."""
    from gba_hvd.ps.protocol import Status, StatusReport

    with _a_job_that_ends(folder), connection(folder, timeout_s) as client:
        body = client.call(0, Status()).body
    assert isinstance(body, StatusReport)
    return body.report


def ask_switch(folder: Path, mode: str, reason: str, timeout_s: float) -> None:
    from gba_hvd.ps.protocol import SwitchTo

    with _a_job_that_ends(folder), connection(folder, timeout_s) as client:
        client.call(0, SwitchTo(mode, reason))


@contextmanager
def _a_job_that_ends(folder: Path) -> Iterator[None]:
    """The folder may go at any moment; whatever then fails means the same."""
    from gba_hvd.errors import BadInput, GbaError

    try:
        yield
    except (GbaError, OSError) as error:
        if folder.exists():
            raise
        raise BadInput(f"job {folder.name.removeprefix(_PREFIX)!r} has just ended") from error


def _wait_for(folder: Path, mode: str, wait_s: float, timeout_s: float) -> dict[str, Any] | None:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        report = ask_status(folder, timeout_s)
        if report["mode"] == mode:
            return report
        time.sleep(_LOOK_AGAIN_S)
    return None


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        return "the operator"


# --- how it is shown -------------------------------------------------------------------------------------------------


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a report says of the whole job, as (word, sentence)."""
    from gba_hvd.tracking.gauges import staleness_words, whole_numbers

    said = [("mode", str(report["mode"]))]
    if report.get("wanted"):
        why = f": {report['reason']}" if report.get("reason") else ""
        said.append(("on the way to", f"{report['wanted']}{why}"))
    if "step" in report:
        epoch = f", epoch {report['epoch']}" if "epoch" in report else ""
        within = f" (step {report['steps_done']:,} of it)" if "steps_done" in report else ""
        said.append(("step", f"{report['step']:,}{epoch}{within}"))
    if "workers" in report:
        said.append(("workers", str(report["workers"])))
    if isinstance(report.get("loss"), float):
        said.append(("loss", f"{report['loss']:.4f}"))
    account = report.get("account") or {}
    if account:
        parts = [f"{account.get(k, 0):,} {k}" for k in ("applied", "dropped", "lost")]
        said.append(("samples", f"{' + '.join(parts)} = {account.get('total', 0):,}"))
    staleness = whole_numbers(report.get("staleness"))
    if staleness:
        said.append(("staleness", staleness_words(staleness)))
    counts = [f"{report[k]:,} {k}" for k in ("under_way", "reissued", "refused") if report.get(k)]
    if counts:
        said.append(("micro-batches", ", ".join(counts).replace("_", " ")))
    said += [("refused", text) for text in report.get("refused_gradients") or ()]
    if report.get("last_decision"):
        said.append(("last decision", str(report["last_decision"])))
    said += [("decided", text) for text in report.get("decisions") or ()]
    return said


def workers(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By rank: {"rank", "seconds", and in asynchronous modes "pid", "silent_s", "micro_batches"}."""
    if report.get("by_worker"):
        return [{**worker, "seconds": worker["seconds_per_micro_batch"]} for worker in report["by_worker"]]
    return [{"rank": rank, "seconds": seconds} for rank, seconds in report.get("rates") or ()]


def print_report(report: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    console.print(f"[bold]job {report['job']}[/bold]")
    said = Table.grid(padding=(0, 2))
    for word, sentence in facts(report):
        said.add_row(word, sentence, style="bold" if word == "mode" else None)
    console.print(said)
    listed = workers(report)
    if not listed:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("rank", "ms per micro-batch", "micro-batches/s", "done", "last heard", "process"):
        table.add_column(heading, justify="right")
    for worker in listed:
        seconds = worker["seconds"]
        table.add_row(
            str(worker["rank"]),
            f"{1000 * seconds:,.1f}" if seconds else "-",
            f"{1 / seconds:,.1f}" if seconds else "-",
            f"{worker['micro_batches']:,}" if "micro_batches" in worker else "-",
            f"{worker['silent_s']:.1f} s ago" if "silent_s" in worker else "-",
            str(worker.get("pid", "-")),
        )  # fmt: skip
    console.print(table)
