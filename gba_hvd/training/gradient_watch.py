"""Whether the script changes dense gradients between `backward()` and `step()`: those of rows do not follow.

Torch counts the in-place changes of every tensor, so nothing is read: a hook notes the count whenever a backward pass
has added to a gradient, and what differs from that at `step()` was written by other code. Looks at the first
micro-batches of a process alone; then the hooks are removed.
"""

from __future__ import annotations

from torch import Tensor

from gba_hvd.gradients.dense_gradients import DenseGradients

_MICRO_BATCHES = 50


class GradientWatch:
    """One worker's. Belongs to the training thread."""

    def __init__(self, dense: DenseGradients) -> None:
        self._dense = dense
        self._added: dict[int, Tensor] = {}  # by parameter: its gradient, since a backward pass has added to it
        self._counts: dict[int, tuple[Tensor, int]] = {}  # by tensor that owns gradients: how often it was changed
        self._is_found = False
        self._left = _MICRO_BATCHES
        number_of = {id(p): number for number, p in enumerate(dense.parameters)}
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p: self._note(p, number_of[id(p)])) for p in dense.parameters
        ]
        self.clear()

    def _note(self, parameter: Tensor, number: int) -> None:
        if (grad := parameter.grad) is not None:
            # A new one: what an earlier pass has left was thrown away, and rows have both.
            self._is_found |= self._added.get(number, grad) is not grad
            self._added[number] = grad
            self._count(grad)

    def _count(self, tensor: Tensor) -> None:
        owner = tensor if tensor._base is None else tensor._base  # which counts the changes of all views
        self._counts[id(owner)] = owner, owner._version

    def clear(self) -> None:
        """All gradients are zero, those of rows as well."""
        self._added, self._counts, self._is_found = {}, {}, False

    @property
    def is_changed(self) -> bool:
        """Whether other code has written gradients since the backward passes of this micro-batch."""
        if self._is_found or not self._hooks:
            return self._is_found
        parameters = self._dense.parameters
        if any(parameters[number].grad is not grad for number, grad in self._added.items()):
            return True
        if self._added:
            return any(owner._version != count for owner, count in self._counts.values())
        return not self._dense.is_zero  # no backward pass has reached a parameter

    def scaled(self, is_changed: bool) -> None:
        """All gradients were scaled, those of rows as well, and are views of the flat buffer. is_changed: before"""
        found = self._added
        self.clear()
        self._is_found = is_changed
        parameters = self._dense.parameters
        self._added = {number: grad for number in found if (grad := parameters[number].grad) is not None}
        self._count(self._dense.flat)

    def next(self) -> None:
        """The gradients of a micro-batch are taken in."""
        self._left -= 1
        if self._left <= 0:
            self.stop()
        self.clear()

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
