"""Faults that come from outside the job, carried out when it has reached their step. Each says whether it happened."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import services
from .job import NAMES, ChaosJob
from .plan import NETWORK, STORE

_NEVER = ("shards",)  # the memory itself: mapped by all, and a missing one is a missing host
_READ_WHOLE = (".json", ".address", ".session", ".ledger", "key", ".log", ".position")


@dataclass
class Outside:
    """The faults of one job. `look()` now and then; `end()` undoes what lasts. fired: kind, step, time."""

    job: ChaosJob
    proxies: list[services.Proxy] = field(default_factory=list)
    fired: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._due = [f for f in self.job.plan.outside if f["kind"] != "stop_server_in_switch"]
        self._ends: list[tuple[float, int, Any]] = []  # (time, step, what to do then): whichever comes first
        self._undo: list[Any] = []

    def look(self, step: int) -> None:
        """Begin what is due at this step, end what is over."""
        now = time.monotonic()
        for entry in list(self._ends):
            at_s, at_step, undo = entry
            if now >= at_s or step >= at_step:
                self._ends.remove(entry)
                undo()
        for fault in list(self._due):
            if step >= fault["at_step"]:
                happened = self._begin(fault, step)
                if happened is not None:
                    self._due.remove(fault)
                    if happened:
                        self.fired.append({"kind": fault["kind"], "step": step, "time": time.time(), "what": happened})

    def end(self) -> None:
        for _, _, undo in self._ends:
            undo()
        self._ends.clear()
        for fault in self.job.plan.outside:  # that were on: did anybody meet them?
            kind = fault["kind"]
            started = [one for one in self.fired if one["kind"] == kind]
            met = True
            if kind in STORE:
                met = Path(f"{self.job.store_control}.hits").exists()
            elif kind in NETWORK:
                met = any(proxy.met for proxy in self.proxies)
            if started and not met:
                self.fired = [one for one in self.fired if one["kind"] != kind]

    def _begin(self, fault: dict[str, Any], step: int) -> str | None:
        """What was done; empty if it could not be, None: try again."""
        kind, job = fault["kind"], self.job
        until = time.monotonic() + fault.get("seconds", 0.0)
        if kind == "host_leaves":
            if job.last_workers() < 2:  # Horovod ends a job of whose hosts none is left
                return None
            job.set_hosts(NAMES[:2])
            self._ends.append((until + 60, step + fault["steps"], lambda: job.set_hosts(NAMES)))
            return f"{NAMES[2]} left"
        if kind in ("remove_file", "truncate_file"):
            return self._damage(kind, fault["which"])
        if kind in ("full_memory", "full_disk"):
            ballast = services.fill(job.shard_dir if kind == "full_memory" else job.disk)
            self._ends.append((until, 1 << 62, lambda: ballast.unlink(missing_ok=True)))
            return f"{ballast.stat().st_size / 1e6:.1f} MB of ballast"
        if kind in STORE:
            job.store_control.write_text(json.dumps({"kind": kind, "until": time.time() + fault["seconds"]}))
            return "on"
        if kind in NETWORK:
            for proxy in self.proxies:
                proxy.fault(kind, fault["seconds"])
            return "on"
        assert kind == "neighbour"
        burning = services.start_neighbours(len(job.processes()), fault["seconds"])
        self._ends.append((until + 30, 1 << 62, lambda: [one.wait(60) for one in burning]))
        return f"{len(burning)} processes"

    def _damage(self, kind: str, which: float) -> str | None:
        files = [
            path
            for folder in self.job.job_folders()
            for path in sorted(folder.iterdir())
            if path.is_file()
            and path.name not in _NEVER
            # To cut a file that others map would kill them by SIGBUS: no file system does that to anybody.
            and (kind == "remove_file" or path.name.endswith(_READ_WHOLE))
        ]
        if not files:
            return None
        path = files[int(which * len(files))]
        with contextlib.suppress(FileNotFoundError):
            if kind == "remove_file":
                path.unlink()
            else:
                os.truncate(path, path.stat().st_size // 2)
            return path.name
        return None
