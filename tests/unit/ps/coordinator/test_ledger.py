"""Every micro-batch is a member of exactly one applied step, whatever happens on the way."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gba_hvd.epoch import EpochPlan, SampleAccount
from gba_hvd.errors import BadInput, StateMismatch
from gba_hvd.mode_names import SERVER_MODES
from gba_hvd.ps.coordinator import ledger as ledger_module
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.coordinator.ledger import Drained, Finished, Ledger, Member, StepPlan, Waiting
from gba_hvd.ps.messages import LeaseGrant

M4 = EpochPlan(n_samples=80, global_batch=16, micro_batch=4)  # 20 micro-batches, 5 steps of 4
SHORT = EpochPlan(n_samples=42, global_batch=16, micro_batch=4)  # 11 micro-batches, the last of 2 samples; 3 steps


def ledger(name: str = "gba", cut: EpochPlan = M4, steps_done: int = 0, step: int = 0, **rules: Any) -> Ledger:
    return Ledger(cut, Discipline(name, **rules), epoch=0, steps_done=steps_done, step=step, account=SampleAccount())


class Asking:
    """Workers that number their requests."""

    def __init__(self, of: Ledger) -> None:
        self.of, self.requests = of, 0

    def ask(self, worker: int = 0) -> LeaseGrant | Waiting | Finished | Drained:
        self.requests += 1
        return self.of.lease(worker, self.requests)

    def lease(self, worker: int = 0) -> LeaseGrant:
        answer = self.ask(worker)
        assert isinstance(answer, LeaseGrant), answer
        return answer

    def push(self, lease: LeaseGrant, worker: int = 0) -> None:
        assert self.of.accept(worker, lease.micro, lease.serial) == "accepted"

    def step(self) -> StepPlan:
        plan = self.of.next_step()
        assert plan is not None
        self.of.applied(plan.step)
        return plan

    def refusal(self, worker: int = 0) -> str:
        answer = self.ask(worker)
        assert isinstance(answer, Waiting), answer
        return answer.reason


def micros(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [member.micro for member in plan.members]


def weights(plan: StepPlan) -> list[float]:
    return [member.weight for member in plan.members]


# Leases


def test_micro_batches_go_out_in_order_with_their_tokens() -> None:
    job = Asking(ledger(step=100))
    leases = [job.lease() for _ in range(9)]
    assert [lease.micro for lease in leases] == list(range(9))
    assert [lease.token for lease in leases] == [100] * 4 + [101] * 4 + [102]
    assert len({lease.serial for lease in leases}) == 9


# Lanes: micro-batches of one index mod M


def lanes(job: Asking, order: list[int]) -> dict[int, list[int]]:
    """The lanes of what each worker gets, when they ask in this order."""
    found: dict[int, list[int]] = {}
    for worker in order:
        found.setdefault(worker, []).append(job.lease(worker).micro % 4)
    return found


def test_a_worker_gets_the_lanes_that_it_had_before() -> None:
    job = Asking(ledger())
    assert lanes(job, [0, 1, 0, 1]) == {0: [0, 2], 1: [1, 3]}
    for order in ([0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]):
        assert {worker: sorted(some) for worker, some in lanes(job, order).items()} == {0: [0, 2], 1: [1, 3]}


def test_a_faster_worker_takes_a_lane_of_another_and_that_one_goes_back_and_forth() -> None:
    job = Asking(ledger())
    assert lanes(job, [0, 1, 0, 1]) == {0: [0, 2], 1: [1, 3]}
    assert lanes(job, [0, 0, 0, 1]) == {0: [0, 2, 3], 1: [1]}
    assert lanes(job, [0, 1, 0, 1]) == {0: [0, 2], 1: [1, 3]}
    assert lanes(job, [0, 0, 1, 0]) == {0: [0, 2, 3], 1: [1]}


def test_tokens_are_those_of_the_order_in_which_leases_are_given() -> None:
    job = Asking(ledger(step=100))
    leases = [job.lease(worker) for worker in (0, 1, 1, 0, 1, 1, 0, 0, 0)]
    assert [lease.token for lease in leases] == [100] * 4 + [101] * 4 + [102]
    assert sorted(lease.micro for lease in leases) == [*range(8), 8]


def test_lanes_of_a_worker_that_is_gone_are_for_anybody() -> None:
    job = Asking(ledger())
    lanes(job, [0, 1, 0, 1])
    job.of.leave(1)
    assert [job.lease().micro for _ in range(6)] == [1, 3, 4, 6, 5, 7]


def test_what_a_worker_gets_is_what_it_was_said_to_expect() -> None:
    alone = Asking(ledger(cut=SHORT))
    assert alone.of.expected(0) == list(range(11))
    assert alone.lease().micro == 0
    assert alone.of.expected(0, 3) == [1, 2, 3]
    job = Asking(ledger())
    lanes(job, [0, 1, 0, 1])
    assert job.of.expected(0, 5) == [4, 6, 8, 10, 12]
    assert job.lease(0).micro == 4
    assert job.of.expected(0, 3) == [6, 8, 10]
    assert job.of.expected(1, 3) == [5, 7, 9]


def test_a_successor_hands_out_what_is_left_of_a_step() -> None:
    job = Asking(ledger())
    lanes(job, [0, 1, 0, 1, 1])
    after = Asking(Ledger.from_state(json.loads(json.dumps(job.of.state()))))
    assert sorted(after.lease(5).micro for _ in range(3)) == [4, 6, 7]


def test_an_epoch_that_is_partly_done_goes_on_where_it_stands() -> None:
    assert Asking(ledger(steps_done=3, step=50)).lease() == LeaseGrant(micro=12, serial=1, token=50, n_samples=4)


def test_an_epoch_that_is_done_has_nothing_to_hand_out() -> None:
    done = ledger(cut=SHORT, steps_done=3, step=3)
    assert done.lease(0, 1) == Finished()
    assert done.steps_done == 3


def test_a_repeated_request_gets_the_same_lease_while_it_is_outstanding() -> None:
    it = ledger()
    first = it.lease(0, request=7)
    assert it.lease(0, request=7) == first
    assert it.lease(1, request=7) != first  # another worker's seventh
    assert isinstance(first, LeaseGrant)
    it.accept(0, first.micro, first.serial)
    assert it.lease(0, request=7) != first
    assert it.n_outstanding == 2


def test_revoked_micro_batches_go_out_first_lowest_index_first_under_a_new_serial() -> None:
    job = Asking(ledger())
    old = [job.lease() for _ in range(5)]
    for micro in (3, 1):
        job.of.revoke(micro)
    again = [job.lease(worker=1) for _ in range(3)]
    assert [lease.micro for lease in again] == [1, 3, 7]
    assert not {lease.serial for lease in again} & {lease.serial for lease in old}
    assert job.of.reissued == 2


def test_a_worker_that_leaves_gives_its_leases_back_and_keeps_its_pushes() -> None:
    job = Asking(ledger())
    held = [job.lease(worker=5) for _ in range(3)]
    job.push(held[1], worker=5)
    assert job.of.leave(5) == [0, 2]
    assert job.of.outstanding(5) == []
    assert [job.lease(worker=6).micro for _ in range(3)] == [0, 2, 3]
    assert job.of.leave(77) == []


def test_outstanding_reports_what_a_worker_holds() -> None:
    job = Asking(ledger())
    first, _, third = job.lease(0), job.lease(1), job.lease(0)
    assert job.of.outstanding(0) == [first, third]
    job.push(first)
    assert job.of.outstanding(0) == [third]


# Pushes


def test_a_push_is_accepted_once() -> None:
    job = Asking(ledger())
    lease = job.lease()
    assert job.of.accept(0, lease.micro, lease.serial) == "accepted"
    assert job.of.accept(0, lease.micro, lease.serial) == "repeated"
    assert job.of.repeated == 1


def test_a_push_is_known_as_repeated_long_after_its_step() -> None:
    job = Asking(ledger("async"))
    lease = job.lease()
    job.push(lease)
    job.step()
    assert job.of.accept(0, lease.micro, lease.serial) == "repeated"


def test_a_push_of_a_revoked_lease_is_not_accepted_and_the_new_one_is() -> None:
    job = Asking(ledger())
    old = job.lease(worker=0)
    job.of.revoke(old.micro)
    assert job.of.accept(0, old.micro, old.serial) == "revoked"
    new = job.lease(worker=1)
    assert job.of.accept(0, old.micro, old.serial) == "revoked"
    assert job.of.accept(1, new.micro, new.serial) == "accepted"


def test_a_lease_whose_push_came_in_cannot_be_revoked() -> None:
    job = Asking(ledger())
    lease = job.lease()
    job.push(lease)
    job.of.revoke(lease.micro)
    assert job.lease().micro == 1


def test_a_push_that_was_never_leased_is_not_accepted() -> None:
    job = Asking(ledger())
    lease = job.lease(worker=0)
    for worker, micro, serial in [(1, 0, lease.serial), (0, 1, lease.serial), (0, 0, 99), (0, 0, 0), (0, 0, -1)]:
        assert job.of.accept(worker, micro, serial) == "revoked"
    job.push(lease)


def test_memory_of_revoked_leases_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_REVOKED_KEPT", 3)
    job = Asking(ledger())
    for _ in range(10):
        job.of.revoke(job.lease().micro)
    assert job.of.state()["revoked"] == [8, 9, 10]
    assert job.of.accept(0, 0, serial=1) != "accepted"


# Steps of gba and bsp


def test_whichever_pushes_came_next_make_a_step() -> None:
    job = Asking(ledger(cut=SHORT))
    leases = [job.lease() for _ in range(11)]
    for i in (10, 4, 0):
        job.push(leases[i])
        assert job.of.next_step() is None
    job.push(leases[7])
    assert job.of.next_step() == StepPlan(
        step=1,
        members=tuple(Member(i, leases[i].serial, 1.0, 2 if i == 10 else 4, 0) for i in (0, 4, 7, 10)),
        n_samples=14,
    )


def test_one_step_is_decided_at_a_time() -> None:
    job = Asking(ledger())
    for _ in range(8):
        job.push(job.lease())
    first = job.of.next_step()
    assert micros(first) == [0, 1, 2, 3]
    assert job.of.next_step() is None
    assert job.of.decided == first
    job.of.applied(1)
    assert (job.of.step, job.of.decided) == (1, None)
    assert micros(job.of.next_step()) == [4, 5, 6, 7]


def test_the_last_step_of_the_epoch_waits_for_every_micro_batch_and_may_be_short() -> None:
    job = Asking(ledger(cut=SHORT))
    leases = [job.lease() for _ in range(11)]
    for lease in leases[:10]:
        job.push(lease)
    assert [micros(job.step()) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert job.of.next_step() is None
    job.of.revoke(10)
    assert job.of.next_step() is None
    job.push(job.lease())
    assert job.refusal() == "the last micro-batches of the epoch are in flight"
    assert micros(job.step()) == [8, 9, 10]
    assert job.ask() == Finished()
    assert job.of.account == SampleAccount(total=42, applied=42)
    assert job.of.steps_done == 3


@pytest.mark.parametrize(
    ("name", "staleness", "late"),
    [("gba", "threshold", 0.0), ("gba", "linear", 0.0), ("gba", "inverse", 0.25), ("bsp", "threshold", 1.0)],
)
def test_a_push_that_comes_three_steps_late(name: str, staleness: str, late: float) -> None:
    job = Asking(ledger(name, staleness=staleness, tolerance=2))
    straggler = job.lease(worker=1)
    for _ in range(3):
        for _ in range(4):
            job.push(job.lease())
        job.step()
    job.push(straggler, worker=1)
    for _ in range(3):
        job.push(job.lease())
    plan = job.step()
    assert micros(plan) == [0, 13, 14, 15]
    assert weights(plan) == [late, 1, 1, 1]
    assert plan.members[0].staleness == 3
    assert plan.n_samples == 16  # dropped ones included
    assert job.of.account == SampleAccount(total=64, applied=64 if late else 60, dropped=0 if late else 4)
    # The straggler's place in each step was taken by a micro-batch of the next: those are ahead, not stale.
    assert job.of.staleness_histogram == {0: 15, 3: 1}


def test_weights_may_go_by_the_age_of_the_values_a_gradient_was_computed_with() -> None:
    job = Asking(ledger(staleness="inverse", staleness_of="values", step=10))
    leases = [job.lease() for _ in range(4)]
    for lease, values_step in zip(leases, (10, 9, 7, -1), strict=True):  # -1: not known, so the token counts
        assert job.of.accept(0, lease.micro, lease.serial, values_step=values_step) == "accepted"
    job.of = Ledger.from_state(json.loads(json.dumps(job.of.state())))
    plan = job.step()
    assert weights(plan) == [1.0, 0.5, 0.25, 1.0]
    assert [member.staleness for member in plan.members] == [0] * 4  # of the data: what is reported


def test_with_tolerance_0_only_gradients_of_the_newest_values_count() -> None:
    job = Asking(ledger(tolerance=0, staleness_of="values", step=10))
    for values_step in (10, 9, 10, 10):
        lease = job.lease()
        job.of.accept(0, lease.micro, lease.serial, values_step=values_step)
    assert weights(job.step()) == [1, 0, 1, 1]
    assert job.of.account == SampleAccount(total=16, applied=12, dropped=4)
    assert job.of.account.dropped_for == {"stale": 4}
    assert job.of.age_histogram == {0: 3, 1: 1}, "the dropped one is counted, too, as in the staleness"
    assert sum(job.of.staleness_histogram.values()) == 4
    assert Ledger.from_state(json.loads(json.dumps(job.of.state()))).age_histogram == {0: 3, 1: 1}


def test_the_histogram_ends_in_a_key_for_all_that_is_staler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_STALENESS", 2)
    job = Asking(ledger("async"))
    late = [job.lease() for _ in range(5)]
    for lease in late:
        job.push(lease)
        job.step()
    assert job.of.staleness_histogram == {0: 1, 1: 1, 2: 3}


def test_a_refused_gradient_is_a_member_that_is_dropped() -> None:
    job = Asking(ledger())
    for i in range(4):
        lease = job.lease()
        job.of.accept(0, lease.micro, lease.serial, refused="dense gradient is not finite" if i == 2 else None)
    assert weights(job.step()) == [1, 1, 0, 1]
    assert job.of.refused == 1
    assert job.of.account == SampleAccount(total=16, applied=12, dropped=4, not_finite=4)
    assert job.of.account.dropped_for == {"not_finite": 4}


@pytest.mark.parametrize("name", ["gba", "bsp"])
def test_lock_step_makes_every_step_of_its_own_micro_batches(name: str) -> None:
    job = Asking(ledger(name, lookahead=0))
    for k in range(5):
        leases = [job.lease(worker) for worker in (0, 1, 2, 0)]
        assert job.refusal(1) == "the next micro-batch is 1 steps ahead, the lookahead is 0" or k == 4
        for lease, worker in zip(leases, (0, 1, 2, 0), strict=True):
            job.push(lease, worker)
        plan = job.step()
        assert micros(plan) == list(range(4 * k, 4 * k + 4))
        assert [m.staleness for m in plan.members] == [0] * 4
    assert job.ask() == Finished()


def test_a_lookahead_of_one_step_hands_out_two() -> None:
    job = Asking(ledger(lookahead=1))
    leases = [job.lease() for _ in range(8)]
    assert "lookahead is 1" in job.refusal()
    job.of.revoke(2)
    assert job.lease().micro == 2
    for lease in (leases[0], leases[1], leases[6], leases[7]):
        job.push(lease)
    job.step()
    assert job.lease().micro == 8


# Steps that were decided, or lost


def test_a_step_that_was_applied_nowhere_is_computed_again() -> None:
    job = Asking(ledger())
    leases = [job.lease() for _ in range(5)]
    for lease in leases:
        job.push(lease)
    assert job.of.next_step() is not None
    job.of.undo()
    assert job.of.step == 0
    assert job.of.account == SampleAccount()
    assert job.of.accept(0, 0, leases[0].serial) == "revoked"
    again = [job.lease() for _ in range(4)]
    assert [lease.micro for lease in again] == [0, 1, 2, 3]
    for lease in again[1:]:
        job.push(lease)
    assert micros(job.of.next_step()) == [1, 2, 3, 4]


def test_undo_without_a_decided_step_changes_nothing() -> None:
    it = ledger()
    before = it.state()
    it.undo()
    assert it.state() == before


def test_lost_pushes_are_computed_again_and_a_decided_step_stands() -> None:
    job = Asking(ledger())
    leases = [job.lease() for _ in range(6)]
    for lease in leases:
        job.push(lease)
    plan = job.of.next_step()
    assert job.of.lost_pushes() == [4, 5]
    assert job.of.decided == plan
    assert job.of.accept(0, 5, leases[5].serial) == "revoked"
    assert [job.lease().micro for _ in range(3)] == [4, 5, 6]
    assert job.of.lost_pushes() == []


def test_only_the_decided_step_can_be_applied() -> None:
    job = Asking(ledger())
    with pytest.raises(StateMismatch, match="step 1 cannot have been applied, none is decided"):
        job.of.applied(1)
    for _ in range(4):
        job.push(job.lease())
    job.of.next_step()
    with pytest.raises(StateMismatch, match="step 2 cannot have been applied, step 1 is the decided one"):
        job.of.applied(2)


# Stopping


@pytest.mark.parametrize("name", SERVER_MODES)
def test_on_hold_leases_end_at_a_step_boundary(name: str) -> None:
    job = Asking(ledger(name))
    first = job.lease()
    job.of.hold()
    job.push(first)
    n_leases = 1
    while True:
        while (plan := job.of.next_step()) is not None:
            job.of.applied(plan.step)
        answer = job.ask()
        if not isinstance(answer, LeaseGrant):
            break
        n_leases += 1
        job.push(answer)
    assert answer == Drained()
    assert n_leases == 4
    assert job.of.drained
    assert job.of.steps_done == 1
    job.of.release()
    assert job.lease().micro == 4


def test_on_hold_what_is_outstanding_is_waited_for_and_can_be_handed_out_again() -> None:
    job = Asking(ledger())
    leases = [job.lease(worker=i % 2) for i in range(4)]
    job.of.hold()
    assert job.refusal() == "on hold"
    for lease in leases[::2]:
        job.push(lease, worker=0)
    job.of.leave(1)
    for _ in range(2):
        assert not job.of.drained
        job.push(job.lease())
    assert job.refusal() == "on hold"  # the step has to be decided and applied
    assert job.of.next_step() is not None
    assert job.refusal() == "on hold"
    job.of.applied(1)
    assert job.ask() == Drained()


def test_a_job_on_hold_before_its_first_lease_is_drained() -> None:
    it = ledger()
    it.hold()
    assert it.lease(0, 1) == Drained()


# async and the baselines with limits


def test_async_applies_every_push_on_its_own_however_stale() -> None:
    job = Asking(ledger("async", step=10))
    a, b, c = (job.lease(worker) for worker in range(3))
    assert [a.token, b.token, c.token] == [10, 10, 10]
    for lease, worker in ((c, 2), (a, 0), (b, 1)):
        job.push(lease, worker)
    plans = [job.step() for _ in range(3)]
    assert [(plan.step, micros(plan)) for plan in plans] == [(11, [2]), (12, [0]), (13, [1])]
    assert [(m.weight, m.staleness) for plan in plans for m in plan.members] == [(1, 0), (1, 1), (1, 2)]
    assert job.lease().token == 13
    assert job.of.steps_done == 0  # 3 of the 4 micro-batches of a step


def test_bounded_staleness_stops_whoever_is_too_far_ahead_of_the_slowest() -> None:
    job = Asking(ledger("hop_bs", slack=2))
    slow = job.lease(worker=1)
    for _ in range(3):
        job.push(job.lease(worker=0))
    assert job.refusal(0) == "3 micro-batches ahead of the slowest worker, the slack is 2"
    job.push(slow, worker=1)
    job.lease(worker=0)


def test_a_slow_worker_that_leaves_holds_nobody_up() -> None:
    job = Asking(ledger("hop_bs", slack=0))
    job.lease(worker=1)
    job.push(job.lease(worker=0))
    assert "ahead of the slowest" in job.refusal(0)
    assert job.of.leave(1) == [0]
    assert job.lease(worker=0).micro == 0


def test_a_late_joiner_starts_where_the_slowest_is() -> None:
    job = Asking(ledger("hop_bs", slack=1))
    for worker in (0, 1):
        job.of.join(worker)
    for worker in (0, 1, 0, 1, 0):
        job.push(job.lease(worker), worker)
    job.of.join(2)
    assert dict(job.of.state()["clock"]) == {0: 3, 1: 2, 2: 2}


def test_a_round_does_not_wait_for_the_backup_workers() -> None:
    job = Asking(ledger("hop_bw", backups=1))
    first = [job.lease(worker) for worker in range(3)]
    assert job.refusal(0) == "its part of step 1 is done or in its hands"
    job.push(first[0], 0)
    assert job.of.next_step() is None
    assert job.refusal(0) == "its part of step 1 is done or in its hands"
    job.push(first[1], 1)
    assert micros(job.of.next_step()) == [0, 1]
    assert job.refusal(0) == "step 1 is being applied"
    job.of.applied(1)

    second = [job.lease(worker) for worker in (0, 1)]
    assert [lease.token for lease in second] == [1, 1]
    job.push(first[2], 2)  # late: a member that does not count
    assert job.of.next_step() is None
    for worker, lease in enumerate(second):
        job.push(lease, worker)
    plan = job.step()
    assert [(m.micro, m.weight, m.staleness) for m in plan.members] == [(2, 0, 1), (3, 1, 0), (5, 1, 0)]
    assert job.of.account == SampleAccount(total=20, applied=16, dropped=4)


def test_a_round_takes_no_more_than_the_first_pushes() -> None:
    job = Asking(ledger("hop_bw", backups=2))
    leases = [job.lease(worker) for worker in range(3)]
    for worker in (2, 0, 1):
        job.push(leases[worker], worker)
    assert micros(job.step()) == [2]
    job.push(job.lease(1), 1)
    assert weights(job.step()) == [0, 0, 1]


def test_more_backups_than_workers_leave_rounds_of_one() -> None:
    job = Asking(ledger("hop_bw", backups=9))
    job.of.join(1)
    job.push(job.lease(0), 0)
    assert micros(job.step()) == [0]


def test_a_round_goes_on_without_a_worker_that_leaves() -> None:
    job = Asking(ledger("hop_bw", backups=0))
    leases = [job.lease(worker) for worker in (0, 1)]
    job.push(leases[0], 0)
    assert job.of.next_step() is None
    job.of.leave(1)
    assert micros(job.step()) == [0]
    assert job.lease(0).micro == 1


def test_a_worker_whose_lease_was_revoked_may_take_part_in_the_round_again() -> None:
    job = Asking(ledger("hop_bw", backups=0))
    leases = [job.lease(worker) for worker in (0, 1)]
    job.push(leases[0], 0)
    job.of.revoke(1)
    assert job.refusal(0) == "its part of step 1 is done or in its hands"
    job.push(job.lease(1), 1)
    assert micros(job.step()) == [0, 1]


def test_an_epoch_that_ends_with_late_pushes_ends_in_a_step_that_drops_them() -> None:
    job = Asking(ledger("hop_bw", cut=EpochPlan(8, 8, 4), backups=1))
    leases = [job.lease(worker) for worker in (0, 1)]
    job.push(leases[0], 0)
    job.step()
    assert job.of.next_step() is None
    job.push(leases[1], 1)
    assert weights(job.step()) == [0]
    assert job.ask() == Finished()
    assert job.of.account == SampleAccount(total=8, applied=4, dropped=4)


# Settings


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"name": "hopbw"}, "no asynchronous mode 'hopbw'; did you mean 'hop_bw'"),
        ({"name": "?"}, "'gba' or 'bsp' or 'async' or 'hop_bs' or 'hop_bw'"),
        ({"staleness": "liner"}, "did you mean 'linear'"),
        ({"tolerance": -1}, "must be a number of steps, 0 or more, got -1"),
        ({"lookahead": -1}, "lookahead must be a whole number, 0 or more, or None, got -1"),
        ({"slack": None}, "slack must be a whole number, 0 or more, got None"),
        ({"backups": True}, "backups must be a whole number, 0 or more, got True"),
        ({"staleness_of": "rows"}, "staleness_of is 'token' or 'values', got 'rows'"),
        ({"staleness_of": "values", "staleness": "none"}, "staleness_of='values' has no effect with staleness='none'"),
    ],
)
def test_bad_rules_are_refused(rules: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says.replace("?", r"\?")):
        Discipline(**rules)


@pytest.mark.parametrize("steps_done", [-1, 6])
def test_an_epoch_cannot_have_more_steps_done_than_it_has(steps_done: int) -> None:
    with pytest.raises(BadInput, match=f"from 0 to the epoch's 5 steps, got {steps_done}"):
        ledger(steps_done=steps_done)


# Everything at once


class Job(RuleBasedStateMachine):
    """A job whose workers, servers and coordinator do anything in any order."""

    name: str

    @initialize(
        n_samples=st.integers(1, 70),
        per_step=st.integers(1, 4),
        done=st.sampled_from([0, 0, 0.3, 0.7, 1]),
        lookahead=st.sampled_from([None, 0, 1, 3]),
        small=st.integers(0, 2),
    )
    def begin(self, n_samples: int, per_step: int, done: float, lookahead: int | None, small: int) -> None:
        cut = EpochPlan(n_samples, per_step * 2, 2)
        self.start = int(done * cut.n_steps)
        rules = Discipline(self.name, tolerance=small, lookahead=lookahead, slack=small, backups=small)
        self.it = Ledger(cut, rules, epoch=3, steps_done=self.start, step=50, account=SampleAccount())
        self.request = 0
        self.held: dict[int, tuple[int, LeaseGrant]] = {}  # by serial: what the workers hold, and the ledger waits for
        self.pushed: dict[int, tuple[int, LeaseGrant]] = {}  # accepted
        self.gone: dict[int, tuple[int, LeaseGrant]] = {}  # revoked or lost
        self.members: Counter[int] = Counter()
        self.plans: list[StepPlan] = []
        self.n_refused = 0

    def revoked(self, holder: dict[int, tuple[int, LeaseGrant]], micros: set[int]) -> None:
        for serial, (worker, lease) in list(holder.items()):
            if lease.micro in micros and self.members[lease.micro] == 0:
                self.gone[serial] = (worker, holder.pop(serial)[1])

    @rule(worker=st.integers(0, 3))
    def ask(self, worker: int) -> None:
        self.hand_out(worker)

    def hand_out(self, worker: int) -> bool:
        self.request += 1
        answer = self.it.lease(worker, self.request)
        if isinstance(answer, LeaseGrant):
            assert answer.serial not in {*self.held, *self.pushed, *self.gone}
            assert answer.micro not in {lease.micro for _, lease in self.held.values()}
            assert self.members[answer.micro] == 0
            self.held[answer.serial] = (worker, answer)
            assert self.it.lease(worker, self.request) == answer
        return isinstance(answer, LeaseGrant)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), refused=st.sampled_from([None, None, None, "not finite"]))
    def push(self, data: st.DataObject, refused: str | None) -> None:
        serial = data.draw(st.sampled_from(sorted(self.held)))
        worker, lease = self.held.pop(serial)
        assert self.it.accept(worker, lease.micro, serial, refused) == "accepted"
        self.pushed[serial] = (worker, lease)
        self.n_refused += refused is not None

    @precondition(lambda self: self.pushed)
    @rule(data=st.data())
    def push_once_more(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(sorted(self.pushed)))
        worker, lease = self.pushed[serial]
        assert self.it.accept(worker, lease.micro, serial) == "repeated"

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def push_too_late(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(sorted(self.gone)))
        worker, lease = self.gone[serial]
        assert self.it.accept(worker, lease.micro, serial) == "revoked"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(sorted(self.held)))
        self.it.revoke(self.held[serial][1].micro)
        self.revoked(self.held, {self.held[serial][1].micro})

    @rule(worker=st.integers(0, 3))
    def leave(self, worker: int) -> None:
        gone = self.it.leave(worker)
        assert gone == sorted(lease.micro for by, lease in self.held.values() if by == worker)
        self.revoked(self.held, set(gone))

    @rule(worker=st.integers(0, 3))
    def join(self, worker: int) -> None:
        self.it.join(worker)

    @rule()
    def decide(self) -> None:
        before = self.it.decided
        plan = self.it.next_step()
        assert plan is None or before is None

    @precondition(lambda self: self.it.decided is not None)
    @rule()
    def apply(self) -> None:
        plan = self.it.decided
        assert plan is not None
        assert plan.step == self.it.step + 1
        assert plan.members
        assert all(member.serial in self.pushed for member in plan.members)
        assert plan.n_samples == sum(self.it.cut.samples_of_micro(micro) for micro in micros(plan))
        self.it.applied(plan.step)
        self.members.update(micros(plan))
        self.plans.append(plan)

    @rule()
    def undo(self) -> None:
        lost = set() if self.it.decided is None else set(micros(self.it.decided))
        self.it.undo()
        self.revoked(self.pushed, lost)

    @rule()
    def lose_the_buffer(self) -> None:
        self.revoked(self.pushed, set(self.it.lost_pushes()))

    @rule()
    def hold(self) -> None:
        self.it.hold()

    @rule()
    def release(self) -> None:
        self.it.release()

    @rule()
    def go_on_in_another_process(self) -> None:
        state = self.it.state()
        as_json, packed = json.loads(json.dumps(state)), msgspec.msgpack.decode(msgspec.msgpack.encode(state))
        assert as_json == packed == state
        self.it = Ledger.from_state(packed)
        assert self.it.state() == state

    @invariant()
    def adds_up(self) -> None:
        it, cut = self.it, self.it.cut
        assert set(self.members.values()) <= {1}
        assert it.n_outstanding == len(self.held)
        decided = () if it.decided is None else micros(it.decided)
        undecided = {
            s for s, (_, lease) in self.pushed.items() if not self.members[lease.micro] and lease.micro not in decided
        }
        assert it.oldest_serial == min({*self.held, *undecided}, default=it.state()["serial"] + 1)
        done = sum(cut.samples_of_micro(micro) for micro in self.members)
        dropped, not_finite = done - it.account.applied, it.account.not_finite
        assert it.account == SampleAccount(done, it.account.applied, dropped, not_finite=not_finite)
        assert 0 <= not_finite <= dropped and (self.n_refused > 0 or not_finite == 0)
        assert sum(it.staleness_histogram.values()) == len(self.members)
        assert it.refused == self.n_refused
        assert it.step == 50 + len(self.plans)
        assert it.finished == (it.steps_done == cut.n_steps)

    def work_off(self) -> None:
        """Two workers ask in turn and push late; every step is applied when it is decided."""
        idle = 0
        while idle < 4:  # both workers were refused, before and after whatever could be decided
            leased = self.hand_out(self.request % 2)
            idle = 0 if leased else idle + 1
            if self.held and (not leased or len(self.held) > 2):
                serial = min(self.held)
                worker, lease = self.pushed[serial] = self.held.pop(serial)
                assert self.it.accept(worker, lease.micro, serial) == "accepted"
                idle = 0
            while self.it.decided is not None or self.it.next_step() is not None:
                self.apply()
                idle = 0

    def teardown(self) -> None:
        if not hasattr(self, "it"):
            return
        it, cut = self.it, self.it.cut
        for worker in (2, 3):
            self.leave(worker)
        it.hold()
        self.work_off()
        assert it.finished or it.drained
        assert it.lease(0, -1) in (Finished(), Drained())
        assert it.finished or len(self.members) == (it.steps_done - self.start) * cut.n_micro
        it.release()
        self.work_off()
        assert it.finished
        assert it.lease(0, -1) == Finished()
        first = self.start * cut.n_micro
        assert sorted(self.members) == list(range(first, -(-cut.n_samples // cut.micro_batch)))
        assert it.account.total == max(0, cut.n_samples - first * cut.micro_batch)
        self.adds_up()
        if it.discipline.name in ("gba", "bsp"):
            assert len(self.plans) == cut.n_steps - self.start
        if it.discipline.name in ("async", "hop_bs"):
            assert len(self.plans) == len(self.members)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVER_MODES)
def test_nothing_that_happens_loses_or_repeats_a_micro_batch(name: str) -> None:
    job = type("Job", (Job,), {"name": name})
    run_state_machine_as_test(job, settings=settings(max_examples=40, stateful_step_count=50))
