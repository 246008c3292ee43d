"""What runs of `bench gpu` amount to: medians by size and contestant, ratios, and the tables that a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..harness import measure
from ..harness.measure import Row

MEASURED, NOT_RUN = "measured", "not run"  # states of a row; any other: why it failed
SIZE = ("rows", "dim", "batch")
AGAINST = ("hbm", "ours_host")
FIGURES = (
    "samples_per_s", "ms_per_step", "cpu_ms_per_step", "gpu_peak_bytes", "gpu_in_use_bytes", "host_bytes",
    "first_step_s", "loss", "load",
)  # fmt: skip
COLUMNS = {
    "contestant": "{peer}", "samples/s": "{samples_per_s:,.0f}", "ms/step": "{ms_per_step:.2f}",
    "CPU ms": "{cpu_ms_per_step:.2f}", "GPU MiB": "{gpu_mib:,.0f}", "host GiB": "{host_gib:.2f}",
    "first step s": "{first_step_s:.1f}", "loss": "{loss:.4f}",
    **{f"/ {peer}": f"{{vs_{peer}:.2f}}" for peer in AGAINST},
}  # fmt: skip


def of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each size: rows, dim, batch, names of the GPUs; by contestant its medians and ratios, or its state."""
    sizes = dict.fromkeys(tuple(row[name] for name in SIZE) for row in rows)
    found = []
    for size in sizes:
        some = [row for row in rows if tuple(row[name] for name in SIZE) == size]
        peers = {peer: _of_peer(peer, some) for peer in dict.fromkeys(row["peer"] for row in some)}
        gpus = sorted({row["gpu"] for row in some})
        found.append({**dict(zip(SIZE, size, strict=True)), "gpus": gpus, "peers": peers})
    return found


def _of_peer(peer: str, rows: Sequence[Row]) -> dict[str, Any]:
    mine = [row for row in rows if row["peer"] == peer]
    measured = [row for row in mine if row["state"] == MEASURED]
    if not measured:
        return {"state": mine[-1]["state"], "why": mine[-1]["why"]}
    found: dict[str, Any] = {"state": MEASURED, "runs": len(measured)}
    found |= {name: median(row[name] for row in measured) for name in FIGURES}
    found["said"] = list(measured[-1].get("said", ()))
    return found | {f"vs_{other}": ratio(rows, peer, other) for other in AGAINST}


def ratio(rows: Sequence[Row], peer: str, other: str) -> float | None:
    """Samples/s over those of another: the median over runs of one number on one GPU. None: there is no such pair."""
    speeds = {(row["peer"], row["run"], row["gpu"]): row["samples_per_s"] for row in rows if row["state"] == MEASURED}
    found = [
        speed / speeds[other, number, gpu]
        for (name, number, gpu), speed in speeds.items()
        if name == peer and (other, number, gpu) in speeds
    ]
    return median(found) if found else None


def is_settled(rows: Sequence[Row], contestant: tuple[int, int, int, str]) -> bool:
    """Whether a run of it has shown that this size cannot be measured."""
    return any(tuple(row[name] for name in (*SIZE, "peer")) == contestant and row["state"] != MEASURED for row in rows)


def in_words(row: Row) -> str:
    """The result of one run."""
    if row["state"] != MEASURED:
        return f"{row['state']}: {_first_line(row['why'])}"
    text = f"{row['samples_per_s']:,.0f} samples/s, {row['ms_per_step']:.2f} ms/step, loss {row['loss']:.4f}"
    if row.get("hit_share") is not None:
        text += f", {row['hit_share']:.0%} of rows found among the hot ones"
    return "; ".join([text, *row.get("said", ())])


def show(found: Sequence[Mapping[str, Any]]) -> None:
    for size in found:
        peers = size["peers"]
        others = {peer: one for peer, one in peers.items() if one["state"] != MEASURED}
        lines = [_line(peer, one) for peer, one in peers.items() if peer not in others]
        lines += [{"peer": f"{peer}: {one['state']}"} for peer, one in others.items()]
        title = f"{size['rows']:,} rows x {size['dim']}, batch {size['batch']:,}, {' and '.join(size['gpus'])}, medians"
        measure.print_figures(title, COLUMNS, lines)
        for peer, text in ((peer, text) for peer, one in peers.items() for text in one.get("said", ())):
            print(f"{peer}: {text}")
        for peer, one in others.items():
            print(f"{peer}: {one['state']}: {_first_line(one['why'])}")
        if len(size["gpus"]) > 1:
            print("medians are over runs on different GPUs, ratios over pairs of runs on the same one")


def _line(peer: str, one: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {"gpu_mib": one["gpu_peak_bytes"] / 2**20, "host_gib": one["host_bytes"] / 2**30}
    return {"peer": peer, **one, **sizes}


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]
