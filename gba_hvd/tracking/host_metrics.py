"""How busy this host is, as MLflow metrics named `system/<host>/...`, written to the spool like any other record."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Self

import psutil

from gba_hvd.tracking.records import Record, metric_key, metrics_records
from gba_hvd.tracking.spool import SpoolWriter

_MB = 1e6


class HostSampler:
    """Reads the host's counters; rates are over the time since the previous call."""

    def __init__(self, host: str) -> None:
        self._prefix = metric_key(f"system/{host}/")
        psutil.cpu_percent(None)  # the first reading only starts the interval
        self._last = (time.monotonic(), psutil.net_io_counters())

    def sample(self) -> dict[str, float]:
        now, network = time.monotonic(), psutil.net_io_counters()
        before, earlier = self._last
        self._last = (now, network)
        memory = psutil.virtual_memory()
        values = {"cpu_percent": psutil.cpu_percent(None), "memory_percent": memory.percent}
        values["memory_used_mb"] = (memory.total - memory.available) / _MB
        if now > before and network is not None and earlier is not None:
            values["network_receive_mb_per_s"] = (network.bytes_recv - earlier.bytes_recv) / (now - before) / _MB
            values["network_send_mb_per_s"] = (network.bytes_sent - earlier.bytes_sent) / (now - before) / _MB
        if os.path.isdir("/dev/shm"):
            values["shm_used_mb"] = psutil.disk_usage("/dev/shm").used / _MB
        return {self._prefix + name: round(value, 3) for name, value in values.items()}


class HostReporter:
    """A thread of the sender process that writes a sample to the spool every `job["system_every_s"]` seconds.

    A thread, because a slow server may hold the sender's main thread for seconds. Entering starts it, leaving stops it.
    """

    def __init__(self, spool: Path) -> None:
        self._writer = SpoolWriter(spool)
        self._job: Record | None = None
        self._step = 0
        self._awake = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="host-metrics", daemon=True)

    def set_progress(self, job: Record | None, step: int) -> None:
        """Where training stands; None when there is nothing to report on any more."""
        with self._awake:
            self._job, self._step = job, step
            self._awake.notify()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        with self._awake:
            self._stopped = True
            self._awake.notify()
        self._thread.join()
        self._writer.close()

    def _run(self) -> None:
        sampler: HostSampler | None = None
        due_s = 0.0
        with self._awake:
            while not self._stopped:
                job = self._job
                if job is None or not job["leads_host"] or job["system_every_s"] <= 0:
                    sampler = None
                    self._awake.wait()
                    continue
                now = time.monotonic()
                if sampler is None:
                    sampler, due_s = HostSampler(job["host"]), now + min(1.0, job["system_every_s"])
                elif now >= due_s:
                    due_s = now + job["system_every_s"]
                    for record in metrics_records(self._step, time.time_ns() // 1_000_000, sampler.sample()):
                        self._writer.append({**record, "host": True})
                self._awake.wait(max(0.0, due_s - now))
