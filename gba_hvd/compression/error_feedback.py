"""Error feedback: what was not sent waits, and is added to the next gradient. Nothing is lost, nothing counts twice.

    u = gradient + residual;   sent = what the receivers see of u;   residual = u - sent

With a selector, `sent` is some of u's elements; a value coder's rounding stays in the residual, too. So the sum of all
that was sent and the last residual is the sum of all gradients (DCT-DP, arXiv 2010.08899), bit for bit where the
additions are.

The new residual is *pending* until the step is decided and `settle` makes it the residual. A step that is not decided
is computed again: what is pending is then overwritten, and nothing is to be undone. A step that was decided without
this worker seeing it is settled when the worker learns of it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from gba_hvd.compression import kernels, sparse_message
from gba_hvd.compression.spec import MIN_ELEMENTS, Spec
from gba_hvd.compression.thresholds import Thresholds
from gba_hvd.errors import BadInput, NonFiniteGradient


class NonFiniteResidual(NonFiniteGradient):
    """What waits is NaN or infinite itself: no gradient that it is added to can be sent any more."""


@dataclass(frozen=True)
class TensorSpan:
    """One tensor's elements within a flat array, and within a message."""

    tensor: int
    at: slice
    start: int
    stop: int


def spans_of(sizes: Sequence[int], tensors: Sequence[int], whole: Collection[int] = ()) -> tuple[list[TensorSpan], int]:
    """The tensors that are compressed, of some that lie in a flat array at their offsets; and their elements together.

    sizes: of all tensors of the flat array. Those under MIN_ELEMENTS, and `whole`, are left out: they travel as they
    are.
    """
    ends = np.cumsum([0, *sizes])
    spans, n = [], 0
    for t in tensors:
        if sizes[t] >= MIN_ELEMENTS and t not in whole:
            spans.append(TensorSpan(t, slice(int(ends[t]), int(ends[t + 1])), n, n + sizes[t]))
            n += sizes[t]
    return spans, n


def plain_of(sizes: Sequence[int], tensors: Sequence[int], whole: Collection[int] = ()) -> list[slice]:
    """The spans of those that travel as they are."""
    ends = np.cumsum([0, *sizes])
    return [slice(int(ends[t]), int(ends[t + 1])) for t in tensors if sizes[t] < MIN_ELEMENTS or t in whole]


class Feedback:
    """One worker's residual of every dense tensor. Not thread-safe: belongs to the training thread.

    residual: [n], as of the last decided step; thresholds: which elements are selected, and how dense they were
    encode_s, sent_bytes: float64 [tensors], of each tensor's newest message
    """

    def __init__(self, spec: Spec, names: Sequence[str], sizes: Sequence[int], dtype: np.dtype) -> None:
        if dtype.kind != "f" or dtype.itemsize < 4:
            raise BadInput(f"compressors take gradients of float32 or float64, got {dtype}")
        if spec.values != "none" and dtype != np.float32:
            raise BadInput(f"{spec.values} takes gradients of float32, got {dtype}: use a selector alone")
        self.spec, self.names, self.sizes = spec, list(names), list(sizes)
        n = sum(sizes)
        if n > sparse_message.MOST_ELEMENTS:
            most = sparse_message.MOST_ELEMENTS
            raise BadInput(f"{n:,} dense parameters are more than a message can number ({most:,})")
        self.residual, self._next = np.zeros(n, dtype), np.zeros(n, dtype)
        self.thresholds = Thresholds(spec, len(self.sizes))
        self._indices, self._values = np.empty(n, np.int32), np.empty(n, dtype)
        self._size = np.zeros(1)
        self.encode_s, self.sent_bytes = np.zeros(len(self.sizes)), np.zeros(len(self.sizes))
        self.residual_size = self._next_size = 0.0  # sum of |residual|, and of what is pending
        self._residual_is_empty = self._next_is_empty = True

    def begin(self) -> None:
        """A step: `encode` and `flush` follow for every tensor of it, then `settle`, if it is decided."""
        self._next_size = 0.0

    def encode(self, flat: np.ndarray, spans: Sequence[TensorSpan], n: int, plain: np.ndarray) -> bytes:
        """A message with what is sent of these tensors. flat: [n of all], this step's gradients; not changed.

        spans, n: as of `spans_of`. plain: [m], what travels with them as it is.
        Raises NonFiniteGradient, naming the tensor and what of it is not finite; NonFiniteResidual where that is the
        residual, which no later step would mend.
        """
        count, self._next_is_empty = 0, False
        counts: list[int] = []
        began_s = [time.perf_counter()]
        for span in spans:
            grad, residual, pending = flat[span.at], self.residual[span.at], self._next[span.at]
            if not self.spec.selector:
                _add(grad, residual, pending)
                self._values[span.start : span.stop] = pending
                counts.append(len(grad))
            else:
                counts.append(self._select(span, grad, residual, pending, count))
            count += counts[-1]
            began_s.append(time.perf_counter())
        what = self._values[:count]
        if not self.spec.selector and not np.isfinite(what.sum(dtype=np.float64)):
            for span in spans:
                self.refuse_non_finite(span, flat[span.at])
        where = self._indices[:count] if self.spec.selector else None
        sent, seen = sparse_message.write(where, what, n, self.spec.values, plain)
        if self.spec.selector:
            self._next_size -= float(np.abs(what).sum(dtype=np.float64))
        if seen is not what:
            self._keep_rounding(spans, counts, what - seen)
        shares, tensors = np.array(counts) / max(1, count), [span.tensor for span in spans]
        self.encode_s[tensors] = np.diff(began_s) + shares * (time.perf_counter() - began_s[-1])
        self.sent_bytes[tensors] = shares * len(sent)
        return sent

    def flush_all(self, flat: np.ndarray, spans: Sequence[TensorSpan]) -> None:
        """As `flush` for the tensors of a step that is sent uncompressed. Costs nothing while nothing waits."""
        if not (self._residual_is_empty and self._next_is_empty):
            self.flush(flat, spans)
            self._next_is_empty = True

    def flush(self, flat: np.ndarray, spans: Sequence[TensorSpan]) -> None:
        """flat += residual for these tensors: they are sent uncompressed."""
        for span in spans:
            flat[span.at] += self.residual[span.at]
            self._next[span.at] = 0

    def sent(self, flat: np.ndarray, spans: Sequence[TensorSpan], seen: np.ndarray) -> None:
        """These tensors were sent by the caller, as `seen` [n of the spans] after adding the residual."""
        self._next_is_empty = False
        for span in spans:
            pending = self._next[span.at]
            np.add(flat[span.at], self.residual[span.at], out=pending)
            pending -= seen[span.start : span.stop]
            self._next_size += float(np.abs(pending).sum(dtype=np.float64))

    def settle(self) -> None:
        """The step is decided: what was sent of it counts."""
        self.residual, self._next = self._next, self.residual
        self._residual_is_empty, self._next_is_empty = self._next_is_empty, self._residual_is_empty
        self.residual_size = self._next_size

    def load(self, residual: np.ndarray) -> None:
        """Begin with this residual, [n]. Raises BadInput when it does not fit or is not finite."""
        if residual.shape != self.residual.shape or residual.dtype != self.residual.dtype:
            raise BadInput(
                f"expected a residual of {len(self.residual)} numbers of {self.residual.dtype}, got {residual.dtype} "
                f"{list(residual.shape)}: is it of another model?"
            )
        at = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if not np.isfinite(residual[at : at + size]).all():
                raise BadInput(f"the residual of {name} is not finite: leave the residual out, or resume from an "
                               "older checkpoint")  # fmt: skip
            at += size
        self.residual[:], self._residual_is_empty = residual, False
        self.residual_size = float(np.abs(residual).sum(dtype=np.float64))

    def clear(self) -> None:
        """Discard the residual."""
        self.residual[:], self.residual_size, self._residual_is_empty = 0, 0.0, True

    # -----------------------------------------------------------------------------------------------------------------

    def _select(self, span: TensorSpan, grad: np.ndarray, residual: np.ndarray, pending: np.ndarray, done: int) -> int:
        thresholds = self.thresholds
        if thresholds.is_due(span.tensor):
            _add(grad, residual, pending)
            thresholds.find(span.tensor, pending)
        least = grad.dtype.type(thresholds.least(span.tensor))
        indices, values = self._indices[done:], self._values[done:]
        n = kernels.add_and_select(grad, residual, least, span.start, pending, indices, values, self._size)
        if not np.isfinite(self._size[0]):
            self.refuse_non_finite(span, grad)
        self._next_size += float(self._size[0])
        thresholds.sent(span.tensor, n, len(grad))
        return int(n)

    def _keep_rounding(self, spans: Sequence[TensorSpan], counts: Sequence[int], error: np.ndarray) -> None:
        at = 0
        for span, count in zip(spans, counts, strict=True):
            pending, mine = self._next[span.at], error[at : at + count]
            if self.spec.selector:
                kernels.add_at(pending, self._indices[at : at + count], span.start, mine)
            else:
                pending[:] = mine
            at += count
        self._next_size += float(np.abs(error).sum(dtype=np.float64))

    def refuse_non_finite(self, span: TensorSpan, grad: np.ndarray) -> None:
        """Raises if this tensor's gradient and residual are not finite together, and says which of them it is."""
        name, residual = self.names[span.tensor], self.residual[span.at]
        if not np.isfinite(residual).all():
            raise NonFiniteResidual(
                f"the residual of {name} is not finite, so no gradient of it can be sent any more: resume from the "
                "newest checkpoint, or without the residual (`clear`)"
            )
        if not np.isfinite(grad).all():
            raise NonFiniteGradient(f"the gradient of {name} is not finite")
        self._next_is_empty = False
        if not np.isfinite(_add(grad, residual, self._next[span.at])).all():
            raise NonFiniteGradient(f"the sum of the gradient of {name} and its residual is not finite")


def _add(grad: np.ndarray, residual: np.ndarray, out: np.ndarray) -> np.ndarray:
    """out = grad + residual. What overflows is refused by name, so numpy need not warn of it."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(grad, residual, out=out)
    return out
