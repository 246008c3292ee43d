"""The dense gradient of one micro-batch, compressed for the servers of other hosts; and how a server reads it.

A push takes its part of the residual along and is final for the worker: what is sent is no longer waiting. A push that
the servers drop as stale, or lose, takes that part with it, as it takes its samples, which are counted. It is not given
back: it would come a second time with a newer date than its samples have. A push that is never sent (its gradient is
not finite) takes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gba_hvd.compression import message
from gba_hvd.compression.feedback import Feedback, plain_of, spans_of


class DensePush:
    """One worker's dense frames.

    parts: by server, the tensors it holds; is_far: by server, whether it is on another host: only those are compressed.
    Uses the worker's feedback, which outlives the mode.
    """

    def __init__(self, feedback: Feedback, parts: Sequence[Sequence[int]], is_far: Sequence[bool]) -> None:
        self._feedback, self.is_far = feedback, list(is_far)
        self._spans = [spans_of(feedback.sizes, part) for part in parts]
        self._plain = [plain_of(feedback.sizes, part) for part in parts]
        ends = np.cumsum([0, *feedback.sizes])
        self._whole = [[slice(int(ends[t]), int(ends[t + 1])) for t in part] for part in parts]

    def frames(self, flat: np.ndarray) -> list[Any]:
        """A frame for each server: a message for those far away, float32 [n of the server] for the others.

        flat: float32 [n], the gradient; it is used up. Raises NonFiniteGradient; then nothing is sent.
        """
        feedback = self._feedback
        feedback.begin()
        frames: list[Any] = []
        for (spans, n), plain, whole, far in zip(self._spans, self._plain, self._whole, self.is_far, strict=True):
            if far:
                frames.append(feedback.encode(flat, spans, n, _together(flat, plain)))
            else:
                feedback.flush(flat, spans)
                frames.append(_together(flat, whole))
        feedback.settle()
        return frames


def read(data: Any, sizes: Sequence[int]) -> np.ndarray:
    """The gradient float32 [n] that a message for the tensors of these sizes holds. Raises BadMessage."""
    _, n = spans_of(sizes, range(len(sizes)))
    plain = plain_of(sizes, range(len(sizes)))
    got = message.read(data, n, sum(at.stop - at.start for at in plain))
    flat = np.zeros(sum(sizes), np.float32)
    add_(flat, got, sizes)
    return flat


def add_(flat: np.ndarray, got: message.Elements, sizes: Sequence[int]) -> None:
    """flat += what is compressed; what is plain takes the place of what was there."""
    spans, _ = spans_of(sizes, range(len(sizes)))
    for span in spans:
        got.add_to(flat[span.at], span.start, span.stop)
    at = 0
    for place in plain_of(sizes, range(len(sizes))):
        size = place.stop - place.start
        flat[place] = got.plain[at : at + size]
        at += size


def _together(flat: np.ndarray, places: Sequence[slice]) -> np.ndarray:
    return np.concatenate([flat[at] for at in places]) if places else flat[:0].copy()
