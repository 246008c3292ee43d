"""What `gba-hvd run` starts: a pure function of what was asked for and of what this machine is.

Static jobs, elastic ones, and a script alone become one command with its variables, and notes for the person. Nothing
is started or asked here; `commands/run.py` does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gba_hvd.errors import BadInput
from recovery.redaction import redacted, redacted_command

HOST_COOLDOWN_S = (
    30,
    300,
)  # a host whose workers all died is tried again after these; a single worker's slot after 2 s
CYCLE_MS = 5
_HOST = re.compile(r"([A-Za-z0-9_.-]+):([1-9][0-9]*)")


@dataclass(frozen=True)
class Asked:
    """The command line, parsed.

    least, most: numbers of workers; equal for a static job. hosts: name -> workers it may have; empty: this machine.
    discovery: a command that prints `host:slots` lines, instead of `hosts`. command: of one worker.
    """

    least: int
    most: int
    elastic: bool
    command: Sequence[str]
    hosts: Mapping[str, int]
    discovery: str | None = None
    interface: str | None = None
    log_dir: str | None = None
    job: str | None = None
    key_file: str | None = None


@dataclass(frozen=True)
class Here:
    """This machine. local: which of the hosts are it; loopback: its interface with 127.0.0.1."""

    cores: int
    loopback: str
    local: frozenset[str]
    horovodrun: str
    environ: Mapping[str, str]


@dataclass(frozen=True)
class Launch:
    """argv with the variables it is started with, beside those of this process; notes: sentences for the person."""

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def words(self) -> str:
        """As a person would type it, without secrets."""
        settings = [redacted(f"{name}={shlex.quote(value)}") for name, value in self.variables.items()]
        return " ".join([*settings, *map(shlex.quote, redacted_command(self.argv))])


def parse_workers(text: str) -> tuple[int, int, bool]:
    """`4` is (4, 4, static); `2:8` is (2, 8, elastic). Raises BadInput."""
    least, colon, most = text.partition(":")
    if not re.fullmatch(r"[1-9][0-9]*(:[1-9][0-9]*)?", text) or (colon and int(least) > int(most)):
        raise BadInput(f"-np {text!r}: expected a number of workers like 4, or MIN:MAX like 2:8 for an elastic job")
    return int(least), int(most or least), bool(colon)


def parse_hosts(text: str, where: str = "--hosts") -> dict[str, int]:
    """`h1:4,h2:4`, or such lines, as {host: slots}. Raises BadInput that names the part it cannot read."""
    hosts: dict[str, int] = {}
    for part in re.split(r"[,\n]", text.strip()):
        found = _HOST.fullmatch(part.strip())
        if found is None:
            raise BadInput(f"{where}: expected host:slots, such as h1:4, got {part.strip()!r}")
        if found[1] in hosts:
            raise BadInput(f"{where}: the host {found[1]} is named twice; give the sum of its slots once")
        hosts[found[1]] = int(found[2])
    return hosts


def plan(asked: Asked, here: Here, slots_now: int | None = None) -> Launch:
    """The command to start, with its variables.

    slots_now: what the discovery command answers now, over all hosts. Raises BadInput when it cannot be as asked.
    """
    hosts = dict(asked.hosts) or ({} if asked.discovery else {"localhost": asked.most})
    total = sum(hosts.values()) if hosts else slots_now or 0
    if not asked.elastic and asked.discovery:
        raise BadInput("--discovery is for elastic jobs: give -np MIN:MAX, or name the hosts with --hosts")
    if hosts and total < asked.least:
        raise BadInput(f"--hosts has {total} slots, -np asks for at least {asked.least} workers")
    notes = [*_about_key(asked, hosts, here), *_about_logs(asked)]
    variables, threads_note = _threads(asked, here, hosts)
    cycle, cycle_note = _cycle(here, hosts)
    variables |= cycle
    if asked.job:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", asked.job):
            raise BadInput(f"--job {asked.job!r}: expected 1 to 64 letters, digits, '.', '_' or '-'")
        variables |= {"GBA_HVD_JOB_ID": asked.job, "GBA_HVD_JOB_NAME": asked.job}
    if asked.key_file:
        variables["GBA_HVD_KEY_FILE"] = asked.key_file
    notes[:0] = [threads_note, *cycle_note]
    if not asked.elastic and asked.most == 1 and not asked.hosts:
        if asked.log_dir:
            raise BadInput("--log-dir is for jobs of several workers: horovodrun writes it, and -np 1 needs none")
        return Launch(tuple(asked.command), variables, tuple(notes))
    argv = [here.horovodrun, "-np", str(_at_start(asked, total))]
    if asked.elastic:
        low, high = HOST_COOLDOWN_S
        script = asked.discovery or "; ".join(f"echo {host}:{n}" for host, n in hosts.items())
        variables["GBA_HVD_MIN_WORKERS"] = str(asked.least)  # what a worker says of a job that has fewer
        argv += ["--min-np", str(asked.least), "--max-np", str(asked.most), "--host-discovery-script", script]
        argv += ["--blacklist-cooldown-range", str(low), str(high)]
        notes.append(
            f"--blacklist-cooldown-range {low} {high} is of hosts whose workers all died: tried again after {2 * low} "
            f"to {3 * low} s, then ever later, up to {high} s. One dead worker of several on a host is started again "
            "after 2 s, 4, 8, 16"
        )
    elif asked.hosts:
        argv += ["-H", ",".join(f"{host}:{slots}" for host, slots in hosts.items())]
    interface = asked.interface or (here.loopback if hosts and set(hosts) <= here.local else None)
    if interface:
        argv += ["--network-interface", interface]
    else:
        notes.append(
            "no interface is named: horovodrun looks for one that all hosts share; --network-interface NAME skips that"
        )
    if asked.log_dir:
        argv += ["--output-filename", asked.log_dir]
    # horovodrun looks for its own options among the arguments of the script, too, unless they come after `--`; and it
    # takes a `--` before the command for the command.
    own = ["env", "--"] if any(one.startswith("-") for one in asked.command) else []
    return Launch((*argv, *own, *asked.command), variables, tuple(notes))


def _at_start(asked: Asked, total: int) -> int:
    """So many workers are waited for at the start: all there are room for now."""
    return max(asked.least, min(asked.most, total)) if asked.elastic else asked.most


def _threads(asked: Asked, here: Here, hosts: Mapping[str, int]) -> tuple[dict[str, str], str]:
    """OMP_NUM_THREADS: without it each worker computes with as many threads as there are cores."""
    on_a_host = min(asked.most, max(hosts.values(), default=asked.most))
    given = here.environ.get("OMP_NUM_THREADS")
    if given is not None:
        note = f"OMP_NUM_THREADS={given}, from the environment"
        if given.isdigit() and int(given) * on_a_host > here.cores:
            note += f": {on_a_host} workers of a host would use {int(given) * on_a_host} threads on {here.cores} cores"
        return {}, note
    threads = max(1, here.cores // on_a_host)
    of = "of each host, if they are like this one" if set(hosts) - here.local else "here"
    note = f"OMP_NUM_THREADS={threads}: {here.cores} cores {of} / {on_a_host} workers"
    return {"OMP_NUM_THREADS": str(threads)}, note


def _cycle(here: Here, hosts: Mapping[str, int]) -> tuple[dict[str, str], list[str]]:
    """HOROVOD_CYCLE_TIME: hardly a step waits for Horovod, whose idle rounds take processor time."""
    if sum(hosts.values()) == 1 or "HOROVOD_CYCLE_TIME" in here.environ:
        return {}, []
    note = (
        f"HOROVOD_CYCLE_TIME={CYCLE_MS}: rows and gradients do not go through Horovod. Set 1 where each step waits for "
        "it all the same: hvd.allreduce of the script, negatives of all workers, compression, ma or bmuf"
    )
    return {"HOROVOD_CYCLE_TIME": str(CYCLE_MS)}, [note]


def _about_key(asked: Asked, hosts: Mapping[str, int], here: Here) -> list[str]:
    if asked.key_file and "GBA_HVD_KEY" in here.environ:
        raise BadInput("both --key-file and the variable GBA_HVD_KEY: give one of them")
    remote = bool(asked.discovery) or not set(hosts) <= here.local
    if asked.key_file and remote:
        return [f"every host reads {asked.key_file}, the secret by which the job's workers know each other: it must be "
                "the same file there, mode 0600"]  # fmt: skip
    if remote and not {"GBA_HVD_KEY_FILE", "GBA_HVD_KEY"} & here.environ.keys():
        return ["no secret is shared by the hosts: who can alter Horovod's traffic could learn the job's key; "
                "--key-file FILE, the same on every host, prevents that"]  # fmt: skip
    return []


def _about_logs(asked: Asked) -> list[str]:
    if not asked.log_dir:
        return []
    name = "HOST.SLOT" if asked.elastic else "rank.N"
    return [f"logs: {asked.log_dir}/{name}/stdout and stderr"]
