"""What distributions register: what is found, what is refused and in which words, and what is never imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd import update_rules
from gba_hvd.compression import sparse_message
from gba_hvd.embedding.row_optimizers import build
from gba_hvd.errors import BadInput
from gba_hvd.ps import wire
from gba_hvd.ps.coordinator.ledger import Ledger
from gba_hvd.ps.coordinator.staleness import weighting
from gba_hvd.ps.messages import Endpoint, Enter, JobPosition
from recovery.config import Config
from recovery.policies import SAVE_POLICIES
from recovery.storage.open import open_store
from tests.distributions import install

WEIGHTINGS = "gba_hvd.staleness_weightings"
MODULE = """
from dataclasses import dataclass
from gba_hvd.ps.coordinator.staleness import Weighting

from gba_hvd.update_rules.rule import Plain

class Windowed(Plain):
    defaults = {"window": 8}

class Whole:
    def __init__(self, tolerance): pass
    def weight(self, staleness): return 1.0

class Empty: pass

class Two:  # of every interface, but for its arguments
    url = ""
    def __init__(self, tolerance, scale): raise AssertionError("it was called")
    def weight(self, staleness): pass
    @classmethod
    def start(cls, optimizer): pass
    n_bytes = encode = decode = refused = why_not = compensated = damping = act = stepped = shown = weight
    importance = saved = restored = state_dict = load_state_dict = put = get = names = delete = weight

class One(Two):
    def __init__(self, url): raise AssertionError("it was called")

class Derived(Weighting):
    def weight(self, staleness): return 1.0

class Failing(Whole):
    def __init__(self, tolerance): raise TypeError("of its own")

instance = Whole(4)

class NoDataclass:
    slots = ()
    lr = 0.1
    def update_(self, *args): pass

@dataclass(frozen=True)
class OtherFields:
    lr: float
    slots = ()
    def __init__(self, rate=0.1): pass
    def update_(self, *args): pass

@dataclass(frozen=True)
class NoSlots:
    lr: float = 0.1
    slots = ("momentum",)
    def update_(self, *args): pass
"""
Register = Callable[..., None]


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Register:
    """Makes distributions: `register("name", group, entry="module:Class")`; all of them have the module `mine`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def make(distribution: str, group: str, /, **entries: str) -> None:
        install(tmp_path, distribution, {group: entries}, {"mine.py": MODULE})
        monkeypatch.syspath_prepend(str(tmp_path / distribution))  # a path of its own: what was found before is no more

    return make


def test_a_name_that_is_registered_is_known_like_the_built_in_ones(register: Register) -> None:
    register("good", WEIGHTINGS, mine="mine:Whole")
    assert weighting("mine", 3).weight(7) == 1.0
    assert gba_hvd.GBACallback(mode="gba", staleness="mine").discipline("gba").staleness == "mine"
    with pytest.raises(BadInput, match="'mime' is not known: did you mean 'mine'"):
        weighting("mime")


def test_a_setting_that_is_a_whole_number_comes_to_a_server_as_it_is_given(register: Register) -> None:
    """All numbers are floats on the way."""
    register("good", "gba_hvd.update_rules", mine="mine:Windowed")
    settings = gba_hvd.GBACallback(mode="async", rule="mine", rule_settings={"window": 10}).rule_settings
    enter = Enter(
        1, [Endpoint(0, 0, "", 1, 2)], 0, [0], JobPosition(), 64, 16, 8, {"name": "async"}, "global", 0.1, [], [], {},
        rule="mine", rule_settings=settings,
    )  # fmt: skip
    arrived = wire.decode_request(wire.open_envelope(wire.encode("job", 1, enter), "job"))
    assert isinstance(arrived, Enter)
    travelled = arrived.rule_settings
    assert update_rules.known_settings("mine", travelled) == {"window": 10}
    with pytest.raises(BadInput, match="window is a number, got True"):
        update_rules.known_settings("mine", {"window": True})


@pytest.mark.parametrize(
    ("entries", "asked", "message"),
    [
        ({"linear": "mine:Whole"}, "linear", r"mine:Whole \(bad 1.0\) registers this name .* built in: rename it"),
        (
            {"mine": "mine:Empty"},
            "mine",
            r"class as .*staleness.Weighting describes it, got Empty without weight",
        ),
        ({"mine": "mine:instance"}, "mine", r"which is no class; correct that class"),
        (
            {"mine": "mine:Missing"},
            "mine",
            r"of mine:Missing \(bad 1.0\) cannot be loaded: .*Missing.*; correct",
        ),
        (
            {"mine": "nowhere:X"},
            "mine",
            r"cannot be loaded: No module named 'nowhere'; correct the entry point",
        ),
        ({"Mine-Own": "mine:Whole"}, "Mine-Own", r"expected a name of lower-case letters, digits and _"),
    ],
)
def test_a_registration_that_cannot_be_used_says_who_registers_what_and_what_to_do(
    register: Register, entries: Mapping[str, str], asked: str, message: str
) -> None:
    register("bad", WEIGHTINGS, **entries)
    with pytest.raises(BadInput, match=message):
        weighting(asked)
    assert weighting("threshold").weight(0) == 1.0, "other names are as they were"


def test_a_name_that_two_distributions_register_is_refused(register: Register) -> None:
    register("one", WEIGHTINGS, mine="mine:Whole")
    register("two", WEIGHTINGS, mine="mine:Whole")
    with pytest.raises(BadInput, match=r"mine:Whole \((one|two) 1.0\) registers .* registers it, too: rename"):
        weighting("mine")


@pytest.mark.parametrize(
    ("group", "ask"),
    [
        (WEIGHTINGS, lambda: weighting("mine")),
        ("gba_hvd.update_rules", lambda: update_rules.known_rule("mine")),
        ("gba_hvd.compressors", lambda: gba_hvd.Compression.by_name("mine")),
        ("gba_hvd.row_optimizers", lambda: build({"class": "mine", "fields": {}})),
        ("recovery.stores", lambda: open_store("mine://there")),
        ("recovery.save_policies", lambda: Config(policy="mine")),
    ],
)
def test_a_class_without_the_methods_is_refused_by_every_interface(
    register: Register, group: str, ask: Callable[[], Any]
) -> None:
    register("bad", group, mine="mine:Empty")
    with pytest.raises(BadInput, match=r"'mine' of mine:Empty \(bad 1.0\): expected a class .*, got Empty without"):
        ask()


@pytest.mark.parametrize(
    ("group", "ask", "kind", "message"),
    [
        (
            WEIGHTINGS,
            lambda: weighting("mine"),
            "Two",
            r"Two\(tolerance, scale\), .* Two\(tolerance\): missing .*'scale'",
        ),
        (WEIGHTINGS, lambda: weighting("mine"), "Derived", r"Derived\(\), .* Derived\(tolerance\): too many"),
        (
            "gba_hvd.compressors",
            lambda: gba_hvd.Compression.by_name("mine"),
            "Two",
            r"Two\(tolerance, scale\), which cannot be called as Two\(\): missing",
        ),
        (
            "gba_hvd.update_rules",
            lambda: update_rules.known_rule("mine"),
            "Two",
            r"Two.start\(optimizer\), which cannot be called as start\(optimizer, dense, workers\): too many",
        ),
        ("recovery.stores", lambda: open_store("mine://there"), "One", r"One\(url\), .* One\(url, options\): too many"),
        ("recovery.save_policies", lambda: Config(policy="mine"), "Two", r".* as Two\(rows\): missing .*'scale'"),
        (
            "gba_hvd.row_optimizers",
            lambda: build({"class": "mine", "fields": {}}),
            "OtherFields",
            r"OtherFields\(rate=0.1\), which cannot be called as OtherFields\(lr=...\): .*'lr'",
        ),
    ],
)
def test_a_class_that_takes_other_arguments_is_refused_before_it_is_called(
    register: Register, group: str, ask: Callable[[], Any], kind: str, message: str
) -> None:
    register("bad", group, mine=f"mine:{kind}")
    with pytest.raises(
        BadInput, match=rf"'mine' of mine:{kind} \(bad 1.0\): expected a class .*, got {message}.*; correct"
    ):
        ask()


def test_a_type_error_of_a_class_s_own_is_not_taken_for_wrong_arguments(register: Register) -> None:
    register("bad", WEIGHTINGS, mine="mine:Failing")
    with pytest.raises(TypeError, match="of its own"):
        weighting("mine")


@pytest.mark.parametrize(
    ("kind", "message"), [("NoDataclass", "which is no dataclass"), ("NoSlots", "`slots` is no tuple of SlotSpec")]
)
def test_a_row_optimizer_is_a_dataclass_with_slots(register: Register, kind: str, message: str) -> None:
    register("bad", "gba_hvd.row_optimizers", mine=f"mine:{kind}")
    with pytest.raises(BadInput, match=message):
        build({"class": "mine", "fields": {}})


@pytest.mark.parametrize("url", ["s3://bucket/job", "memory://there", "gs://bucket/job"])
def test_a_protocol_of_ours_cannot_be_registered(register: Register, url: str) -> None:
    register("bad", "recovery.stores", **{url.partition(":")[0]: "mine:Empty"})
    with pytest.raises(BadInput, match="built in: rename it"):
        open_store(url)


# --- names from elsewhere --------------------------------------------------------------------------------------------


def ledger_of(name: str) -> None:
    """As a server that starts again reads it."""
    Ledger.from_state({"cut": {"n_samples": 8, "global_batch": 4, "micro_batch": 2},
                       "discipline": {"staleness": name}, "account": {}})  # fmt: skip


def message_of(name: str) -> None:
    values = np.ones(300, np.float32)
    message, _ = sparse_message.write(None, values, 300, "int8", values[:0])
    by_name = bytes([len(name)]) + name.encode()
    head = bytearray(message[: sparse_message._HEAD.size])
    fields = list(sparse_message._HEAD.unpack(head))
    fields[3], fields[8] = 255, len(message) - len(head) + len(by_name)
    sparse_message.read(sparse_message._HEAD.pack(*fields) + by_name + message[len(head) :], 300, 0)


@pytest.mark.parametrize("name", ["planted", "planted:Whole", "planted.Whole", "../planted", "os:system"])
@pytest.mark.parametrize(
    "read",
    [
        ledger_of,
        message_of,
        update_rules.known_rule,
        SAVE_POLICIES.get,
        lambda name: build(json.loads(json.dumps({"class": name.replace(":", "."), "fields": {}}))),
        lambda name: open_store(f"{name}://there"),
    ],
    ids=["weighting", "compressor", "rule", "policy", "row optimizer", "store"],
)
def test_a_name_chooses_among_what_is_registered_and_is_never_imported(
    name: str, read: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises((BadInput, sparse_message.BadMessage), match="not known"):
        read(name)
    assert "planted" not in sys.modules
