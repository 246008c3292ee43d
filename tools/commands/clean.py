"""`gba-hvd clean`: shows what dead jobs of this user left on this host, and removes it if asked to.

What counts as left, and that no living process holds it, is decided in `gba_hvd.shm.sweep`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gba_hvd.shm.sweep import (
    OrphanedMemory,
    counted,
    free_and_held,
    held_elsewhere,
    not_of_jobs,
    orphaned_memory,
    remove,
)

from ..folder_argument import shard_folder
from ..terminal import print_line

_WORDS = {
    "job": "memory of a dead job",
    "removal": "memory of a dead job, half removed",
    "semaphore": "semaphores of launchers that were killed",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "clean",
        help="remove what dead jobs left in shard memory",
        description="Show what dead jobs of this user left on this host: their memory, and semaphores of killed "
        "launchers. With --yes remove it. What a living process holds is left alone.",
    )
    parser.add_argument("--yes", action="store_true", help="remove it; without this nothing is changed")
    parser.add_argument("--dir", type=Path, help="where shards lie (default: GBA_HVD_SHARD_DIR, else /dev/shm)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    base = shard_folder(args.dir)
    found, live, foreign = orphaned_memory(base), held_elsewhere(base), not_of_jobs(base)
    free, _ = free_and_held(found)
    removed = [left for left in free if args.yes and remove(left)]
    if args.json:
        listed = [
            {"path": str(left.path), "kind": left.kind, "bytes": left.n_bytes, "held": left.held_by,
             "removed": left in removed}
            for left in found
        ]  # fmt: skip
        others = [{"path": str(path), "held_by": f"processes of {container}"} for path, container in live]
        about = {"dir": str(base), "left": listed, "in_other_containers": others}
        about["not_of_jobs"] = [{"path": str(path), "why": why} for path, why in foreign]
        print(json.dumps(about, indent=2))
        return 0
    for path, container in live:
        print_line(f"{path}  left alone: a running job uses it, with processes of {container}")
    for path, why in foreign:
        print_line(f"{path}  left alone: {why}")
    if not found:
        print_line(f"dead jobs have left nothing in {base}")
        return 0
    _print_table([(left, _fate(left, left in removed, args.yes)) for left in found])
    if free and not args.yes:
        print_line(f"gba-hvd clean --yes removes {counted(free)}")
    return 0


def _fate(left: OrphanedMemory, is_removed: bool, is_asked: bool) -> str:
    if is_removed:
        return "removed"
    if left.held_by:
        return f"left alone: {left.held_by}"
    return "left alone: a process has come to use it" if is_asked else "would be removed"


def _print_table(found: Sequence[tuple[OrphanedMemory, str]]) -> None:
    """Memory with the fate of each; semaphores, of which there are many and none is large, by their number."""
    for left, fate in found:
        if left.kind != "semaphore":
            print_line(f"{left.n_bytes / 2**20:>10,.1f} MiB  {left.path}  {_WORDS[left.kind]}; {fate}")
    semaphores = [(left, fate) for left, fate in found if left.kind == "semaphore"]
    for fate, n in Counter(fate for _, fate in semaphores).items():
        print_line(f"{n:>10,}      {semaphores[0][0].path.parent}/sem.mp-*  {_WORDS['semaphore']}; {fate}")
