"""One flat buffer with the gradients of all dense parameters, and the numbers that travel with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gba_hvd.comm.traffic import ring
from gba_hvd.errors import BadInput


@dataclass(frozen=True)
class AllSum:
    """How a vector is summed over all workers.

    sum_: does so in place, [n] on the CPU. A collective; n_in_ring: of so many workers, who send it round as in a ring;
    is_in_ring: this worker is one of them
    """

    sum_: Callable[[Tensor], None]
    n_in_ring: int
    is_in_ring: bool = True

    def sent(self, n_bytes: int) -> int:
        """What this worker sends, and receives, for a vector of so many bytes."""
        return ring(n_bytes, self.n_in_ring) if self.is_in_ring else 0


class DenseGradients:
    """The gradients of all dense parameters as one flat buffer, so that a step needs one sum.

    `p.grad` of every parameter is a view of `flat` (on a GPU, from `collect_` on: each gradient that a backward pass
    adds to one that is there costs a kernel). `total` collects the worker's micro-batches of a step and ends with
    `n_extra` numbers that travel with them.

    flat:  [n]            gradient of the micro-batch, later of the step
    total: [n + n_extra]  weighted sum over micro-batches, at least float32; on a GPU [n]
    extra: [n_extra]      the numbers: the end of `total`, or, since each would cost a transfer, in the host's memory
    """

    def __init__(self, parameters: Sequence[Tensor], n_extra: int) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        kinds = {(p.dtype, p.device) for p in self._parameters}
        if len(kinds) > 1:
            raise BadInput(f"dense parameters must share one dtype and device, got {sorted(map(str, kinds))}")
        dtype, device = next(iter(kinds)) if kinds else (torch.float32, torch.device("cpu"))
        self.n = sum(p.numel() for p in self._parameters)
        self.flat = torch.zeros(self.n, dtype=dtype, device=device)
        total_dtype = torch.promote_types(dtype, torch.float32)  # the numbers that travel along are counts
        self.total = torch.empty(0, dtype=total_dtype, device=device)
        self._lay_out(n_extra)
        self._views: list[Tensor] = []
        at = 0
        for p in self._parameters:
            self._views.append(self.flat[at : at + p.numel()].view_as(p))
            at += p.numel()
        self.zero_()

    @property
    def parameters(self) -> list[Tensor]:
        return list(self._parameters)

    @property
    def sizes(self) -> list[int]:
        """Numbers in each parameter."""
        return [p.numel() for p in self._parameters]

    def resize_extra(self, n_extra: int) -> None:
        """Let another number of values travel with the gradients; `total` is empty afterwards."""
        if len(self.extra) != n_extra:
            self._lay_out(n_extra)

    def _lay_out(self, n_extra: int) -> None:
        if self.total.device.type == "cpu":
            self.total = self.total.new_zeros(self.n + n_extra)
            self.extra = self.total[self.n :]
        else:
            self.total = self.total.new_zeros(self.n)
            self.extra = torch.zeros(n_extra, dtype=self.total.dtype)

    def sum_(self, add_up: Callable[[Tensor], None]) -> None:
        """Sum `total` and the numbers over the workers. A collective.

        add_up: does so in place, with a tensor on the CPU
        """
        if self.total.device.type == "cpu":
            add_up(self.total)
        else:
            whole = torch.cat([self.total.cpu(), self.extra])
            add_up(whole)
            self.total.copy_(whole[: self.n])
            self.extra.copy_(whole[self.n :])

    def set_parameters_(self, which: Sequence[int], values: Tensor) -> None:
        """Overwrite some parameters, given by number; `values` [n] holds them one after the other."""
        at = 0
        with torch.no_grad():
            for number in which:
                p = self._parameters[number]
                p.copy_(values[at : at + p.numel()].view_as(p))
                at += p.numel()

    def zero_(self) -> None:
        """Clear the micro-batch's gradient: every `p.grad` is a view of zeros again, on a GPU None."""
        if self.flat.device.type == "cpu":
            self.flat.zero_()
            self._show()
        else:
            for p in self._parameters:
                p.grad = None

    def _show(self) -> None:
        for p, view in zip(self._parameters, self._views, strict=True):
            p.grad = view

    def make_step_(self, scale: float) -> None:
        """Make `total` times `scale` the gradient of all parameters, for their optimizer."""
        torch.mul(self.total[: self.n], scale, out=self.flat)
        self._show()

    def collect_(self) -> None:
        """Bring the micro-batch's gradient to `flat`, also where `p.grad` is None or a tensor of other code."""
        found = list(zip(self._parameters, self._views, strict=True))
        others = [(view, p.grad) for p, view in found if p.grad is not None and p.grad is not view]
        for p, view in found:
            if p.grad is None:
                view.zero_()
        if others:
            grads = [grad.to_dense() if grad.is_sparse else grad for _, grad in others]
            torch._foreach_copy_([view for view, _ in others], grads)
        if self.flat.device.type != "cpu":
            self._show()

    @property
    def is_zero(self) -> bool:
        """Whether no parameter has a gradient, wherever it is."""
        return not any(p.grad is not None and bool(p.grad.any()) for p in self._parameters)

    def scale_(self, factor: float) -> None:
        """Multiply the micro-batch's gradient, wherever it is; `p.grad` of every parameter is a view afterwards."""
        if self.flat.dtype == torch.float16:
            raise ValueError("Attempting to unscale FP16 gradients.")  # as torch says
        self.collect_()
        self.flat.mul_(factor)
        self._show()

    def take_over_(self, other: DenseGradients) -> None:
        """Make the gradient that another one collected, of parameters of the same sizes, that of these parameters."""
        self.flat.copy_(other.flat)
        self._show()

    def add_micro_batch_(self, weight: float) -> None:
        """total += weight * gradient of the micro-batch, which `collect_` brought to `flat`; then clear the latter."""
        if weight != 1.0:  # multiplied first, rounded as servers round it
            self.flat.mul_(weight)
        self.total[: self.n].add_(self.flat)
        self.zero_()

    def clear_total_(self) -> None:
        self.total.zero_()
        self.extra.zero_()

    def non_finite(self, names: Sequence[str]) -> str | None:
        """Name of the first parameter whose gradient is NaN or infinite."""
        for name, view in zip(names, self._views, strict=True):
            if not bool(torch.isfinite(view).all()):
                return name
        return None
