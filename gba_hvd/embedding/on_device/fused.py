"""One pass over the rows of a step: sum the gradients of each, update its copy, write it to the host's memory.

`on_device.rows` does the same with torch's operators, a pass for each operation, after it has waited for the number of
distinct rows. Here nothing waits for the device.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gba_hvd.embedding.on_device.records import Records
from gba_hvd.embedding.on_device.row_gradients import SparseRowGrad
from gba_hvd.embedding.row_optimizers import SGD, Adagrad, Adam, RowAdagrad, RowOptimizer

_CHUNK = 32
_WRITTEN_AT_ONCE = 4096  # numbers, by a program
_WIDEST = 256  # of more numbers a row does not fit in registers
_WRITERS = 32  # programs that write to the host's memory
_RULES: Sequence[type[RowOptimizer]] = (SGD, Adagrad, RowAdagrad, Adam)  # by the number that the kernels have for them


def obstacle(device: torch.device, dim: int) -> str:
    """Why the kernels cannot run on this device, for rows of so many weights, in words; empty if they can."""
    if dim > _WIDEST:
        return f"rows of {dim} numbers; kernels are for up to {_WIDEST}"
    return _obstacle(device)


@functools.cache
def _obstacle(device: torch.device) -> str:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"{device} is no GPU"
    try:
        return "" if _try(device) else "Triton's kernels give wrong results"
    except Exception as error:  # of many kinds: it is not installed, finds no C compiler, does not know the GPU
        return f"Triton does not work here: {type(error).__name__}: {error}"


def _try(device: torch.device) -> bool:
    """Whether SGD of 64 rows, with a gradient of -1 for each, makes them 1, and writes that."""
    from gba_hvd.embedding.on_device import fused_kernels as kernels

    n, dim = 2 * _CHUNK, 16
    with _on(device):
        keys, grads = torch.arange(n, device=device), torch.full((n, dim), -1.0, device=device)
        sums, counts = torch.zeros_like(grads), torch.zeros(n, dtype=torch.int32, device=device)
        weights, rest = torch.zeros(n, dim, device=device), torch.zeros(n, 1, device=device)
        host = torch.zeros(n * (dim + 1), dtype=torch.int32, device=device)
        shape: dict[str, Any] = {"DIM": dim, "WIDE": 16, "CHUNK": _CHUNK}
        kernels.sum_chunks[(2,)](keys, keys, grads, sums, counts, n, **shape)
        kernels.update[(2,)](
            keys, sums, counts, weights, rest, rest.view(torch.int32), n, 1.0, 1.0, *[0.0] * 7,
            RULE=0, COUNTS=True, REST=1, **shape,
        )  # fmt: skip
        kernels.write[(2,)](
            keys, weights.view(torch.int32), rest.view(torch.int32), host, n, 1, len(host), 0,
            DIM=dim, REST=1, WIDE=32, CHUNK=16,
        )  # fmt: skip
        records = host.view(n, dim + 1)
        return bool((records[:, :dim].contiguous().view(torch.float32) == 1).all() and (records[:, dim] == 1).all())


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton's kernels run on the current device, whichever has their tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class FusedRows:
    """The rows of one group of tables, of which the device has copies."""

    def __init__(self, weights: Tensor, rest: Tensor, host: Records) -> None:
        """weights: float32 [rows, dim], by key; rest: float32 [rows, slots + 1], what follows them in the records."""
        from gba_hvd.embedding.on_device import fused_kernels  # needs Triton

        self._kernels, self._host = fused_kernels, host
        self._weights, self._rest = weights, rest

    def update(self, grad: SparseRowGrad, optimizer: RowOptimizer, scale: float, lr: float, step: int) -> None:
        """Apply a gradient to the copies. See `DeviceRows.apply` for what it does."""
        ordered, values = grad.sorted, grad.values.contiguous()
        keys, n, dim = ordered.keys, len(values), values.shape[1]
        sums, counts = torch.empty_like(values), torch.empty(n, dtype=torch.int32, device=values.device)
        shape: dict[str, Any] = {"DIM": dim, "WIDE": max(16, _power_of_2(dim)), "CHUNK": _CHUNK}
        grid = (-(-n // _CHUNK),)
        with _on(values.device):
            self._kernels.sum_chunks[grid](keys, ordered.order, values, sums, counts, n, **shape)
            self._host.writes.before_reading()  # those of the step before read the copies
            self._kernels.update[grid](
                keys, sums, counts, self._weights, self._rest, self._rest.view(torch.int32), n, scale,
                *_numbers(optimizer, lr, step), RULE=_RULES.index(type(optimizer)), COUNTS=grad.counts_accesses,
                REST=self._rest.shape[1], **shape,
            )  # fmt: skip

    def write(self, grad: SparseRowGrad) -> None:
        """Write the records of these rows to the host's memory, beside what is asked of the device from now on."""
        host, keys = self._host, grad.sorted.keys
        whole, weights, rest = (one.view(torch.int32) for one in (host.flat, self._weights, self._rest))
        wide = _power_of_2(host.width)
        with host.writes.after(keys):
            self._kernels.write[(_WRITERS,)](
                keys, weights, rest, whole, len(keys), host.n_shards, host.region, host.at,
                DIM=weights.shape[1], REST=rest.shape[1], WIDE=wide,
                CHUNK=max(1, _WRITTEN_AT_ONCE // wide),
            )  # fmt: skip


def _numbers(optimizer: RowOptimizer, lr: float, step: int) -> tuple[float, ...]:
    """lr, decay, eps, beta1, left1, beta2, left2, root2 of `fused_kernels.update`; those that a rule has not are 0."""
    decay, eps = (float(getattr(optimizer, name, 0.0)) for name in ("weight_decay", "eps"))
    if not isinstance(optimizer, Adam):
        return lr, decay, eps, 0.0, 0.0, 0.0, 0.0, 0.0
    beta1, beta2 = optimizer.betas
    root2 = math.sqrt(1 - beta2**step)
    return lr / (1 - beta1**step), decay, eps, beta1, 1 - beta1, beta2, 1 - beta2, root2


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
