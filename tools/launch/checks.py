"""What a job of several workers needs of this machine and of its hosts: checks for `gba-hvd run` and `gba-hvd doctor`.

As in `doctor/checks.py`, each gives a finding with its advice, and takes the edge it touches as an argument with a
default.
"""

from __future__ import annotations

import os
import shlex
import socket
import stat
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from gba_hvd.errors import BadInput

from ..doctor.checks import Finding, network_interfaces
from .command_line import parse_hosts

DISCOVERY_TIMEOUT_S = 10.0
SSH_TIMEOUT_S = 10
MIN_KEY_BYTES = 32
_NO_KEY_FILE = (
    "no GBA_HVD_KEY_FILE: the workers agree on the job's key by an exchange that shows nothing to an eavesdropper; a "
    "file that all hosts share would keep out who can alter their traffic, too"
)

Runner = Callable[[list[str], float], "subprocess.CompletedProcess[str]"]


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
    )


def loopback_interface(interfaces: Callable[[], Mapping[str, str]] = network_interfaces) -> str:
    return next((name for name, address in interfaces().items() if address == "127.0.0.1"), "lo")


def is_local(host: str) -> bool:
    """Whether the host's name is one of this machine's addresses. False for a name that does not resolve."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    return address.startswith("127.") or address in network_interfaces().values()


def check_interface(name: str, interfaces: Callable[[], Mapping[str, str]] = network_interfaces) -> Finding:
    known = interfaces()
    if name in known:
        return Finding("interface", "ok", f"{name} has {known[name]}")
    advice = f"name one of {', '.join(known)} with --network-interface"
    return Finding("interface", "FAIL", f"{name} is not up here, or has no IPv4 address", advice)


def check_discovery(
    command: str, run: Runner = _run, timeout_s: float = DISCOVERY_TIMEOUT_S
) -> tuple[Finding, int | None]:
    """What a host discovery command answers, and the slots in it."""

    def bad(found: str, advice: str) -> tuple[Finding, None]:
        return Finding("discovery", "FAIL", found, advice), None

    first = Path(shlex.split(command)[0]) if command.strip() else Path()
    if first.is_file() and not os.access(first, os.X_OK):
        return bad(f"{first} is not executable", f"chmod +x {shlex.quote(str(first))}")
    try:
        done = run(["/bin/sh", "-c", command], timeout_s)
    except subprocess.TimeoutExpired:
        return bad(f"{command!r} does not answer within {timeout_s:g} s", "it is asked every second: make it quick")
    if done.returncode != 0:
        output = done.stderr.strip().splitlines()
        return bad(
            f"{command!r} ended with {done.returncode}: {output[-1] if output else 'no message'}", "run it by hand"
        )
    try:
        hosts = parse_hosts(done.stdout, f"{command!r}")
    except BadInput as error:
        return bad(str(error), "it must print one `host:slots` a line")
    slots = sum(hosts.values())
    return Finding("discovery", "ok", f"{slots} slots on {', '.join(f'{h}:{n}' for h, n in hosts.items())}"), slots


def check_ssh(host: str, run: Runner = _run) -> Finding:
    """Whether this machine may start processes there without a password, and notices when the host vanishes.

    Its own names need no ssh.
    """
    if is_local(host):
        return Finding("ssh", "ok", f"{host} is this machine")
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_TIMEOUT_S}", "-o", "StrictHostKeyChecking=no"]
    try:
        done = run(["ssh", *options, host, "true"], SSH_TIMEOUT_S + 5.0)
    except FileNotFoundError:
        return Finding("ssh", "FAIL", "no program ssh here", "apt-get install -y openssh-client")
    except subprocess.TimeoutExpired:
        return Finding("ssh", "FAIL", f"{host} does not answer within {SSH_TIMEOUT_S + 5} s", f"try: ssh {host} true")
    if done.returncode == 0:
        settings = run(["ssh", "-G", host], SSH_TIMEOUT_S).stdout.split("\n")
        if "serveraliveinterval 0" not in settings:
            return Finding("ssh", "ok", f"{host} lets this user in")
        found = f"{host} lets this user in; if it vanishes, the launcher may notice it after two hours only"
        return Finding("ssh", "warning", found, "ServerAliveInterval 5 and ServerAliveCountMax 3 in ~/.ssh/config")
    output = done.stderr.strip().splitlines()
    found = f"{host} refuses: {output[-1] if output else f'exit status {done.returncode}'}"
    return Finding("ssh", "FAIL", found, f"ssh-copy-id {host}, until `ssh {host} true` asks for nothing")


def check_key_file(path: str | None = None, environ: Mapping[str, str] = os.environ) -> Finding:
    """path: default GBA_HVD_KEY_FILE."""
    path = path or environ.get("GBA_HVD_KEY_FILE")
    if not path:
        return Finding("job key", "ok", _NO_KEY_FILE)
    make = f"(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > {shlex.quote(path)})"
    try:
        found, size = os.stat(path), len(Path(path).read_bytes().strip())
    except OSError as error:
        return Finding("job key", "FAIL", f"{path} cannot be read: {error.strerror}", make)
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        return Finding("job key", "FAIL", f"{path} has mode {mode}: others can read it", f"chmod 600 {path}")
    if size < MIN_KEY_BYTES:
        return Finding("job key", "FAIL", f"{path} has {size} bytes, needed are {MIN_KEY_BYTES} or more", make)
    return Finding("job key", "ok", f"{path}, mode 0600")


def check_threads(
    environ: Mapping[str, str] = os.environ, cores: Callable[[], int] = lambda: len(os.sched_getaffinity(0))
) -> Finding:
    given = environ.get("OMP_NUM_THREADS")
    if given is None:
        found = f"OMP_NUM_THREADS is not set: each worker that horovodrun starts would use {cores()} threads"
        advice = "`gba-hvd run` sets it; with horovodrun: export OMP_NUM_THREADS=<cores / workers of a host>"
        return Finding("threads", "warning" if cores() > 1 else "ok", found, advice)
    if not given.isdigit() or not 0 < int(given) <= cores():
        return Finding("threads", "warning", f"OMP_NUM_THREADS={given} on {cores()} cores", "cores / workers of a host")
    return Finding("threads", "ok", f"OMP_NUM_THREADS={given} of {cores()} cores")
