"""What is logged of a long wait in an operation of Horovod's: when, of what, and for whom."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd.comm import collective_waits, collectives
from gba_hvd.comm.collective_waits import PURPOSES, LongWait, purpose, who_is_behind
from gba_hvd.comm.collectives import HorovodWorld, WorldLeft
from tests.unit import syntax

PACKAGE = Path(collective_waits.__file__).parents[1]
# Which argument names the operation.
OPERATIONS = {
    "gather": 0, "broadcast": 0, "alltoall": 0, "sum_": 0, "gather_bytes": 0, "all_or_none": 2, "agree_on": 1,
    "form_group": 0, "_refuse_failed": 1,
}  # fmt: skip


class Store:
    """The launcher's, or one that is out of reach."""

    def __init__(self, values: dict[str, str], fails: bool = False) -> None:
        self.values, self.fails, self.asked = values, fails, 0

    def ask(self, method: str, path: str, body: bytes | None = None) -> str | None:
        self.asked += 1
        if self.fails:
            raise ConnectionRefusedError("no launcher")
        if body is not None:
            self.values[path] = body.decode()
        return self.values.get(path)


def marks(**values: str) -> dict[str, str]:
    return {f"/gba_hvd_waits/{rank.removeprefix('rank')}": value for rank, value in values.items()}


def reported_at(wait: LongWait, caplog: pytest.LogCaptureFixture, until_s: int = 500) -> list[int]:
    found = []
    for waited_s in range(10, until_s):
        before = len(caplog.records)
        wait.report(float(waited_s))
        found += [waited_s] * (len(caplog.records) - before)
    return found


def test_who_waits_for_the_claim_suggests_no_hang(caplog: pytest.LogCaptureFixture) -> None:
    LongWait("use", 1, range(2), Store({})).report(30.0)
    assert caplog.messages == [
        "rank 1 has waited for 30 s in the claim of the checkpoint location, which one worker makes for all: rank 0 "
        "has not come to it. It may wait until the lease of a job ends that did not release its claim there, as its "
        "log then says. The wait ends when all have come; Ctrl-C ends the job"
    ]


def test_who_waits_for_a_worker_that_may_wait_for_its_servers_suggests_no_hang_until_that_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reported_at(LongWait("servers.wait_s=60", 1, range(2), None), caplog, until_s=130)
    at_30_s, at_60_s, at_120_s = caplog.messages
    assert at_30_s == (
        "rank 1 has waited for 30 s in a change of mode: not all workers have come to it. A worker that is behind may "
        "be waiting for the companion servers of its host (wait_s=60), as its own log then says. The wait ends when "
        "all have come; Ctrl-C ends the job"
    )
    assert "(wait_s=60)" in at_60_s and "py-spy" not in at_60_s
    assert "(wait_s=60)" not in at_120_s and "py-spy" in at_120_s


def test_where_no_servers_are_waited_for_they_are_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    LongWait("servers.wait_s=0", 1, range(2), None).report(30.0)
    (reported,) = caplog.messages
    assert "in a change of mode" in reported and "wait_s" not in reported and "py-spy" in reported


def test_a_long_wait_is_reported_after_30_s_and_then_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    assert reported_at(LongWait("epoch", 0, range(2), None), caplog) == [30, 60, 120, 240, 480]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert caplog.messages[0] == (
        "rank 0 has waited for 30 s in the start of an epoch: not all workers have come to it. A worker that is behind "
        "computes, loads data, or hangs: its log, or `py-spy dump --pid` on its host, shows where. The wait ends when "
        "all have come; Ctrl-C ends the job"
    )


def test_ranks_that_left_no_mark_are_named_and_those_that_wait_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = Store(marks(rank1="evaluation", rank3="-", rank4="save"))
    wait = LongWait("evaluation", 0, range(5), store)
    assert store.values["/gba_hvd_waits/0"] == "evaluation"
    wait.report(30.0)
    assert (
        "in an evaluation (gba_hvd.evaluate): ranks 2, 3 have not come to it; rank 4 waits in a checkpoint (exchange "
        "'save')." in caplog.text
    )
    wait.end()
    assert store.values["/gba_hvd_waits/0"] == "-"


def test_where_all_wait_in_it_nobody_is_blamed() -> None:
    assert who_is_behind("epoch", {1: "epoch", 2: "epoch"}) == ""


def test_without_a_launcher_in_reach_the_wait_is_reported_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = Store({}, fails=True)
    wait = LongWait("epoch", 0, range(2), store)
    wait.report(30.0)
    wait.end()
    assert "not all workers have come to it" in caplog.text
    assert store.asked == 1, "one refusal is enough"


def test_in_a_large_job_the_launcher_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = Store({})
    LongWait("epoch", 0, range(33), store).report(30.0)
    assert store.asked == 0 and "not all workers have come to it" in caplog.text


def names() -> set[str]:
    """The names of the package's operations, as far as the source has them; of others what they begin with."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in syntax.nodes(path.read_text()):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            at = OPERATIONS.get(called, len(node.args))
            name = node.args[at] if at < len(node.args) else None
            if isinstance(name, ast.JoinedStr):
                name = name.values[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.add(name.value)
    return found


@pytest.mark.slow
def test_every_operation_has_words_and_no_others_have() -> None:
    found = names()
    assert len(found) > 40 and collective_waits._SERVERS in found
    firsts = {name.partition(".")[0] for name in found}
    assert not [name for name in found if purpose(name).startswith("the exchange '")]
    assert set(PURPOSES) <= found | firsts


class Horovod:
    """An operation that takes so many looks, one a second."""

    def __init__(self, looks: int) -> None:
        self.looks, self.now_s = looks, 0.0

    def poll(self, handle: str) -> bool:
        self.now_s += 1.0
        return self.now_s > self.looks

    def synchronize(self, handle: str) -> str:
        return f"the result of {handle}"


def world(monkeypatch: pytest.MonkeyPatch, looks: int, store: Store) -> Any:
    hvd = Horovod(looks)
    clock = SimpleNamespace(perf_counter=lambda: hvd.now_s, sleep=lambda _: None)
    monkeypatch.setattr(collectives, "time", clock)
    monkeypatch.setattr(collectives, "LauncherStore", SimpleNamespace(of=lambda: store))
    one = HorovodWorld.__new__(HorovodWorld)
    one.rank, one.size, one._hvd = 0, 2, hvd
    return one


def test_a_world_reports_its_long_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store = Store({})
    assert world(monkeypatch, 40, store)._wait("facts", "it") == "the result of it"
    (said,) = caplog.messages
    assert "in the exchange of state before training (state.sync): rank 1 has not come to it" in said
    assert store.values == marks(rank0="-")


def test_a_short_wait_asks_and_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store = Store({})
    world(monkeypatch, 9, store)._wait("commit", "it")
    assert store.asked == 0 and caplog.messages == []


def test_a_sum_in_the_background_has_marks_of_its_own_and_leaves_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(marks(rank1="rounds"))  # of the thread that trains
    one = world(monkeypatch, 10**6, store)
    with pytest.raises(WorldLeft):
        one._wait("rounds", "it", cancelled=lambda: one._hvd.now_s > 40)
    (reported,) = caplog.messages
    assert "rank 0 has waited for 30 s in a round of replicas: rank 1 has not come to it. A worker" in reported
    assert reported.endswith("Training continues; replicas are not synchronised until all have come")
    assert store.values == marks(rank1="rounds") | {"/gba_hvd_waits/0-background": "-"}
