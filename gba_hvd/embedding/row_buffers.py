"""Memory for the rows of a forward pass and their gradients, used again once nothing refers to it.

Fresh memory of this size costs a page fault for every 4 KiB, more than what is done with it.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

_LEAST = 1 << 18  # numbers: what is smaller, the allocator keeps itself
_KEPT = 4  # arrays: rows and gradients of two steps overlap


class RowBuffers:
    """Owns the arrays that are free. Safe in several threads."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def empty(self, n_rows: int, dim: int) -> Tensor:
        """float32 [n_rows, dim], not initialised. Its memory is used again once nothing refers to it."""
        n = n_rows * dim
        if n < _LEAST:
            return torch.empty(n_rows, dim)
        memory = self._taken(n)
        rows = memory[:n].reshape(n_rows, dim)
        # Views of the tensor hold its memory, and that holds `rows`, which nothing else does.
        weakref.finalize(rows, self._give_back, memory).atexit = False
        return torch.from_numpy(rows)

    def zeros(self, n_rows: int, dim: int) -> Tensor:
        """float32 [n_rows, dim]"""
        return self.empty(n_rows, dim).zero_()

    def _taken(self, n: int) -> np.ndarray:
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()
            except IndexError:  # another thread was faster
                break
            if n <= len(memory) <= 2 * n:
                return memory
            self._free.insert(0, memory)
        return np.empty(n + n // 8, np.float32)  # (the next step has about as many)

    def _give_back(self, memory: np.ndarray) -> None:
        self._free.append(memory)
        del self._free[:-_KEPT]
