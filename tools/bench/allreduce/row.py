"""From what the workers of one run have measured to a row of the result."""

from __future__ import annotations

from collections.abc import Sequence

from ..harness.measure import Row


def row_of(ranks: Sequence[Row], started: float, batch: int, steps: int) -> Row:
    """What one run measured. The slowest worker's time counts; memory is that of the larger worker."""
    seconds = max(rank["seconds"] for rank in ranks)
    row = {
        "steps": steps,
        "samples_per_s": len(ranks) * batch * steps / seconds,
        "ms_per_step": 1000 * seconds / steps,
        "cpu_ms_per_step": 1000 * sum(rank["cpu_s"] for rank in ranks) / len(ranks) / steps,
        "startup_s": max(rank["first_step_unix_s"] for rank in ranks) - started,
        "peak_own_bytes": max(rank["peak_own_bytes"] for rank in ranks),
        "loss_first": sum(rank["loss_first"] for rank in ranks) / len(ranks),
        "loss_last": sum(rank["loss_last"] for rank in ranks) / len(ranks),
    }
    if "shared_bytes" in ranks[0]:
        copies = sum(rank["shared_proportional_bytes"] for rank in ranks) / ranks[0]["shared_bytes"]
        row |= {"table_bytes": ranks[0]["shared_bytes"], "table_copies_per_host": copies}
    return row
