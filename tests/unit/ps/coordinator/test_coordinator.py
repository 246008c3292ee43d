"""The coordinator: whose lease lasts how long, what a silent or unknown worker costs, what goes on after a restart."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from gba_hvd.epoch import SampleAccount
from gba_hvd.errors import BadInput
from gba_hvd.ps.coordinator.coordinator import Coordinator
from gba_hvd.ps.messages import (
    Apply,
    Endpoint,
    Enter,
    HeartbeatMsg,
    JobPosition,
    LeaseGrant,
    LeaseReply,
    LeaseRequest,
    Mismatch,
    PushDone,
    ReplicaSubmitted,
)

GENERATION, ALIVE_S, LEASE_S = 5, 2.0, 60.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def an_enter(**changes: Any) -> Enter:
    fields: dict[str, Any] = {
        "generation": GENERATION, "servers": [Endpoint(0, 0, "127.0.0.1", 1, 2)], "me": 0, "shard_servers": [0],
        "position": JobPosition(account=vars(SampleAccount())), "n_samples": 32, "global_batch": 16, "micro_batch": 8,
        "discipline": {"name": "gba"}, "row_average": "global", "row_lr": 0.1, "lrs": [0.5], "tensors": [],
        "optimizer": {}, **changes,
    }  # fmt: skip
    return Enter(**fields)


def a_coordinator(clock: Clock, **changes: Any) -> Coordinator:
    return Coordinator(an_enter(**changes), heartbeat_timeout_s=ALIVE_S, lease_s=LEASE_S, clock=clock)


def ask(worker: int, request: int, epoch: int = 0, **changes: Any) -> LeaseRequest:
    fields: dict[str, Any] = {"n_samples": 32, "lrs": [0.5, 0.1], "lrs_step": 0, **changes}
    return LeaseRequest(worker, GENERATION, request, epoch, **fields)


def beat(worker: int, generation: int = GENERATION, **more: Any) -> HeartbeatMsg:
    return HeartbeatMsg(worker, worker, 0, 1000 + worker, generation, **more)


def lease(coordinator: Coordinator, worker: int, request: int, epoch: int = 0) -> LeaseGrant:
    answer = coordinator.ask(ask(worker, request, epoch))
    assert isinstance(answer, LeaseReply)
    assert answer.lease is not None
    return answer.lease


def done(coordinator: Coordinator, worker: int, given: LeaseGrant, **more: Any) -> str:
    return coordinator.done(PushDone(worker, GENERATION, given.micro, given.serial, **more))


def apply_steps(coordinator: Coordinator) -> None:
    while (step := coordinator.decide()) is not None:
        coordinator.applied(step.step, set(), 0)


def finish_all_but_one(coordinator: Coordinator) -> LeaseGrant:
    """Of epoch 0, by worker 1, which holds the last micro-batch."""
    held, request = lease(coordinator, 1, 1000), 1001
    while isinstance(answer := coordinator.ask(ask(1, request)), LeaseReply) and answer.lease is not None:
        done(coordinator, 1, held)
        apply_steps(coordinator)
        held, request = answer.lease, request + 1
    return held


def finish_epoch(coordinator: Coordinator, epoch: int, worker: int = 1) -> list[int]:
    """Compute and apply what is left; returns the serials given."""
    serials, request = [], 1000 * (epoch + 1)
    while True:
        answer = coordinator.ask(ask(worker, request, epoch))
        assert isinstance(answer, LeaseReply)
        if answer.status == "finished":
            return serials
        assert answer.lease is not None
        done(coordinator, worker, answer.lease)
        serials.append(answer.lease.serial)
        request += 1
        while (step := coordinator.decide()) is not None:
            coordinator.applied(step.step, set(), 0)


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_a_worker_gives_back_is_for_the_next_that_asks_and_nothing_of_it_is_late(comes_back: bool) -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    for worker in (1, 2):
        coordinator.beat(beat(worker))
    held = [lease(coordinator, 1, request) for request in (1, 2)]
    coordinator.give_back(1)
    again = [lease(coordinator, 1 if comes_back else 2, request) for request in (3, 4)]
    assert [given.micro for given in again] == [given.micro for given in held]
    assert [given.token for given in again] == [given.token for given in held]
    assert done(coordinator, 1, held[0]) == "revoked"
    clock.now += LEASE_S / 2  # less than a lease may take, since the second time it was given
    coordinator.beat(beat(1)), coordinator.beat(beat(2))
    coordinator.fall_silent()
    assert [done(coordinator, 1 if comes_back else 2, given) for given in again] == ["accepted", "accepted"]
    assert not any(seen.lost_lease for seen in coordinator.workers.values())


def test_a_lease_that_was_given_back_takes_too_long_for_nobody() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    coordinator.beat(beat(1))
    lease(coordinator, 1, 1)
    coordinator.give_back(1)
    clock.now += LEASE_S + 1
    coordinator.beat(beat(1))
    assert coordinator.fall_silent() == [] and not coordinator.workers[1].lost_lease


def test_an_epoch_is_every_micro_batch_once_and_serials_go_on() -> None:
    coordinator = a_coordinator(Clock())
    first, second = finish_epoch(coordinator, 0), finish_epoch(coordinator, 1)
    assert (len(first), len(second)) == (4, 4)
    assert min(second) > max(first), "a late push of the epoch before must never be taken for one of this epoch"
    assert vars(coordinator.account) == {**vars(SampleAccount()), "total": 64, "applied": 64}


def test_ages_of_dense_values_add_up_over_epochs_and_survive_a_restart() -> None:
    position = JobPosition(account=vars(SampleAccount()), dense_ages={3: 5}, step=10)
    coordinator = a_coordinator(Clock(), position=position)
    for request, dense_step in enumerate((10, 9, 7, -1), start=1):  # -1: not known
        done(coordinator, 1, lease(coordinator, 1, request), dense_step=dense_step)
    apply_steps(coordinator)
    assert coordinator.position().dense_ages == {0: 1, 1: 1, 3: 5, 4: 1}  # two steps of two
    finish_epoch(coordinator, 0)
    before = coordinator.position().dense_ages
    finish_epoch(coordinator, 1)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(coordinator.state()), strict=False)
    successor = a_coordinator(Clock(), position=position)
    successor.resume(state)
    assert successor.position().dense_ages == coordinator.position().dense_ages == before


def test_what_is_dropped_is_counted_by_worker() -> None:
    coordinator = a_coordinator(Clock(), discipline={"name": "gba", "tolerance": 0})
    for worker in (1, 2):
        coordinator.beat(beat(worker))
    late = lease(coordinator, 2, 1)
    for request in (1, 2, 3):
        done(coordinator, 1, lease(coordinator, 1, request))
        apply_steps(coordinator)
    done(coordinator, 2, late)
    apply_steps(coordinator)
    assert coordinator.account.dropped == 8
    assert coordinator.position().drops == [(1, 1, 3, 0), (2, 2, 1, 1)]


def test_bytes_are_summed_over_workers_and_with_those_of_modes_before() -> None:
    before = {"allreduce": (1, 2, 3, 4, 5, 6), "gba": (100, 0, 0, 0, 0, 0)}
    position = JobPosition(account=vars(SampleAccount()), traffic=before)
    coordinator = a_coordinator(Clock(), position=position)
    for worker, request, n in ((1, 1, 10), (2, 2, 1000), (1, 3, 25)):  # each reports all since it came
        coordinator.beat(beat(worker))
        given = lease(coordinator, worker, request)
        for _ in range(2):  # sent again: the answer was lost
            done(coordinator, worker, given, traffic=(n, 0, 0, 0, n + 1, 0))
    coordinator.dead(2)
    assert coordinator.position().traffic == {"allreduce": (1, 2, 3, 4, 5, 6), "gba": (1125, 0, 0, 0, 1027, 0)}


def test_the_pace_of_a_worker_and_of_the_job_is_of_what_was_done() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    coordinator.beat(beat(1))
    coordinator.beat(beat(2))
    for request in range(coordinator.ledger.cut.n_micro):
        done(coordinator, 1, lease(coordinator, 1, request + 1))
    apply_steps(coordinator)
    seen, applied = coordinator.workers[1], coordinator.account.applied
    clock.now += 5
    assert applied > 0 and coordinator.sample_pace.per_s(clock.now) == pytest.approx(applied / 5)
    assert seen.pace is not None and seen.pace.per_s(clock.now) == pytest.approx(seen.done / 5)
    assert coordinator.workers[2].pace is None


def test_a_silent_workers_micro_batches_go_to_others() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    coordinator.beat(beat(1))
    coordinator.beat(beat(2))
    lost = lease(coordinator, 1, 1)
    clock.now += ALIVE_S + 0.1
    coordinator.beat(beat(2))
    assert coordinator.fall_silent() == [1]
    again = lease(coordinator, 2, 1)
    assert (again.micro, again.serial != lost.serial) == (lost.micro, True)
    assert done(coordinator, 1, lost) == "revoked"
    coordinator.beat(beat(1))
    assert coordinator.fall_silent() == []


def test_a_lease_that_takes_too_long_is_revoked_though_its_worker_lives() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    slow = lease(coordinator, 1, 1)
    for _ in range(70):
        clock.now += 1
        coordinator.beat(beat(1))
        coordinator.fall_silent()
    assert lease(coordinator, 1, 2).micro == slow.micro


def test_a_micro_batch_handed_out_again_has_the_full_time_again() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    for worker in (1, 2):
        coordinator.beat(beat(worker))
    first = lease(coordinator, 1, 1)
    clock.now += LEASE_S - 1
    coordinator.bye(1)
    coordinator.beat(beat(2))
    second = lease(coordinator, 2, 1)
    assert second.micro == first.micro
    clock.now += 2
    coordinator.beat(beat(2))
    coordinator.fall_silent()
    assert done(coordinator, 2, second) == "accepted"


def test_a_lease_of_a_worker_that_never_lived_does_not_last() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    coordinator.beat(beat(1))
    coordinator.beat(beat(2))
    coordinator.bye(1)
    late = lease(coordinator, 1, 1)  # its request came after its goodbye
    clock.now += ALIVE_S + 0.1
    coordinator.beat(beat(2))
    assert coordinator.fall_silent() == []
    assert lease(coordinator, 2, 1).micro == late.micro


def a_minute_passes(clock: Clock, coordinator: Coordinator, *workers: int) -> None:
    """In which these workers send heartbeats."""
    for _ in range(int(LEASE_S) + 2):
        clock.now += 1
        for worker in workers:
            coordinator.beat(beat(worker))
        coordinator.fall_silent()


def asks(coordinator: Coordinator, worker: int, request: int, epoch: int = 0) -> bool:
    """Whether it gets a lease."""
    answer = coordinator.ask(ask(worker, request, epoch))
    return answer is not None and answer.lease is not None


@pytest.mark.parametrize("when", ["with a lease", "between epochs"])
def test_no_worker_of_hop_bs_waits_for_one_that_hangs(when: str) -> None:
    """Its heartbeats go on. When it is back, it is one of them again."""
    clock = Clock()
    coordinator = a_coordinator(clock, discipline={"name": "hop_bs", "slack": 0})
    for worker in (1, 2):
        coordinator.beat(beat(worker))
    epoch, at = (0, 1) if when == "with a lease" else (1, 10)
    if when == "with a lease":
        lease(coordinator, 2, 1)
    else:
        coordinator.ledger.await_no_more(2)
        finish_epoch(coordinator, 0)
        coordinator.ledger.await_again(2)
    done(coordinator, 1, lease(coordinator, 1, at, epoch))
    coordinator.beat(beat(2))
    assert not asks(coordinator, 1, at + 1, epoch), "it waits for the slowest"
    a_minute_passes(clock, coordinator, 1, 2)
    assert asks(coordinator, 1, at + 1, epoch)
    assert coordinator.position().hanging == ([(2, 1002, 62.0)] if when == "with a lease" else [])
    if when == "with a lease":
        assert asks(coordinator, 2, 2), "another thread of it reads ahead"
        coordinator.beat(beat(2))
        assert coordinator.position().hanging, "which is no sign of life"
    coordinator.works(2)
    coordinator.beat(beat(2))
    assert not coordinator.position().hanging
    assert asks(coordinator, 2, 3, epoch)


def test_a_round_of_hop_bw_is_complete_without_a_worker_that_hangs() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock, discipline={"name": "hop_bw", "backups": 0})
    for worker in (1, 2):
        coordinator.beat(beat(worker))
    lost = lease(coordinator, 2, 1)
    done(coordinator, 1, lease(coordinator, 1, 1))
    assert coordinator.decide() is None, "the other part of the round"
    a_minute_passes(clock, coordinator, 1, 2)
    assert asks(coordinator, 2, 2), "another thread of it reads ahead"
    apply_steps(coordinator)
    assert coordinator.position().step == 1
    assert done(coordinator, 2, lost) == "revoked"
    assert coordinator.position().hanging == []


def test_a_worker_that_is_stopped_is_reported_until_its_heartbeats_come_again() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    for worker in (1, 2):
        coordinator.beat(beat(worker))
    for second in range(1, 13):
        clock.now += 1
        coordinator.beat(beat(1))
        coordinator.fall_silent()
        assert coordinator.position().hanging == ([(2, 1002, second)] if second > 5 * ALIVE_S else [])
    coordinator.beat(beat(2))
    assert coordinator.position().hanging == []


def test_a_worker_that_evaluates_for_long_does_not_hang() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock, discipline={"name": "hop_bw", "backups": 0})
    for worker in (1, 2):
        coordinator.beat(beat(worker))
    read_ahead = lease(coordinator, 2, 1)
    for _ in range(3):
        clock.now += LEASE_S - 10
        for worker in (1, 2):
            coordinator.beat(beat(worker))
            coordinator.works(worker)
        coordinator.fall_silent()
        assert coordinator.position().hanging == []
    assert done(coordinator, 2, read_ahead) == "revoked"
    done(coordinator, 1, lease(coordinator, 1, 1))
    assert coordinator.decide() is None, "it waits for the other one"


def test_leases_given_before_a_restart_expire_too() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    coordinator.beat(beat(1))
    dropped = lease(coordinator, 1, 1)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(coordinator.state()), strict=False)
    successor = a_coordinator(clock)
    successor.resume(state)
    for _ in range(70):
        clock.now += 1
        successor.beat(beat(1))
        successor.fall_silent()
    assert lease(successor, 1, 2).micro == dropped.micro


def test_a_successor_goes_on_exactly() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    coordinator.beat(beat(1))
    for request in (1, 2):
        done(coordinator, 1, lease(coordinator, 1, request))
    step = coordinator.decide()
    assert step is not None
    coordinator.request_mode("allreduce", "an operator asked", True)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(coordinator.state()), strict=False)
    successor = a_coordinator(clock)
    successor.resume(state)
    assert successor.decide() == step
    successor.applied(step.step, set(), 0)
    coordinator.applied(step.step, set(), 0)
    ours, theirs = successor.position(), coordinator.position()
    assert dataclasses.asdict(successor.account) == dataclasses.asdict(coordinator.account)
    assert (ours.step, ours.requested_mode, ours.pinned, ours.membership_epoch) == (
        theirs.step,
        theirs.requested_mode,
        theirs.pinned,
        theirs.membership_epoch,
    )


def test_a_request_for_the_mode_that_is_on_stops_nothing_and_measurements_do_not_replace_it() -> None:
    coordinator = a_coordinator(Clock())
    coordinator.beat(beat(1))
    mode = coordinator.ledger.discipline.name
    coordinator.request_mode(mode, "an operator asked", True)
    coordinator.request_mode("allreduce", "decided before rank 0 learned of it", False)
    lease(coordinator, 1, 1)
    assert not coordinator.state()["ledger"]["held"]
    position = coordinator.position()
    assert (position.requested_mode, position.reason, position.pinned) == (mode, "an operator asked", True)
    coordinator.request_mode("allreduce", "an operator asked again", True)
    assert coordinator.state()["ledger"]["held"]


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("pin", [True, False])
def test_a_switch_that_measurements_decided_is_dropped_when_a_worker_is_gone(pin: bool, is_silent: bool) -> None:
    coordinator, world = a_coordinator(clock := Clock()), 0
    coordinator.beat(beat(1)), coordinator.beat(beat(2))
    held = lease(coordinator, 1, 1), lease(coordinator, 2, 2)
    coordinator.request_mode("allreduce", "why", pin, world)
    if is_silent:
        clock.now += 1000
        coordinator.beat(beat(1))
        assert coordinator.fall_silent() == [2]
    else:
        coordinator.dead(2)
        assert coordinator.world > world
    asked = ("allreduce", "why", pin) if pin else ("", "", False)
    coordinator.request_mode("allreduce", "decided before rank 0 learned of it", False, world)
    position = coordinator.position()
    assert (position.requested_mode, position.reason, position.pinned) == asked
    assert coordinator.state()["ledger"]["held"] == pin
    if not pin and not is_silent:
        done(coordinator, 1, held[0])
        assert finish_epoch(coordinator, 0)
        coordinator.request_mode("allreduce", "decided by those that are left", False, coordinator.world)
        assert coordinator.position().requested_mode == "allreduce"


def test_a_mode_that_some_worker_is_leaving_is_left_by_all_though_one_has_died() -> None:
    coordinator = a_coordinator(Clock())
    coordinator.beat(beat(1)), coordinator.beat(beat(2))
    coordinator.request_mode("allreduce", "why", False)
    answer = coordinator.ask(ask(1, 1))
    assert isinstance(answer, LeaseReply) and answer.status == "drained"
    successor = a_coordinator(Clock())
    successor.resume(msgspec.msgpack.decode(msgspec.msgpack.encode(coordinator.state()), strict=False))
    for one in (coordinator, successor):
        one.dead(2)
        answer = one.ask(ask(3, 2))
        assert isinstance(answer, LeaseReply) and answer.status == "drained"


@pytest.mark.parametrize("mode", ["gba", "auto"])
def test_an_operator_who_lets_the_job_stay_ends_the_stop_that_measurements_decided(mode: str) -> None:
    coordinator = a_coordinator(Clock())
    coordinator.beat(beat(1)), coordinator.beat(beat(2))
    assert coordinator.request_mode("allreduce", "why", False)
    assert coordinator.request_mode(mode, "an operator asked", True)
    coordinator.dead(2)
    assert not coordinator.state()["ledger"]["held"]
    lease(coordinator, 1, 1)


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("mode", ["gba", "auto"])
def test_an_operator_does_not_keep_some_workers_in_a_mode_that_others_are_leaving(mode: str, is_finished: bool) -> None:
    coordinator = a_coordinator(Clock())
    coordinator.beat(beat(1)), coordinator.beat(beat(2))
    if is_finished:
        assert finish_epoch(coordinator, 0)
    coordinator.request_mode("allreduce", "why", False)
    for worker in (1, 2):
        answer = coordinator.ask(ask(worker, 100, int(is_finished)))
        assert isinstance(answer, LeaseReply) and answer.status == "drained"
        coordinator.request_mode(mode, "an operator asked", True)


@pytest.mark.parametrize("lrs", [[], [0.5], [0.5, 0.1, 0.1], [float("nan"), 0.1], [0.5, float("inf")]])
def test_learning_rates_that_would_destroy_parameters_are_refused(lrs: list[float]) -> None:
    coordinator = a_coordinator(Clock())
    before = coordinator.state()
    with pytest.raises(Mismatch, match="learning rates"):
        coordinator.ask(ask(1, 1, lrs=lrs))
    assert coordinator.state() == before


def test_other_data_than_the_others_have_is_refused() -> None:
    with pytest.raises(Mismatch, match="32 samples for others and 31 here"):
        a_coordinator(Clock()).ask(ask(1, 1, n_samples=31))


def test_an_epoch_without_samples_changes_nothing() -> None:
    coordinator = a_coordinator(Clock())
    finish_epoch(coordinator, 0)
    before = coordinator.state()
    with pytest.raises(BadInput, match="no samples"):
        coordinator.ask(ask(1, 1, epoch=1, n_samples=0))
    assert coordinator.state() == before


def test_the_newest_learning_rates_count_in_whatever_order_they_come() -> None:
    coordinator = a_coordinator(Clock())
    coordinator.ask(ask(1, 1, lrs=[0.3, 0.2], lrs_step=4))
    coordinator.ask(ask(2, 1, lrs=[0.9, 0.9], lrs_step=3))
    for worker in (1, 2):
        done(coordinator, worker, lease(coordinator, worker, 1))
    step = coordinator.decide()
    assert step is not None
    assert (step.lrs, step.row_lr) == ([0.3], 0.2)


ADAM = {"class": "torch.optim.adam:Adam", "groups": [{"betas": {"tuple": [0.9, 0.999]}, "eps": 1e-8}]}


def test_the_newest_settings_count_and_a_successor_has_them() -> None:
    coordinator = a_coordinator(Clock(), optimizer=ADAM)
    coordinator.ask(ask(1, 1, lrs_step=4, settings=[{"betas": (0.5, 0.9), "eps": 0.1}]))
    coordinator.ask(ask(2, 1, lrs_step=3, settings=[{"eps": 0.9}]))
    given = lease(coordinator, 1, 2)
    done(coordinator, 1, given, lrs=[0.5, 0.1], lrs_step=5, settings=[{"eps": 0.2}])  # a worker that came late
    done(coordinator, 2, lease(coordinator, 2, 1), lrs=[0.5, 0.1], lrs_step=5)
    successor = a_coordinator(Clock(), optimizer=ADAM)
    successor.resume(msgspec.msgpack.decode(msgspec.msgpack.encode(coordinator.state()), strict=False))
    for one in (coordinator, successor):
        step = one.decide()
        assert isinstance(step, Apply) and step.settings == [{"betas": (0.5, 0.9), "eps": 0.2}]


@pytest.mark.parametrize(
    "settings", [[{"lr": 0.1}], [{"params": ()}], [{"eps": float("nan")}], [{"betas": (0.9, float("inf"))}], [{}, {}]]
)
def test_settings_that_would_destroy_parameters_are_refused(settings: list[dict[str, Any]]) -> None:
    coordinator = a_coordinator(Clock(), optimizer=ADAM)
    before = coordinator.state()
    with pytest.raises(Mismatch, match="optimizer group"):
        coordinator.ask(ask(1, 1, settings=settings))
    assert coordinator.state() == before


def test_a_refused_gradient_is_dropped_counted_and_named() -> None:
    coordinator = a_coordinator(Clock())
    coordinator.beat(beat(1))
    done(coordinator, 1, lease(coordinator, 1, 1), refused="the gradient of w is not finite")
    done(coordinator, 1, lease(coordinator, 1, 2))
    step = coordinator.decide()
    assert step is not None
    assert [m.micro for m in step.members] == [1]
    coordinator.applied(step.step, set(), 0)
    assert (coordinator.account.applied, coordinator.account.dropped) == (8, 8)
    assert coordinator.refused_gradients == ["worker 1, micro-batch 0: the gradient of w is not finite"]
    assert coordinator.position().refused == 1


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_times_that_cannot_be_do_not_spoil_the_rates(seconds: float) -> None:
    coordinator = a_coordinator(Clock())
    coordinator.beat(beat(1))
    done(coordinator, 1, lease(coordinator, 1, 1), seconds=0.5)
    done(coordinator, 1, lease(coordinator, 1, 2), seconds=seconds)
    assert coordinator.position().rates == [(1, 0.5)]
    assert [(rank, newest_s) for rank, _, _, newest_s in coordinator.position().newest] == [(1, 0.5)]


def test_what_a_server_lost_is_counted_lost() -> None:
    coordinator = a_coordinator(Clock())
    for request in (1, 2):
        done(coordinator, 1, lease(coordinator, 1, request))
    step = coordinator.decide()
    assert step is not None
    coordinator.applied(step.step, {1}, 3)
    account = coordinator.account
    assert (account.total, account.applied, account.lost, account.shard_steps_missed) == (16, 8, 8, 3)


# --- between two epochs ----------------------------------------------------------------------------------------------


def between_epochs(clock: Clock) -> Coordinator:
    """Two workers have trained epoch 0, and 1 has asked for the next one, which 2 has not."""
    coordinator = a_coordinator(clock)
    for worker in (1, 2):
        coordinator.beat(beat(worker))
    done(coordinator, 2, lease(coordinator, 2, 1))
    finish_epoch(coordinator, 0)
    finish_epoch(coordinator, 0, worker=2)
    assert not asks(coordinator, 1, 10, epoch=1), "code of worker 2 may read the model"
    return coordinator


def test_an_epoch_begins_when_all_that_trained_in_the_one_before_ask_for_it() -> None:
    coordinator = between_epochs(Clock())
    coordinator.beat(beat(3))
    assert not asks(coordinator, 1, 10, epoch=1)
    assert asks(coordinator, 2, 10, epoch=1), "one that came since then is not awaited"
    assert asks(coordinator, 1, 10, epoch=1)
    assert not coordinator.position().hanging


def test_segments_of_an_epoch_wait_for_nobody() -> None:
    coordinator = a_coordinator(Clock())
    for worker in (1, 2):
        coordinator.beat(beat(worker))
    done(coordinator, 2, lease(coordinator, 2, 1))
    finish_epoch(coordinator, 0)
    answer = coordinator.ask(ask(1, 10, segment=1))
    assert answer is not None and answer.lease is not None
    done(coordinator, 1, answer.lease)
    for request in (11, 12, 13):
        given = coordinator.ask(ask(1, request, segment=1))
        assert given is not None and given.lease is not None
        done(coordinator, 1, given.lease)
    apply_steps(coordinator)
    assert not asks(coordinator, 1, 14, epoch=1), "worker 2 is still in the epoch before"


def test_a_worker_that_is_back_in_what_it_had_left_early_has_not_left_it() -> None:
    coordinator = a_coordinator(Clock())
    for worker in (1, 2):
        coordinator.beat(beat(worker))
    lease(coordinator, 2, 1)
    assert coordinator.ask(ask(1, 10, segment=1)) is None
    lease(coordinator, 1, 11)
    assert coordinator.ask(ask(2, 10, segment=1)) is None, "the rest of segment 0 would be skipped"
    answer = coordinator.ask(ask(1, 12, segment=1))
    assert answer is not None and answer.lease is not None, "now both have left it"


@pytest.mark.parametrize("what", ["is dead", "is silent", "hangs"])
def test_an_epoch_does_not_wait_for_a_worker_that(what: str) -> None:
    clock = Clock()
    coordinator = between_epochs(clock)
    if what == "is dead":
        coordinator.dead(2)
    elif what == "is silent":
        clock.now += ALIVE_S + 1
        coordinator.beat(beat(1))
        coordinator.fall_silent()
    else:
        a_minute_passes(clock, coordinator, 1, 2)
    assert asks(coordinator, 1, 11, epoch=1)
    assert coordinator.position().hanging == ([(2, 1002, 62.0)] if what == "hangs" else [])


def test_a_worker_that_comes_back_after_a_minute_between_epochs_hangs_no_more() -> None:
    clock = Clock()
    coordinator = between_epochs(clock)
    a_minute_passes(clock, coordinator, 1, 2)
    assert asks(coordinator, 1, 11, epoch=1) and coordinator.position().hanging
    assert asks(coordinator, 2, 10, epoch=1)
    assert not coordinator.position().hanging


def test_an_epoch_waits_for_a_worker_that_asks_for_it_however_long_it_takes() -> None:
    clock = Clock()
    coordinator = between_epochs(clock)
    for _ in range(5):
        clock.now += LEASE_S - 1
        coordinator.beat(beat(1)), coordinator.beat(beat(2, awaited=True))
        assert not asks(coordinator, 1, 11, epoch=1)
    a_minute_passes(clock, coordinator, 1, 2)
    assert asks(coordinator, 1, 12, epoch=1), "that is over, and it hangs"


def test_a_worker_that_asks_for_it_within_an_epoch_is_no_worker_at_work() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    coordinator.beat(beat(1))
    lease(coordinator, 1, 1)
    clock.now += LEASE_S + 1
    coordinator.beat(beat(1, awaited=True))
    coordinator.fall_silent()
    assert coordinator.position().hanging


def test_a_successor_waits_for_all_between_two_epochs() -> None:
    clock = Clock()
    coordinator = between_epochs(clock)
    successor = a_coordinator(clock)
    successor.resume(msgspec.msgpack.decode(msgspec.msgpack.encode(coordinator.state()), strict=False))
    assert not asks(successor, 1, 10, epoch=1)
    assert asks(successor, 2, 10, epoch=1) and asks(successor, 1, 10, epoch=1)


# --- replicas that are submitted (mode shadow) -----------------------------------------------------------------------


def handed_in(coordinator: Coordinator, worker: int, phase: int = 1, early: bool = False) -> bool:
    return coordinator.replica_submitted(ReplicaSubmitted(worker, GENERATION, phase, early))


def with_workers(clock: Clock, *workers: int) -> Coordinator:
    coordinator = a_coordinator(clock, discipline={"name": "shadow"})
    for worker in workers:
        coordinator.beat(beat(worker))
    return coordinator


def test_replicas_are_in_when_every_living_worker_has_said_so():
    coordinator = with_workers(Clock(), 1, 2)
    assert not handed_in(coordinator, 1)
    assert not handed_in(coordinator, 1)
    assert handed_in(coordinator, 2)
    assert handed_in(coordinator, 1)
    assert coordinator.replicas.gathered == 1


def test_a_worker_that_died_is_not_waited_for():
    coordinator = with_workers(Clock(), 1, 2)
    assert not handed_in(coordinator, 1)
    coordinator.dead(2)
    assert handed_in(coordinator, 1)


def test_a_silent_worker_is_not_waited_for_and_finds_the_phase_over_when_it_comes_back():
    clock = Clock()
    coordinator = with_workers(clock, 1, 2)
    clock.now += ALIVE_S + 1
    coordinator.beat(beat(1))
    coordinator.fall_silent()
    assert handed_in(coordinator, 1)
    coordinator.beat(beat(2))
    assert handed_in(coordinator, 2)


def test_a_worker_that_lives_and_does_not_come_is_waited_for_as_long_as_for_a_micro_batch():
    clock = Clock()
    coordinator = with_workers(clock, 1, 2)
    assert not handed_in(coordinator, 1)
    clock.now += LEASE_S + 1
    coordinator.beat(beat(1))
    coordinator.beat(beat(2))
    assert handed_in(coordinator, 1)


def test_a_worker_that_left_its_loop_early_waits_for_nobody_and_nobody_waits_for_it():
    coordinator = with_workers(Clock(), 1, 2)
    held = lease(coordinator, 1, 1)
    assert handed_in(coordinator, 1, early=True) and coordinator.replicas.gathered == -1
    assert lease(coordinator, 2, 1).micro == held.micro
    assert handed_in(coordinator, 2) and coordinator.replicas.gathered == 1


def test_a_worker_that_comes_back_to_its_loop_is_waited_for_again():
    coordinator = with_workers(Clock(), 1, 2)
    handed_in(coordinator, 1, early=True)
    lease(coordinator, 1, 1)
    assert not handed_in(coordinator, 2)
    assert handed_in(coordinator, 1)


def test_a_phase_that_is_over_stays_over_after_a_restart():
    clock = Clock()
    coordinator = with_workers(clock, 1, 2)
    handed_in(coordinator, 1)
    assert handed_in(coordinator, 2)
    successor = a_coordinator(clock, discipline={"name": "shadow"})
    successor.resume(msgspec.msgpack.decode(msgspec.msgpack.encode(coordinator.state()), strict=False))
    assert handed_in(successor, 2)
    assert not handed_in(successor, 2, phase=3)


@pytest.mark.parametrize(("waited_s", "rank"), [(0.0, 0), (100.0, 1)], ids=["another is rank 0", "long enough"])
def test_an_epoch_is_not_over_while_its_chief_is_dead(waited_s: float, rank: int) -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    for worker in (0, 1):
        coordinator.beat(beat(worker))
    finish_epoch(coordinator, 0)
    coordinator.dead(0)
    assert coordinator.ask(ask(1, 50)) is None
    clock.now += waited_s
    coordinator.beat(HeartbeatMsg(1, rank, 0, 1001, GENERATION))
    answer = coordinator.ask(ask(1, 51))
    assert isinstance(answer, LeaseReply) and answer.status == "finished"


def test_an_epoch_is_not_over_before_its_chief_was_seen_again() -> None:
    """It may have died in the last step, and nobody has noticed yet."""
    clock = Clock()
    coordinator = a_coordinator(clock)
    for worker in (0, 1):
        coordinator.beat(beat(worker))
    held = finish_all_but_one(coordinator)
    clock.now += 2.0
    done(coordinator, 1, held)
    apply_steps(coordinator)
    assert coordinator.ask(ask(1, 50)) is None and coordinator.missed_chiefs() == []
    clock.now += 2.0
    assert coordinator.missed_chiefs() == [0]
    coordinator.beat(beat(0))
    assert coordinator.missed_chiefs() == []
    answer = coordinator.ask(ask(1, 51))
    assert isinstance(answer, LeaseReply) and answer.status == "finished"


def test_a_chief_that_asks_itself_learns_at_once_that_the_epoch_is_over() -> None:
    clock = Clock()
    coordinator = a_coordinator(clock)
    for worker in (0, 1):
        coordinator.beat(beat(worker))
    clock.now += 2.0
    finish_epoch(coordinator, 0, worker=0)
    answer = coordinator.ask(ask(1, 50))
    assert isinstance(answer, LeaseReply) and answer.status == "finished"


def test_a_coordinator_that_goes_on_knows_that_the_chief_has_died() -> None:
    coordinator = a_coordinator(Clock())
    for worker in (0, 1):
        coordinator.beat(beat(worker))
    finish_epoch(coordinator, 0)
    coordinator.dead(0)
    successor = a_coordinator(Clock())
    successor.resume(msgspec.msgpack.decode(msgspec.msgpack.encode(coordinator.state()), strict=False))
    assert successor.ask(ask(1, 50)) is None
    successor.beat(HeartbeatMsg(1, 0, 0, 1001, GENERATION))
    answer = successor.ask(ask(1, 51))
    assert isinstance(answer, LeaseReply) and answer.status == "finished"


def test_a_worker_that_asks_for_an_older_segment_learns_how_many_steps_that_had() -> None:
    coordinator = a_coordinator(Clock(), n_samples=64)
    request = 0
    while coordinator.ledger.segment == 0:
        request += 1
        answer = coordinator.ask(ask(1, request, n_samples=64))
        assert isinstance(answer, LeaseReply)
        if answer.lease is None:
            assert coordinator.ask(ask(1, request, segment=1, n_samples=16)) is not None
        else:
            done(coordinator, 1, answer.lease)
            apply_steps(coordinator)
    late = coordinator.ask(ask(2, 1, n_samples=64))
    assert isinstance(late, LeaseReply) and late.status == "finished"
    assert (late.position.segment, late.position.steps_done) == (0, 4)
