"""Parameter servers on `torch.distributed.rpc`, as its tutorials build them, for comparison.

`TableServer` answers pulls and pushes of rows. `BatchUpdateServer` is the tutorial's batch-update parameter server
("Implementing Batch RPC Processing Using Asynchronous Executions"): a push is answered with the new dense parameters
when every worker's push of the step is in. Ids and row gradients travel, never whole tables.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

_served: Any = None  # by this process


def serve(server: Any) -> None:
    """Let other processes call the functions below; before `init_rpc`, so that no caller can be too early."""
    global _served  # noqa: PLW0603
    _served = server


def pull(ids: Tensor) -> Tensor:
    rows: Tensor = _served.pull(ids)
    return rows


def push(ids: Tensor, grads: Tensor) -> None:
    _served.push(ids, grads)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push_and_wait(ids: Tensor, grads: Tensor, dense_grad: Tensor) -> torch.futures.Future[Tensor]:
    answer: torch.futures.Future[Tensor] = _served.push(ids, grads, dense_grad)
    return answer


class TableServer:
    """One table float32 [n_rows, dim], trained by SGD as pushes come in. Calls run on several threads."""

    def __init__(self, n_rows: int, dim: int, lr: float) -> None:
        torch.set_num_threads(1)
        self._rows = torch.zeros(n_rows, dim)
        self._lr = lr
        self._lock = threading.Lock()

    def pull(self, ids: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, dim]"""
        return self._rows.index_select(0, ids)

    def push(self, ids: Tensor, grads: Tensor) -> None:
        """ids: int64 [n], distinct; grads: float32 [n, dim]"""
        with self._lock:
            self._rows.index_add_(0, ids, grads, alpha=-self._lr)


class BatchUpdateServer:
    """A table and a dense vector, stepped by Adagrad once per global step of `n_workers` pushes."""

    def __init__(self, rows: Tensor, dense: Tensor, n_workers: int, lr: float, eps: float) -> None:
        torch.set_num_threads(1)
        self._rows = torch.nn.Parameter(rows)
        self._dense = torch.nn.Parameter(dense)
        self._optimizer = torch.optim.Adagrad([self._rows, self._dense], lr=lr, eps=eps)
        self._n_workers = n_workers
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._answer: torch.futures.Future[Tensor] = torch.futures.Future()
        self._ids: list[Tensor] = []
        self._grads: list[Tensor] = []
        self._dense_grad = torch.zeros_like(self._dense)

    def pull(self, ids: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, dim]"""
        return self._rows.detach().index_select(0, ids)

    def push(self, ids: Tensor, grads: Tensor, dense_grad: Tensor) -> torch.futures.Future[Tensor]:
        """A worker's part of the global batch's gradient; the answer will be the new dense parameters [n]."""
        with self._lock:
            answer = self._answer
            self._ids.append(ids)
            self._grads.append(grads)
            self._dense_grad += dense_grad
            if len(self._ids) == self._n_workers:
                self._step()
                self._begin()
                answer.set_result(self._dense.detach().clone())
        return answer

    def _step(self) -> None:
        indices = torch.cat(self._ids).unsqueeze(0)
        shape = (int(self._rows.shape[0]), int(self._rows.shape[1]))
        self._rows.grad = torch.sparse_coo_tensor(indices, torch.cat(self._grads), shape, check_invariants=False)
        self._dense.grad = self._dense_grad
        self._optimizer.step()
