"""One writer at a time: whoever comes second is refused, whoever was replaced is fenced."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.catalog.claims import (
    Claim,
    after_renewals,
    check,
    claim,
    claims_of,
    is_free_again,
    release,
    renew,
)
from recovery.catalog.writer_process import WriterProcess, started
from recovery.errors import BadInput, Fenced, StoreError
from recovery.format.manifest import Manifest, to_json
from recovery.rows import Schema
from recovery.storage.local_store import LocalStore
from recovery.storage.store import Store
from recovery.testing import RamStore
from tests.recovery.stores import Crash, FaultyStore


class VirtualTime:
    """A clock that moves when somebody sleeps; what else happens meanwhile, the test says."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.now_s, self._meanwhile = 0.0, meanwhile

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s
        self._meanwhile()


def claimed(store: Store, writer: str, time: VirtualTime | None = None, **settings: Any) -> Claim:
    time = time or VirtualTime()
    return claim(store, writer, sleep=time.sleep, **settings)


def forbidden() -> None:
    raise AssertionError("nobody had to be waited for")


# --- one after the other ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_writer_is_let_in_at_once(store: Store) -> None:
    mine = claimed(store, "job-1", VirtualTime(forbidden))
    assert mine.epoch == 1
    check(store, mine)
    mine = renew(store, renew(store, mine))
    check(store, mine)
    assert len(store.names("claims/")) == 2, "renewals do not pile up"


def test_a_writer_that_left_in_peace_is_not_waited_for(ram: RamStore) -> None:
    release(ram, claimed(ram, "job-1"))
    assert claimed(ram, "job-2", VirtualTime(forbidden)).epoch == 2


def test_the_same_job_is_let_in_at_once_and_what_it_replaces_is_fenced(ram: RamStore) -> None:
    before = claimed(ram, "job-1")
    after = claimed(ram, "job-1", VirtualTime(forbidden))
    assert after.epoch == 2
    check(ram, after)
    with pytest.raises(Fenced, match=r"job 'job-1' on host .* has taken over \(epoch 2, this process has 1\)"):
        check(ram, before)


def test_a_second_job_is_refused_while_the_first_gives_signs_of_life(ram: RamStore) -> None:
    first = claimed(ram, "job-1", lease_s=30)

    def alive() -> None:
        nonlocal first
        if time.now_s >= 12:
            first = renew(ram, first)

    time = VirtualTime(alive)
    with pytest.raises(BadInput, match=r"written to by job 'job-1' on host .*takeover=True"):
        claimed(ram, "job-2", time)
    assert time.now_s == 12
    check(ram, first)
    assert {one.writer for one in claims_of(ram.objects)} == {"job-1"}


def test_a_job_that_gives_no_sign_of_life_is_passed_over(ram: RamStore) -> None:
    first, time = renew(ram, claimed(ram, "job-1", lease_s=30)), VirtualTime()
    second = claimed(ram, "job-2", time, lease_s=10)
    assert time.now_s == pytest.approx(30), "for as long as the other one promised"
    assert second.epoch == 2
    with pytest.raises(Fenced, match="job 'job-2'"):
        check(ram, first)


def test_the_wait_for_another_job_is_said_before_it_begins(ram: RamStore, caplog: pytest.LogCaptureFixture) -> None:
    claimed(ram, "job-1", lease_s=30)
    assert not caplog.messages, "nobody was waited for"
    said: list[list[str]] = []
    claimed(ram, "job-2", VirtualTime(lambda: said.append(list(caplog.messages))), lease_s=45)
    (text,) = said[0]
    assert said[-1] == said[0] and [record.levelname for record in caplog.records] == ["WARNING"]
    assert text.startswith("waiting for up to 45 s for a renewal by job 'job-1' on host ")
    assert f"(process {os.getpid()}), whose claim on {ram.url} was not released" in text
    assert "If the claim is not renewed meanwhile, this job continues" in text and "takeover=True" in text


@pytest.fixture
def ended_process() -> Iterator[WriterProcess]:
    """A process of this host that has ended, and not been waited for."""
    child = subprocess.Popen(["sleep", "60"])
    try:
        process = replace(WriterProcess.this(), pid=child.pid, started=started(str(child.pid)))
        assert not process.has_ended_here()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        yield process
    finally:
        child.kill()
        child.wait()


def written_by(process: WriterProcess | None, act: Callable[[], Claim]) -> Claim:
    with pytest.MonkeyPatch.context() as patch:
        if process is not None:
            patch.setattr(WriterProcess, "this", lambda: process)
        return act()


def test_a_claim_whose_process_has_ended_on_this_host_is_passed_over_at_once(
    ram: RamStore, ended_process: WriterProcess
) -> None:
    first = written_by(ended_process, lambda: claimed(ram, "job-1"))
    written_by(ended_process, lambda: renew(ram, first))
    assert claimed(ram, "job-2", VirtualTime(forbidden)).epoch == 2


@pytest.mark.parametrize("difference", [{"boot": "another"}, {"pids": 1}, {"boot": ""}, {"pids": 0}, {"started": -1}])
def test_a_process_of_which_this_host_knows_nothing_is_waited_for(
    ram: RamStore, ended_process: WriterProcess, difference: dict[str, Any]
) -> None:
    written_by(replace(ended_process, **difference), lambda: claimed(ram, "job-1"))
    time = VirtualTime()
    claimed(ram, "job-2", time)
    assert time.now_s == pytest.approx(30)


@pytest.mark.parametrize("alive", ["claimant", "renewer"])
def test_a_claim_is_waited_for_while_its_claimant_or_its_renewer_lives(
    ram: RamStore, ended_process: WriterProcess, alive: str
) -> None:
    first = written_by(None if alive == "claimant" else ended_process, lambda: claimed(ram, "job-1"))
    written_by(None if alive == "renewer" else ended_process, lambda: renew(ram, first))
    time = VirtualTime()
    claimed(ram, "job-2", time)
    assert time.now_s == pytest.approx(30)


@pytest.fixture
def living_process() -> Iterator[WriterProcess]:
    """Another process of this host."""
    with subprocess.Popen(["sleep", "60"]) as child:
        yield replace(WriterProcess.this(), pid=child.pid, started=started(str(child.pid)))
        child.kill()


@pytest.mark.parametrize("writer", ["job-1", "job-2"])
def test_a_claim_whose_process_lives_on_this_host_is_not_taken_over_however_old_it_is(
    ram: RamStore, living_process: WriterProcess, writer: str
) -> None:
    first = written_by(living_process, lambda: claimed(ram, "job-1"))
    before = dict(ram.objects)
    words = (
        rf"by job 'job-1' on host .* \(process {living_process.pid}\), and that process lives on this host: .*takeover"
    )
    with pytest.raises(BadInput, match=words):
        claimed(ram, writer, VirtualTime(forbidden))
    assert ram.objects == before
    check(ram, first)


@pytest.mark.parametrize("settings", [{"takeover": True}, {"again": True}])
def test_a_job_that_takes_over_or_claims_again_is_let_in_beside_a_living_process(
    ram: RamStore, living_process: WriterProcess, settings: dict[str, Any]
) -> None:
    written_by(living_process, lambda: claimed(ram, "job-1"))
    assert claimed(ram, "job-1", VirtualTime(forbidden), **settings).epoch == 2


def test_a_process_that_takes_the_place_of_a_dead_one_of_its_job_is_let_in(
    ram: RamStore, living_process: WriterProcess
) -> None:
    first = written_by(living_process, lambda: claimed(ram, "job-1"))
    assert claimed(ram, "job-1", VirtualTime(forbidden), after=first).epoch == 2


def test_a_job_that_claims_again_is_refused_by_another_one_that_lives_on_this_host(
    ram: RamStore, living_process: WriterProcess
) -> None:
    claimed(ram, "job-1")
    written_by(living_process, lambda: claimed(ram, "job-2", takeover=True))
    with pytest.raises(BadInput, match="by job 'job-2'"):
        claimed(ram, "job-1", VirtualTime(forbidden), again=True)


def test_two_processes_renew_one_claim_under_names_of_their_own(ram: RamStore) -> None:
    mine = claimed(ram, "job-1")
    worker = renew(ram, renew(ram, mine, "w"), "w")
    renew(ram, mine)
    assert {one.rpartition("/")[2] for one in ram.names("claims/")} == {"000000", "000001", "w000002"}
    check(ram, worker)

    time = VirtualTime(lambda: renew(ram, worker, "w"))
    with pytest.raises(BadInput, match="which renewed its lease"):
        claimed(ram, "job-2", time)


@pytest.mark.parametrize("lives", ["w", ""])
def test_a_claim_is_waited_for_while_one_of_two_renewers_lives(
    ram: RamStore, ended_process: WriterProcess, lives: str
) -> None:
    first = written_by(ended_process, lambda: claimed(ram, "job-1"))
    for series in ("w", ""):
        written_by(None if series == lives else ended_process, lambda series=series: renew(ram, first, series))
    time = VirtualTime()
    claimed(ram, "job-2", time)
    assert time.now_s == pytest.approx(30)


def test_a_place_is_free_again_when_the_other_writer_has_left_without_a_checkpoint(ram: RamStore) -> None:
    mine = claimed(ram, "job-1")
    assert not is_free_again(ram, mine)
    other = claimed(ram, "job-2", takeover=True)
    assert not is_free_again(ram, mine)
    release(ram, other)
    assert is_free_again(ram, mine)
    manifest = Manifest(other.epoch, 3, "full", None, 1, 1, 0.0, Schema((), 1), (), None)
    ram.put(manifest.name, [to_json(manifest)])
    assert not is_free_again(ram, mine)


def test_a_later_process_of_the_same_number_is_not_taken_for_the_writer() -> None:
    assert replace(WriterProcess.this(), started=WriterProcess.this().started - 1).has_ended_here()


def test_a_claim_of_an_earlier_release_is_waited_for(ram: RamStore) -> None:
    ram.put("claims/000001-job-1.0123abcd/000000", [b'{"host": "here", "lease_s": 30.0, "pid": 1}'])
    time = VirtualTime()
    claimed(ram, "job-2", time)
    assert time.now_s == pytest.approx(30)


def test_a_job_that_leaves_while_it_is_waited_for_is_followed_at_once(ram: RamStore) -> None:
    first = claimed(ram, "job-1")
    time = VirtualTime(lambda: release(ram, first))
    assert claimed(ram, "job-2", time).epoch == 2
    assert time.now_s == 3


def test_a_third_that_was_faster_is_respected(ram: RamStore) -> None:
    claimed(ram, "job-1")
    time = VirtualTime(lambda: claimed(ram, "job-3", takeover=True))
    with pytest.raises(BadInput, match="written to by job 'job-3'"):
        claimed(ram, "job-2", time)


def test_takeover_asks_nobody_and_the_old_writer_is_fenced(ram: RamStore) -> None:
    first = claimed(ram, "job-1")
    second = claimed(ram, "job-2", VirtualTime(forbidden), takeover=True)
    first = renew(ram, first)  # it does not know yet
    check(ram, second)
    with pytest.raises(Fenced):
        check(ram, first)


def test_an_epoch_is_never_used_again_even_when_the_claims_were_deleted(ram: RamStore) -> None:
    manifest = Manifest(7, 3, "full", None, 1, 1, 0.0, Schema((), 1), (), None)
    ram.put(manifest.name, [to_json(manifest)])
    assert claimed(ram, "job-1").epoch == 8


def test_a_claim_that_somebody_removed_is_noticed(ram: RamStore) -> None:
    mine = claimed(ram, "job-1")
    ram.objects.clear()
    with pytest.raises(StoreError, match="is not listed"):
        check(ram, mine)


@pytest.mark.parametrize("writer", ["", "a/b", "..", "x" * 90, "a b", "ä"])
def test_a_writer_whose_name_cannot_be_a_name_is_refused(ram: RamStore, writer: str) -> None:
    with pytest.raises(BadInput, match="letters, digits"):
        claimed(ram, writer)


def test_a_lease_without_sense_is_refused(ram: RamStore) -> None:
    for lease_s in (0.0, -1.0, 1e9, float("nan")):
        with pytest.raises(BadInput, match="lease_s"):
            claimed(ram, "job-1", lease_s=lease_s)


def test_what_stands_in_a_claim_is_not_trusted(ram: RamStore) -> None:
    for about in (b"", b"[1]", b'{"lease_s": 1e12}', b'{"lease_s": "long"}', b"\xff"):
        ram.objects.clear()
        ram.put("claims/000004-job-1.00000000/000000", [about])
        time = VirtualTime()
        assert claimed(ram, "job-2", time).epoch == 5
        assert time.now_s <= 600


# --- bad stores ------------------------------------------------------------------------------------------------------


def test_an_old_listing_does_not_let_anybody_in(ram: RamStore) -> None:
    faulty = FaultyStore(ram)
    for at in range(3, 8):  # claims, manifests, then the listings after the write
        faulty.lists_what_was(at)
    with pytest.raises(StoreError, match="they are old"):
        claimed(faulty, "job-1")
    assert faulty.fired == faulty.planned


def test_a_listing_that_is_late_is_asked_for_again(ram: RamStore) -> None:
    faulty = FaultyStore(ram).lists_what_was(3).lists_what_was(4)
    assert claimed(faulty, "job-1").epoch == 1
    assert faulty.fired == faulty.planned


@pytest.mark.parametrize(
    ("dies", "operation"),
    [("before", "put"), ("within", "put"), ("after", "put"), ("before", "names"), ("after", "names")],
)
def test_a_claimant_that_dies_leaves_nothing_worse_than_something_to_wait_for(
    ram: RamStore, dies: str, operation: str
) -> None:
    faulty = FaultyStore(ram)
    if dies == "within":
        faulty.dies_within(1, keep_bytes=3)
    else:
        getattr(faulty, f"dies_{dies}")(operation, 1 if operation == "put" else 3)
    with pytest.raises(Crash):
        claimed(faulty, "job-1")
    assert faulty.fired == faulty.planned
    time = VirtualTime()
    mine = claimed(ram, "job-2", time)
    check(ram, mine)
    assert time.now_s == (0 if (dies, operation) == ("before", "put") else pytest.approx(30))


# --- all at once -----------------------------------------------------------------------------------------------------


class Turns:
    """Lets several threads use a store one call at a time, in an order that is given.

    choices: at each call, which of those that wait may go (modulo their number); afterwards, the first.
    """

    def __init__(self, choices: Sequence[int], n_threads: int) -> None:
        self._choices = iter(choices)
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._running = set(range(n_threads))
        self._next: int | None = None
        self.options: list[int] = []

    def take(self, me: int) -> None:
        with self._changed:
            self._running.discard(me)
            self._waiting.add(me)
            self._grant()
            assert self._changed.wait_for(lambda: self._next == me, timeout=100)
            self._next = None
            self._waiting.discard(me)
            self._running.add(me)

    def leave(self, me: int) -> None:
        with self._changed:
            self._running.discard(me)
            self._grant()

    def _grant(self) -> None:
        if not self._running and self._waiting and self._next is None:
            able = sorted(self._waiting)
            self.options.append(len(able))
            self._next = able[next(self._choices, 0) % len(able)]
            self._changed.notify_all()


class OneOfMany:
    """A store as one of several threads sees it: each call waits for its turn."""

    def __init__(self, store: Store, turns: Turns, me: int) -> None:
        self.url, self._store, self._turns, self._me = store.url, store, turns, me

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        self._turns.take(self._me)
        self._store.put(name, pieces)

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        self._turns.take(self._me)
        return self._store.get(name, start, n_bytes)

    def names(self, prefix: str) -> dict[str, int]:
        self._turns.take(self._me)
        return self._store.names(prefix)

    def delete(self, names: Sequence[str]) -> None:
        self._turns.take(self._me)
        self._store.delete(names)


def race(choices: Sequence[int], writers: Sequence[str]) -> tuple[list[Claim], RamStore, list[int]]:
    """Everybody claims and then, if let in, checks; who was let in ever, the store, and how many could go each time."""
    store, turns = RamStore(), Turns(choices, len(writers))
    let_in: list[Claim] = []

    def run(me: int) -> None:
        view = OneOfMany(store, turns, me)
        try:
            mine = claim(view, writers[me], looks=2, sleep=lambda _: None,
                         nonce=lambda: f"{me:08x}")  # fmt: skip
            let_in.append(mine)
            check(view, mine)
        except (BadInput, Fenced):
            pass
        finally:
            turns.leave(me)

    threads = [threading.Thread(target=run, args=(me,)) for me in range(len(writers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    return let_in, store, turns.options


def assert_one_owner(let_in: list[Claim], store: RamStore) -> None:
    assert len({one.epoch for one in let_in}) == len(let_in) >= 1, "an epoch has one owner"
    owners = []
    for one in let_in:
        try:
            check(store, one)
            owners.append(one)
        except Fenced:
            pass
    assert owners == [max(let_in)]


@pytest.mark.slow
def test_of_two_that_claim_at_once_one_gets_through_in_whatever_order_their_calls_happen() -> None:
    """Every order there is: each run says where it could have gone another way."""
    n_orders, todo = 0, [[]]
    while todo:
        choices = todo.pop()
        let_in, store, options = race(choices, ["job-1", "job-2"])
        assert_one_owner(let_in, store)
        n_orders += 1
        for at in range(len(choices), len(options)):
            padded = choices + [0] * (at - len(choices))
            todo += [[*padded, other] for other in range(1, options[at])]
    assert n_orders > 50


@pytest.mark.slow
@pytest.mark.parametrize("writers", [["job-1"] * 3, ["job-1", "job-2", "job-3", "job-2"]])
@given(choices=st.lists(st.integers(0, 3), max_size=40))
@settings(max_examples=60, deadline=None)
def test_of_many_that_claim_at_once_one_gets_through(writers: list[str], choices: list[int]) -> None:
    let_in, store, _ = race(choices, writers)
    assert_one_owner(let_in, store)


def test_a_process_goes_on_with_the_renewals_of_one_before_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first = claim(store, "job")
    renewed = first
    for _ in range(3):
        renewed = renew(store, renewed)
    renew(store, first, "w")  # another process counts for itself
    again = after_renewals(store, first)
    assert again.signs == 3
    renew(store, again)
    assert {name.rpartition("/")[2] for name in store.names(f"{first.name}/")} == {"000000", "000004", "w000001"}
