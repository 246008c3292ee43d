"""Reports to other programs, in small files, which processes train and how far they are.

OUT/pulse/step.json holds the chief's newest step and mode, OUT/pulse/worker-R.json the process of rank R. The demo
reads them to kill a worker at a chosen moment; a person may read them to find the processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gba_hvd.callbacks import Callback, Job, StepRecord


class ProgressFiles(Callback):
    """Writes the files, whole each time: a reader never sees half of one."""

    def __init__(self, out: Path, every_steps: int = 5) -> None:
        self.folder = out / "pulse"
        self.every_steps = every_steps
        self._chief = False
        self._written: StepRecord | None = None

    def on_job(self, job: Job) -> None:
        self._chief = job.is_chief
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(
            f"worker-{job.rank}.json", {"pid": os.getpid(), "host": job.host, "rank": job.rank, "size": job.size}
        )

        if job.is_chief:
            for file in self.folder.glob("worker-*.json"):  # of ranks the job no longer has
                if int(file.stem.removeprefix("worker-")) >= job.size:
                    file.unlink(missing_ok=True)

    def on_step(self, record: StepRecord) -> None:
        last = self._written
        if not self._chief or (last is not None and not self._is_news(last, record)):
            return
        self._written = record
        position = {"step": record.step, "epoch": record.epoch, "workers": record.workers, "mode": record.mode}
        self._write("step.json", position)

    def _is_news(self, last: StepRecord, record: StepRecord) -> bool:
        """In asynchronous modes the chief may get several steps at once."""
        far = record.step >= last.step + self.every_steps
        return far or (record.mode, record.workers) != (last.mode, last.workers)

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        fresh = self.folder / f".{name}.{os.getpid()}"
        fresh.write_text(json.dumps(values))
        fresh.replace(self.folder / name)
