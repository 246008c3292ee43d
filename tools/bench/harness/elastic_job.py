"""An elastic job on this machine, whose workers may be killed: Horovod counts names of the machine as different hosts.

What the job trains is each benchmark's own module. When it is left, all its processes are gone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ... import signals
from . import measure
from .measure import Variant

MARKER = "GBA_HVD_BENCH_FOLDER"
_POLL_S = 0.05


def discovery(folder: Path, n: int = len(measure.NAMES)) -> Path:
    """A script that names n hosts."""
    script = folder / "discover.sh"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {name}:1\n" for name in measure.NAMES[:n]))
    script.chmod(0o755)
    return script


def elastic_variant(name: str, script: Path, module: str, *flags: str, workers: int, least: int) -> Variant:
    """Workers of one thread each; the job trains while there are `least`. module: within `gba_hvd_tools`."""
    n = str(workers)
    size = ("-np", n, "--min-np", str(least), "--max-np", n, "--host-discovery-script", str(script))
    hosts = ("--blacklist-cooldown-range", "1", "2", "--network-interface", "lo")
    python = (sys.executable, "-m", f"gba_hvd_tools.{module}", *flags)
    env = {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "3", "GBA_HVD_GRACE_S": "2"}
    return Variant(name, (measure.console_script("horovodrun"), *size, *hosts, *python), env)


@contextlib.contextmanager
def memory_folder(place: Path | None = Path("/dev/shm")) -> Iterator[Path]:
    """For the memory of jobs; on a disk where `place` is None, or not there.

    Other jobs of this machine would take a folder called gba-hvd-... for memory of a dead job, and remove it.
    """
    at = place if place is not None and place.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="bench-", dir=at, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class ElasticJob:
    """Starts when it is entered. folder: of its memory and its log, `log`; words: more of its command"""

    def __init__(self, variant: Variant, folder: Path, words: Sequence[object]) -> None:
        self.folder, self._variant, self._words, self._log = folder, variant, words, folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ElasticJob:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "GBA_HVD"))}
        environ |= {**self._variant.env, MARKER: str(self.folder), "GBA_HVD_SHARD_DIR": str(self.folder)}
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [*self._variant.command, *map(str, self._words)], stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env=environ, start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        import psutil

        if self._process is not None:
            signals.stop(self._process)
        left = _processes(self.folder)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=10)

    def wait(self, what: str, timeout_s: float, condition: Callable[[], Any]) -> Any:
        """What `condition` returns once it is true. Raises RunFailed when it takes too long, or the job ends."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            ended = None if self._process is None else self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                why = f"waited {timeout_s:.0f} s for {what}" if ended is None else f"ended with {ended} before {what}"
                raise self._failed(why)
            time.sleep(_POLL_S)
        return value

    def wait_end(self, timeout_s: float) -> None:
        """Raises RunFailed unless the job ends by itself, with success."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise self._failed(f"waited {timeout_s:.0f} s for the end") from error
        if status != 0:
            raise self._failed(f"ended with {status}")

    def pids(self) -> set[int]:
        """Of all its processes, found by their environment."""
        return {process.pid for process in _processes(self.folder)}

    def _failed(self, why: str) -> measure.RunFailed:
        output = measure.gist(self._log.read_text(errors="replace"))
        return measure.RunFailed(f"{self._variant.name}: {why}\n{output}")


def _processes(folder: Path) -> list[Any]:
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARKER) == str(folder):
                found.append(process)
    return found
