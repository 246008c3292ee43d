"""The dense gradients of an allreduce step, compressed. Stands in for the one allreduce of `AllreduceMode.commit`.

    1. encode   what is sent of this worker's gradients becomes a message, the rest is pending (`feedback`)
    2. gather   every worker's message goes round (of variable length); what arrives is *held*
    3. commit   one allreduce of the tensors too small to compress and of the numbers that travel along. It ends only
                when every rank has entered it, and every rank entered it holding all messages: the step is decided
    4. decode   all messages are added up in the order of the ranks, so that all replicas stay equal bit for bit

fp16 without a selector has no messages: an allreduce of half-precision numbers takes the place of 2. A step that goes
without compression carries the rest as well, so nothing waits for ever.

Who owns what: `feedback` and the counters outlive the world, `bypass` is made anew with each. What a crash leaves:
before 3, nobody has the step and every survivor's rest is as it was; after 3, it is settled by who saw the
result, and by who hears of it later (`AllreduceMode.apply_held`). The rest of a dead worker is lost, and counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd.collectives import World
from gba_hvd.compression import message, values
from gba_hvd.compression.bypass import Bypass, Decision, Took
from gba_hvd.compression.feedback import Feedback, plain_of, spans_of
from gba_hvd.compression.spec import Spec
from gba_hvd.errors import NonFiniteGradient
from gba_hvd.gradients import DenseGradients
from gba_hvd.traffic import Traffic, ring

N_NUMBERS = 5  # of each worker, with each commit: wire_s, codec_s and step_s of the step before, |rest|, not finite


class DenseExchange:
    """One worker's part. Belongs to the training thread.

    decisions: what `bypass` decided since somebody last looked
    """

    def __init__(self, spec: Spec, names: Sequence[str], dense: DenseGradients) -> None:
        self.spec = spec
        self.feedback = Feedback(spec, names, dense.sizes, dense.total.cpu().numpy().dtype)
        everything = range(len(dense.sizes))
        self._spans, self._n = spans_of(dense.sizes, everything)
        self._plain = plain_of(dense.sizes, everything)
        self.decisions: list[Decision] = []
        self._known: list[float] = []  # by rank, the sum of |rest| at the last commit
        self._rank, self._size = -1, 0  # this worker's place in the world that was formed last
        self.world_formed()

    def world_formed(self) -> None:
        """Other workers, other links: what was measured is void."""
        self._bypass = Bypass(self.spec.is_forced)
        self._last: tuple[bool, Took] | None = None
        self._ended_s = time.perf_counter()

    def n_numbers(self, n_workers: int) -> int:
        return N_NUMBERS * n_workers

    def sum_(self, world: World, dense: DenseGradients, traffic: Traffic) -> None:
        """Sum the gradients and the numbers that travel along over all ranks, in place. Returning means: decided."""
        self.feedback.begin()
        if world.size == 1:
            flat = self._flat(dense)
            self.feedback.flush_all(flat, self._spans)
            self._put(dense, flat)
            return
        numbers = dense.extra[-self.n_numbers(world.size) :]
        numbers.zero_()
        mine = numbers[N_NUMBERS * world.rank :]
        if self._last is not None:
            before = self._last[1]
            mine[0], mine[1], mine[2] = before.wire_s, before.codec_s, before.step_s
        mine[3] = self.feedback.rest_size
        compresses = self._bypass.compresses_next() and bool(self._spans)
        took = (
            self._sum_compressed_(world, dense, mine, traffic)
            if compresses
            else self._sum_plain_(world, dense, traffic)
        )
        agreed = numbers.reshape(world.size, N_NUMBERS).tolist()
        self._known = [row[3] for row in agreed]
        if any(row[4] for row in agreed):
            dense.total[: dense.n] = float("nan")  # told as any gradient that is not finite
        if self._last is not None and self._spans:
            decision = self._bypass.saw(self._last[0], [Took(*row[:3]) for row in agreed])
            if decision is not None and decision.changed:
                self.decisions.append(decision)
        self._last = compresses, took

    def settle(self) -> None:
        self.feedback.settle()

    # --- what becomes of the rest ------------------------------------------------------------------------------------

    def clear(self) -> None:
        """This worker is a newcomer again."""
        self.feedback.clear()
        self._known, self._rank, self._size = [], -1, 0

    def count_lost(self, world: World, was_here: bool) -> tuple[int, float]:
        """How many workers of the world before are gone, and the sum of |rest| they had. A collective.

        Each time it is run counts for the next: by then this world is the one before.
        """
        row = np.array([self._rank if was_here else -1], dtype=np.int64)
        gone = set(range(self._size)) - set(world.gather("residuals", row)[:, 0].tolist())
        lost = sum(self._known[rank] for rank in gone) if self._known else 0.0
        self._known, self._rank, self._size = [], world.rank, world.size
        return len(gone), lost

    def state(self, world: World) -> dict[str, Any]:
        """For a checkpoint: the sum of all workers' rests. A collective."""
        rest = torch.from_numpy(self.feedback.rest.copy())
        world.sum_("residual", rest)
        return {"compression": {"rest": rest.numpy(), "missing": 0}}

    def load_state(self, state: Mapping[str, Any]) -> int:
        """On one worker of a job that goes on from a checkpoint: it takes over all that was not sent.

        Returns of how many workers that is missing.
        """
        saved = state.get("compression", {})
        if saved.get("rest") is not None:
            self.feedback.load(np.asarray(saved["rest"]))
        return int(saved.get("missing", 0))

    # -----------------------------------------------------------------------------------------------------------------

    @staticmethod
    def _flat(dense: DenseGradients) -> np.ndarray:
        """The gradients as an array; the same memory where they are on a CPU."""
        flat: np.ndarray = dense.total[: dense.n].cpu().numpy()
        return flat

    @staticmethod
    def _put(dense: DenseGradients, flat: np.ndarray) -> None:
        if dense.total.device.type != "cpu":
            dense.total[: dense.n].copy_(torch.from_numpy(flat))

    def _sum_plain_(self, world: World, dense: DenseGradients, traffic: Traffic) -> Took:
        began_s = time.perf_counter()
        flat = self._flat(dense)
        self.feedback.flush_all(flat, self._spans)
        self._put(dense, flat)
        entered_s = time.perf_counter()
        world.sum_("commit", dense.total)
        left_s = time.perf_counter()
        traffic.both("dense", ring(dense.total.element_size() * dense.n, world.size))
        traffic.both("header", ring(dense.total.element_size() * (len(dense.total) - dense.n), world.size))
        return self._took(left_s - entered_s, entered_s - began_s)

    def _sum_compressed_(self, world: World, dense: DenseGradients, mine: Tensor, traffic: Traffic) -> Took:
        began_s = time.perf_counter()
        flat, itemsize = self._flat(dense), dense.total.element_size()
        as_half = self.spec.values == "fp16" and not self.spec.selector
        half, sent = torch.empty(0), b""
        try:
            if as_half:
                half = self._halved(flat, world.size)
            else:
                sent = self.feedback.encode(flat, self._spans, self._n, flat[:0])
        except NonFiniteGradient:
            mine[4] = 1.0
            half = torch.zeros(self._n, dtype=torch.float16)
            sent, _ = message.write(np.empty(0, np.int32), flat[:0], self._n, "none", flat[:0])
        small = torch.cat([dense.total[at] for at in self._plain] + [dense.extra])
        entered_s = time.perf_counter()
        received: list[np.ndarray] = []
        if as_half:
            world.sum_("dense.fp16", half)
            traffic.both("dense", ring(2 * self._n, world.size))
        else:
            received = world.gather_bytes("dense", sent)
            n_all = sum(map(len, received))
            traffic.both("dense", n_all * (world.size - 1) // world.size)
        world.sum_("commit", small)
        left_s = time.perf_counter()
        n_small = len(small) - len(dense.extra)
        traffic.both("dense", ring(itemsize * n_small, world.size))
        traffic.both("header", ring(itemsize * len(dense.extra), world.size))
        parts = [message.read(one, self._n, 0, flat.dtype) for one in received]
        for span in self._spans:
            if as_half:
                flat[span.at] = half[span.start : span.stop].float().numpy()
                continue
            flat[span.at] = 0
            for part in parts:
                part.add_to(flat[span.at], span.start, span.stop)
        self._put(dense, flat)
        at = 0
        for place in self._plain:
            dense.total[place] = small[at : at + place.stop - place.start]
            at += place.stop - place.start
        dense.extra.copy_(small[n_small:])
        return self._took(left_s - entered_s, entered_s - began_s + time.perf_counter() - left_s)

    def _halved(self, flat: np.ndarray, n_workers: int) -> Tensor:
        """Gradients with their rest in half precision; what that rounds off is pending."""
        wanted = np.concatenate([flat[s.at] + self.feedback.rest[s.at] for s in self._spans])
        if not np.isfinite(wanted.sum(dtype=np.float64)):
            raise NonFiniteGradient("the gradients and their residual add up to NaN or infinity")
        half = values.to_half(torch.from_numpy(wanted), torch.float16, n_workers)
        self.feedback.sent(flat, self._spans, half.to(torch.float32).numpy())
        return half

    def _took(self, wire_s: float, codec_s: float) -> Took:
        now = time.perf_counter()
        step_s, self._ended_s = now - self._ended_s, now
        return Took(wire_s, codec_s, step_s)
