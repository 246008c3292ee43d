"""The settings of one job, in one validated place. Argument beats environment beats default."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gba_hvd.errors import BadInput, refuse_unknown
from recovery.environment import settings_from
from recovery.old_names import accepts, renamed

_PREFIX = "GBA_HVD_"
DEVICE_ROWS = ("auto", "off", "on")
_OLD = {"heartbeat_timeout_s": "ALIVE_S", "server_timeout_s": "SERVER_S"}  # variables that are still read


@accepts(alive_s="heartbeat_timeout_s", server_s="server_timeout_s")
@dataclass(frozen=True)
class Config:
    """
    shard_dir:  folder for the memory of this host's shards; /dev/shm, or a folder on disk for tables larger than RAM
    job_id:     name of the job; by default the first worker draws one
    job_name:   what people call it, in `gba-hvd ps` and elsewhere; by default the script's name
    n_shards:   S, in how many shards every table is cut; fixed for the job
    timeout_s:  longest wait for another worker of this host to finish applying a step
    heartbeat_timeout_s: asynchronous modes: a worker without heartbeats for this long loses its leases to others
    lease_s:    asynchronous modes: longest time for one micro-batch, before it is given to another worker
    server_timeout_s: asynchronous modes: a server that answers nothing for this long counts as lost, with its host. In
                every mode: a worker that lost the others ends when it cannot reach the launcher for this long
    grace_s:    how long the memory stays when every worker of the host has died (a restarted worker finds it again)
    device_rows: "auto": a GPU that has the model reads rows in the host's memory; "off": the CPU reads and pools them;
                "on": as "auto", and a CPU takes the same way (for tests)
    """

    shard_dir: Path = Path("/dev/shm")
    job_id: str | None = None
    job_name: str = ""
    n_shards: int = 16
    timeout_s: float = 60.0
    heartbeat_timeout_s: float = 2.0
    lease_s: float = 60.0
    server_timeout_s: float = 20.0
    grace_s: float = 20.0
    device_rows: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shard_dir", Path(self.shard_dir).resolve())
        if self.n_shards < 1:
            raise BadInput(f"n_shards must be at least 1, got {self.n_shards}")
        for name in ("timeout_s", "heartbeat_timeout_s", "lease_s", "server_timeout_s"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} must be positive, got {getattr(self, name)}")
        if self.grace_s < 0:
            raise BadInput(f"grace_s must not be negative, got {self.grace_s}")
        refuse_unknown("device_rows", self.device_rows, DEVICE_ROWS)
        if self.job_id is not None:
            checked_job_id(self.job_id)
        object.__setattr__(self, "job_name", checked_job_name(self.job_name or _script()))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **arguments: Any) -> Config:
        """Build from GBA_HVD_<NAME> variables; arguments that are not None win."""
        values = settings_from(environ, cls, _PREFIX, _OLD)
        given = {name: value for name, value in arguments.items() if value is not None}
        values.update(renamed(given, {"alive_s": "heartbeat_timeout_s", "server_s": "server_timeout_s"}))
        return cls(**values)


def checked_job_id(job_id: str) -> str:
    """The name of a job, which is part of a folder's name. Raises BadInput for any other text."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", job_id):
        raise BadInput(f"job_id must be 1 to 64 letters, digits, '.', '_' or '-', got {job_id!r}")
    return job_id


def checked_job_name(name: str) -> str:
    """Raises BadInput for a name that does not fit in a line of a table."""
    if not name.isprintable() or not 0 < len(name) <= 100:
        raise BadInput(f"a job's name has 1 to 100 printable characters, got {name!r}")
    return name


def _script() -> str:
    """What a job without a name of its own is called: the script, without folder and suffix."""
    stem = Path(sys.argv[0]).stem
    return stem if stem.isprintable() and 0 < len(stem) <= 100 else "python"
