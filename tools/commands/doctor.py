"""`gba-hvd doctor`: which checks run, in which order, and how their findings are shown.

What each check looks at, and its advice, is in `doctor/checks.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import TextIO

from gba_hvd.errors import BadInput

from ..doctor import checks
from ..doctor.checks import Finding
from ..launch.checks import check_discovery, check_interface, check_key_file, check_ssh, check_threads
from ..launch.command_line import parse_hosts
from ..terminal import print_line

CHECKS: tuple[Callable[[], Finding], ...] = (
    checks.check_python, checks.check_torch, checks.check_kernels, checks.check_machine, checks.check_horovod,
    checks.check_shard_memory, checks.check_orphaned_memory, checks.check_host_name, checks.check_allreduce,
    checks.check_mlflow, checks.check_file_systems, checks.check_gpu, check_threads, check_key_file,
)  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check that this machine can train",
        description="Check this machine: one line per check, and for each failure what to do about it. "
        "Exit status 1 when something fails.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("-H", "--hosts", type=_hosts, metavar="H1:4,H2:4", help="also check ssh to these hosts")
    parser.add_argument("--discovery", metavar="COMMAND", help="also ask this host discovery command")
    parser.add_argument("--network-interface", metavar="NAME", help="also look for this interface")
    parser.set_defaults(run=run)


def _hosts(text: str) -> dict[str, int]:
    try:
        return parse_hosts(text)
    except BadInput as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(args: argparse.Namespace) -> int:
    findings = []
    for finding in diagnose((*checks_of_a_launch(args), *CHECKS)):
        findings.append(finding)
        if not args.json:
            print_finding(finding, sys.stdout)
    failed = sum(finding.status == "FAIL" for finding in findings)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(summary(findings))
    return 1 if failed else 0


def checks_of_a_launch(args: argparse.Namespace) -> list[Callable[[], Finding]]:
    """Checks of the arguments that `gba-hvd run` would be given."""
    found: list[Callable[[], Finding]] = []
    if args.network_interface:
        found.append(partial(check_interface, args.network_interface))
    if args.discovery:
        found.append(lambda: check_discovery(args.discovery)[0])
    return found + [partial(check_ssh, host) for host in args.hosts or ()]


def diagnose(some: Iterable[Callable[[], Finding]]) -> Iterable[Finding]:
    """Run the checks one after the other. One that breaks is a finding too, and does not stop the others."""
    for check in some:
        try:
            yield check()
        except Exception as error:
            name = getattr(check, "func", check).__name__.removeprefix("check_").replace("_", " ")
            yield Finding(
                name, "FAIL", f"the check itself broke: {type(error).__name__}: {error}", "report this as a bug"
            )


def print_finding(finding: Finding, screen: TextIO) -> None:
    print_line(f"{finding.status:<8} {finding.name:<14} {finding.found}", file=screen)
    for line in finding.advice.splitlines():
        print_line(f"{'':<8} -> {line}", file=screen)
    screen.flush()


def summary(findings: list[Finding]) -> str:
    failed = [finding.name for finding in findings if finding.status == "FAIL"]
    warned = [finding.name for finding in findings if finding.status == "warning"]
    if failed:
        return f"not ready to train; start with: {failed[0]}"
    return "ready to train" + (f"; worth a look: {', '.join(warned)}" if warned else "")
