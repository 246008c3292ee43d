"""What all benchmarks have in common: arguments, launching, interleaving, medians, describing the machine, the result.

Plain functions; which systems are compared, and on what, is each benchmark's own file.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from recovery.storage.rename import replace_file

from ... import terminal
from ...launch.command_line import CYCLE_MS
from ...signals import stop

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = Any

Row = dict[str, Any]
NAMES = ("localhost", "127.0.0.1", socket.gethostname())  # of this machine: Horovod counts them as different hosts
AS_RUN = {"HOROVOD_CYCLE_TIME": str(CYCLE_MS)}  # what `gba-hvd run` sets
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PACKAGES = ("torch", "horovod", "numpy")  # whose versions stand in a result


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


def benchmark(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """For the function that runs a benchmark: --out is checked before it, and RunFailed is one line and status 1."""

    @functools.wraps(run)
    def guarded(args: argparse.Namespace) -> int:
        try:
            if args.out is not None:
                check_writable(args.out)
            return run(args)
        except RunFailed as error:
            print(f"gba-hvd: {error}", file=sys.stderr)
            return 1

    return guarded


class ShowsDefaults(argparse.HelpFormatter):
    """Help as of `with_default`. Paragraphs stay apart; one that lists terms beside their meaning stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = re.split(r"\n\s*\n", text.strip())
        return "\n\n".join(part if re.search(r"\S {2,}\S", part) else fill(part, width, indent) for part in parts)

    def _format_action(self, action: argparse.Action) -> str:
        return super()._format_action(with_default(action))


def with_default(action: argparse.Action) -> argparse.Action:
    """Help that ends with the option's default, if it has one; with `all`, where that is all there is to choose."""
    shown = copy.copy(action)
    value, text = action.default, action.help or ""
    if value == math.inf:
        shown.default = "no limit"
    elif isinstance(value, (list, tuple)):
        everything = action.choices is not None and list(value) == list(action.choices)
        shown.default = "all" if everything else " ".join(str(one) for one in value if one is not None)
    has_default = action.option_strings and str(shown.default) not in ("None", "", "False", argparse.SUPPRESS)
    if has_default and "default" not in text:
        text = f"{text} (default: %(default)s)".strip()
    shown.help = text or action.help
    return shown


def add_benchmark(
    subparsers: Subparsers, name: str, does: str, doc: str | None, run: Callable[[argparse.Namespace], int],
    **out: Any,
) -> argparse.ArgumentParser:  # fmt: skip
    """A subcommand with --out. out: what differs from usual in its declaration."""
    parser = subparsers.add_parser(name, help=does, description=doc, formatter_class=ShowsDefaults)
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", **{"required": True, "help": "the figures, as JSON", **out}
    )
    parser.set_defaults(run=run)
    return parser


def add_chosen(parser: argparse.ArgumentParser, name: str, choices: Iterable[str], metavar: str, **more: Any) -> None:
    """An option that takes some of these names; all of them by default."""
    names = list(choices)
    parser.add_argument(name, **{"nargs": "+", "default": names, "choices": names, "metavar": metavar, **more})


def horovodrun(
    name: str, workers: int, module: str, *flags: str, hosts: int | Sequence[str] = 1, **env: str
) -> Variant:
    """Workers on this machine, one thread each. module: within `gba_hvd_tools`. env: see also `AS_RUN`

    hosts: so many names of the machine, which Horovod counts as hosts, with as many workers each; or virtual hosts
    """
    names, interface = (NAMES[:hosts], "lo") if isinstance(hosts, int) else (hosts, "eth0")
    slots = ",".join(f"{host}:{workers // len(names)}" for host in names)
    launcher = (console_script("horovodrun"), "-np", str(workers), "-H", slots)
    python = ("--network-interface", interface, sys.executable, "-m", f"gba_hvd_tools.{module}")
    return Variant(name, (*launcher, *python, *flags), {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "3", **env})


def launch(
    variant: Variant,
    more: Sequence[str],
    *,
    log: Path,
    timeout_s: float,
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    wait: Callable[[subprocess.Popen[bytes], float], int] = subprocess.Popen.wait,
) -> float:
    """Run to its end, output to `log`; returns the Unix time of the start. Raises RunFailed, with the root cause.

    popen, wait: what else starts it, and what does more until it ends
    """
    command = [*variant.command, *more]
    with log.open("wb") as out:
        started = time.time()
        process = popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **variant.env}, start_new_session=True
        )
        try:
            status: int | None = wait(process, timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(process)
    if status != 0:
        why = f"still running after {timeout_s:.0f} s" if status is None else f"exit status {status}"
        output = gist(log.read_text(errors="replace"))
        raise RunFailed(f"{variant.name}: {why}\n{shlex.join(command)}\n{output}")
    return started


def result_of(variant: Variant, more: Sequence[object], folder: Path, timeout_s: float, **how: Any) -> Any:
    """Launch with `--result FILE`, in `folder`; what it wrote there, JSON. how: see `launch`. Raises RunFailed."""
    result, log = folder / "result.json", folder / "log"
    result.unlink(missing_ok=True)
    launch(variant, [*map(str, more), "--result", str(result)], log=log, timeout_s=timeout_s, **how)
    if not result.exists():
        raise RunFailed(f"{variant.name}: ended without a result\n{gist(log.read_text(errors='replace'))}")
    return json.loads(result.read_text())


def train_ctr(config: Path, workers: int) -> Variant:
    """`examples/train_ctr.py` with this file of settings."""
    launcher = (console_script("horovodrun"), "-np", str(workers), "--network-interface", "lo")
    script = (sys.executable, str(EXAMPLES / "train_ctr.py"), "--config", str(config))
    return Variant("train_ctr", (*launcher, *script), {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "3"})


def summary_of(job: Variant, more: Sequence[str], folder: Path, timeout_s: float) -> dict[str, Any]:
    """Launch a `train_ctr` that writes to `folder`; its summary. Raises RunFailed unless it has trained to its end."""
    launch(job, ["--out", str(folder), *more, "mlflow=false"], log=folder / "log", timeout_s=timeout_s)
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    except FileNotFoundError as error:
        raise RunFailed("ended without a summary") from error
    if summary["status"] != "FINISHED":
        raise RunFailed(f"ended as {summary['status']}: {summary['error']}")
    return summary


def gist(log: str, n_lines: int = 30) -> str:
    """The first traceback of a log, which launchers bury under their own; its end when there is none."""
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line), -n_lines)
    return "\n".join(lines[first:][:n_lines])


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


def by_groups(
    rows: Sequence[Row], outer: str, inner: str, columns: Iterable[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over the runs: value of `outer` -> value of `inner` -> column."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for column in columns:
        for (first, second), value in medians(rows, (outer, inner), column).items():
            found.setdefault(str(first), {}).setdefault(second, {})[column] = value
    return found


def machine(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
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


def check_plot(path: Path | None) -> None:
    """The same for --plot: the ending of the name is the format of the picture."""
    if path is not None:
        check_writable(path)
        if path.suffix not in (".svg", ".png"):
            raise RunFailed(f"--plot {path}: the name must end in .svg or .png")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """A result at its end."""
    write_whole(path, result)
    print(f"written to {path}")


def write_whole(path: Path, result: Mapping[str, Any]) -> None:
    """For a file that is written again and again: an interruption leaves the one of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(result, indent=2) + "\n")


def require_at_least(args: argparse.Namespace, **least: float) -> None:
    """Raise RunFailed for an option below its least value; those that are None, or have no values, are left out."""
    for name, smallest in least.items():
        value = getattr(args, name)
        for one in value if isinstance(value, list) else [value]:
            if one is not None and not one >= smallest:
                raise RunFailed(f"{option(name)} must be at least {smallest}, got {one}")


def require_positive(args: argparse.Namespace, *names: str) -> None:
    """The same for options that must be above 0."""
    for name in names:
        value = getattr(args, name)
        for one in value if isinstance(value, list) else [value]:
            if one is not None and not one > 0:
                raise RunFailed(f"{option(name)} must be positive, got {one}")


def option(name: str) -> str:
    """`warm_up` as a person writes it."""
    return f"--{name.replace('_', '-')}"


def print_figures(title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A table. columns: by title the text of a cell, of `str.format` with the values of the row, see `cell`."""
    print_table(title, list(columns), [[cell(text, row) for text in columns.values()] for row in rows])


def cell(text: str, row: Mapping[str, Any]) -> str:
    """`cell("{auc:.4f}", {"auc": 0.5})`; "-" where the row has no such value, or None."""
    try:
        return text.format_map(row)
    except (KeyError, TypeError):  # None takes no format
        return "-"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    terminal.print_table(columns, rows, left=(0,), title=title)
