"""What is trained, and what a contestant is to the worker that measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..allreduce.shape import DenseDLRM
from ..harness import dlrm
from .clicks import Clicks


class NotRun(Exception):
    """A contestant cannot be run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """26 tables of `n_rows` rows of `dim` each.

    rule: of the rows, "adagrad" or "row_adagrad"; the dense parameters have element-wise Adagrad
    hot_rows: of all tables, those that a contestant with some of the rows on the GPU keeps there
    device: of the dense modules, as torch names it
    seed: of the dense values, which all contestants start with
    """

    n_rows: int
    dim: int
    rule: str
    hot_rows: int
    device: str
    seed: int

    @property
    def spread(self) -> float:
        """Rows start between minus this and this, or with the same standard deviation."""
        return float(self.n_rows**-0.5)

    def dense(self) -> DenseDLRM:
        """Bottom MLP 512-256-dim, dot products of all pairs, top MLP 512-256-1, on the device."""
        bottom = (dlrm.N_DENSE, 512, 256, self.dim)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return DenseDLRM(dlrm.N_TABLES, bottom, (512, 256, 1)).to(self.device)


@dataclass(frozen=True)
class Training:
    """A contestant that is ready to train.

    step: trains on the next batch, the copies to the device included, and returns the loss, a scalar on the device,
    without waiting for it
    finish: after the last step: `host_bytes` of tables in host memory, optimizer slots included, and what else the
    contestant reports
    """

    step: Callable[[], Tensor]
    finish: Callable[[], dict[str, Any]]


def adagrad(*groups: nn.Module) -> torch.optim.Optimizer:
    """Element-wise Adagrad, a group of parameters for each module."""
    found = [{"params": list(group.parameters())} for group in groups]
    return torch.optim.Adagrad(found, lr=dlrm.LEARNING_RATE, eps=dlrm.EPS)


def plain_step(
    setting: Setting, clicks: Clicks, optimizer: torch.optim.Optimizer, logits_of: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], Tensor]:
    """`Training.step` of a contestant that takes batches as they are. logits_of: (ids, dense), on the device -> [B]"""
    numbers = iter(range(len(clicks)))

    def step() -> Tensor:
        i = next(numbers)
        ids, dense, label = (
            part[i].to(setting.device, non_blocking=True) for part in (clicks.ids, clicks.dense, clicks.label)
        )
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(logits_of(ids, dense), label)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
