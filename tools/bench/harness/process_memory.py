"""What every peer's worker does around its own training step: warm up, time, write the result."""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments every peer's worker takes."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--clicks", type=Path, required=True, help="folder of batches")
    parser.add_argument("--result", type=Path, required=True, help="folder that gets rank0.json, rank1.json")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    return parser


def time_steps(
    args: argparse.Namespace,
    rank: int,
    step: Callable[[int], float],
    barrier: Callable[[], object],
    *,
    shared_files: str = "",
) -> None:
    """Run `step(i)`, which returns the loss, warm-up first, and write rank<r>.json.

    shared_files: where table pages are mapped from, if several workers share them; they count apart from own memory
    """
    result: dict[str, Any] = {"rank": rank, "steps": args.steps}
    losses = [step(0)]
    result["first_step_unix_s"] = time.time()
    losses += [step(i) for i in range(1, args.warmup)]

    # All pages of shared tables are touched by every worker before any is measured: the proportion is then exact.
    if shared_files:
        touch(shared_files)
    barrier()
    if shared_files:
        result.update(shared_memory(shared_files))
    Path("/proc/self/clear_refs").write_text("5")  # peak resident size restarts here
    barrier()

    start, cpu = time.perf_counter(), time.process_time()
    losses.extend(step(i) for i in range(args.warmup, args.warmup + args.steps))
    barrier()
    result["seconds"], result["cpu_s"] = time.perf_counter() - start, time.process_time() - cpu
    result["peak_own_bytes"] = status_bytes("VmHWM") - result.get("shared_resident_bytes", 0)
    result["loss_first"], result["loss_last"] = losses[0], float(np.mean(losses[-10:]))
    (args.result / f"rank{rank}.json").write_text(json.dumps(result))


def status_bytes(field: str, pid: int | str = "self") -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found, f"no {field} in /proc/{pid}/status"
    return int(found[1]) * 1024


def touch(prefix: str) -> None:
    """Read one byte of every page that is mapped from files under `prefix`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(prefix):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            mapped = np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start))
            int(mapped[:: mmap.PAGESIZE].sum())


def shared_memory(prefix: str, smaps: str | None = None) -> dict[str, int]:
    """What this process maps from files under `prefix`: size of one copy, resident and proportional share, bytes."""
    text = Path("/proc/self/smaps").read_text() if smaps is None else smaps
    sizes = {"shared_bytes": 0, "shared_resident_bytes": 0, "shared_proportional_bytes": 0}
    names = {"Size": "shared_bytes", "Rss": "shared_resident_bytes", "Pss": "shared_proportional_bytes"}
    inside = False
    for line in text.splitlines():
        head = line.split(maxsplit=5)
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", head[0]):
            inside = len(head) == 6 and head[5].startswith(prefix)
        elif inside and head[0].rstrip(":") in names:
            sizes[names[head[0].rstrip(":")]] += int(head[1]) * 1024
    return sizes
