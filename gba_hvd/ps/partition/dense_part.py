"""The dense parameters one server holds, stepped by the user's torch optimizer, in a file that survives the server.

The server steps a private copy. Each step is then published: values and optimizer state go into that one of the file's
two halves, the one that `active` does not name, then one aligned int64, `active`, names step and half. So a process
killed at any instruction leaves the last complete step, for `DensePart.open` and for readers. x86-64 store order is
assumed.

    head    int64 [512]      magic, active = 2 * step + half, then of each half: generation, place and room of its state
    about   JSON             tensors, optimizer, dtype; never changes
    values  [n] twice        at fixed offsets, so that a reader maps them once
    shown   [n] twice        only where an update rule shows workers other values than the model's
    state   two areas        placed and enlarged as the optimizer's state appears

A half's generation is odd while it is written; a reader takes what it copied only if the generation stayed the same.
Not decided here: which tensors a server holds, what the gradient of a step is, when to step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd.errors import BadInput, ShardMemoryError, StateMismatch
from gba_hvd.ps.dense_file import (
    AREA_HEAD,
    DenseFile,
    DenseTensor,
    StatePlan,
    crc_of,
    is_raw,
    kind_of,
    signature,
)
from gba_hvd.torch_optimizers import build
from recovery import state_codec


class DensePart:
    """Made with `create` or `open`; belongs to one process and one thread. `close()` may be called twice.

    step:    the last complete step
    values:  [n], a read-only view of the current values, all tensors in order; it changes in place with each step
    shown:   the same of what workers are shown: `values`, unless a rule says otherwise
    tensors: what the values are
    """

    def __init__(self, file: DenseFile) -> None:
        self._file = file
        self.tensors: tuple[DenseTensor, ...] = file.tensors
        self._spec: dict[str, Any] = file.about["optimizer"]
        flat, gradient = np.zeros(file.n, np.float32), np.zeros(file.n, np.float32)
        self._flat, self._gradient = flat, gradient
        self.values = flat.view()
        self.values.flags.writeable = False
        self.shown = np.zeros(file.n, np.float32) if file.shows else self.values
        self.step, self._plan = -1, StatePlan.of([], ())
        self._state_views: dict[int, list[Tensor]] = {0: [], 1: []}
        ends = np.cumsum([0, *(t.size for t in self.tensors)])
        self._views = [
            torch.from_numpy(flat[a:b]).view(t.shape) for t, a, b in zip(self.tensors, ends[:-1], ends[1:], strict=True)
        ]
        self._params = [view.detach().requires_grad_() for view in self._views]
        for param, t, a in zip(self._params, self.tensors, ends[:-1], strict=True):
            param.grad = torch.from_numpy(gradient[a : a + t.size]).view(t.shape)
        self._optimizer = self._build()

    @classmethod
    def create(
        cls,
        path: Path,
        tensors: Sequence[DenseTensor],
        optimizer: Mapping[str, Any],
        values: np.ndarray,
        state: Sequence[Mapping[str, Any]],
        step: int,
        shown: np.ndarray | None = None,
    ) -> DensePart:
        """Make the file at `path`, in place of an older one, complete from the first moment it is visible there.

        optimizer: as of `torch_optimizers.spec_of`. values: [n]. state: of each tensor, as in `optimizer.state[p]`;
        an empty dict leaves what the optimizer begins with. shown: [n], what workers are to see in place of the values.
        Readers of an older file still see that one.

        Raises BadInput when the arguments do not fit each other, ShardMemoryError when the file cannot be made.
        """
        n = sum(t.size for t in tensors)
        for given in (values, *(() if shown is None else (shown,))):
            if given.shape != (n,) or given.dtype != np.float32:
                raise BadInput(f"expected {n} values of float32 for {len(tensors)} tensors, got {kind_of(given)}")
        if len(state) != len(tensors):
            raise BadInput(
                f"expected optimizer state for {len(tensors)} tensors, got {len(state)} (empty dicts will do)"
            )
        for t in tensors:
            if not 0 <= t.group < len(optimizer["groups"]):
                raise BadInput(f"{t.name} is in group {t.group}, the optimizer has {len(optimizer['groups'])} groups")
        temporary = path.with_name(f"{path.name}.new-{os.getpid()}")
        about = {
            "tensors": [asdict(t) for t in tensors], "optimizer": dict(optimizer), "dtype": "float32",
            "shows": shown is not None,
        }  # fmt: skip
        part = None
        try:
            part = cls(DenseFile.create(temporary, about))
            part._flat[:] = values
            part._set_state(state)
            if shown is not None:
                part.shown[:] = shown
            part._publish(step)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            if part is not None:
                part.close()
            raise
        part._file.path = path
        return part

    @classmethod
    def open(cls, path: Path) -> DensePart:
        """What an earlier process left at `path`, as of its last complete step.

        Raises ShardMemoryError when there is no such file or it is damaged.
        """
        part = cls(DenseFile.open(path))
        part._load()
        return part

    def step_(
        self, grad: np.ndarray, lrs: Sequence[float], step: int, ahead: float = 0.0,
        settings: Sequence[Mapping[str, Any]] = (),
    ) -> None:  # fmt: skip
        """Step the optimizer once, then publish. If anything raises, all is as after the last complete step.

        grad: [n], the gradient of the step. lrs: learning rate of each group. step: later than the last one.
        ahead: where workers are shown other values, these are those after the step plus so many times the step.
        settings: other settings of each group that were changed, from this step on; empty: none.
        """
        self._check(step)
        if grad.shape != self._gradient.shape or grad.dtype != self._gradient.dtype:
            raise BadInput(f"step {step}: expected a gradient of {kind_of(self._gradient)}, got {kind_of(grad)}")
        if len(lrs) != len(self._optimizer.param_groups):
            raise BadInput(
                f"step {step}: expected a learning rate for each of {len(self._optimizer.param_groups)} groups, "
                f"got {len(lrs)}"
            )
        try:
            before = self._flat.copy() if self._file.shows else None
            self._gradient[:] = grad
            for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
                group["lr"] = float(lr)
            for group, changed in zip(self._optimizer.param_groups, settings, strict=False):
                group.update(changed)
            if self._params:
                self._optimizer.step()
            for param, view in zip(self._params, self._views, strict=True):
                if param.data_ptr() != view.data_ptr():  # an optimizer that puts a new tensor into `param.data`
                    param.data = view.copy_(param.detach())
            if before is not None:
                np.subtract(self._flat, before, out=self.shown)
                self.shown *= np.float32(ahead)
                self.shown += self._flat
            self._publish(step)
        except BaseException:
            self._load()
            raise

    def put_(
        self, values: np.ndarray, momentum: np.ndarray, shown: np.ndarray | None, lrs: Sequence[float], step: int
    ) -> None:
        """Take a step that a rule made in the optimizer's place, then publish; as `step_` when anything raises.

        values, momentum: [n], after the step; shown: [n] where there is something to show, or None.
        """
        self._check(step)
        try:
            self._flat[:] = values
            for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
                group["lr"] = float(lr)
            at = 0
            for param in self._params:
                buffer = torch.from_numpy(momentum[at : at + param.numel()]).view(param.shape)
                self._optimizer.state[param]["momentum_buffer"] = buffer
                at += param.numel()
            if shown is not None:
                self.shown[:] = shown
            self._publish(step)
        except BaseException:
            self._load()
            raise

    def replace_(self, values: np.ndarray | None, state: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Other values [n], other optimizer state, or both, as of the same step. If anything raises, all is as before.

        Readers that ask for a newer step than this one do not see it.
        """
        try:
            if values is not None:
                self._flat[:] = values
            if state is not None:
                self._set_state(state)
            self._publish(self.step)
        except BaseException:
            self._load()
            raise

    def skip_(self, step: int) -> None:
        """Publish the same values under a new step number (a step this server missed)."""
        self._check(step)
        self._file.activate(step, self._file.half)
        self.step = step

    def state(self) -> list[dict[str, Any]]:
        """The optimizer's state of each tensor, copies, as `create` takes it; bit-exact."""
        copied: list[dict[str, Any]] = state_codec.decode(state_codec.encode(self._state()))
        return copied

    @property
    def is_newest(self) -> bool:
        """Whether no other server process has published a step to the file since this part loaded it."""
        return self._file.step == self.step

    @property
    def path(self) -> Path:
        return self._file.path

    def close(self) -> None:
        """Let go of the file; it stays where it is."""
        self._state_views = {0: [], 1: []}
        self._file.close()

    # -----------------------------------------------------------------------------------------------------------------

    def _check(self, step: int) -> None:
        if step <= self.step:
            raise StateMismatch(
                f"step {step} cannot be taken: the dense part at {self._file.path} has {self.step} already"
            )

    def _build(self) -> torch.optim.Optimizer:
        by_group: list[list[Tensor]] = [[] for _ in self._spec["groups"]]
        for tensor, param in zip(self.tensors, self._params, strict=True):
            by_group[tensor.group].append(param)
        return build(self._spec, by_group)

    def _state(self) -> list[dict[str, Any]]:
        states = self._optimizer.state
        return [dict(states[param]) if param in states else {} for param in self._params]

    def _set_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        copied = state_codec.decode(state_codec.encode([dict(entries) for entries in state]))
        for param, entries in zip(self._params, copied, strict=True):
            if entries:
                self._optimizer.state[param] = entries

    def _publish(self, step: int) -> None:
        state = self._state()
        if self._plan.signature != (found := signature(state)):
            self._plan, self._state_views = StatePlan.of(state, found), {0: [], 1: []}
        plan, file, half = self._plan, self._file, 1 - self._file.half
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        plain = {i: other for i, e in enumerate(state) if (other := {k: v for k, v in e.items() if not is_raw(v)})}
        changing = state_codec.encode([groups, plain])
        small = plan.directory + changing
        file.begin(half)
        if file.reserve(half, plan.end + len(small)):
            self._state_views = {0: [], 1: []}  # the file is mapped again
        area = file.area(half)
        self._state_views[half] = self._state_views[half] or [
            area[a:b].view(kind).view(shape) for a, b, kind, shape in plan.spans
        ]
        file.values(half)[:] = self._flat
        if file.shows:
            file.shown(half)[:] = self.shown
        raw = (v for entries in state for v in entries.values() if is_raw(v))
        for state_view, tensor in zip(self._state_views[half], raw, strict=True):
            state_view.copy_(tensor)
        area[plan.end : plan.end + len(small)] = torch.frombuffer(bytearray(small), dtype=torch.uint8)
        head = (plan.end, len(plan.directory), len(changing))
        area[:AREA_HEAD].view(torch.int64)[:4] = torch.tensor([*head, crc_of(head, small)])
        file.finish(half)
        file.activate(step, half)  # last: from here on this is the step
        self.step = step

    def _load(self) -> None:
        """Make the private copy what the active half is."""
        file = self._file
        self.step, self._flat[:] = file.step, file.values(file.half)
        if file.shows:
            self.shown[:] = file.shown(file.half)
        area = file.area(file.half)
        end, n_directory, n_changing, crc = area[:AREA_HEAD].view(torch.int64)[:4].tolist()
        small = area[end : end + n_directory + n_changing].numpy().tobytes()
        if crc != crc_of((end, n_directory, n_changing), small):
            raise ShardMemoryError(f"{file.path} is damaged at step {self.step}: remove it; a checkpoint may have it")
        groups, plain = state_codec.decode(small[n_directory:])
        self._optimizer = self._build()
        for group, hyper in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(hyper)
        for i, (param, entries) in enumerate(zip(self._params, state_codec.decode(small[:n_directory]), strict=True)):
            self._optimizer.state[param] = {
                key: plain[i][key]
                if at is None
                else area[at : at + n_bytes].clone().view(getattr(torch, dtype)).view(shape)
                for key, at, n_bytes, dtype, shape in entries
            }
