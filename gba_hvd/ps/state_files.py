"""What of a server outlives it, in files of the job's folder: a successor resumes from them.

    ps-N.address   where it listens, and its process; written last at its start, from there on the server is there
    ps-N.session   what it serves: the `Enter` of its mode, and whether the mode is over (idle)
    ps-N.ledger    the coordinator's state, saved before any answer leaves
    ps-N.failed    why the newest one could not start

These are written here, each completely or not at all, when their owner asks for it. Others write theirs themselves: the
dense part (`dense_file`, `central_copy`, `residuals`), what the newest checkpoint has (`saver`), a final save
(`final_checkpoint`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from gba_hvd.ps import launch
from gba_hvd.ps.messages import Enter
from gba_hvd.shm.snapshot_file import SnapshotFile
from recovery.storage.rename import replace_file


def path_of(folder: Path, index: int, name: str) -> Path:
    """A file of a server of this host."""
    return folder / f"ps-{index}.{name}"


class StateFiles:
    """The state files of one server. Belongs to its main thread."""

    def __init__(self, folder: Path, index: int) -> None:
        self._folder, self._index = folder, index
        self.n_ledgers = 0  # how often the ledger was saved
        self._ledger_file: SnapshotFile | None = None

    def path(self, name: str) -> Path:
        return path_of(self._folder, self._index, name)

    def ports(self) -> tuple[int, int]:
        """(control, pull) of the predecessor, where a successor listens; 0: there was none."""
        try:
            stored = json.loads(self.path("address").read_text())
        except FileNotFoundError:
            return 0, 0
        return stored["control"], stored["pull"]

    def save_address(self, control: int, pull: int) -> None:
        before = launch.process_of(self._folder, self._index)
        process = launch.ServerProcess(os.getpid(), time.time(), 0 if before is None else before.n_restarts + 1)
        replace_file(self.path("address"), json.dumps({"control": control, "pull": pull, **asdict(process)}))

    def save_failure(self, error: Exception) -> None:
        replace_file(self.path("failed"), f"{type(error).__name__}: {error}")

    def save_session(self, enter: Enter, idle: bool) -> None:
        replace_file(self.path("session"), msgspec.msgpack.encode({"idle": idle, "enter": enter}))

    def session(self) -> tuple[Enter, bool] | None:
        """As `save_session` had them; None when no mode was entered here."""
        try:
            stored = msgspec.msgpack.decode(self.path("session").read_bytes())
        except FileNotFoundError:
            return None
        return msgspec.convert(stored["enter"], Enter), stored["idle"]

    def save_ledger(self, generation: int, state: Mapping[str, Any]) -> None:
        """state: of the coordinator. Raises OSError when there is no room for it; the one before stays."""
        self._ledger().write(msgspec.msgpack.encode({"generation": generation, **state}))
        self.n_ledgers += 1

    def ledger(self, generation: int) -> dict[str, Any] | None:
        """The newest one of this generation, for `Coordinator.resume`. Raises ShardMemoryError when it is damaged."""
        saved = self._ledger().read()
        if saved is None:
            return None
        state: dict[str, Any] = msgspec.msgpack.decode(saved, strict=False)
        return state if state["generation"] == generation else None

    def _ledger(self) -> SnapshotFile:
        if self._ledger_file is None:
            self._ledger_file = SnapshotFile(self.path("ledger"))
        return self._ledger_file


MARK = "ps-*.flushing"  # a file that is there meanwhile; a restart of the job waits for it
