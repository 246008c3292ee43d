"""How batches are read: the arguments of `batches` that are not about their order, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gba_hvd.errors import BadInput

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class ReadSettings:
    """num_workers: reader processes of this worker, 0: its own process reads.

    prefetch: batches that are read ahead, by each reader process or by the one thread that reads; None: 2, 0: none
    collate_fn: makes a batch of the samples of a map-style dataset
    pin_memory: tensors of a batch are copied to pinned memory
    worker_init_fn: called in each reader process with its number, before it reads
    """

    num_workers: int = 0
    prefetch: int | None = None
    collate_fn: Collate | None = None
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.num_workers):
            raise BadInput(f"num_workers must be a whole number, 0 or more, got {self.num_workers!r}")
        if self.prefetch is not None and not _is_count(self.prefetch):
            raise BadInput(f"prefetch must be a whole number, 0 or more, got {self.prefetch!r}")
        if self.prefetch == 0 and self.num_workers:
            raise BadInput(
                f"num_workers={self.num_workers} with prefetch=0: reader processes work ahead of the "
                "training or not at all. Leave prefetch out (2), or num_workers"
            )
        if self.worker_init_fn is not None and not self.num_workers:
            raise BadInput(
                "worker_init_fn is called in reader processes, and num_workers=0 starts none. Set "
                "num_workers, or leave worker_init_fn out"
            )
        for name in ("collate_fn", "worker_init_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise BadInput(f"{name} must be a function, got {getattr(self, name)!r}")
        if self.pin_memory and not torch.cuda.is_available():
            raise BadInput("pin_memory=True is for copies to a GPU, and torch finds none here. Leave pin_memory out")

    @property
    def n_readers(self) -> int:
        """How many batches may be read at the same time."""
        return max(1, self.num_workers)

    @property
    def depth(self) -> int:
        """How many batches are read ahead in all."""
        return self.n_readers * (2 if self.prefetch is None else self.prefetch)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
