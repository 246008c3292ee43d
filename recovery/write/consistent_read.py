"""Copies rows out of memory while training continues, so that weights, slots and counter of a row are of one step.

Optimistic, after the seqlock of the Linux kernel: look at the shard's marks, copy, look again. Nothing is locked and
training never waits; a copy during which a step began is thrown away. Which rows are copied, and what becomes of them,
is decided elsewhere.

Why that is enough. Who updates a shard writes `begun = k`, then rows and counts, then `finished = k`. The reader finds
finished == begun == k, reading `finished` first, so step k was over and no later one had begun when it read `begun`.
It copies, and finds `begun` still k: no later step had begun when the copy was over, so nothing it read was younger
than step k. This needs that stores become visible in program order, and that loads are done in program order: x86-64
promises both (total store order), for numpy's and numba's plain loops and for memcpy (which fences its streaming
stores); Python adds no reordering. On a weaker machine, barriers would be needed at the four places where marks are
read and written.

A copy is made in pieces of about 0.1 ms, each checked on its own. So a step that begins in the middle costs one piece,
and what was copied before it counts; a shard without a pause of that length is read in ever smaller pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from recovery.errors import RecoveryError
from recovery.rows import RowIndices, RowSource, copy_rows, n_indices, slice_indices

PIECE_BYTES = 512 << 10
_PAUSE_S = 50e-6


class Busy(RecoveryError, TimeoutError):
    """A shard was being changed whenever one looked."""


@dataclass(frozen=True)
class ReadResult:
    """n_rows: how many of the rows asked for were copied, the first ones, at least one: all are of step `step`.

    n_torn: pieces that had to be copied again.
    """

    n_rows: int
    step: int
    n_torn: int


def read(
    source: RowSource,
    table: int,
    shard: int,
    indices: RowIndices,
    records: np.ndarray,
    counts: np.ndarray,
    *,
    timeout_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> ReadResult:
    """Copy rows into records, float32 [n, width], and counts, uint32 [n], as far as they are of one step.

    pause: sleeps for so long, or does something else, however long that takes, and returns True.

    Raises Busy when not even one row could be had in `timeout_s`.
    """
    n, slab = n_indices(indices), source.slab(table, shard)
    piece = max(1, PIECE_BYTES // records[:1].nbytes)
    done, step, n_torn = 0, 0, 0
    deadline: float | None = None
    while done < n:
        finished, begun = source.step_marks(shard)
        if finished == begun and (done == 0 or begun == step):
            stop = min(done + piece, n)
            copy_rows(slab, slice_indices(indices, done, stop), records[done:stop], counts[done:stop])
            if source.step_marks(shard)[1] == begun:
                done, step = stop, begun
                continue
            n_torn += 1
            piece = max(1, piece // 2)
        if done:
            break
        now = clock()
        if deadline is None:
            deadline = now + timeout_s
        if now > deadline:
            name = source.schema.tables[table].name
            raise Busy(
                f"shard {shard}: no {min(piece, n)} rows of {name!r} could be read between steps in {timeout_s:g} s "
                f"(step {begun} has begun, {finished} was the last one finished); "
                + ("its writer died or failed in the middle of it" if n_torn == 0 else "leave pauses between steps")
            )
        if pause(_PAUSE_S):
            deadline = None  # not looked at meanwhile
    return ReadResult(done, step, n_torn)
