"""What all benchmarks have in common: launching, interleaving, medians, describing the machine, writing the result.

Plain functions; which systems are compared, and on what, is each benchmark's own file.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One of the systems compared: a name and how its run is launched."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return shlex.join([*(f"{key}={value}" for key, value in self.env.items()), *self.command])


class RunFailed(Exception):
    """A launched run ended with an error or ran out of time."""


def launch(variant: Variant, more: Sequence[str], *, log: Path, timeout_s: float) -> float:
    """Run to its end, output to `log`; returns the Unix time of the start. Raises RunFailed, with the root cause."""
    command = [*variant.command, *more]
    with log.open("wb") as out:
        started = time.time()
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **variant.env}, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(process)
    if status != 0:
        why = f"still running after {timeout_s:.0f} s" if status is None else f"exit status {status}"
        said = gist(log.read_text(errors="replace"))
        raise RunFailed(f"{variant.name}: {why}\n{shlex.join(command)}\n{said}")
    return started


def gist(log: str, n_lines: int = 30) -> str:
    """The first traceback of a log, which launchers bury under their own; its end when there is none."""
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line), -n_lines)
    return "\n".join(lines[first:][:n_lines])


def stop(process: subprocess.Popen[bytes], grace_s: float = 10) -> None:
    """End the process and its session; launchers get the chance to end their workers themselves."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def interleave(variants: Sequence[Variant], runs: int, run: Callable[[Variant, int], Row]) -> list[Row]:
    """A B C A B C ...: what else the machine does then falls on all alike."""
    return [run(variant, i) for i in range(runs) for variant in variants]


def medians(rows: Iterable[Row], by: Sequence[str], of: str) -> dict[tuple[Any, ...], float]:
    """Median of column `of` for each distinct combination of the columns `by`, in order of appearance."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row.get(of) is not None:
            groups.setdefault(tuple(row[name] for name in by), []).append(row[of])
    return {key: median(values) for key, values in groups.items()}


def machine(packages: Sequence[str] = ("torch", "horovod", "numpy")) -> dict[str, Any]:
    """What a reader needs to assess the figures."""
    import psutil

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def console_script(name: str) -> str:
    """The command of that name beside the running Python."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise RunFailed(
            f"no {name} beside {sys.executable}; run `make setup` and use that virtual environment's gba-hvd"
        )
    return str(path)


def check_writable(path: Path) -> None:
    """Raise RunFailed unless a result can be written there: before the minutes of work, not after them."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFailed(f"{path}: the result cannot be written here: {error}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        what = "is a folder" if path.is_dir() else "cannot be written"
        raise RunFailed(f"{path}: {what}; --out is the file that gets the result")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def write_whole(path: Path, result: Mapping[str, Any]) -> None:
    """For a file that is written again and again: an interruption leaves the one of before."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    write_json(fresh, result)
    fresh.replace(path)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
