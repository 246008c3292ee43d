"""One server's part of the model: its shards, its dense tensors, the pushes that wait. Applies a step once.

Owns the buffer and the dense part; uses the host's shard memory, of which it is the only writer while the job is in an
asynchronous mode. What a kill leaves behind, in the order of `apply`:

    before `begin`     nothing of the step; its pushes are gone with the process
    rows in part       marks say begun > finished: the shards missed a step, which `resume` counts
    rows, not dense    the dense part is as of the step before: it missed this one, counted too
    after both         the step is applied; asked again, the server says so
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd import state_codec
from gba_hvd.buffer import GradientBuffer, StoredPush, merge_pushes
from gba_hvd.gradients import RowGrad, average_over_contributors
from gba_hvd.ps import protocol
from gba_hvd.ps.dense import DensePart, DenseTensor
from gba_hvd.ps.protocol import Applied, Apply, Enter, ProtocolError
from gba_hvd.row_optimizers import RowOptimizer
from gba_hvd.shard.memory import ShardMemory


@dataclass(frozen=True)
class Limits:
    """What a server holds at most. buffer_bytes: pushes that wait for their step."""

    buffer_bytes: int = 4 << 30


class Part:
    """Not thread-safe: belongs to the server's main thread."""

    def __init__(
        self, enter: Enter, dense: DensePart, memory: ShardMemory, optimizer: RowOptimizer, limits: Limits
    ) -> None:
        self.enter, self.dense, self._memory, self._optimizer, self._limits = enter, dense, memory, optimizer, limits
        self.mine = np.array(enter.shard_servers) == enter.me  # bool [S]
        self.shards = np.flatnonzero(self.mine)
        self._extra = int(enter.row_average == "contributors")
        self._dims = [group.dim + self._extra for group in memory.layout.groups]
        self._names = [name for name, _, _ in enter.tensors]
        self._sizes = [int(np.prod(shape)) for _, shape, _ in enter.tensors]
        self.n_dense = sum(self._sizes)
        self.buffer = GradientBuffer()
        self._last: Applied | None = None

    @classmethod
    def begin(
        cls,
        enter: Enter,
        frames: Sequence[Any],
        path: Path,
        memory: ShardMemory,
        optimizer: RowOptimizer,
        limits: Limits,
    ) -> Part:
        """Take over from the workers. Frames: dense values, optimizer state."""
        if len(frames) != 2:
            raise ProtocolError(f"Enter comes with two frames, got {len(frames)}")
        if len(enter.shard_servers) != memory.layout.n_shards:
            raise ProtocolError(f"{len(enter.shard_servers)} shards, this job has {memory.layout.n_shards}")
        values = protocol.array_of(frames[0], "float32", "dense values")
        tensors = [DenseTensor(name, tuple(shape), group) for name, shape, group in enter.tensors]
        expected = sum(int(np.prod(t.shape)) for t in tensors)
        if len(values) != expected:
            raise ProtocolError(f"{len(values)} dense values, the tensors have {expected}")
        state = state_codec.decode(bytes(frames[1]))
        dense = DensePart.create(path, tensors, enter.optimizer, values, state, enter.position.step)
        part = cls(enter, dense, memory, optimizer, limits)
        memory.claim(part.shards)
        return part

    @classmethod
    def resume(
        cls, enter: Enter, path: Path, memory: ShardMemory, optimizer: RowOptimizer, limits: Limits
    ) -> tuple[Part, int]:
        """Go on where a server that died stopped. Returns the part, and how many shards were in the middle of a step."""
        part = cls(enter, DensePart.open(path), memory, optimizer, limits)
        marks = memory.marks()
        torn = [int(s) for s in part.shards if marks.begun[s] > marks.finished[s]]
        for shard in torn:
            memory.set_ready(shard, int(marks.begun[shard]))
        memory.claim(part.shards)
        return part, len(torn)

    def begun_and_done(self, step: int) -> tuple[bool, bool]:
        """Whether anything of this step, and whether all of it, was applied here."""
        marks = self._memory.marks()
        begun, finished = marks.begun[self.shards], marks.finished[self.shards]
        return (
            bool((begun >= step).any()) or self.dense.step >= step,
            bool((finished >= step).all()) and self.dense.step >= step,
        )

    def push(self, micro: int, serial: int, frames: Sequence[Any]) -> bool:
        """Store a checked push; False when there is no room. Raises ProtocolError; then nothing is stored."""
        if len(frames) != 2:
            raise ProtocolError(f"Push comes with two frames, got {len(frames)}")
        dense = protocol.array_of(frames[0], "float32", "dense gradient")
        rows = protocol.array_of(frames[1], "float32", "row gradients")
        if len(dense) != self.n_dense:
            raise ProtocolError(f"a dense gradient of {len(dense)} numbers, expected {self.n_dense}")
        if self.buffer.n_bytes + dense.nbytes + rows.nbytes > self._limits.buffer_bytes:
            return False
        protocol.check_finite(dense, self._names, self._sizes)
        protocol.check_row_message(self._memory.layout, rows, self.mine, self._extra)
        self.buffer.add(StoredPush(micro, serial, dense, rows))
        return True

    def apply(self, request: Apply) -> Applied:
        """Apply a decided step. Asked again, says the same and does nothing."""
        if self._last is not None and self._last.step == request.step:
            return self._last
        if request.step <= self.dense.step:
            return Applied(request.step)
        found = self.buffer.take((m.micro, m.serial) for m in request.members)
        self.buffer.forget_before(request.oldest_serial)
        pushes = [(found[m.micro, m.serial], m.weight) for m in request.members if (m.micro, m.serial) in found]
        missing = [m.micro for m in request.members if (m.micro, m.serial) not in found]
        dense, rows = merge_pushes(pushes, self.n_dense, self._dims)
        memory, layout = self._memory, self._memory.layout
        due = self.shards[memory.marks().begun[self.shards] < request.step]
        scale = request.scale
        if self._extra:
            rows, scale = [average_over_contributors(grad) for grad in rows], 1.0
        memory.begin(due, request.step)
        for group, grad in zip(layout.groups, rows, strict=True):
            if len(due) < len(self.shards):
                wanted = np.isin(grad.keys % layout.n_shards, due)
                grad = RowGrad(grad.keys[wanted], grad.values[wanted])
            self._optimizer.update_(memory.flat, layout, group, grad, scale, request.row_lr, request.step)
        memory.finish(due, request.step)
        if pushes:
            dense *= np.float32(request.scale)
            self.dense.step_(dense, request.lrs, request.step)
        else:  # nothing came through to this server: it misses the step
            self.dense.skip_(request.step)
        self._last = Applied(request.step, missing, len(self.shards) - len(due))
        return self._last

    def skip(self, step: int) -> int:
        """This server missed a decided step, having lost its pushes; returns how many of its shards missed it."""
        marks = self._memory.marks()
        behind = [int(s) for s in self.shards if marks.finished[s] < step]
        for shard in behind:
            self._memory.set_ready(shard, step)
        if self.dense.step < step:
            self.dense.skip_(step)
        return len(behind)

    def rows_for(self, frames: Sequence[Any]) -> list[np.ndarray]:
        return gather(self._memory, self.mine, frames)

    def export(self) -> tuple[int, np.ndarray, bytes]:
        """(step, dense values, optimizer state)"""
        return self.dense.step, self.dense.values.copy(), state_codec.encode(self.dense.state())

    def close(self) -> None:
        self.dense.close()


def gather(memory: ShardMemory, mine: np.ndarray, frames: Sequence[Any]) -> list[np.ndarray]:
    """Weights float32 [n, dim] of the keys (int64) of each group, checked. Safe beside a thread that applies."""
    from gba_hvd import kernels

    layout = memory.layout
    if len(frames) != len(layout.groups):
        raise ProtocolError(f"{len(frames)} frames of keys, expected one for each of {len(layout.groups)} groups")
    out = []
    for number, (group, frame) in enumerate(zip(layout.groups, frames, strict=True)):
        keys = protocol.array_of(frame, "int64", "keys")
        protocol.check_keys(layout, number, keys, mine)
        rows = np.empty((len(keys), group.dim), dtype=np.float32)
        kernels.gather_rows(memory.flat, layout.places(keys, group), 0, rows)
        out.append(rows)
    return out


def optimizer_of(spec: Mapping[str, Any]) -> RowOptimizer:
    """A row optimizer from its description (`describe_optimizer`)."""
    import importlib

    module, _, name = spec["class"].partition(":")
    made: RowOptimizer = getattr(importlib.import_module(module), name)(**spec["fields"])
    return made
