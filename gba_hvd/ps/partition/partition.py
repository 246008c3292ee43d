"""One server's part of the model: its shards, its dense tensors, the pushes that wait. Applies a step once.

Owns the buffer and the dense part; uses the host's shard memory, of which it is the only writer while the job is in an
asynchronous mode. What a kill leaves behind, in the order of `apply`:

    before `begin`     nothing of the step; its pushes are gone with the process
    rows in part       marks say begun > finished: the shards missed a step, which is counted
    rows, not dense    the dense part is as of the step before: it missed this one, counted too. In both cases the
                       successor does not apply the step again: its samples are not lost
    residuals          are of this step from before `begin` on, see `residuals`
    after both         the step is applied; asked again, the server says so

Where steps are clipped, `measure` merges the pushes before it is known how the step is to be applied. It changes
nothing, and what it merged is stored for `apply`: a server that dies in between has lost its pushes, as before `begin`.

A step that cannot be applied (the optimizer raises, the disk is full) is over too: what missed it is counted, and the
answer says why.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd import update_rules
from gba_hvd.compression.dense_deltas import DenseDeltas
from gba_hvd.embedding.apply_rows import apply_rows, by_row
from gba_hvd.embedding.row_gradients import RowGrad, average_over_contributors
from gba_hvd.embedding.row_optimizers import RowOptimizer, TableOptimizers
from gba_hvd.errors import NonFiniteGradient
from gba_hvd.gradients import clipping
from gba_hvd.mode_names import REPLICA_MODES
from gba_hvd.ps import messages, validation
from gba_hvd.ps.dense_file import DenseTensor
from gba_hvd.ps.messages import Applied, Apply, Enter, Measure, Measured, ProtocolError
from gba_hvd.ps.partition.central_copy import CentralCopy
from gba_hvd.ps.partition.dense_part import DensePart
from gba_hvd.ps.partition.gaps import GapMeter
from gba_hvd.ps.partition.push_buffer import BufferedPush, PushBuffer, merge_pushes
from gba_hvd.ps.partition.residuals import Residuals
from gba_hvd.ps.transport import MAX_FRAME_BYTES
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.trace import TRACE
from gba_hvd.update_rules import delay_sequence
from gba_hvd.update_rules.rule import ByOptimizer, DenseStart, Received, Rule, Step
from recovery import state_codec

log = logging.getLogger("gba_hvd.ps")


@dataclass(frozen=True)
class _Merged:
    """The gradient of a step, as the optimizers get it before clipping.

    pushes: with their weights, dense gradients as the rule compensates them
    dense: float32 [n]; rows: by group of tables, to be multiplied by `row_scale`
    """

    pushes: list[tuple[BufferedPush, float]]
    dense: np.ndarray
    rows: list[RowGrad]
    row_scale: float


class Partition:
    """Not thread-safe: belongs to the server's main thread."""

    def __init__(
        self,
        enter: Enter,
        dense: DensePart,
        memory: ShardMemory,
        optimizer: RowOptimizer | TableOptimizers,
        buffer_bytes: int,
        rule: Rule | None = None,
        residuals: Residuals | None = None,
    ) -> None:
        self.enter, self.dense, self._memory, self._optimizer = enter, dense, memory, optimizer
        self._buffer_bytes = buffer_bytes  # of pushes that wait for their step, at most
        self.idle = True  # workers apply the steps; no shard may be touched. The owner of the partition changes it
        self.mine = np.array(enter.shard_servers) == enter.me  # bool [S]
        self.shards = np.flatnonzero(self.mine)
        self._extra = int(enter.row_average != "global")
        self._dims = [group.dim + self._extra for group in memory.layout.groups]
        self._counted = enter.accesses
        self._names = [name for name, _, _ in enter.tensors]
        self._sizes = [math.prod(shape) for _, shape, _ in enter.tensors]
        has_replicas = enter.discipline.get("name") in REPLICA_MODES
        self._central = CentralCopy(dense, enter.generation) if has_replicas else None
        self.n_dense = 0 if has_replicas else sum(self._sizes)  # numbers in a push
        self.buffer = PushBuffer()
        # How many steps the dense values of applied pushes were old, with their shares; of the newest steps.
        self.arrivals: deque[list[tuple[int, float]]] = deque(maxlen=delay_sequence.MOST)
        if rule is None:  # after a server that died
            rule = _rule_of(enter, dense.tensors, dense.values, dense.state(), dense.step, dense.shown)
        self.rule = rule
        self.gaps = GapMeter(dense.values, dense.shown, dense.step)  # of the pushes applied since this server started
        self.mirrors: DenseDeltas | None = None  # of workers of other hosts that take differences
        self.residuals = residuals or Residuals.none(_residuals_at(dense.path), enter.generation)
        self._living: set[int] = set()  # as of the newest step
        self._last: Applied | None = None
        self._measured: tuple[Measure, _Merged] | None = None  # the newest one, until it is applied
        self._begun, self._torn = -1, 0  # the last step of a server that died: begun here; shards in the middle of it

    @classmethod
    def begin(
        cls,
        enter: Enter,
        frames: Sequence[Any],
        path: Path,
        memory: ShardMemory,
        optimizer: RowOptimizer | TableOptimizers,
        buffer_bytes: int,
    ) -> Partition:
        """Take over from the workers. Frames: dense values, optimizer state. Changes nothing when it raises."""
        if len(frames) != 2:
            raise ProtocolError(f"Enter comes with two frames, got {len(frames)}")
        validation.check_enter(enter, memory.layout)
        values = validation.array_of(frames[0], "float32", "dense values")
        tensors = [DenseTensor(name, tuple(shape), group) for name, shape, group in enter.tensors]
        expected = sum(t.size for t in tensors)
        if len(values) != expected:
            raise ProtocolError(f"{len(values)} dense values, the tensors have {expected}")
        state = validation.optimizer_state(frames[1], len(tensors))
        rule = _rule_of(enter, tensors, values, state, enter.position.step)
        shown = rule.shown(values, enter.lrs)
        dense = DensePart.create(path, tensors, enter.optimizer, values, state, enter.position.step, shown=shown)
        part = cls(enter, dense, memory, optimizer, buffer_bytes, rule)
        memory.claim(part.shards)
        return part

    @classmethod
    def resume(
        cls, enter: Enter, path: Path, memory: ShardMemory, optimizer: RowOptimizer | TableOptimizers, buffer_bytes: int
    ) -> tuple[Partition, int]:
        """Resume where a server that died stopped. Returns the part, and how many shards were in mid-step."""
        residuals = Residuals.resume(_residuals_at(path), enter.generation)
        part = cls(enter, DensePart.open(path), memory, optimizer, buffer_bytes, residuals=residuals)
        marks = memory.marks()
        torn = [int(s) for s in part.shards if marks.begun[s] > marks.finished[s]]
        for shard in torn:
            memory.set_ready(shard, int(marks.begun[shard]))
        part._begun, part._torn = int(marks.begun[part.shards].max(initial=-1)), len(torn)
        memory.claim(part.shards)
        return part, len(torn)

    def release(self) -> None:
        """This server writes its shards no more, until it enters a mode."""
        self._memory.release(self.shards)

    @property
    def most_bytes(self) -> int:
        """That the row gradients of one push may take, opened: as much as those that come as they are."""
        return min(MAX_FRAME_BYTES, self._buffer_bytes)

    def begun_and_done(self, step: int) -> tuple[bool, bool]:
        """Whether anything of this step, and whether all of it, was applied here."""
        marks = self._memory.marks()
        begun, finished = marks.begun[self.shards], marks.finished[self.shards]
        return (
            bool((begun >= step).any()) or self.dense.step >= step,
            bool((finished >= step).all()) and self.dense.step >= step,
        )

    def push(self, micro: int, serial: int, frames: Sequence[Any], dense_step: int = -1, worker: int = -1) -> bool:
        """Store a checked push; False when there is no room. Raises ProtocolError; then nothing is stored."""
        if len(frames) not in (2, 3):
            raise ProtocolError(f"Push comes with two frames, or three, got {len(frames)}")
        dense = validation.array_of(frames[0], "float32", "dense gradient")
        rows = validation.array_of(frames[1], "float32", "row gradients")
        if len(dense) != self.n_dense:
            raise ProtocolError(f"a dense gradient of {len(dense)} numbers, expected {self.n_dense}")
        residual = self.residuals.check(frames[2]) if len(frames) == 3 else None
        push = BufferedPush(micro, serial, dense, rows, dense_step, worker, residual)
        if self.buffer.n_bytes + push.n_bytes > self._buffer_bytes:
            return False
        validation.check_finite(dense, self._names, self._sizes)
        validation.check_row_message(self._memory.layout, rows, self.mine, self._extra, self._counted)
        self.buffer.add(push)
        return True

    def measure(self, request: Measure) -> Measured:
        """How large a decided step's gradient is here, of the pushes that are here. Zero where the step was missed.

        With `damping`: how the update rule damps each of them here.
        """
        if request.step <= self.dense.step:
            return Measured(request.step, 0.0, 0.0, [] if request.damping else None)
        validation.check_members(request, self.dense.step, counts=bool(self._extra))
        found = self.buffer.find((m.micro, m.serial) for m in request.members)
        if request.damping:
            by_rule = [(push.micro, self.n_dense, self.rule.damping(push.dense_step).rows) for push in found.values()]
            return Measured(request.step, 0.0, 0.0, by_rule)
        merged = self._merge(request, found, list(self.buffer.find(request.dropped).values()))
        self._measured = request, merged
        return Measured(
            request.step,
            clipping.squares([merged.dense]),
            clipping.squares(self._values_by_row(merged.rows)) * merged.row_scale**2,
        )

    def apply(self, request: Apply) -> Applied:
        """Apply a decided step. Asked again, answers the same and does nothing."""
        if self._last is not None and self._last.step == request.step:
            return self._last
        if request.step == self._begun:  # its pushes went down with the server that died
            return Applied(request.step, [], self.skip(request.step))
        if request.step <= self.dense.step:
            return Applied(request.step)
        validation.check_apply(request, self.dense.step, len(self.enter.lrs), counts=bool(self._extra))
        validation.check_settings(request.settings, self.enter.optimizer.get("groups", ()))
        for worker in self._living.difference(request.workers):
            self.forget_worker(worker)
        self._living = set(request.workers)
        found = self.buffer.take((m.micro, m.serial) for m in request.members)
        dropped = list(self.buffer.take(request.dropped).values())
        self.buffer.discard_before(request.oldest_serial)
        self._note_arrivals(request, found)
        self.residuals.applied(found.values())
        missing = [m.micro for m in request.members if (m.micro, m.serial) not in found]
        due = self.shards[self._memory.marks().begun[self.shards] < request.step]
        missed = len(self.shards) - len(due)
        failed = ""
        if TRACE is not None:
            members = [(m.micro, m.serial, m.weight) for m in request.members if (m.micro, m.serial) in found]
            TRACE.write(
                "apply", generation=request.generation, step=request.step, server=self.enter.me, members=members,
                missing=missing, scale=request.scale, lrs=request.lrs, row_lr=request.row_lr, missed=missed,
                n_micro=request.n_micro, row_damping=[m.row_damping for m in request.members],
                rule=self.enter.rule, rule_settings=self.enter.rule_settings,
            )  # fmt: skip
        try:
            self._apply(request, found, dropped, due)
        except Exception as error:
            log.exception("step %d could not be applied", request.step)
            failed = f"step {request.step} could not be applied: {type(error).__name__}: {error}"
            self._memory.finish(due, request.step)
            if self.dense.step < request.step:
                self.dense.skip_(request.step)
            missed = len(self.shards) + bool(self.n_dense)
        self._last = Applied(request.step, missing, missed, failed)
        if TRACE is not None:
            TRACE.write("applied", step=request.step, server=self.enter.me, missed=missed, failed=failed)
        return self._last

    def _values_by_row(self, grads: Sequence[RowGrad]) -> Iterator[np.ndarray]:
        for group, grad in zip(self._memory.layout.groups, grads, strict=True):
            yield by_row(self._memory, group, grad).values

    def _note_arrivals(self, request: Apply, found: Mapping[tuple[int, int], BufferedPush]) -> None:
        """How old the dense values of a step's gradients are, and by what each is weighted in it."""
        shares: dict[int, float] = {}
        for member in request.members:
            push = found.get((member.micro, member.serial))
            if push is not None and push.dense_step >= 0:
                age = request.step - 1 - push.dense_step
                shares[age] = shares.get(age, 0.0) + member.weight * request.scale
        if shares:
            self.arrivals.append(sorted(shares.items()))

    def _merge(
        self, request: Apply | Measure, found: Mapping[tuple[int, int], BufferedPush], dropped: Sequence[BufferedPush]
    ) -> _Merged:
        here = [m for m in request.members if (m.micro, m.serial) in found]
        pushes = [(found[m.micro, m.serial], m.weight) for m in here]
        if self._central is None:
            computed = [(push.dense_step, push.dense) for push, _ in pushes]
            corrected = self.rule.compensated(computed, self.dense.values)
            pushes = [(replace(push, dense=g), w) for (push, w), g in zip(pushes, corrected, strict=True)]
        dense, rows = merge_pushes(
            pushes,
            self.n_dense,
            self._dims,
            self.rule.damping,
            dropped if self._extra else None,
            [m.row_damping for m in here],
            self._counted,
        )
        dense *= np.float32(request.scale)
        if self._extra:
            rows = [average_over_contributors(grad) for grad in rows]
            return _Merged(pushes, dense, rows, request.scale * request.n_micro)
        return _Merged(pushes, dense, rows, request.scale)

    def _as_measured(self, request: Apply, n_found: int) -> _Merged | None:
        """What was merged to measure this step, if its pushes are still those."""
        if self._measured is None:
            return None
        (of, merged), self._measured = self._measured, None
        is_this = of.step == request.step and of.members == request.members and of.scale == request.scale
        is_this = is_this and of.dropped == request.dropped
        return merged if is_this and len(merged.pushes) == n_found else None

    def _apply(
        self,
        request: Apply,
        found: Mapping[tuple[int, int], BufferedPush],
        dropped: Sequence[BufferedPush],
        due: np.ndarray,
    ) -> None:
        memory, layout = self._memory, self._memory.layout
        merged = self._as_measured(request, len(found)) or self._merge(request, found, dropped)
        pushes, dense, rows, scale = merged.pushes, merged.dense, merged.rows, merged.row_scale * request.row_factor
        if not all(map(validation.all_finite, (dense, *(grad.values for grad in rows)))):
            raise NonFiniteGradient("the sum of finite gradients is not finite: they are far too large")
        number = request.step - request.n_skipped
        memory.begin(due, request.step)
        for group, grad in zip(layout.groups, rows, strict=True):
            is_part = len(due) < len(self.shards)
            wanted = grad.select(np.isin(grad.keys % layout.n_shards, due)) if is_part else grad
            apply_rows(
                memory, self._optimizer, group, wanted, due, scale=scale, lr=request.row_lr, number=number,
                step=request.step,
            )  # fmt: skip
        memory.finish(due, request.step)
        if pushes and self._central is None:
            if request.dense_factor != 1.0:
                dense *= np.float32(request.dense_factor)
            self._step_dense(request, pushes, dense)
        else:  # nothing came through to this server: it misses the step; or workers step replicas of their own
            self.dense.skip_(request.step)

    def _step_dense(self, request: Apply, pushes: Sequence[tuple[BufferedPush, float]], gradient: np.ndarray) -> None:
        """The step of the dense part, as the rule has it. gradient: of the step, float32 [n]."""
        before, dense = request.step - 1, self.dense
        received = [
            Received(push.worker, weight * request.scale * request.dense_factor, _lag(push, before), push.dense)
            for push, weight in pushes
        ]
        gaps = [(push.worker, self.gaps.of(push.dense_step)) for push, _ in pushes]
        answer = self.rule.act(Step(request.step, dense.values, gradient, received, request.lrs, request.workers))
        if isinstance(answer, ByOptimizer):
            dense.step_(gradient, answer.lrs, request.step, answer.ahead, request.settings)
        else:
            if not validation.all_finite(answer.values):
                raise NonFiniteGradient("the values after the step are not finite: the learning rate is far too large")
            dense.put_(answer.values, answer.momentum, answer.shown, request.lrs, request.step)
        self.rule.stepped(dense.values, gradient, request.lrs, request.step)
        self.gaps.stepped(gaps, dense.values, dense.shown, request.step)

    def skip(self, step: int) -> int:
        """This server missed a decided step, having lost its pushes, or part of it.

        Returns how many of its shards missed it, and one more if the dense part did. `apply` then answers the same.
        """
        marks = self._memory.marks()
        behind = [int(s) for s in self.shards if marks.finished[s] < step]
        for shard in behind:
            self._memory.set_ready(shard, step)
        missed = len(behind) + self._torn
        if self.dense.step < step:
            self.dense.skip_(step)
            missed += bool(self.n_dense)
        self._last = Applied(step, [], missed)
        if TRACE is not None:
            TRACE.write("applied", step=step, server=self.enter.me, missed=missed, failed="")
        return missed

    def forget_worker(self, worker: int, finished: bool = False) -> None:
        """It is gone, and nothing is stored for it. finished: training is over; what it had not sent still counts."""
        if self.mirrors is not None:
            self.mirrors.forget(worker)
        if not finished:
            self.residuals.forget(worker)

    @property
    def central(self) -> CentralCopy:
        """Where workers have replicas. Raises ProtocolError in other modes."""
        if self._central is None:
            raise ProtocolError(f"in mode {self.enter.discipline.get('name')!r} workers have no replicas")
        return self._central

    def export(self, phase: int = -1) -> tuple[int, np.ndarray, bytes]:
        """(step, dense values, optimizer state). phase: of replicas, see `messages.Export`."""
        if phase >= 0:
            return self.dense.step, *self.central.gather(phase)
        return self.dense.step, self.dense.values.copy(), state_codec.encode(self.dense.state())

    def close(self) -> None:
        self.dense.close()


def _residuals_at(dense: Path) -> Path:
    return dense.with_name(f"{dense.name}.residuals")


def _lag(push: BufferedPush, before: int) -> int:
    """Steps between the dense values a push was computed with and those of step `before`; 0 if not known."""
    return max(0, before - push.dense_step) if push.dense_step >= 0 else 0


def _rule_of(
    enter: Enter,
    tensors: Sequence[DenseTensor],
    values: np.ndarray,
    state: Sequence[Mapping[str, Any]],
    step: int,
    shown: np.ndarray | None = None,
) -> Rule:
    sizes, groups = [t.size for t in tensors], [t.group for t in tensors]
    start = DenseStart(values, step, sizes, groups, state, enter.rule_settings, enter.lrs, shown)
    return update_rules.make(enter.rule, enter.optimizer, start, [worker for worker, *_ in enter.workers])


def gather(memory: ShardMemory, mine: np.ndarray, frames: Sequence[Any]) -> list[np.ndarray]:
    """Weights float32 [n, dim] of the keys (int64) of each group, checked. Safe beside a thread that applies."""
    layout = memory.layout
    if len(frames) != len(layout.groups):
        raise ProtocolError(f"{len(frames)} frames of keys, expected one for each of {len(layout.groups)} groups")
    n_bytes = sum(len(frame) // 8 * 4 * group.dim for group, frame in zip(layout.groups, frames, strict=True))
    if n_bytes > messages.MAX_ANSWER_BYTES:
        raise ProtocolError(
            f"these rows take {n_bytes:,} bytes, the limit is {messages.MAX_ANSWER_BYTES:,}: ask for fewer"
        )
    out = []
    for number, (group, frame) in enumerate(zip(layout.groups, frames, strict=True)):
        keys = validation.array_of(frame, "int64", "keys")
        validation.check_keys(layout, number, keys, mine)
        rows = np.empty((len(keys), group.dim), dtype=np.float32)
        memory.gather(keys, group, 0, rows)
        out.append(rows)
    return out
