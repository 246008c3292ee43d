"""The dense gradients of an allreduce step, compressed. Stands in for the one sum of `AllreduceExchange.commit`.

    1. encode   what is sent of this worker's gradients becomes a message, the residual is pending (`error_feedback`)
    2. gather   every worker's message goes round (of variable length); what arrives is *held*
    3. commit   one sum over all workers of the tensors too small to compress and of the numbers that travel along. It
                ends only when every rank has entered it, holding all messages: the step is decided
    4. decode   all messages are added up in the order of the ranks, so that all replicas stay equal bit for bit

fp16 without a selector has no messages: an allreduce of half-precision numbers takes the place of 2. A step that goes
without compression carries the residual as well, so nothing waits for ever.

Who owns what: `error_feedback` and the counters outlive the world, `bypass` is new in each. What a crash leaves:
before 3, no worker has the step and every survivor's residual is as it was; after 3, it is settled by who saw the
result, and by who learns of it later (`AllreduceExchange.apply_held`). That of a dead worker is lost, and counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd.comm.collectives import World
from gba_hvd.comm.traffic import Traffic, ring
from gba_hvd.compression import sparse_message, value_codec
from gba_hvd.compression.bypass import Bypass, BypassDecision, Cost, StepTiming
from gba_hvd.compression.error_feedback import Feedback, TensorSpan, plain_of, spans_of
from gba_hvd.compression.spec import Spec
from gba_hvd.errors import NonFiniteGradient
from gba_hvd.gradients.dense_gradients import AllSum, DenseGradients

N_NUMBERS = 5  # of each worker, with each commit: wire_s, codec_s and step_s of the step before, |residual|, not finite


@dataclass(frozen=True)
class _Shape:
    """What one step's message is about: tensors that are compressed, and the spans of those that go as they are.

    n: elements of `spans`. flushed: tensors that could be compressed, and are not
    """

    spans: list[TensorSpan]
    n: int
    plain: list[slice]
    flushed: list[TensorSpan]


class DenseExchange:
    """One worker's part. Belongs to the training thread.

    decisions: what `bypass` decided since the last report. not_finite: of the last step, whose gradient and
    residual were not, if any
    """

    def __init__(self, spec: Spec, names: Sequence[str], dense: DenseGradients) -> None:
        self.spec = spec
        self.feedback = Feedback(spec, names, dense.sizes, dense.total.cpu().numpy().dtype)
        self._all = self._shape(())
        self._candidates = [span.tensor for span in self._all.spans]
        self._itemsize = dense.total.element_size()
        self.decisions: list[BypassDecision] = []
        self.not_finite = ""
        self._known: list[float] = []  # by rank, the sum of |residual| when the last step was begun; empty: not known
        self._rank, self._size = -1, 0  # this worker's place in the world that was formed last
        self.world_formed()

    def world_formed(self) -> None:
        """Other workers, other links: what was measured is void."""
        self._bypass = Bypass([self.feedback.names[t] for t in self._candidates], self.spec.is_forced)
        self._last: tuple[bool, StepTiming] | None = None
        self._codec_s: list[deque[float]] = [deque(maxlen=3) for _ in self.feedback.sizes]  # of compressed steps
        self._ended_s = time.perf_counter()

    def n_numbers(self, n_workers: int) -> int:
        return N_NUMBERS * n_workers

    def sum_(self, world: World, dense: DenseGradients, numbers: Tensor, traffic: Traffic, over_all: AllSum) -> None:
        """Sum the gradients and the numbers that travel along over all ranks, in place. Returning means: decided.

        numbers: this class's among those that travel along, [n_numbers]
        """
        self.feedback.begin()
        self.not_finite = ""
        if world.size == 1:
            flat = self._flat(dense)
            self.feedback.flush_all(flat, self._all.spans)
            self._put(dense, flat)
            return
        numbers.zero_()
        mine = numbers[N_NUMBERS * world.rank :]
        costs: list[Cost] = []
        if self._last is not None:
            before = self._last[1]
            mine[0], mine[1], mine[2] = before.wire_s, before.codec_s, before.step_s
            if self._bypass.decides_next:
                costs = self._costs(world, over_all)
        mine[3] = self.feedback.residual_size
        chosen = self._bypass.tensors_next()
        took = (
            self._sum_compressed_(world, dense, mine, traffic, over_all, chosen)
            if any(chosen)
            else self._sum_plain_(dense, traffic, over_all)
        )
        agreed = numbers.reshape(world.size, N_NUMBERS).tolist()
        self._known = [row[3] for row in agreed]
        if bad := [rank for rank, row in enumerate(agreed) if row[4]]:
            self.not_finite = self.not_finite or f"on worker {bad[0]} (its log has more)"
            dense.total[: dense.n] = float("nan")  # reported as any gradient that is not finite
        if self._last is not None and self._candidates:
            decision = self._bypass.saw(self._last[0], [StepTiming(*row[:3]) for row in agreed], costs)
            if decision is not None and decision.changed:
                self.decisions.append(decision)
        self._last = any(chosen), took

    def _costs(self, world: World, over_all: AllSum) -> list[Cost]:
        """The costs of each tensor that can be compressed, the same on all workers. A collective, before a step's
        commit.
        """
        codec_s = [median(self._codec_s[t] or [0.0]) for t in self._candidates]
        sums = torch.tensor([codec_s, self.feedback.sent_bytes[self._candidates].tolist()], dtype=torch.float64)
        world.sum_("compression.costs", sums)
        n, (all_codec_s, all_sent) = world.size, sums.tolist()
        whole = [ring(self._itemsize * self.feedback.sizes[t], over_all.n_in_ring) for t in self._candidates]
        return [
            Cost(codec_s / n, max(0.0, size - sent * (n - 1) / n))
            for codec_s, sent, size in zip(all_codec_s, all_sent, whole, strict=True)
        ]

    def settle(self) -> None:
        self.feedback.settle()

    # --- residuals ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """This worker is a late joiner again."""
        self.feedback.clear()
        self._known, self._rank, self._size = [], -1, 0

    def forget_known(self) -> None:
        """From now on residuals change without commits, in an asynchronous mode."""
        self._known = []

    def count_lost(self, world: World, was_here: bool) -> tuple[int, float | None]:
        """How many workers of the world before are gone, and the sum of |residual| they had, if known. A collective.

        Each time it is run counts for the next: by then this world is the one before.
        """
        row = np.array([self._rank if was_here else -1], dtype=np.int64)
        gone = set(range(self._size)) - set(world.gather("residuals", row)[:, 0].tolist())
        lost = sum(self._known[rank] for rank in gone) if self._known else None
        self._known, self._rank, self._size = [], world.rank, world.size
        return len(gone), lost

    def state(self, world: World) -> dict[str, Any]:
        """For a checkpoint: the sum of all workers' residuals. A collective."""
        residual = torch.from_numpy(self.feedback.residual.copy())
        world.sum_("residual", residual)
        return {"compression": {"rest": residual.numpy(), "missing": 0}}

    def load_state(self, state: Mapping[str, Any]) -> int:
        """On one worker of a job that resumes from a checkpoint: it takes over all that was not sent.

        Returns of how many workers that is missing.
        """
        saved = state.get("compression", {})
        if saved.get("rest") is not None:
            self.feedback.load(np.asarray(saved["rest"]))
        return int(saved.get("missing", 0))

    # -----------------------------------------------------------------------------------------------------------------

    def _shape(self, whole: Collection[int]) -> _Shape:
        """whole: tensors that are sent uncompressed, though they could be compressed."""
        sizes = self.feedback.sizes
        everything = range(len(sizes))
        spans, n = spans_of(sizes, everything, whole)
        flushed, _ = spans_of(sizes, sorted(whole))
        return _Shape(spans, n, plain_of(sizes, everything, whole), flushed)

    @staticmethod
    def _flat(dense: DenseGradients) -> np.ndarray:
        """The gradients as an array; the same memory where they are on a CPU."""
        flat: np.ndarray = dense.total[: dense.n].cpu().numpy()
        return flat

    @staticmethod
    def _put(dense: DenseGradients, flat: np.ndarray) -> None:
        if dense.total.device.type != "cpu":
            dense.total[: dense.n].copy_(torch.from_numpy(flat))

    def _sum_plain_(self, dense: DenseGradients, traffic: Traffic, over_all: AllSum) -> StepTiming:
        began_s = time.perf_counter()
        flat = self._flat(dense)
        self.feedback.flush_all(flat, self._all.spans)
        self._put(dense, flat)
        entered_s = time.perf_counter()
        dense.sum_(over_all.sum_)
        left_s = time.perf_counter()
        traffic.both("dense", over_all.sent(self._itemsize * dense.n))
        traffic.both("header", over_all.sent(self._itemsize * len(dense.extra)))
        return self._took(left_s - entered_s, entered_s - began_s)

    def _sum_compressed_(
        self,
        world: World,
        dense: DenseGradients,
        mine: Tensor,
        traffic: Traffic,
        over_all: AllSum,
        chosen: tuple[bool, ...],
    ) -> StepTiming:
        began_s = time.perf_counter()
        flat = self._flat(dense)
        shape = self._all
        if not all(chosen):
            shape = self._shape({t for t, is_ in zip(self._candidates, chosen, strict=True) if not is_})
            self.feedback.flush(flat, shape.flushed)
            self._put(dense, flat)
        as_half = self.spec.values == "fp16" and not self.spec.selector
        half, sent = torch.empty(0), b""
        try:
            if as_half:
                half = self._halved(flat, shape, world.size)
            else:
                sent = self.feedback.encode(flat, shape.spans, shape.n, flat[:0])
        except NonFiniteGradient as error:
            mine[4], self.not_finite = 1.0, str(error)
            half = torch.zeros(shape.n, dtype=torch.float16)
            sent, _ = sparse_message.write(np.empty(0, np.int32), flat[:0], shape.n, "none", flat[:0])
        small = torch.cat([dense.total[at].cpu() for at in shape.plain] + [dense.extra])
        entered_s = time.perf_counter()
        received: list[np.ndarray] = []
        if as_half:
            world.sum_("dense.fp16", half)
            traffic.both("dense", ring(2 * shape.n, world.size))
        else:
            received = world.gather_bytes("dense", sent)
            n_all = sum(map(len, received))
            traffic.both("dense", n_all * (world.size - 1) // world.size)
        over_all.sum_(small)
        left_s = time.perf_counter()
        n_small = len(small) - len(dense.extra)
        traffic.both("dense", over_all.sent(self._itemsize * n_small))
        traffic.both("header", over_all.sent(self._itemsize * len(dense.extra)))
        parts = [sparse_message.read(one, shape.n, 0, flat.dtype) for one in received]
        read_s = (time.perf_counter() - left_s) / max(1, shape.n)
        for span in shape.spans:
            adds_s = time.perf_counter()
            if as_half:
                flat[span.at] = half[span.start : span.stop].float().numpy()
            else:
                flat[span.at] = 0
                for part in parts:
                    part.add_to(flat[span.at], span.start, span.stop)
            decode_s = time.perf_counter() - adds_s + read_s * (span.stop - span.start)
            self._codec_s[span.tensor].append(float(self.feedback.encode_s[span.tensor]) + decode_s)
        self._put(dense, flat)
        at = 0
        for place in shape.plain:
            dense.total[place] = small[at : at + place.stop - place.start]
            at += place.stop - place.start
        dense.extra.copy_(small[n_small:])
        return self._took(left_s - entered_s, entered_s - began_s + time.perf_counter() - left_s)

    def _halved(self, flat: np.ndarray, shape: _Shape, n_workers: int) -> Tensor:
        """Gradients with their residual in half precision; what that rounds off is pending."""
        began_s = time.perf_counter()
        with np.errstate(over="ignore", invalid="ignore"):  # it is refused by name
            wanted = np.concatenate([flat[s.at] + self.feedback.residual[s.at] for s in shape.spans])
        if not np.isfinite(wanted.sum(dtype=np.float64)):
            for span in shape.spans:
                self.feedback.refuse_non_finite(span, flat[span.at])
        half = value_codec.to_half(torch.from_numpy(wanted), torch.float16, n_workers)
        self.feedback.sent(flat, shape.spans, half.to(torch.float32).numpy())
        tensors, sizes = [s.tensor for s in shape.spans], np.array([s.stop - s.start for s in shape.spans])
        self.feedback.encode_s[tensors] = (time.perf_counter() - began_s) * sizes / shape.n
        self.feedback.sent_bytes[tensors] = 2 * 2 * sizes / n_workers  # of each worker's share of the ring
        return half

    def _took(self, wire_s: float, codec_s: float) -> StepTiming:
        now = time.perf_counter()
        step_s, self._ended_s = now - self._ended_s, now
        return StepTiming(wire_s, codec_s, step_s)
