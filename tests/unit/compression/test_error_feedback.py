"""What is sent and what waits add up to the gradient; messages say what they are; bad ones are refused."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gba_hvd
from gba_hvd.compression import Compression, Spec, index_codec, sparse_message, value_codec
from gba_hvd.compression.error_feedback import Feedback, NonFiniteResidual, plain_of, spans_of
from gba_hvd.compression.spec import dense_spec_of, row_spec_of
from gba_hvd.compression.thresholds import Thresholds, kth_largest
from gba_hvd.errors import BadInput, NonFiniteGradient

SIZES = [700, 20, 3000, 256]
NAMES = ["first", "bias", "second", "last"]
N = sum(SIZES)
SPANS, N_SENT = spans_of(SIZES, range(4))
CODERS = [Compression.fp16, Compression.bf16, Compression.int8]
SELECTORS_OF_ALL = [Compression.topk(1.0), Compression.dct(1.0)]
EVERYTHING = [*SELECTORS_OF_ALL, *CODERS, *(selector.then(coder) for selector in SELECTORS_OF_ALL for coder in CODERS)]
CHAINS = [
    Compression.topk(0.05),
    Compression.dct(0.05, refresh_every=7),
    Compression.dct(0.05).then(Compression.fp16),
    Compression.dct(0.05).then(Compression.bf16),
    Compression.dct(0.05).then(Compression.int8),
    Compression.topk(0.3).then(Compression.int8),
    Compression.int8,
    Compression.bf16,
]


def feedback(spec: Spec, dtype: type = np.float32) -> Feedback:
    return Feedback(spec, NAMES, SIZES, np.dtype(dtype))


def send(worker: Feedback, grad: np.ndarray) -> np.ndarray:
    """What the receivers add up of one step, [N]."""
    worker.begin()
    sent = worker.encode(grad, SPANS, N_SENT, grad[:0])
    worker.settle()
    got = sparse_message.read(sent, N_SENT, 0, grad.dtype)
    out = np.zeros_like(grad)
    for span in SPANS:
        got.add_to(out[span.at], span.start, span.stop)
    return out


def gradients(steps: int, dtype: type = np.float32, seed: int = 0) -> list[np.ndarray]:
    """As they come: most of them small, their scale falling. The tensor that is not compressed has none here."""
    rng = np.random.default_rng(seed)
    made = [(rng.standard_t(3, N) * 0.9**step).astype(dtype) for step in range(steps)]
    for grad in made:
        grad[plain_of(SIZES, range(4))[0]] = 0
    return made


@pytest.mark.parametrize("spec", CHAINS, ids=str)
def test_all_that_was_sent_and_the_rest_are_all_gradients(spec: Spec) -> None:
    worker, made = feedback(spec), gradients(30)
    sent = sum(send(worker, grad).astype(np.float64) for grad in made)
    assert np.abs(worker.residual).max() > 0
    np.testing.assert_allclose(sent + worker.residual, sum(g.astype(np.float64) for g in made), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("spec", [Compression.topk(0.05), Compression.dct(0.05, refresh_every=3)], ids=str)
def test_selectors_conserve_float64_gradients_bit_for_bit(spec: Spec) -> None:
    rng = np.random.default_rng(1)
    made = [rng.integers(-(2**40), 2**40, N).astype(np.float64) / 2**20 for _ in range(50)]  # additions are exact
    for grad in made:
        grad[plain_of(SIZES, range(4))[0]] = 0
    worker = feedback(spec, np.float64)
    sent = sum(send(worker, grad) for grad in made)
    assert np.array_equal(sent + worker.residual, sum(made))


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [*((spec, np.float32) for spec in CHAINS), *((s, np.float64) for s in CHAINS if s.values == "none")],
    ids=str,
)
def test_each_step_sent_and_rest_are_what_was_there(spec: Spec, dtype: type) -> None:
    """With a selector alone bit for bit, whatever the gradients: only the sum of gradient and rest is rounded."""
    worker = feedback(spec, dtype)
    for grad in gradients(5, dtype):
        wanted = grad + worker.residual
        sent = send(worker, grad)
        if spec.values == "none":
            assert np.array_equal(sent + worker.residual, wanted)
            assert not (sent * worker.residual).any()  # every element is here or there
        else:
            np.testing.assert_allclose(sent + worker.residual, wanted, rtol=2e-7, atol=1e-12)


@pytest.mark.parametrize("spec", EVERYTHING, ids=str)
def test_keeping_everything_is_no_compressor(spec: Spec) -> None:
    worker = feedback(spec)
    for grad in gradients(3):
        exact = np.round(grad * 64).clip(-127, 127) / 64  # such that half precision and int8 have them
        for span in SPANS:
            exact[span.at][::100] = 127 / 64
        sent = send(worker, exact.astype(np.float32))
        assert np.array_equal(sent, exact)
        assert not worker.residual.any()


@pytest.mark.parametrize("selector", SELECTORS_OF_ALL, ids=str)
@pytest.mark.parametrize("coder", CODERS, ids=str)
def test_keeping_everything_leaves_the_value_coder_alone(selector: Spec, coder: Spec) -> None:
    """Where no element is 0: those are not sent, so int8's scales would be of other elements."""
    chained, alone = feedback(selector.then(coder)), feedback(coder)
    for grad in gradients(5):
        assert np.array_equal(send(chained, grad), send(alone, grad))
        assert alone.residual.any() and np.array_equal(chained.residual, alone.residual)


def test_a_step_that_is_computed_again_finds_the_rest_it_had() -> None:
    worker, (first, second, third) = feedback(Compression.dct(0.1).then(Compression.int8)), gradients(3)
    send(worker, first)
    residual = worker.residual.copy()
    worker.begin()
    worker.encode(second, SPANS, N_SENT, second[:0])
    assert np.array_equal(worker.residual, residual)
    sent = send(worker, third)
    np.testing.assert_allclose(sent + worker.residual, residual + third, rtol=1e-6, atol=1e-7)


def test_a_step_that_goes_whole_takes_the_rest_along() -> None:
    worker, (first, second) = feedback(Compression.topk(0.1)), gradients(2)
    sent = send(worker, first)
    worker.begin()
    flat = second.copy()
    worker.flush_all(flat, SPANS)
    worker.settle()
    assert not worker.residual.any() and worker.residual_size == 0
    assert np.array_equal(flat, second + (first - sent))
    for grad in gradients(3):
        whole = grad.copy()
        worker.begin()
        worker.flush_all(whole, SPANS)
        worker.settle()
        assert np.array_equal(whole, grad)
    np.testing.assert_allclose(send(worker, first) + worker.residual, first, rtol=1e-6)


def test_the_size_of_the_rest_is_known() -> None:
    for spec in CHAINS:
        worker = feedback(spec)
        for grad in gradients(4):
            send(worker, grad)
            assert worker.residual_size == pytest.approx(
                np.abs(worker.residual).sum(dtype=np.float64), rel=1e-4, abs=1e-6
            ), spec


# --- which elements ---------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=300), st.data())
def test_the_kth_largest_is_exact(numbers: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(numbers)))
    for dtype in (np.float32, np.float64):
        assert kth_largest(np.array(numbers, dtype), k) == sorted(map(abs, numbers))[-k]


def test_topk_sends_as_many_of_each_tensor_as_it_was_asked_for() -> None:
    worker = feedback(Compression.topk(0.1))
    for grad in gradients(3):
        sent = send(worker, grad)
        assert [np.count_nonzero(sent[span.at]) for span in SPANS] == [70, 300, 25]
        for span in SPANS:
            assert np.abs(sent[span.at])[sent[span.at] != 0].min() >= np.abs(worker.residual[span.at]).max()


def test_a_threshold_is_kept_for_as_many_steps_as_asked() -> None:
    thresholds = Thresholds(Compression.dct(0.1, refresh_every=5, drift=math.inf), 1)
    rng, found = np.random.default_rng(0), []
    for step in range(20):
        if thresholds.is_due(0):
            thresholds.find(0, rng.normal(size=1000).astype(np.float32))
            found.append(step)
        thresholds.sent(0, 900, 1000)
    assert found == [0, 5, 10, 15]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_threshold_found_among_values_that_were_none_is_found_again(bad: float) -> None:
    thresholds, rows = Thresholds(Compression.dct(0.1, refresh_every=1000, drift=math.inf), 1), np.ones(100, np.float32)
    rows[:50] = bad
    thresholds.find(0, rows)
    thresholds.sent(0, 0, 100)
    assert thresholds.is_due(0)
    thresholds.find(0, np.ones(100, np.float32))
    assert thresholds.least(0) == 1.0 and not thresholds.is_due(0)


def test_a_threshold_that_lets_too_much_through_is_found_before_its_time() -> None:
    thresholds = Thresholds(Compression.dct(0.1, refresh_every=1000, drift=2), 1)
    thresholds.find(0, np.ones(1000, np.float32))
    for _ in range(6):
        thresholds.sent(0, 150, 1000)
    assert not thresholds.is_due(0)
    thresholds.sent(0, 250, 1000)
    assert thresholds.is_due(0)
    assert thresholds.density == [0.25]


@pytest.mark.parametrize(("drift", "found"), [(2.0, [0, 10, 20, 30, 40]), (math.inf, [0, 20, 40])])
def test_a_refresh_for_drift_starts_the_count_over_so_the_limit_may_never_be_reached(
    drift: float, found: list[int]
) -> None:
    thresholds, when = Thresholds(Compression.dct(0.1, refresh_every=20, drift=drift), 1), []
    for step in range(50):
        if thresholds.is_due(0):
            thresholds.find(0, np.ones(1000, np.float32))
            when.append(step)
        thresholds.sent(0, 250 if step % 10 == 9 else 150, 1000)
    assert when == found


def test_the_share_sent_stays_near_what_was_asked_for() -> None:
    worker, shares = feedback(Compression.dct(0.05, refresh_every=1000)), []
    rng = np.random.default_rng(0)
    for _ in range(300):
        sent = send(worker, rng.normal(size=N).astype(np.float32))
        shares.append(np.count_nonzero(sent) / N_SENT)
    assert 0.025 < np.mean(shares[20:]) < 0.1


def test_zeros_are_not_sent() -> None:
    worker = feedback(Compression.topk(0.5))
    sent = worker.encode(np.zeros(N, np.float32), SPANS, N_SENT, np.empty(0, np.float32))
    assert len(sent) < 70


def test_small_tensors_are_left_as_they_are() -> None:
    assert [span.tensor for span in SPANS] == [0, 2, 3]
    assert plain_of(SIZES, range(4)) == [slice(700, 720)]


@pytest.mark.parametrize("spec", [Compression.dct(0.1), Compression.topk(0.1), Compression.int8], ids=str)
@pytest.mark.parametrize(
    ("of_grad", "of_residual", "error", "words"),
    [
        (np.inf, 0.0, NonFiniteGradient, "the gradient of second is not finite"),
        (np.nan, 1.0, NonFiniteGradient, "the gradient of second is not finite"),
        (3e38, 3e38, NonFiniteGradient, "the sum of the gradient of second and its residual is not finite"),
        (0.0, np.nan, NonFiniteResidual, "the residual of second is not finite, .* newest checkpoint"),
        (np.inf, -np.inf, NonFiniteResidual, "the residual of second is not finite"),
    ],
)
def test_what_is_not_finite_is_named(
    spec: Spec, of_grad: float, of_residual: float, error: type[Exception], words: str
) -> None:
    worker, (grad,) = feedback(spec), gradients(1)
    grad[800], worker.residual[800] = of_grad, of_residual
    residual = worker.residual.copy()
    with pytest.raises(error, match=words) as caught:
        worker.encode(grad, SPANS, N_SENT, grad[:0])
    assert type(caught.value) is error
    assert np.array_equal(worker.residual, residual, equal_nan=True)


# --- bytes ------------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 69_999), max_size=400), st.integers(0, 2))
def test_places_come_back(chosen: set[int], thinning: int) -> None:
    where = np.array(sorted(p for p in chosen if thinning == 0 or p < 2000 * thinning), dtype=np.int32)
    kind, data = index_codec.encode(where, 70_000)
    back = index_codec.decode(np.frombuffer(data, np.uint8), kind, 70_000, len(where))
    assert np.array_equal(back, where)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.2, 0.6])
def test_places_take_few_bytes(share: float) -> None:
    where = np.flatnonzero(np.random.default_rng(0).random(200_000) < share).astype(np.int32)
    _, data = index_codec.encode(where, 200_000)
    entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) * 200_000 / 8
    assert len(data) < (1.45 if share < 0.01 else 1.2) * entropy


@pytest.mark.parametrize("coder", ["none", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 1000])
def test_values_come_back_as_their_sender_sees_them(coder: str, n: int) -> None:
    given_values = np.random.default_rng(n).normal(size=n).astype(np.float32)
    assert len(value_codec.encode(given_values, coder)) == value_codec.n_bytes(coder, n, np.dtype(np.float32))
    data, seen = sparse_message.write(None, given_values, n, coder, given_values[:0])
    assert np.array_equal(sparse_message.read(data, n, 0).values, seen)
    np.testing.assert_allclose(seen, given_values, rtol={"bf16": 4e-3}.get(coder, 5e-4), atol=0.02 * (coder == "int8"))


def test_values_beyond_half_precision_keep_their_rest() -> None:
    worker, grad = feedback(Compression.dct(1.0).then(Compression.fp16)), np.zeros(N, np.float32)
    grad[0], grad[1] = 1e6, 1e-9
    sent = send(worker, grad)
    assert sent[0] == 65504 and sent[0] + worker.residual[0] == 1e6
    assert sent[1] == 0 and worker.residual[1] == np.float32(1e-9)


@pytest.mark.parametrize("coder", CODERS, ids=str)
def test_the_largest_numbers_stay_numbers(coder: Spec) -> None:
    most = np.finfo(np.float32).max
    largest = np.array([most, -most, 1.0], np.float32)
    _, seen = sparse_message.write(None, largest, 3, coder.values, largest[:0])
    assert np.isfinite(seen).all() and seen[0] == -seen[1] > 65000


def test_numbers_too_small_for_a_scale_wait() -> None:
    worker, grad = feedback(Compression.int8), np.full(N, 1e-44, np.float32)
    assert not send(worker, grad).any()
    assert worker.residual[0] == np.float32(1e-44)


@pytest.mark.parametrize(
    ("spec", "least"), [(Compression.int8, 3.8), (Compression.topk(0.01).then(Compression.int8), 150)]
)
def test_messages_are_short(spec: Spec, least: float) -> None:
    worker = Feedback(spec, ["w"], [1_000_000], np.dtype(np.float32))
    spans, n = spans_of([1_000_000], [0])
    grad = np.random.default_rng(0).normal(size=n).astype(np.float32)
    assert 4 * n / len(worker.encode(grad, spans, n, grad[:0])) > least


def whole() -> bytearray:
    grad = gradients(1)[0]
    return bytearray(feedback(Compression.topk(0.05).then(Compression.int8)).encode(grad, SPANS, N_SENT, grad[:3]))


DAMAGES: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "nothing": (lambda m: m.clear(), "a head of"),
    "cut short": (lambda m: m.pop(), "was announced"),
    "longer": (lambda m: m.append(0), "was announced"),
    "another magic": (lambda m: m.__setitem__(0, 0), "no compressed gradient"),
    "an unknown way of telling places": (lambda m: m.__setitem__(5, 9), "no compressed gradient"),
    "an unknown coder": (lambda m: m.__setitem__(6, 9), "no compressed gradient"),
    "another coder": (lambda m: m.__setitem__(6, 1), "bytes of values are not"),
    "another type": (lambda m: m.__setitem__(4, 8), "train the same model"),
    "another tensor": (lambda m: m.__setitem__(slice(8, 16), struct.pack("<Q", 7)), "train the same model"),
    "too many elements": (lambda m: m.__setitem__(slice(24, 32), struct.pack("<Q", 2**60)), "bytes of values"),
    "places beyond the end": (lambda m: m.__setitem__(slice(64, 124), b"\xff" * 60), "they leave the tensors"),
    "all, but not all of them": (lambda m: m.__setitem__(5, 0), "fewer than announced"),
    "bits instead of gaps": (lambda m: m.__setitem__(5, 3), "no bit for each"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_message_that_is_not_what_it_should_be_is_refused(damage: Callable[[bytearray], object], words: str) -> None:
    sparse_message.read(whole(), N_SENT, 3)
    damaged = whole()
    damage(damaged)
    with pytest.raises(sparse_message.BadMessage, match=words):
        sparse_message.read(damaged, N_SENT, 3)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=8))
def test_whatever_bytes_come_nothing_outside_is_written(changes: list[tuple[int, int]]) -> None:
    damaged = whole()
    for at, byte in changes:
        damaged[at % len(damaged)] = byte
    try:
        got = sparse_message.read(damaged, N_SENT, 3)
    except sparse_message.BadMessage:
        return
    if got.indices is not None and len(got.indices):
        assert (np.diff(got.indices) > 0).all() and got.indices[0] >= 0 and got.indices[-1] < N_SENT
    out = np.zeros(N_SENT, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        got.add_to(out)


# --- what a user writes ----------------------------------------------------------------------------------------------


def test_compressors_chain_and_say_what_they_are() -> None:
    assert str(Compression.dct(keep=0.01).then(Compression.int8)) == "dct(keep=0.01, refresh_every=1000).then(int8)"
    assert str(Compression.topk(0.1)) == "topk(keep=0.1)"
    assert str(Compression.fp16) == "fp16"
    assert Compression.by_name("dct", keep=0.1) == Compression.dct(0.1)
    assert dense_spec_of("int8") == row_spec_of("int8") == Compression.int8
    assert Compression.none.is_none and not Compression.dct(1.0).is_none


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Compression.dct(keep=0), r"keep is the share .* in \(0, 1\]; got 0"),
        (lambda: Compression.topk(keep=1.5), "got 1.5"),
        (lambda: Compression.topk(keep=math.nan), "got nan"),
        (lambda: Compression.dct(refresh_every=0), "at least 1; got 0"),
        (lambda: Compression.dct(drift=1.0), "drift is a number above 1"),
        (lambda: Compression.dct(drift="inf"), r"drift is a number above 1 \(math.inf: .*got 'inf'"),  # type: ignore
        (lambda: Compression.dct(keep="0.1"), "got '0.1'"),  # type: ignore[arg-type]
        (lambda: Compression.dct(eta="0.1"), "got '0.1'"),  # type: ignore[arg-type]
        (lambda: Compression.dct(refresh_every="9"), "at least 1; got '9'"),  # type: ignore[arg-type]
        (lambda: Compression.dct(refresh_every=math.inf), "at least 1; got inf"),  # type: ignore[arg-type]
        (lambda: Compression.dct(0.1).then("int4"), r"takes a value coder .*got 'int4'"),  # type: ignore[arg-type]
        (lambda: Compression.dct(0.1).then(Compression.topk), "takes a value coder .*got topk"),  # type: ignore
        (lambda: Compression.by_name("dct_dp"), "'dct_dp' is not known: did you mean 'dct'"),
        (lambda: Compression.by_name("dtc"), "did you mean 'dct'. Choose one of none, fp16, .*, dct_mp$"),
        (lambda: Compression.by_name("dtc"), "did you mean 'dct'"),
        (lambda: Compression.by_name("zip"), "choose one of none, fp16"),
        (lambda: Compression.by_name("int8", keep=0.1), "'int8' has no setting 'keep': it has none"),
        (
            lambda: Compression.by_name("topk", refresh_every=5),
            "'topk' has no setting 'refresh_every': it has keep, eta",
        ),
        (lambda: Compression.by_name("dct", kep=0.1), "'kep': it has keep, eta, refresh_every, drift"),
        (lambda: Compression.int8.then(Compression.dct()), "a selector .* with one value coder"),
        (lambda: Compression.dct().then(Compression.topk()), "a selector .* with one value coder"),
        (lambda: Compression.dct().then(Compression.int8).then(Compression.fp16), "a selector"),
        (lambda: dense_spec_of(Compression.dct), r"write gba_hvd.Compression.dct\(keep=0.01\)"),
        (lambda: dense_spec_of(0.5), "one of gba_hvd.Compression"),
        (lambda: Feedback(Compression.topk(), ["w"], [300], np.dtype(np.int64)), "float32 or float64, got int64"),
        (lambda: Feedback(Compression.int8, ["w"], [300], np.dtype(np.float64)), "int8 takes gradients of float32"),
    ],
)
def test_bad_settings_say_what_is_expected(make: Callable[[], object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make()


@pytest.mark.parametrize(
    ("residual", "words"),
    [
        (np.zeros(3, np.float32), "expected a residual of 3976 numbers"),
        (np.zeros(N, np.float64), "got float64"),
        (np.where(np.arange(N) == 800, np.nan, 0).astype(np.float32), "the residual of second is not finite"),
    ],
)
def test_a_residual_that_does_not_fit_is_refused(residual: np.ndarray, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        feedback(Compression.dct(0.1)).load(residual)


def test_an_optimizer_refuses_what_is_no_compressor(training: Callable[..., object]) -> None:
    with pytest.raises(BadInput, match="did you mean 'fp16'"):
        training(compression="fp61")
    assert gba_hvd.Compression is Compression
