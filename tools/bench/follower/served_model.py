"""The process that serves, as the benchmark has it: started, killed, started again; and the files it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from recovery.storage.rename import replace_file

from ..harness import measure

MODULE = f"{__package__}.served"


class ServedModel:
    """Starts with `start`; leaving kills it. words: of its command, besides the folder"""

    def __init__(self, folder: Path, words: list[object]) -> None:
        self.folder, self._log = folder, folder / "log"
        folder.mkdir()
        self._command = [sys.executable, "-m", MODULE, "--folder", str(folder), *map(str, words)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "GBA_HVD"))}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ | {"OMP_NUM_THREADS": "1"}
            )

    def kill(self) -> None:
        """By SIGKILL. Raises RunFailed where it has ended by itself."""
        self.check()
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def check(self) -> bool:
        """True; raises RunFailed where it has ended by itself."""
        if self._process is None or self._process.poll() is not None:
            raise measure.RunFailed(f"the follower ended\n{measure.gist(self._log.read_text(errors='replace'))}")
        return True

    def end(self, name: str, timeout_s: float) -> None:
        """Wait until it has applied the checkpoint of this name. Raises RunFailed."""
        replace_file(self.folder / "end", name)
        assert self._process is not None
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            gist = measure.gist(self._log.read_text(errors="replace"))
            raise measure.RunFailed(f"the follower has not applied {name} within {timeout_s:.0f} s\n{gist}") from error
        if status != 0:
            self.check()

    def updates(self) -> list[dict[str, Any]]:
        """In order; see `served.py`."""
        return [json.loads(line) for line in self._lines("updates")]

    def answers(self) -> Counter[str]:
        """How many requests had each answer, by its digest."""
        return Counter(self._lines("answers"))

    def _lines(self, name: str) -> list[str]:
        """Those that are complete."""
        path = self.folder / name
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
