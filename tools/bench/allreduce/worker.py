"""What the peers' workers have in common: arguments, and one training step of a model that is an ordinary module."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ..harness import peer_worker
from .shape import SHAPES, Shape

Batch = TypeVar("Batch")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments that every worker takes."""
    found = peer_worker.parser(doc)
    found.add_argument("--shape", choices=SHAPES, required=True)
    return found


def arguments(doc: str | None) -> tuple[argparse.Namespace, Shape]:
    """Them, and the shape they name."""
    args = parser(doc).parse_args()
    return args, SHAPES[args.shape]


def training_step(
    batches: Sequence[tuple[Batch, Tensor]], logits: Callable[[Batch], Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[int], float]:
    """step(i), which trains on batch i of these, in turn, and returns the loss. batches: with labels, float32 [B]"""

    def step(i: int) -> float:
        batch, label = batches[i % len(batches)]
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(logits(batch), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
