"""What every peer's worker does around its own training step: arguments, warm up, time, write the result."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ..harness.process_memory import forget_peak, shared_memory, status_bytes, touch
from .shape import SHAPES

Batch = TypeVar("Batch")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments that every worker takes."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--clicks", type=Path, required=True, help="folder of batches")
    parser.add_argument("--result", type=Path, required=True, help="folder that gets rank0.json, rank1.json")
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    return parser


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


def time_steps(
    args: argparse.Namespace, rank: int, step: Callable[[int], float], barrier: Callable[[], object], *,
    shared_files: str = "",
) -> None:  # fmt: skip
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
    forget_peak()
    barrier()

    start, cpu = time.perf_counter(), time.process_time()
    losses.extend(step(i) for i in range(args.warmup, args.warmup + args.steps))
    barrier()
    result["seconds"], result["cpu_s"] = time.perf_counter() - start, time.process_time() - cpu
    result["peak_own_bytes"] = status_bytes("VmHWM") - result.get("shared_resident_bytes", 0)
    result["loss_first"], result["loss_last"] = losses[0], float(np.mean(losses[-10:]))
    (args.result / f"rank{rank}.json").write_text(json.dumps(result))
