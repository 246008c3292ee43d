"""Carrying out decided steps over servers: what is saved when, whose answers count, what a dead server leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gba_hvd.epoch import SampleAccount
from gba_hvd.errors import GbaError
from gba_hvd.ps.coordinator.coordinator import Coordinator
from gba_hvd.ps.coordinator.service import CoordinatorService
from gba_hvd.ps.coordinator.step_executor import StepExecutor
from gba_hvd.ps.messages import (
    Applied,
    Apply,
    Discard,
    Endpoint,
    Enter,
    HeartbeatMsg,
    JobPosition,
    LeaseReply,
    LeaseRequest,
    Measure,
    Measured,
    PushDone,
    Refused,
    Request,
    Save,
    SaveAbout,
    SaveSettings,
    SaveStatus,
)
from gba_hvd.ps.state_files import StateFiles
from recovery import state_codec
from recovery.catalog.claims import Claim
from recovery.config import Config

GENERATION, WORKER, MICRO_BATCH = 5, 1, 8


class Scene:
    """Server 0 with a real coordinator and real records; what it does to its part, its peers and the saver is noted.

    log: (what, which step, whether the ledger on disk had a decided step then)
    """

    def __init__(self, folder: Path, n_servers: int, **limits: float) -> None:
        servers = [Endpoint(0, index, "127.0.0.1", 1, 2) for index in range(n_servers)]
        enter = Enter(
            GENERATION, servers, 0, [0], JobPosition(account=vars(SampleAccount())), 64, 2 * MICRO_BATCH, MICRO_BATCH,
            {"name": "gba"}, "global", 0.1, [0.5], [], {}, workers=[(WORKER, 0, 0, 1)], **limits,
        )  # fmt: skip
        self.coordinator = Coordinator(enter, heartbeat_timeout_s=1e6, lease_s=1e6, clock=lambda: 0.0)
        self.records, self._folder = StateFiles(folder, 0), folder
        self.log: list[tuple[str, int, bool]] = []
        self.sent: list[tuple[int, Request]] = []
        self.saves: list[Save] = []
        self.part: Any = SimpleNamespace(
            enter=enter, apply=self.apply, measure=self.measure, shards=np.array([0]),
            export=lambda: (0, np.empty(0), state_codec.encode([])), dense=SimpleNamespace(tensors=[]),
            residuals=SimpleNamespace(workers=[], total=lambda: None),
        )  # fmt: skip
        self.others: Any = Others(range(1, n_servers), self)
        saver: Any = SimpleNamespace(begin=lambda request, *_: self.saves.append(request), report=SaveStatus)
        self.executor = StepExecutor(self.coordinator, self.part, self.others, self.records, saver)
        self._n_asked = 0

    def apply(self, request: Apply) -> Applied:
        self.note("applied here", request.step)
        return Applied(request.step)

    def measure(self, request: Measure) -> Measured:
        self.note("measured here", request.step)
        return Measured(request.step, 9.0, 0.0)

    def note(self, what: str, step: int) -> None:
        on_disk = StateFiles(self._folder, 0).ledger(GENERATION)
        self.log.append((what, step, on_disk is not None and on_disk["ledger"]["decided"] is not None))

    def compute_a_step(self) -> None:
        for _ in range(2):
            self._n_asked += 1
            given = self.coordinator.ask(LeaseRequest(WORKER, GENERATION, self._n_asked, 0, 64, [0.5, 0.1], 0))
            assert isinstance(given, LeaseReply) and given.lease is not None
            self.coordinator.done(PushDone(WORKER, GENERATION, given.lease.micro, given.lease.serial))


class Others:
    """In the place of `Peers`."""

    def __init__(self, indices: Sequence[int], scene: Scene) -> None:
        self._indices, self._scene = indices, scene

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def send(self, to: Iterable[int], number: int, request: Request) -> None:
        for index in to:
            self._scene.sent.append((index, request))
            self._scene.note(f"{type(request).__name__} to {index}", number)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Scene]:
    return lambda n_servers, **limits: Scene(tmp_path, n_servers, **limits)


def test_a_decision_is_in_the_ledger_before_anything_of_it_is_sent_or_applied(make: Callable[[int], Scene]) -> None:
    scene = make(2)
    scene.compute_a_step()
    scene.executor.advance()
    assert scene.log == [("Apply to 1", 1, True), ("applied here", 1, True)]


def factors_on_disk(scene: Scene) -> Any:
    saved = scene.records.ledger(GENERATION)
    assert saved is not None
    return saved["ledger"]["clipped"]


def test_how_a_step_is_clipped_is_in_the_ledger_before_anything_of_it_is_applied(make: Callable[..., Scene]) -> None:
    scene = make(3, max_norm=1.0)
    scene.compute_a_step()
    scene.executor.advance()
    assert scene.log == [("measured here", 1, True), ("Measure to 1", 1, True), ("Measure to 2", 1, True)]
    assert factors_on_disk(scene) is None
    assert scene.executor.resume_position() is None, "no checkpoint begins now"
    assert not scene.executor.measured_by(1, Measured(7, 1e9, 0.0)), "of another step"
    assert not scene.executor.measured_by(1, Measured(1, 0.0, 7.0)), "one is still to come"
    assert not scene.executor.measured_by(1, Measured(1, 1e9, 0.0)), "said before"
    assert scene.executor.measured_by(2, Measured(1, 0.0, 9.0))
    scene.executor.advance()
    factor = 1.0 / (5.0 + 1e-6)
    assert factors_on_disk(scene) == pytest.approx([factor, factor, 5.0])
    applied = [request for _, request in scene.sent if isinstance(request, Apply)]
    assert [(one.dense_factor, one.row_factor) for one in applied] == [(pytest.approx(factor),) * 2] * 2
    assert scene.executor.applied_by(1, Applied(1)) and scene.executor.applied_by(2, Applied(1))
    assert scene.coordinator.position().grad_norm == 5.0
    assert scene.coordinator.position().grad_norms == [(1, 5.0)], "the step after which it is, and its norm"
    assert factors_on_disk(scene) is None, "of a step that is over"


def damping_on_disk(scene: Scene) -> Any:
    saved = scene.records.ledger(GENERATION)
    assert saved is not None
    return saved["ledger"]["row_damping"]


def test_how_rows_are_damped_is_in_the_ledger_before_a_server_sees_it(make: Callable[..., Scene]) -> None:
    """First the damping, then the norm of what is damped, then the step; late answers count for neither."""
    scene = make(2, max_norm=1.0, rule="gap_aware")
    scene.part.measure = lambda request: Measured(
        request.step, *((0.0, 0.0, [(0, 6, 1.0), (1, 6, 0.5)]) if request.damping else (9.0, 0.0))
    )
    scene.compute_a_step()
    scene.executor.advance()
    (_, asked), answer = scene.sent[-1], Measured(1, 0.0, 0.0, [(0, 2, 1.0), (1, 2, 0.1)])
    assert isinstance(asked, Measure) and asked.damping and damping_on_disk(scene) is None
    assert not scene.executor.measured_by(1, Measured(1, 9.0, 0.0)), "the answer to another question"
    assert scene.executor.measured_by(1, answer)
    scene.executor.advance()
    expected = [1.0, pytest.approx((6 * 0.5 + 2 * 0.1) / 8)]
    (_, asked) = scene.sent[-1]
    assert isinstance(asked, Measure) and not asked.damping
    assert [member.row_damping for member in asked.members] == expected == damping_on_disk(scene)
    assert not scene.executor.measured_by(1, answer), "repeated"
    assert scene.executor.measured_by(1, Measured(1, 0.0, 16.0))
    scene.executor.advance()
    (apply,) = [request for _, request in scene.sent if isinstance(request, Apply)]
    assert [member.row_damping for member in apply.members] == expected
    assert apply.row_factor == pytest.approx(1 / 5)


@pytest.mark.parametrize("saved_before", [False, True], ids=["before it is known", "when it is known"])
def test_a_successor_damps_a_decided_step_as_its_ledger_says(make: Callable[..., Scene], saved_before: bool) -> None:
    dead = make(2, rule="gap_aware")
    dead.part.measure = lambda request: Measured(request.step, 0.0, 0.0, [(0, 6, 0.5), (1, 6, 0.5)])
    dead.compute_a_step()
    dead.executor.advance()
    if saved_before:
        dead.executor.measured_by(1, Measured(1, 0.0, 0.0, []))
        dead.executor.advance()
    scene, saved = make(2, rule="gap_aware"), dead.records.ledger(GENERATION)
    assert saved is not None
    scene.coordinator.resume(saved)
    scene.part.begun_and_done, scene.part.skip = (lambda step: (False, False)), lambda step: 1
    scene.part.measure = lambda request: Measured(request.step, 0.0, 0.0, [])  # it went down with its pushes
    scene.executor.recover(torn=0)
    scene.executor.advance()
    if not saved_before:
        scene.executor.measured_by(1, Measured(1, 0.0, 0.0, [(0, 2, 0.25), (1, 2, 0.25)]))
        scene.executor.advance()
    (apply,) = [request for _, request in scene.sent if isinstance(request, Apply)]
    assert [member.row_damping for member in apply.members] == [0.5 if saved_before else 0.25] * 2


@pytest.mark.parametrize("measured", [False, True], ids=["before it is measured", "when it is measured"])
def test_a_successor_clips_a_decided_step_as_its_ledger_says(make: Callable[..., Scene], measured: bool) -> None:
    """By the factors that are saved, or, where there are none, by what can be measured now."""
    dead = make(2, max_norm=1.0)
    dead.compute_a_step()
    dead.executor.advance()
    if measured:
        dead.executor.measured_by(1, Measured(1, 0.0, 16.0))
        dead.executor.advance()
    scene, saved = make(2, max_norm=1.0), dead.records.ledger(GENERATION)
    assert saved is not None
    scene.coordinator.resume(saved)
    scene.part.begun_and_done, scene.part.skip = (lambda step: (False, False)), lambda step: 1
    scene.part.measure = lambda request: Measured(request.step, 0.0, 0.0)  # it went down with its pushes
    scene.executor.recover(torn=0)
    scene.executor.advance()
    assert [type(request) for _, request in scene.sent] == [Apply if measured else Measure]
    if not measured:
        scene.executor.measured_by(1, Measured(1, 0.0, 16.0))
        scene.executor.advance()
    (apply,) = [request for _, request in scene.sent if isinstance(request, Apply)]
    assert apply.row_factor == pytest.approx(1 / 5 if measured else 1 / 4)


def test_a_server_that_refuses_to_measure_ends_the_steps(make: Callable[..., Scene]) -> None:
    scene = make(2, max_row_norm=1.0)
    scene.compute_a_step()
    scene.executor.advance()
    assert scene.executor.refused_by(1, 1, Refused("another generation"))
    assert "server 1 cannot take part in step 1: another generation" in scene.executor.failure


@pytest.mark.parametrize("n_servers", [1, 2])
@pytest.mark.parametrize("how", [{"max_norm": 1.0}, {"rule": "gap_aware"}], ids=["clipped", "damped"])
def test_a_step_that_cannot_be_measured_here_ends_the_steps(
    make: Callable[..., Scene], how: Any, n_servers: int
) -> None:
    """A rule that somebody registered may raise anything; without a reason the workers would wait for ever."""
    scene = make(n_servers, **how)

    def fails(request: Measure) -> Measured:
        raise ZeroDivisionError("a rule's own")

    scene.part.measure = fails
    scene.compute_a_step()
    scene.executor.advance()
    assert scene.executor.failure == "step 1 could not be measured: ZeroDivisionError: a rule's own"
    assert not scene.sent
    assert not scene.executor.measured_by(1, Measured(1, 0.0, 0.0))
    scene.executor.advance()


def test_a_step_counts_when_all_servers_have_applied_it(make: Callable[[int], Scene]) -> None:
    scene = make(3)
    scene.compute_a_step()
    scene.executor.advance()
    assert scene.executor.applied_by(1, Applied(1))
    assert not scene.executor.applied_by(1, Applied(1, missed=9)), "said before"
    assert not scene.executor.applied_by(2, Applied(7)), "of another step"
    assert scene.coordinator.ledger.step == 0
    assert scene.executor.applied_by(2, Applied(1, missing=[0], missed=2))
    assert scene.coordinator.ledger.step == 1
    account = scene.coordinator.account
    assert (account.applied, account.lost, account.shard_steps_missed) == (MICRO_BATCH, MICRO_BATCH, 2)
    saved = scene.records.ledger(GENERATION)
    assert saved is not None
    assert (saved["ledger"]["step"], saved["ledger"]["decided"]) == (1, None)


@pytest.mark.parametrize("where", ["here", "here, half way", "there, half way", "refused there"])
def test_no_step_follows_one_that_failed(make: Callable[[int], Scene], where: str) -> None:
    scene = make(2)

    def fails(request: Apply) -> Applied:
        if where == "here":
            raise GbaError("too large")
        return Applied(request.step, failed="too large" if where == "here, half way" else "")

    scene.part.apply = fails
    scene.compute_a_step()
    scene.executor.advance()
    if where == "refused there":
        assert scene.executor.refused_by(1, 1, Refused("too large"))
    elif where != "here":
        assert scene.executor.applied_by(1, Applied(1, failed="too large" if where == "there, half way" else ""))
    assert "too large" in scene.executor.failure
    scene.compute_a_step()
    scene.executor.advance()
    assert [request.step for _, request in scene.sent if isinstance(request, Apply)] == [1]


def test_a_server_that_refuses_something_else_ends_nothing(make: Callable[[int], Scene]) -> None:
    scene = make(2)
    scene.compute_a_step()
    scene.executor.advance()
    assert not scene.executor.refused_by(1, 0, Refused("a checkpoint is still being saved"))
    assert scene.executor.failure == ""
    assert scene.executor.applied_by(1, Applied(1))


def test_a_checkpoint_waits_until_all_servers_have_the_step_and_comes_before_the_next(
    make: Callable[[int], Scene],
) -> None:
    scene = make(2)
    scene.compute_a_step()
    scene.executor.advance()
    scene.compute_a_step()
    request = Save(
        epoch=0, number=0, part=0, n_parts=1, kind="full", parent=None, step=0, samples=0, about=SaveAbout(),
        settings=SaveSettings("/place", {}, Config()), claim=Claim(0, "job", "00000000"), generation=GENERATION,
    )  # fmt: skip
    scene.executor.save(request, b"")
    assert scene.executor.save_waits
    assert scene.executor.resume_position() is None
    assert scene.saves == []
    assert scene.executor.applied_by(1, Applied(1))
    scene.executor.advance()
    (saved,) = scene.saves
    assert (saved.part, saved.n_parts, saved.number, saved.step, saved.samples) == (0, 2, 1, 1, 2 * MICRO_BATCH)
    assert [what for what, *_ in scene.log] == [
        "Apply to 1", "applied here", "Save to 1", "Apply to 1", "applied here"
    ]  # fmt: skip
    assert not scene.executor.save_waits


@pytest.mark.parametrize(
    ("n_servers", "begun", "done", "torn", "skipped", "became"),
    [
        (1, False, False, 0, False, "computed again"),
        (1, True, False, 0, True, "over"),
        (1, True, True, 0, False, "over"),
        (1, True, True, 1, True, "over"),
        (2, False, False, 0, True, "sent again"),
        (2, True, False, 0, True, "sent again"),
        (2, True, True, 0, False, "sent again"),
        (2, True, True, 1, True, "sent again"),
    ],
)
def test_what_becomes_of_a_step_that_a_dead_server_had_decided(
    make: Callable[[int], Scene], n_servers: int, begun: bool, done: bool, torn: int, skipped: bool, became: str
) -> None:
    scene = make(n_servers)
    skips: list[int] = []

    def skip(step: int) -> int:
        skips.append(step)
        return 3

    scene.part.begun_and_done, scene.part.skip = (lambda step: (begun, done)), skip
    scene.compute_a_step()
    assert scene.coordinator.decide() is not None
    scene.executor.recover(torn)
    ledger, account = scene.coordinator.ledger, scene.coordinator.account
    assert skips == ([1] if skipped else [])
    assert (ledger.step, ledger.decided is not None) == {
        "computed again": (0, False), "over": (1, False), "sent again": (0, True)
    }[became]  # fmt: skip
    assert account.shard_steps_missed == (3 if became == "over" and skipped else 0)
    assert scene.sent == [], "the peers may still need what they have"


def test_pushes_that_no_decided_step_has_are_thrown_away_everywhere(make: Callable[[int], Scene]) -> None:
    scene = make(3)
    scene.compute_a_step()
    scene.executor.recover(torn=0)
    discard = Discard(GENERATION, scene.coordinator.ledger.last_serial + 1)
    assert scene.sent == [(1, discard), (2, discard)]
    assert scene.coordinator.decide() is None, "its micro-batches are computed again"


def test_a_server_that_lost_a_step_has_lost_what_came_after_it(make: Callable[[int], Scene]) -> None:
    """So that is computed again: what waits for a step, and what was on its way to the servers."""
    scene = make(3)
    scene.compute_a_step()
    scene.executor.advance()
    scene.compute_a_step()
    given = scene.coordinator.ask(LeaseRequest(WORKER, GENERATION, 99, 0, 64, [0.5, 0.1], 0))
    assert isinstance(given, LeaseReply) and given.lease is not None
    on_its_way = given.lease
    scene.executor.applied_by(1, Applied(1, missing=[0, 1], missed=2))
    scene.executor.applied_by(2, Applied(1))
    ledger = scene.coordinator.ledger
    assert scene.coordinator.account.lost == 2 * MICRO_BATCH
    assert scene.coordinator.decide() is None, "its micro-batches are computed again"
    assert [one for _, one in scene.sent[2:]] == [Discard(GENERATION, ledger.last_serial + 1)] * 2
    coordinator_service = CoordinatorService(scene.executor, SimpleNamespace(), scene.records)  # type: ignore[arg-type]
    scene.part.idle, scene.part.buffer = False, {(on_its_way.micro, on_its_way.serial)}
    coordinator_service.done(PushDone(WORKER, GENERATION, on_its_way.micro, on_its_way.serial))
    assert scene.coordinator.decide() is None
    again = []
    for request in (100, 101, 102):
        given = scene.coordinator.ask(LeaseRequest(WORKER, GENERATION, request, 0, 64, [0.5, 0.1], 0))
        assert isinstance(given, LeaseReply) and given.lease is not None
        again.append(given.lease.micro)
        scene.part.buffer.add((given.lease.micro, given.lease.serial))
        coordinator_service.done(PushDone(WORKER, GENERATION, given.lease.micro, given.lease.serial))
    assert again == [2, 3, on_its_way.micro]
    assert ledger.decided is not None and ledger.decided.step == 2


def test_a_successor_of_the_coordinator_knows_which_pushes_are_void(make: Callable[[int], Scene]) -> None:
    """The ledger says so before another server is asked to discard them."""
    scene = make(2)
    scene.compute_a_step()
    scene.executor.advance()
    on_disk: list[int] = []
    scene.others.send = lambda to, number, request: on_disk.append(scene.records.ledger(GENERATION)["void"])  # type: ignore[index]
    assert scene.executor.applied_by(1, Applied(1, missing=[0]))
    assert on_disk == [scene.coordinator.ledger.last_serial] and on_disk[0] > 0
    successor = make(2).coordinator
    successor.resume(scene.records.ledger(GENERATION) or {})
    assert successor.void == on_disk[0]


def test_who_waits_for_an_epoch_gets_a_lease_as_soon_as_the_last_one_asks_for_it(make: Callable[[int], Scene]) -> None:
    scene, other = make(1), WORKER + 1
    scene.part.idle = False
    coordinator, answers = scene.coordinator, []
    coordinator.beat(HeartbeatMsg(other, 1, 0, 2, GENERATION))
    for worker in [WORKER] * 7 + [other]:
        given = coordinator.ask(LeaseRequest(worker, GENERATION, 100 + len(answers), 0, 64, [0.5, 0.1], 0))
        assert isinstance(given, LeaseReply) and given.lease is not None
        coordinator.done(PushDone(worker, GENERATION, given.lease.micro, given.lease.serial))
        answers.append(given)
    scene.executor.advance()
    assert coordinator.ledger.finished
    service = CoordinatorService(scene.executor, SimpleNamespace(), scene.records)  # type: ignore[arg-type]
    replies: list[Any] = []
    waits: Any = SimpleNamespace(reply=replies.append)
    assert service.ask(waits, LeaseRequest(other, GENERATION, 200, 1, 64, [0.5, 0.1], 0)) is None and not replies
    last = service.ask(waits, LeaseRequest(WORKER, GENERATION, 200, 1, 64, [0.5, 0.1], 0))
    assert isinstance(last, LeaseReply) and last.lease is not None
    (first,) = replies
    assert first.lease is not None and first.lease.micro != last.lease.micro
