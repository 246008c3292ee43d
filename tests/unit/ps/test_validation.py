"""What is believed of a message: nothing that was not checked."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.embedding.row_gradients import RowGrad, pack_by_owner, unpack, with_contributors
from gba_hvd.ps import messages, validation, wire
from gba_hvd.ps.messages import (
    Apply,
    DelegateClaim,
    HeartbeatMsg,
    JobPosition,
    LeaseGrant,
    LeaseReply,
    NotFinite,
    Ok,
    PlannedMember,
    ProtocolError,
    Push,
    PushDone,
    Refused,
    Save,
    SaveAbout,
    SavePace,
    SaveSettings,
    SaveStatus,
)
from gba_hvd.shm.layout import Layout
from recovery.catalog.claims import Claim
from recovery.config import Config
from recovery.schedule.adaptive import Goals
from recovery.schedule.costs import Costs

LAYOUT = Layout.of({"user": (20, 3), "item": (5, 3), "wide": (7, 5)}, (), n_shards=4, seed=1, init_std=0.1)
ALL = np.ones(4, dtype=bool)
FIRST = (0, 5 * 4)  # key of row 0 of "user", of "item"


def message(keys: list[list[int]], value: float = 1.0, contributors: bool = False) -> np.ndarray:
    grads = []
    for group, chosen in zip(LAYOUT.groups, keys, strict=True):
        grad = RowGrad(np.array(chosen, np.int64), np.full((len(chosen), group.dim), value, np.float32))
        grads.append(with_contributors(grad) if contributors else grad)
    return pack_by_owner(grads, np.zeros(4, np.int32), 1)[0]


# --- envelopes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        Push(3, 9, 4, 5),
        Push(3, 9, 4, 5, dense_step=17),
        PushDone(3, 9, 4, 5, None, 0.25, "the gradient of w is not finite"),
        HeartbeatMsg(1, 0, 0, 123, 9, report={"step": 4}),
        Apply(9, 7, [PlannedMember(1, 2, 0.5)], 0.25, 0.1, [0.1, 0.2], 3),
        Apply(9, 7, [], 1.0, 0.1, [0.1], 3, settings=[{"betas": (0.5, 1), "eps": 0.5, "amsgrad": True, "none": None}]),
    ],
)
def test_a_request_comes_through_as_it_was(body: Any) -> None:
    envelope = wire.open_envelope(wire.encode("job", 12, body), "job")
    assert (envelope.number, wire.decode_request(envelope)) == (12, body)


def test_an_answer_comes_through_as_it_was() -> None:
    body = LeaseReply(JobPosition(step=3, staleness={0: 4, 2: 1}, rates=[(0, 0.5)]), LeaseGrant(1, 2, 3, 16))
    envelope = wire.open_envelope(wire.encode("job", 1, body), "job")
    assert wire.decode_answer(envelope) == body


CLAIM = {"epoch": 3, "writer": "job.1", "nonce": "0011aabb", "signs": 0, "lease_s": 1.0}
COSTS = {"save_s": 2.0, "load_s": 1.0, "reschedule_s": 30.0, "partial_load_s": None, "stall_share": 1.0,
         "delta_share": None, "partial_stall_s": None}  # fmt: skip
GIVEN = {"policy": "mfu", "r": 0.25, "mtbf_h": None, "target_pls": 0.1, "longest_s": 3600.0, "one_host": None,
         "strategy": "auto"}  # fmt: skip
ABOUT = {"job": "clicks", "mode": "gba", "compression": "none", "given": GIVEN, "costs": COSTS,
         "pace": {"is_planned": True, "every_s": 60.0}}  # fmt: skip
SETTINGS = {"url": "/place", "storage_options": {"key": "x"}, "config": {"policy": "mfu", "keep_last": 5}}
ASKED = {"epoch": 3, "number": 8, "part": 0, "n_parts": 2, "kind": "full", "parent": None, "step": 8, "samples": 64}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (
            {"type": "Save", **ASKED, "settings": SETTINGS, "claim": CLAIM, "about": ABOUT},
            Save(
                **ASKED,  # type: ignore[arg-type]
                settings=SaveSettings("/place", {"key": "x"}, Config(policy="mfu", keep_last=5)),
                claim=Claim(3, "job.1", "0011aabb", lease_s=1.0),
                about=SaveAbout(
                    job="clicks",
                    mode="gba",
                    compression="none",
                    given=Goals("mfu", 0.25),
                    pace=SavePace(every_s=60.0, is_planned=True),
                    costs=Costs(2.0, 1.0, 30.0),
                ),
            ),
        ),
        (
            {"type": "Hold", "claim": CLAIM, "settings": {**SETTINGS, "config": {}, "last_gasp_s": 60}, "part": 1},
            DelegateClaim(
                Claim(3, "job.1", "0011aabb", lease_s=1.0),
                SaveSettings("/place", {"key": "x"}, Config(), 60.0),
                part=1,
            ),
        ),
    ],
)
def test_what_is_asked_of_a_save_is_plain_maps_on_the_wire(sent: dict[str, Any], read: Any) -> None:
    """As versions before wrote and read them: no tags inside, and in the manifest only what is known."""
    envelope = wire.Envelope(messages.VERSION, "job", 1, msgspec.Raw(msgspec.msgpack.encode(sent)))
    assert wire.decode_request(envelope) == read
    written = msgspec.to_builtins(read)
    assert {name: written[name] for name in ("type", "claim", "part")} == {
        name: sent[name] for name in ("type", "claim", "part")
    }
    assert written["about"] == sent.get("about", {})
    assert {**written["settings"]["config"], **sent["settings"]["config"]} == written["settings"]["config"]


@pytest.mark.parametrize(
    "facts", [{}, {"why": "no"}, {"read": True}, {"rows": 27, "n_bytes": 10, "manifest": "m", "worst_error": 0.5}]
)
def test_figures_of_a_save_are_a_plain_map_of_what_is_known(facts: dict[str, Any]) -> None:
    saved = msgspec.convert({"type": "Saved", "epoch": 1, "number": 4, "state": "done", "facts": facts}, SaveStatus)
    assert msgspec.to_builtins(saved)["facts"] == facts


def test_settings_that_make_no_sense_are_refused_where_they_are_read() -> None:
    sent = {"type": "Hold", "claim": CLAIM, "settings": {**SETTINGS, "config": {"policy": "best"}}}
    envelope = wire.Envelope(messages.VERSION, "job", 1, msgspec.Raw(msgspec.msgpack.encode(sent)))
    with pytest.raises(ProtocolError, match="policy 'best' is not known"):
        wire.decode_request(envelope)


def test_a_budget_in_powers_of_ten_is_a_whole_number_of_bytes() -> None:
    hold = DelegateClaim(Claim(3, "job.1", "0011aabb"), SaveSettings("/place", {}, Config(budget_bytes=1e9)))  # type: ignore[arg-type]
    envelope = wire.open_envelope(wire.encode("job", 1, hold), "job")
    assert wire.decode_request(envelope) == hold


@given(st.binary(max_size=200))
def test_random_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.open_envelope(data, "job")


@given(st.data())
def test_a_damaged_message_is_refused_or_is_another_valid_one(data: st.DataObject) -> None:
    whole = bytearray(wire.encode("job", 1, Push(3, 9, 4, 5)))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    with contextlib.suppress(ProtocolError):  # and nothing else
        wire.decode_request(wire.open_envelope(bytes(whole[:cut]), "job"))


def test_another_version_is_asked_to_install_the_same_one_and_keeps_its_number() -> None:
    old = msgspec.msgpack.encode([messages.VERSION + 1, "job", 5, {"type": "Status"}])
    with pytest.raises(ProtocolError, match="same version of gba-hvd") as caught:
        wire.open_envelope(old, "job")
    assert caught.value.number == 5


def test_a_message_of_another_job_is_named() -> None:
    with pytest.raises(ProtocolError, match="for job 'yours' came to job 'mine'"):
        wire.open_envelope(wire.encode("yours", 1, Ok()), "mine")


def test_an_endless_header_is_not_even_decoded() -> None:
    with pytest.raises(ProtocolError, match="the limit is"):
        wire.open_envelope(bytes(messages.MAX_HEADER_BYTES + 1), "job")


def test_an_answer_is_no_request() -> None:
    envelope = wire.open_envelope(wire.encode("job", 1, Refused("no")), "job")
    with pytest.raises(ProtocolError, match="request 1"):
        wire.decode_request(envelope)


# --- frames ----------------------------------------------------------------------------------------------------------


def test_an_array_is_a_view_unless_it_would_lie_askew() -> None:
    frame = memoryview(bytearray(40))
    array = validation.array_of(frame, "float32", "x")
    assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
    askew = validation.array_of(memoryview(bytearray(41))[1:], "float32", "x")
    assert askew.flags.aligned


def test_bytes_that_are_no_whole_number_are_refused() -> None:
    with pytest.raises(ProtocolError, match="x: 7 bytes are no whole number of float32"):
        validation.array_of(bytes(7), "float32", "x")


@pytest.mark.parametrize("contributors", [False, True])
def test_a_good_row_message_passes(contributors: bool) -> None:
    words = message([[0, 7, FIRST[1] + 4], [6]], contributors=contributors)
    validation.check_row_message(LAYOUT, words, ALL, int(contributors))


@pytest.mark.parametrize(
    ("group", "key", "says"),
    [
        (0, -1, "expected 0 to"),
        (0, FIRST[1] + 7, "table 'item' has rows 0 to 4, got 7"),
        (0, 2**62, "expected 0 to"),
        (1, 7, "table 'wide' has rows 0 to 6, got 7"),
        (0, FIRST[1] + 5, "table 'item' has rows 0 to 4, got 5"),
    ],
)
def test_a_key_beyond_its_table_is_named(group: int, key: int, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        validation.check_keys(LAYOUT, group, np.array([0, key]), ALL)


def test_a_row_of_another_server_is_refused() -> None:
    mine = np.array([True, True, False, True])
    validation.check_keys(LAYOUT, 0, np.array([0, 1, 3]), mine)
    with pytest.raises(ProtocolError, match="shard 2 is not served here"):
        validation.check_keys(LAYOUT, 0, np.array([0, 2]), mine)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60), st.sampled_from([0, 1]))
def test_random_words_are_refused_or_are_rows_that_exist(numbers: list[int], extra: int) -> None:
    words = np.array(numbers, dtype=np.int32).view(np.float32)
    try:
        validation.check_row_message(LAYOUT, words, ALL, extra)
    except ProtocolError:
        return
    for group, grad in zip(LAYOUT.groups, unpack(words, [g.dim + extra for g in LAYOUT.groups]), strict=True):
        assert np.isfinite(grad.values).all()
        assert ((grad.keys >= 0) & (grad.keys < group.rows_per_shard * LAYOUT.n_shards)).all()


@given(st.data())
def test_a_count_that_lies_never_reads_beyond_the_message(data: st.DataObject) -> None:
    words = message([[0, 7], [6]]).copy()
    words[:2].view(np.int64)[0] = data.draw(st.integers(-(2**63), 2**63 - 1).filter(lambda n: n != 2))
    with pytest.raises(ProtocolError):
        validation.check_row_message(LAYOUT, words, ALL, 0)


def test_a_message_with_words_missing_or_left_over_is_refused() -> None:
    words = message([[0, 7], [6]])
    for wrong in (words[:-1], words[:2], words[:0], np.append(words, np.float32(0))):
        with pytest.raises(ProtocolError):
            validation.check_row_message(LAYOUT, wrong, ALL, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_named(bad: float) -> None:
    words = message([[0, FIRST[1] + 4], [6]]).copy()
    words[2 + 4 + 3] = bad  # the second row of the first group
    with pytest.raises(NotFinite, match="row 4 of table 'item'"):
        validation.check_row_message(LAYOUT, words, ALL, 0)
    dense = np.array([1, 2, bad, -bad, 5], np.float32)
    with pytest.raises(NotFinite, match=r"gradient of mlp\.bias"):
        validation.check_finite(dense, ["mlp.weight", "mlp.bias"], [2, 3])


def test_large_finite_gradients_pass() -> None:
    validation.check_finite(np.full(100, 3e38, np.float32), ["w"], [100])


@pytest.mark.parametrize("n", [1, 4095, 4096, 4097, 10_000])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(n: int, bad: float) -> None:
    values = np.full(n, -3e38, np.float32)
    values[::3], values[1::3] = 1e-45, 0.0
    assert validation.all_finite(values)
    for at in {0, n // 2, n - 1}:
        worse = values.copy()
        worse[at] = bad
        assert not validation.all_finite(worse)
        assert not validation.all_finite(worse.astype(np.float64))
        worse.flags.writeable = False
        assert not validation.all_finite(worse)


def test_what_is_no_plain_array_is_checked_as_well() -> None:
    values = np.zeros((6, 4), np.float32)
    values[2, 1] = np.nan
    assert not validation.all_finite(values)
    assert validation.all_finite(values[:, ::2])
    assert not validation.all_finite(values[:, 1::2])
    assert validation.all_finite(values[:0])


@given(st.lists(st.integers(-3, 60), min_size=1, max_size=12), st.lists(st.booleans(), min_size=4, max_size=4))
def test_keys_pass_exactly_if_each_is_a_row_that_is_here(keys: list[int], here: list[bool]) -> None:
    n_shards, mine = LAYOUT.n_shards, np.array(here)
    rows = {n_shards * f + r for t, f in zip(LAYOUT.groups[0].tables, LAYOUT.groups[0].first, strict=True)
            for r in range(t.n_rows)}  # fmt: skip
    good = all(key in rows and mine[key % n_shards] for key in keys)
    aligned = np.array(keys, np.int64)
    askew = np.frombuffer(bytes(4) + aligned.tobytes(), np.uint8)[4:].view(np.int64)  # as behind an odd number of words
    for found in (aligned, askew):
        try:
            validation.check_keys(LAYOUT, 0, found, mine)
        except ProtocolError:
            assert not good
        else:
            assert good


@pytest.mark.parametrize("count", [0.0, 2.0, -1.0])
def test_a_micro_batch_contributes_once_to_a_row(count: float) -> None:
    words = message([[0], [6]], contributors=True).copy()
    words[2 + 2 + 3] = count
    with pytest.raises(ProtocolError, match="contributes once"):
        validation.check_row_message(LAYOUT, words, ALL, 1)


# --- steps -----------------------------------------------------------------------------------------------------------


def an_apply(**changes: Any) -> Apply:
    fields: dict[str, Any] = {
        "generation": 1, "step": 5, "members": [PlannedMember(0, 1, 1.0)], "scale": 0.5, "row_lr": 0.1,
        "lrs": [0.1, 0.2], "oldest_serial": 1, **changes,
    }  # fmt: skip
    return Apply(**fields)


def test_the_next_step_is_applied() -> None:
    validation.check_apply(an_apply(), last_step=4, n_groups=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 6},
        {"members": [PlannedMember(0, 1, float("nan"))]},
        {"members": [PlannedMember(0, 1, -1.0)]},
        {"scale": float("inf")},
        {"scale": 0.0},
        {"row_lr": float("nan")},
        {"lrs": [0.1]},
        {"lrs": [0.1, float("inf")]},
    ],
)
def test_a_step_that_would_destroy_parameters_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        validation.check_apply(an_apply(**changes), last_step=4, n_groups=2)
