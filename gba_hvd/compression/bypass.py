"""Whether compressing pays: a pure function of what the steps took, equal on all workers, with a sentence why.

Each worker's seconds of a step travel with the commit of the next one (of rows: with its own). Of the time on the wire
the shortest counts (the last rank does not wait), of the time for encoding and decoding the longest. When a world
has formed, a few steps are sent both ways. What the wire took longer for the bytes that compressing saves is its
bandwidth; each tensor whose encoding and decoding takes longer than its saved bytes would is bypassed, and all of them
if those left do not pay. Later the other way is tried again, the more seldom the more it costs: trying takes half a
percent of the time at most.

In asynchronous modes the same function decides, for each worker alone, about its pushes to each server of another host
and about what comes back. Theirs is the time until the server has answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

_FIRST = (True, False) * 6  # which steps are compressed; the first two are not counted
_UNCOUNTED = 2
_TRY_STEPS, _TRY_LATE, _TRY_SHARE = 2, 2, 0.005  # late: so many more go that way before the first is reported
_BETWEEN, _BETWEEN_MOST = 200, 50_000
_GAIN = 0.95  # compressed must take at most this share of the time, when plain is what is done; and not by chance
_NAMED = 3  # bypassed tensors that the reason names


@dataclass(frozen=True)
class StepTiming:
    """One worker's seconds of one step: waiting on the wire, encoding and decoding, all of the step."""

    wire_s: float
    codec_s: float
    step_s: float


@dataclass(frozen=True)
class Cost:
    """One tensor's, in a compressed step: seconds to encode and decode it, bytes that need not travel for that."""

    codec_s: float
    saved_bytes: float


@dataclass(frozen=True)
class TensorVerdict:
    """About one tensor."""

    compress: bool
    reason: str


@dataclass(frozen=True)
class BypassDecision:
    """compress: anything, from now on. bypassed: tensors that go as they are all the same, and why. changed: it is
    another decision than before.
    """

    compress: bool
    reason: str
    changed: bool
    bypassed: dict[str, str] = field(default_factory=dict)


def choose(costs: Sequence[Cost], s_per_byte: float) -> list[TensorVerdict]:
    """Which tensors to compress, at a measured bandwidth: those whose saved bytes would take longer than the coding."""
    verdicts = []
    for cost in costs:
        saved_s = cost.saved_bytes * s_per_byte
        reason = f"{1000 * cost.codec_s:.2f} ms to compress, {1000 * saved_s:.2f} ms for the bytes saved"
        verdicts.append(TensorVerdict(cost.codec_s < saved_s, reason))
    return verdicts


class Bypass:
    """One world's decision. Every worker feeds it the same numbers and gets the same answers.

    names: of the tensors that can be compressed. what, each: for the reason: what is decided about, and what takes so
    long
    """

    def __init__(
        self, names: Sequence[str], is_forced: bool = False, what: str = "dense gradients", each: str = "a step's take"
    ) -> None:
        self._names, self._is_forced, self._what, self._each = list(names), is_forced, what, each
        self._ahead: deque[bool] = deque(() if is_forced else _FIRST)
        self._n_seen = 0
        self._chosen = (True,) * len(self._names)  # what compressed steps compress
        self._compress = True
        self._decided = is_forced
        self._took: dict[bool, deque[tuple[float, float]]] = {True: deque(maxlen=5), False: deque(maxlen=5)}
        self._step_s: deque[float] = deque(maxlen=9)
        self._next_try = 0

    def tensors_next(self) -> tuple[bool, ...]:
        """Which tensors the next step compresses."""
        compress = self._ahead[0] if self._ahead else self._compress
        return self._chosen if compress else (False,) * len(self._names)

    @property
    def decides_next(self) -> bool:
        """The next step that is seen leads to a decision: `saw` must be given the costs."""
        return len(self._ahead) == 1

    def saw(self, compressed: bool, took: Sequence[StepTiming], costs: Sequence[Cost] = ()) -> BypassDecision | None:
        """What a step took on every worker. Returns the decision where one was made.

        costs: of each tensor, as of the newest step that compressed it; empty: all tensors share their fate.
        """
        if self._is_forced:
            return None
        self._n_seen += 1
        wire_s = min(t.wire_s for t in took)
        if self._n_seen > _UNCOUNTED:
            self._took[compressed].append((wire_s, wire_s + max(t.codec_s for t in took)))
            self._step_s.append(max(t.step_s for t in took))
        if self._ahead:
            if self._decided and compressed != self._ahead[0]:
                return None  # sent before the try began
            self._ahead.popleft()
            if self._ahead:
                return None
            if all(self._took.values()):
                return self._decide(costs)
            self._ahead.append(not self._took[True])  # pushes overlap: one way did not have its turn
            return None
        if self._n_seen >= self._next_try:
            other = not self._compress
            self._took[other].clear()
            self._ahead.extend([other] * _TRY_STEPS)
        return None

    def _doubt_s(self) -> float:
        """By how much the medians of the two ways may be apart by chance: half of what their middle halves spread."""
        times = ([all_ for _, all_ in self._took[way]] for way in (True, False))
        return sum(float(np.subtract(*np.percentile(some, (75, 25)))) for some in times) / 2

    def _decide(self, costs: Sequence[Cost]) -> BypassDecision:
        (packed_wire, packed), (plain_wire, plain) = (
            (median(wire for wire, _ in self._took[way]), median(all_ for _, all_ in self._took[way]))
            for way in (True, False)
        )
        before, first = (self._compress, self._chosen), not self._decided
        needed = plain if self._compress and not first else _GAIN * plain - self._doubt_s()
        chosen, predicted, bypassed = self._chosen, packed, {}
        if costs:
            saved = sum(cost.saved_bytes for cost, is_ in zip(costs, self._chosen, strict=True) if is_)
            s_per_byte = max(0.0, plain_wire - packed_wire) / max(1.0, saved)
            verdicts = choose(costs, s_per_byte)
            chosen = tuple(verdict.compress for verdict in verdicts)
            bypassed = {n: v.reason for n, v in zip(self._names, verdicts, strict=True) if not v.compress}
            if chosen != self._chosen:
                gains = (c.saved_bytes * s_per_byte - c.codec_s for c, is_ in zip(costs, chosen, strict=True) if is_)
                predicted = plain - sum(gains)
        self._compress = any(chosen) and predicted < needed
        self._chosen = chosen if self._compress else (True,) * len(self._names)
        self._decided = True
        other = plain if self._compress else packed
        costs_s = (_TRY_STEPS + _TRY_LATE) * max(0.0, other - min(predicted, plain))
        wait = costs_s / (_TRY_SHARE * max(1e-6, median(self._step_s)))
        self._next_try = self._n_seen + int(np.clip(wait, _BETWEEN, _BETWEEN_MOST))
        what = "compressed" if self._compress else "as they are"
        times = f"{1000 * packed:.1f} ms compressed, {1000 * plain:.1f} ms without"
        reason = f"{self._what} go {what}: {self._each} {times}"
        if self._compress and bypassed:
            named = [f"{name} ({why})" for name, why in list(bypassed.items())[:_NAMED]]
            more = [f"{len(bypassed) - _NAMED} more"] if len(bypassed) > _NAMED else []
            reason += f"; {len(bypassed)} of {len(self._names)} tensors go as they are: {', '.join(named + more)}"
        changed = first or before != (self._compress, self._chosen)
        return BypassDecision(self._compress, reason, changed, bypassed if self._compress else {})
