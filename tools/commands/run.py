"""`gba-hvd run`: start a training script on one worker or many, static or elastic.

What is started is decided in `launch/command_line.py`. Here: what this machine is, the checks that cost nothing, and
the start. This process becomes the job's launcher (exec), so signals and the exit status are the job's own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from gba_hvd import kernel_cache
from gba_hvd.errors import BadInput

from ..launch import start_watch
from ..launch.checks import check_discovery, check_interface, check_key_file, is_local, loopback_interface
from ..launch.command_line import Asked, Here, Launch, parse_hosts, parse_workers, plan

_FLAGS = ("--dry-run", "-h", "--help")  # options of `gba-hvd run` without a value; all others have one


def apart(argv: Sequence[str]) -> list[str]:
    """A command line of `gba-hvd run` with `--` before the script: what follows is the script's alone.

    argparse would look for abbreviations of our options among its arguments.
    """
    if list(argv[:1]) != ["run"]:
        return list(argv)
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        is_whole = "=" in argv[at] or any(flag.startswith(argv[at]) for flag in _FLAGS)
        is_whole = is_whole or any(argv[at] != name and argv[at].startswith(name) for name in ("-np", "-H"))
        at += 1 if is_whole else 2
    return [*argv] if at >= len(argv) or argv[at] == "--" else [*argv[:at], "--", *argv[at:]]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "run",
        help="start a training script on several workers, elastic or not",
        usage="%(prog)s -np N|MIN:MAX [options] train.py [its arguments]",
        description="Start a job and print the horovodrun call that does it. -np 4 is static: it ends with its first "
        "dead worker. -np 2:8 is elastic: it continues with 2 to 8 workers. -np 1 is `python train.py`. "
        "docs/RUNNING.md says what happens when a worker or a host dies.",
    )
    parser.add_argument("-np", "--workers", required=True, metavar="N|MIN:MAX", help="number of workers")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="H1:4,H2:4", help="hosts and their slots (default: this machine)")
    where.add_argument(
        "--discovery", metavar="COMMAND", help="elastic: prints `host:slots` lines, and is asked every second"
    )
    parser.add_argument(
        "--network-interface", metavar="NAME", help="that all hosts share (default: found; one host: lo)"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="a folder with the output of every worker")
    parser.add_argument(
        "--job",
        metavar="NAME",
        help="the job's name, here and, without TorchState(name=), in MLflow (default: one is drawn)",
    )
    parser.add_argument(
        "--key-file", metavar="FILE", help="file with a secret that the job's hosts share; made here if it is missing"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the call; start nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="train.py ...", help="script and its arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    asked = _asked(args)
    slots_now = _refuse_what_cannot_work(asked)
    hosts = list(asked.hosts) or ["localhost"]
    launch = plan(asked, here(hosts), slots_now)
    for note in launch.notes:
        _print(f"gba-hvd: {note}", sys.stderr)
    _print(launch.words, sys.stdout)
    if args.dry_run:
        return 0
    if shutil.which(launch.argv[0]) is None:
        raise BadInput(f"cannot start {launch.argv[0]}: there is no such program; `make setup` installs horovodrun")
    _start(launch, asked)
    raise AssertionError("exec does not return")


def _print(text: str, stream: TextIO) -> None:
    """The job starts also without a reader of this, or with a full disk: the launcher reports it for its own output."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def here(hosts: Iterable[str]) -> Here:
    local = frozenset(host for host in hosts if is_local(host))
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    return Here(len(os.sched_getaffinity(0)), loopback_interface(), local, horovodrun, os.environ)


def _asked(args: argparse.Namespace) -> Asked:
    least, most, elastic = parse_workers(args.workers)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise BadInput("which script? gba-hvd run -np 2 train.py")
    if command[0].endswith(".py"):
        if not Path(command[0]).is_file():
            raise BadInput(f"there is no file {command[0]} here ({Path.cwd()})")
        command = [sys.executable, *command]
    hosts = parse_hosts(args.hosts) if args.hosts else {}
    return Asked(
        least, most, elastic, command, hosts, args.discovery, args.network_interface, args.log_dir, args.job,
        None if args.key_file is None else str(Path(args.key_file).absolute()),
    )  # fmt: skip


def _refuse_what_cannot_work(asked: Asked) -> int | None:
    """Checks that take no time. Returns the slots that the discovery command answers. Raises BadInput."""
    slots = None
    findings = [check_interface(asked.interface)] if asked.interface else []
    if asked.discovery and asked.elastic:
        finding, slots = check_discovery(asked.discovery)
        findings.append(finding)
    if asked.key_file and Path(asked.key_file).exists():
        findings.append(check_key_file(asked.key_file))
    for finding in findings:
        if finding.status == "FAIL":
            raise BadInput(f"{finding.name}: {finding.found}; {finding.advice}")
    return slots


def _start(launch: Launch, asked: Asked) -> None:
    if asked.key_file and not Path(asked.key_file).exists():
        fd = os.open(asked.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(os.urandom(32).hex() + "\n")
    is_alone = not asked.discovery and all(is_local(host) for host in asked.hosts)
    home = _home() if is_alone else {}  # (other hosts would get this host's)
    is_here = not asked.discovery and (not asked.hosts or any(is_local(host) for host in asked.hosts))
    watched = start_watch.watch() if is_here else {}
    os.execvpe(launch.argv[0], list(launch.argv), {**os.environ, **home, **launch.variables, **watched})


def _home() -> dict[str, str]:
    """HOME of a user without one that can be written, as of a container: Horovod and MLflow fail without."""
    home = Path(os.path.expanduser("~"))
    if home.is_absolute() and kernel_cache.is_writable(home):
        return {}
    why = f"{home} cannot be written" if home.is_absolute() else "this user has none"
    try:
        made = kernel_cache.make_private("home")
    except OSError as error:
        raise BadInput(f"no home: {why}, nor can one be made ({error}); set HOME to a folder that can be") from error
    _print(f"gba-hvd: HOME={made}: {why}", sys.stderr)
    return {"HOME": str(made)}
