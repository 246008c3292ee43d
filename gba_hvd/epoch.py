"""The order of an epoch's samples and the cutting into micro-batches and steps: by the seed, never by the workers.

The order is a keyed permutation evaluated where it is needed, so it takes no memory and any micro-batch can be found
by its index. Micro-batch i belongs to step i // M of the epoch; the last step of an epoch may be short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gba_hvd import kernels
from gba_hvd.errors import BadInput
from gba_hvd.shm.layout import table_seed
from recovery.catalog.epoch_position import EpochPosition


@dataclass(frozen=True)
class EpochPlan:
    """How an epoch of `n_samples` is cut: G = M x B samples a step, B a micro-batch."""

    n_samples: int
    global_batch: int
    micro_batch: int

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.global_batch < self.micro_batch or self.global_batch % self.micro_batch:
            b = max(1, self.micro_batch)
            nearest = b * max(1, (2 * self.global_batch + b - 1) // (2 * b))
            raise BadInput(
                f"global_batch must be a multiple of micro_batch, got {self.global_batch} and {self.micro_batch}; "
                f"the nearest is {nearest}"
            )
        if self.n_samples < 1:
            raise BadInput("the dataset has no samples")

    @property
    def n_micro(self) -> int:
        """M, the micro-batches of a full step."""
        return self.global_batch // self.micro_batch

    @property
    def n_steps(self) -> int:
        return -(-self.n_samples // self.global_batch)

    def micro_of_step(self, step: int) -> range:
        """Indices of the micro-batches of one step of the epoch."""
        return range(step * self.n_micro, min((step + 1) * self.n_micro, -(-self.n_samples // self.micro_batch)))

    def batches_of_step(self, step: int, together: int = 1) -> list[range]:
        """The micro-batches of one step in groups of `together` neighbours; an epoch's last group may be smaller."""
        micro = self.micro_of_step(step)
        return [micro[at : at + together] for at in range(0, len(micro), together)]

    def samples_of_micro(self, index: int) -> int:
        return min(self.micro_batch, self.n_samples - index * self.micro_batch)

    def samples_of_step(self, step: int) -> int:
        return min(self.global_batch, self.n_samples - step * self.global_batch)


SEGMENTS = 1 << 20  # of an epoch, at most


def run_number(epoch: int, segment: int) -> int:
    """One number for a segment of an epoch, which grows with both. An epoch of known length is its segment 0."""
    return epoch * SEGMENTS + segment


@dataclass(frozen=True)
class EpochOrder:
    """The sample at each position of one epoch, or of one segment of it.

    own: 0, or the digest of the order that the dataset has of its own: then that one's `rows` count where they are
    shuffled, not these
    n_shards, in_segment, shards: of an epoch in segments, its shards, those of a segment, and the digest of their
    names; 0 of any other epoch
    """

    n_samples: int
    seed: int
    epoch: int
    shuffle: bool = True
    own: int = 0
    segment: int = 0
    n_shards: int = 0
    in_segment: int = 0
    shards: int = 0

    def rows(self, first: int, count: int) -> np.ndarray:
        """int64 [count]: the samples at positions first, first + 1, ..."""
        if not self.shuffle:
            return np.arange(first, first + count, dtype=np.int64)
        out = np.empty(count, dtype=np.int64)
        kernels.shuffled(self.n_samples, first, np.uint64(table_seed(self.seed, f"epoch {self.epoch}")), out)
        return out


def position_in(state: Mapping[str, Any]) -> EpochPosition | None:
    """Where a job stands in its data, for the manifest; None: before its first epoch.

    state: of the job's position, with `cursor` and `order`, as a training state has it. That order may be of an epoch
    that has no step yet.
    """
    cursor, order = state["cursor"], state["order"]
    if cursor["epoch"] < 0:
        return None
    n_segments = 0
    if order is not None and order["epoch"] == cursor["epoch"]:
        n_segments = -(-order["n_shards"] // order["in_segment"]) if order["n_shards"] else 1
    return EpochPosition(cursor["epoch"], cursor["steps_done"], cursor["n_steps"], cursor["segment"], n_segments)


@dataclass
class SampleAccount:
    """Where every sample went. applied + dropped + lost = total, always."""

    total: int = 0
    applied: int = 0
    dropped: int = 0  # too stale, not finite (asynchronous modes), or of a step that overflowed
    not_finite: int = 0  # of the dropped ones; these two are not in checkpoints of older versions
    overflowed: int = 0
    lost: int = 0  # handed out, and gone with a failure
    shard_steps_missed: int = 0  # steps that one shard did not get because its worker died while applying them
    rows_lost: int = 0  # rows that went down with a host and started over
    steps_skipped: int = (
        0  # steps that no worker applied since gradients overflowed (`loss_scale`): samples are dropped
    )
    redone: int = 0  # of no sum: trained once, and again after the job rolled back to a checkpoint (full recovery)

    @property
    def dropped_for(self) -> dict[str, int]:
        """The dropped samples by reason; only reasons that there were."""
        by_reason = {"not_finite": self.not_finite, "overflow": self.overflowed}
        by_reason = {"stale": self.dropped - sum(by_reason.values()), **by_reason}
        return {reason: n for reason, n in by_reason.items() if n}

    @classmethod
    def of_state(cls, state: Mapping[str, int], *, was_asynchronous: bool) -> SampleAccount:
        """One of an older version has no reasons: without an asynchronous mode, only overflows dropped samples."""
        account = cls(**state)
        if "overflowed" not in state and not was_asynchronous:
            account.overflowed = account.dropped
        return account

    def rolled_back(self, now: SampleAccount) -> None:
        """Count again what came since: this is a checkpoint's account, and the job rolls back to it from `now`."""
        self.redone = now.redone + max(0, now.total - self.total)


def shares(n_micro: int, n_workers: int, together: int = 1) -> list[int]:
    """How many of a step's micro-batches each worker computes; uneven when they do not divide.

    together: a worker computes so many neighbours as one batch
    """
    groups = [min(together, n_micro - at) for at in range(0, n_micro, together)]
    return [sum(groups[worker::n_workers]) for worker in range(n_workers)]


def micro_batches_together(sync_micro_batch: int | None, global_batch: int, micro_batch: int) -> int:
    """How many micro-batches a worker computes as one batch in an allreduce step: `sync_micro_batch` / B, 1 for None.

    Raises BadInput for a size that is no multiple of B or does not divide G.
    """
    if sync_micro_batch is None:
        return 1
    n_micro = global_batch // micro_batch
    sizes = [micro_batch * n for n in range(1, n_micro + 1) if n_micro % n == 0]
    if sync_micro_batch not in sizes or isinstance(sync_micro_batch, bool | float):
        raise BadInput(
            f"sync_micro_batch={sync_micro_batch!r} with global_batch={global_batch} and micro_batch={micro_batch}: "
            "it is no multiple of micro_batch that divides global_batch; choose one of "
            f"{', '.join(map(str, sizes))}, or leave it out"
        )
    return sync_micro_batch // micro_batch
