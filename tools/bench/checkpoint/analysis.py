"""What `bench checkpoint` concludes: stalls out of step times, what does not fit, and the figures people ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..harness import measure
from ..harness.measure import Row

CONTESTANTS = {
    "ours_full": "Checkpointer.save in the background, all rows",
    "ours_alone_full": "the same while nothing trains, as with plain",
    "ours_delta": "as ours_full, on top of a full one: rows changed since",
    "ours_mfu": "the same, every row having changed: the eighth updated most often",
    "ours_process_full": "ProcessCheckpointer.save, all rows: the same in a process of its own",
    "ours_process_delta": "the same, on top of a full one: rows changed since",
    "ours_process_mfu": "the same, every row having changed: the eighth updated most often",
    "torch_save": "torch.save of both state_dicts, in the training thread",
    "dcp": "torch.distributed.checkpoint.save, in the training thread",
    "dcp_async": "torch.distributed.checkpoint.async_save, defaults: copies everything, then writes in a thread",
    "dcp_async_kept": "the same with one stager for all saves: it copies into the memory of the save before",
    "torchsnapshot": "torchsnapshot 0.1.0: Snapshot.take, in the training thread",
    "torchsnapshot_async": "Snapshot.async_take",
    "plain": "the same bytes written to one file and synced, while nothing trains",
}
RESTORES = {
    "ours_full": ("ours",),
    "ours_delta": ("ours",),
    "ours_mfu": ("ours",),
    "torch_save": ("torch_load", "torch_load_mmap"),
    "dcp": ("dcp_load",),
    "torchsnapshot": ("torchsnapshot",),
}
UNTRAINED = ("ours_alone_full", "plain")
EVERY_ROW = 1.0  # changed for mfu: else fewer rows have changed than it may take
_SPARE_BYTES = 1 << 30
COPIES = {"dcp_async": 2.1, "dcp_async_kept": 2.1, "torchsnapshot_async": 2.1, "torch_load": 2.1}


@dataclass(frozen=True)
class Case:
    """A contestant, with the share of rows that changed since the checkpoint before."""

    contestant: str
    changed: float

    @property
    def name(self) -> str:
        return f"{self.contestant} {self.changed:g}" if self.contestant.endswith("_delta") else self.contestant


def cases(contestants: Sequence[str], changed: Sequence[float]) -> list[Case]:
    """Shares of changed rows make a difference to deltas only; the other process's is measured for the smallest."""
    shares_of = {"ours_delta": tuple(changed), "ours_process_delta": (min(changed),)}
    shares_of |= dict.fromkeys(("ours_mfu", "ours_process_mfu"), (EVERY_ROW,))
    found = []
    for name in contestants:
        shares = shares_of.get(name, (max(changed),))
        found += [Case(name, share) for share in shares]
    return found


def stall(quiet: Sequence[float], during: Sequence[float], blocked_s: float) -> dict[str, Any]:
    """How long training was held up by a save, out of the seconds of its steps before and during the save.

    stall_s: what the call took, and what steps took longer than the quiet median. Steps vary without a save, too;
    stall_net_s is without what as long a time of quiet training would have shown.
    """
    usual = median(quiet)

    def longer(steps: Sequence[float]) -> float:
        return sum(max(0.0, step - usual) for step in steps)

    slowed_s = longer(during)
    noise = longer(quiet) / sum(quiet) if sum(quiet) else 0.0
    return {
        "stall_s": blocked_s + slowed_s,
        "stall_net_s": blocked_s + max(0.0, slowed_s - noise * sum(during)),
        "blocked_s": blocked_s,
        "slowed_s": slowed_s,
        "longest_step_s": max(during, default=0.0),
        "steps": len(during),
        "quiet_step_s": usual,
        "quiet_longest_step_s": max(quiet),
        "quiet_noise": noise,
    }


def why_not(what: str, n_bytes: int, free_memory: int, free_disk: int) -> str | None:
    """Why a contestant or a restore of this size is left out; None: it fits.

    On the disk lies one checkpoint at a time, a full one and at most as much again on top of it.
    """
    memory = int(COPIES.get(what, 1.3) * n_bytes) + _SPARE_BYTES
    if memory > free_memory:
        return f"needs about {memory / 1e9:.1f} GB of memory, {free_memory / 1e9:.1f} GB are free"
    if (disk := int(2.1 * n_bytes) + _SPARE_BYTES) > free_disk:
        return f"needs about {disk / 1e9:.1f} GB of disk, {free_disk / 1e9:.1f} GB are free"
    return None


def headline(rows: Sequence[Row]) -> dict[str, Any]:
    """Ours against what it is compared with, by table bytes; medians over the runs, the largest peak.

    stall_vs_async_save, restore_vs_torch_load: ours over theirs, below 1 ours is better. Stalls are those of saving
    from a process of its own; ..._threads: from threads of the training process. write_efficiency: bytes per second
    until durable over those of plain writes, where nothing trains either; ..._training: while the bench trains, from
    threads, and ..._process from a process of its own. mfu_bytes_share: of a full save's bytes.
    """

    def ratio(column: str, ours: str, theirs: str) -> dict[str, float]:
        found = measure.medians(rows, ("contestant", "table_bytes"), column)
        return {
            str(n): found[ours, n] / value
            for (name, n), value in found.items()
            if name == theirs and (ours, n) in found and value
        }

    def against(way: str) -> dict[str, float]:
        theirs = measure.medians(rows, ("contestant", "table_bytes"), f"restore_s {way}")
        ours = measure.medians(rows, ("contestant", "table_bytes"), "restore_s ours")
        return {str(n): ours["ours_full", n] / value for (_, n), value in theirs.items() if ("ours_full", n) in ours}

    peaks: dict[str, dict[str, int]] = {}
    for row in rows:
        of_size = peaks.setdefault(str(row["table_bytes"]), {})
        of_size[row["contestant"]] = max(of_size.get(row["contestant"], 0), row["peak_extra_bytes"])
    return {
        "stall_vs_async_save": ratio("stall_s", "ours_process_full", "dcp_async"),
        "stall_net_vs_async_save": ratio("stall_net_s", "ours_process_full", "dcp_async"),
        "stall_vs_async_save_kept": ratio("stall_s", "ours_process_full", "dcp_async_kept"),
        "stall_vs_async_save_threads": ratio("stall_s", "ours_full", "dcp_async"),
        "write_efficiency": ratio("bytes_per_s", "ours_alone_full", "plain"),
        "write_efficiency_training": ratio("bytes_per_s", "ours_full", "plain"),
        "write_efficiency_training_process": ratio("bytes_per_s", "ours_process_full", "plain"),
        "mfu_bytes_share": ratio("bytes", "ours_mfu", "ours_full"),
        "restore_vs_torch_load": against("torch_load"),
        "restore_vs_torch_load_mmap": against("torch_load_mmap"),
        "peak_extra_bytes": {n: found["ours_full"] for n, found in peaks.items() if "ours_full" in found},
        "peak_extra_bytes_by_contestant": peaks,
    }


def figures(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians of every number: table bytes -> case -> column."""
    columns = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    return measure.by_groups(rows, "table_bytes", "case", [c for c in columns if c not in ("run", "table_bytes")])
