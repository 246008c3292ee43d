"""`CoderContract`: what every compressor of values promises."""

from __future__ import annotations

import numpy as np
import pytest

from gba_hvd.compression import Spec, value_codec
from gba_hvd.compression.error_feedback import Feedback, spans_of
from gba_hvd.compression.sparse_message import read

N = 600


class CoderContract:
    @pytest.fixture
    def kind(self) -> str:
        """The name of a value coder."""
        raise NotImplementedError

    @pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 1000])
    def test_values_take_the_bytes_that_were_announced_and_come_back_in_number(self, kind: str, n: int) -> None:
        given = np.random.default_rng(n).normal(size=n).astype(np.float32)
        encoded = value_codec.encode(given, kind)
        assert len(encoded) == value_codec.n_bytes(kind, n, given.dtype)
        back = value_codec.decode(np.frombuffer(encoded, np.uint8), kind, n, given.dtype)
        assert back.dtype == np.float32 and back.shape == (n,)
        assert np.abs(back - given).sum() <= np.abs(given).sum(), "sending nothing would be nearer"

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_never_becomes_a_number(self, kind: str, bad: float) -> None:
        given = np.linspace(-1, 1, 300).astype(np.float32)
        given[17] = bad
        encoded = np.frombuffer(value_codec.encode(given, kind), np.uint8)
        assert not np.isfinite(value_codec.decode(encoded, kind, 300, given.dtype)[17])

    def test_large_numbers_stay_finite(self, kind: str) -> None:
        given = np.full(300, 3e38, np.float32)
        encoded = np.frombuffer(value_codec.encode(given, kind), np.uint8)
        assert np.isfinite(value_codec.decode(encoded, kind, 300, given.dtype)).all()

    def test_any_bytes_of_the_right_number_are_values_or_refused(self, kind: str) -> None:
        size = value_codec.n_bytes(kind, 300, np.dtype(np.float32))
        for seed in range(20):
            data = np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)
            try:
                assert len(value_codec.decode(data, kind, 300, np.dtype(np.float32))) == 300
            except ValueError:
                continue

    def test_what_is_sent_and_what_waits_is_the_gradient(self, kind: str) -> None:
        feedback = Feedback(Spec("topk", 0.5, values=kind), ["weight"], [N], np.dtype(np.float32))
        spans, n = spans_of([N], [0])
        total, sent = np.zeros(N), np.zeros(N)
        for step in range(5):
            gradient = np.random.default_rng(step).normal(size=N).astype(np.float32)
            feedback.begin()
            message = feedback.encode(gradient, spans, n, gradient[:0])
            feedback.settle()
            total += gradient
            sent += read(message, n, 0).whole()
        np.testing.assert_allclose(sent + feedback.residual, total, rtol=1e-5, atol=1e-5)
