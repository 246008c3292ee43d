"""The dense gradient of one micro-batch, compressed for the servers of other hosts; and how a server reads it.

A push takes its part of the residual along and is final for the worker: what is sent is no longer waiting. A push that
the servers drop as stale, or lose, or whose lease was taken away, takes that part with it. Its samples are in the
account, dropped or computed again; what it took along of earlier gradients is counted nowhere. It is not given back: it
would come a second time with a newer date than its samples have. A push that is never sent (its gradient is not finite)
takes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gba_hvd.compression import sparse_message
from gba_hvd.compression.bypass import Bypass, BypassDecision, Cost, StepTiming
from gba_hvd.compression.error_feedback import Feedback, TensorSpan, plain_of, spans_of


@dataclass(frozen=True)
class Frame:
    """What goes to one server.

    data: a message if `coded`, else float32 [n of the server]. whole: of its tensors, those that could be compressed
    and go as they are. encode_s: what making it took
    """

    data: Any
    coded: bool = False
    whole: tuple[int, ...] = ()
    encode_s: float = 0.0


class DensePush:
    """One worker's dense frames, and the decision which tensors to compress. Belongs to the training thread.

    parts: by server, the tensors it holds; is_remote: by server, whether it is on another host. Only those compress.
    Uses the worker's feedback, which outlives the mode. decisions: what is decided is added there
    """

    def __init__(
        self,
        feedback: Feedback,
        parts: Sequence[Sequence[int]],
        is_remote: Sequence[bool],
        decisions: list[BypassDecision],
    ) -> None:
        self._feedback, self._parts, self._is_remote = feedback, [list(part) for part in parts], list(is_remote)
        self._candidates = [spans_of(feedback.sizes, part)[0] for part in parts]
        self._bypass = [
            Bypass([feedback.names[span.tensor] for span in spans], feedback.spec.is_forced,
                   f"dense gradients for server {s}", "a push takes")
            for s, spans in enumerate(self._candidates)
        ]  # fmt: skip
        ends = np.cumsum([0, *feedback.sizes])
        self._slices = [[slice(int(ends[t]), int(ends[t + 1])) for t in part] for part in parts]
        self._timings: deque[tuple[int, bool, StepTiming]] = deque()
        self._answered_s = [time.perf_counter()] * len(parts)
        self._decisions = decisions

    def frames(self, flat: np.ndarray) -> list[Frame]:
        """One for each server. flat: float32 [n], the gradient; it is used up.

        Raises as `Feedback.encode`; then nothing is sent.
        """
        self._decide()
        feedback = self._feedback
        feedback.begin()
        frames: list[Frame] = []
        for s, (part, candidates, slices) in enumerate(zip(self._parts, self._candidates, self._slices, strict=True)):
            chosen = self._bypass[s].tensors_next() if self._is_remote[s] else ()
            if not any(chosen):
                feedback.flush(flat, candidates)
                frames.append(Frame(_together(flat, slices)))
                continue
            began_s = time.perf_counter()
            whole = {span.tensor for span, is_ in zip(candidates, chosen, strict=True) if not is_}
            feedback.flush(flat, [span for span in candidates if span.tensor in whole])
            spans, n = spans_of(feedback.sizes, part, whole)
            data = feedback.encode(flat, spans, n, _together(flat, plain_of(feedback.sizes, part, whole)))
            in_full = tuple(i for i, t in enumerate(part) if t in whole)
            frames.append(Frame(data, True, in_full, time.perf_counter() - began_s))
        feedback.settle()
        return frames

    def answered(self, server: int, frame: Frame, seconds: float) -> None:
        """A server has taken this frame, after so long. From any thread."""
        if self._is_remote[server] and self._candidates[server]:
            now = time.perf_counter()
            self._timings.append(
                (server, frame.coded, StepTiming(seconds, frame.encode_s, now - self._answered_s[server]))
            )
            self._answered_s[server] = now

    def _decide(self) -> None:
        """With the reported costs of earlier pushes."""
        while self._timings:
            server, coded, took = self._timings.popleft()
            bypass = self._bypass[server]
            costs = [self._cost(span) for span in self._candidates[server]] if bypass.decides_next else []
            decision = bypass.saw(coded, [took], costs)
            if decision is not None and decision.changed:
                self._decisions.append(decision)

    def _cost(self, span: TensorSpan) -> Cost:
        t = span.tensor
        return Cost(
            float(self._feedback.encode_s[t]), max(0.0, 4 * self._feedback.sizes[t] - self._feedback.sent_bytes[t])
        )


def read(data: Any, sizes: Sequence[int], whole: Collection[int] = ()) -> np.ndarray:
    """The gradient float32 [n] that a message for the tensors of these sizes holds. Raises BadMessage.

    whole: those that are sent uncompressed though they could be compressed
    """
    flat = np.zeros(sum(sizes), np.float32)
    add_(flat, data, sizes, whole)
    return flat


def add_(flat: np.ndarray, data: Any, sizes: Sequence[int], whole: Collection[int] = ()) -> None:
    """flat += what a message has compressed; what it has plain takes the place of what was there.

    Raises BadMessage; then nothing is changed.
    """
    everything = range(len(sizes))
    spans, n = spans_of(sizes, everything, whole)
    plain = plain_of(sizes, everything, whole)
    got = sparse_message.read(data, n, sum(place.stop - place.start for place in plain))
    for span in spans:
        got.add_to(flat[span.at], span.start, span.stop)
    at = 0
    for place in plain:
        size = place.stop - place.start
        flat[place] = got.plain[at : at + size]
        at += size


def _together(flat: np.ndarray, slices: Sequence[slice]) -> np.ndarray:
    return np.concatenate([flat[at] for at in slices]) if slices else flat[:0].copy()
