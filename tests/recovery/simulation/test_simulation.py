"""Operation on a virtual clock: what one failure costs, to the second, and what years cost, within the noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from recovery.schedule.failures import Gamma, failure_times
from recovery.schedule.planner import Costs, JobProfile, Objectives, plan
from recovery.simulation.simulated_rows import RowModel, SimulatedRows
from recovery.simulation.simulation import Mean, SimulatedJob, mean_of, simulate

H = 3600.0
YEAR_S = 365 * 24 * H
CPR = Objectives(rebase_at=math.inf)
COSTS = Costs(save_s=360, load_s=60, reschedule_s=180)
JOB = JobProfile(COSTS, 10**9, n_servers=8, between_failures_s=28 * H, total_s=56 * H)
FRESH = SimulatedJob(JOB, CPR, settled=False, replan_s=None)


def at_hours(*failures: tuple[float, int]) -> np.ndarray:
    return np.array(failures, np.float64).reshape(-1, 2) * (H, 1)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_full_recovery_does_again_what_came_after_the_last_save():
    world = replace(FRESH, objectives=replace(CPR, strategy="full", max_interval_s=4 * H), replan_s=None)
    every_h = plan(JOB, world.objectives).interval_s / H
    found = simulate(world, at_hours((1, 0), (every_h + 0.5, 3)), rng())
    assert found.redoing_s == pytest.approx(1.5 * H)
    assert (found.loading_s, found.rescheduling_s) == (120, 360)
    assert found.n_saves == found.n_bases == math.ceil(56 / every_h) - 1
    assert found.saving_s == found.n_saves * 360
    assert found.pls == 0


def test_partial_recovery_loses_the_samples_of_one_server_since_the_last_round():
    world = replace(FRESH, seeded=True)  # a round of eight saves every 44.8 hours
    found = simulate(world, at_hours((10, 2), (46.8, 2)), rng())
    assert found.pls == pytest.approx((10 + 2) / (56 * 8))
    assert (found.redoing_s, found.loading_s, found.n_failures) == (0, 120, 2)
    assert (found.n_saves, found.n_bases) == (9, 0)
    assert found.written == pytest.approx(9 / 8)


def test_without_a_base_the_first_save_takes_all_rows_and_a_long_chain_ends_in_a_new_base():
    found = simulate(replace(FRESH, objectives=Objectives()), at_hours(), rng())
    assert (found.n_saves, found.n_bases) == (9, 1)
    longer = replace(FRESH, objectives=Objectives(), job=replace(JOB, total_s=62 * H))
    assert simulate(longer, at_hours(), rng()).n_bases == 2  # eight eighths are as much as the base


def test_failures_after_the_end_do_not_count():
    assert simulate(FRESH, at_hours((57, 0)), rng()).n_failures == 0


def test_many_failures_make_the_job_plan_again_and_say_why():
    world = replace(FRESH, job=replace(JOB, between_failures_s=280 * H), replan_s=24 * H)
    found = simulate(world, at_hours(*((h, h % 8) for h in range(1, 50))), rng())
    assert len(found.plans) > 2
    assert found.plans[-1][1].interval_s < found.plans[0][1].interval_s / 10
    assert "a round of saves every" in found.plans[-1][1].reason


def test_the_same_seed_gives_the_same_operation():
    world = replace(FRESH, rows=RowModel(rows_per_server=50), settled=True, replan_s=24 * H)
    trace = failure_times(Gamma(0.7, 28 * H), 56 * H, 8, rng(5))
    assert simulate(world, trace, rng(1)) == simulate(world, trace, rng(1))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [0.6, 1.0, 3.0])
@pytest.mark.parametrize("strategy", ["full", "partial"])
@pytest.mark.parametrize("n_servers", [8, 1000])
def test_a_year_agrees_with_the_closed_forms(n_servers, strategy, shape):
    law = Gamma(shape, 5000 * H)
    job = JobProfile(COSTS, 10**9, n_servers, law.mean_s / n_servers, YEAR_S)
    world = SimulatedJob(job, replace(CPR, strategy=strategy), replan_s=None)
    outcomes = []
    for repeat in range(24 if n_servers == 8 else 12):
        chance = np.random.default_rng([repeat, n_servers])
        outcomes.append(simulate(world, failure_times(law, YEAR_S, n_servers, chance), chance))
    expected = plan(job, world.objectives).expected
    assert abs(mean_of(outcomes, lambda o: o.overhead).sigmas_from(expected.overhead)) < 3
    assert abs(mean_of(outcomes, lambda o: o.pls).sigmas_from(expected.pls)) < 3


@pytest.mark.slow
def test_with_all_rows_at_each_save_the_updates_lost_are_the_lost_samples():
    law = Gamma(1.0, 5000 * H)
    job = JobProfile(COSTS, 10**9, 16, law.mean_s / 16, YEAR_S)
    world = SimulatedJob(job, replace(CPR, strategy="partial", policy="full"), RowModel(16, 100), replan_s=None)
    outcomes = []
    for repeat in range(24):
        chance = np.random.default_rng([repeat])
        outcomes.append(simulate(world, failure_times(law, YEAR_S, 16, chance), chance))
    # Rows that are lost twice in one round are counted twice by the definition of PLS only.
    twice = mean_of(outcomes, lambda o: (o.updates_lost or 0) - o.pls)
    assert -0.2 * 0.1 < twice.value < 3 * twice.error
    assert mean_of(outcomes, lambda o: o.updates_lost or 0).value == pytest.approx(0.1, rel=0.2)


@pytest.mark.slow
def test_priorities_lose_fewer_updates_than_saves_of_all_rows_for_the_same_bytes():
    law, lost, written = Gamma(1.0, 224 * H), {}, {}
    for policy in ("full", "mfu", "scar", "ssu"):
        world = SimulatedJob(JOB, replace(CPR, policy=policy), RowModel(rows_per_server=500), replan_s=None)
        outcomes = [
            simulate(world, failure_times(law, JOB.total_s, 8, rng(repeat)), rng(repeat)) for repeat in range(20)
        ]
        lost[policy] = mean_of(outcomes, lambda o: o.updates_lost or 0).value
        written[policy] = mean_of(outcomes, lambda o: o.written).value
    assert max(lost["mfu"], lost["scar"], lost["ssu"]) < 0.5 * lost["full"]
    assert max(written.values()) < 1.1 * written["full"]


def test_a_lost_server_gets_back_what_was_saved_and_the_others_keep_what_they_have():
    rows = SimulatedRows(RowModel(n_servers=2, rows_per_server=100), rng(), policy="scar", r=0.5)
    rows.pass_time(50 * H)
    assert rows.save("full") == 1.0
    kept = rows.slab(0, 0).columns[0].copy()
    rows.pass_time(50 * H)
    other = rows.slab(0, 1).columns[0].copy()
    updates, since_s = rows.lose(0)
    assert updates > 0 and since_s == pytest.approx(50 * H)
    assert np.array_equal(rows.slab(0, 0).columns[0], kept)
    assert np.array_equal(rows.slab(0, 1).columns[0], other)
    assert rows.lose(0)[0] == 0


def test_a_delta_takes_exactly_what_has_changed():
    rows = SimulatedRows(RowModel(n_servers=2, rows_per_server=100), rng(), policy="delta", r=0.5)
    rows.save("full")
    assert rows.save("delta") == 0
    rows.pass_time(5 * H)
    changed = sum(int(np.count_nonzero(rows.slab(0, shard).counts)) for shard in rows.shards())
    assert rows.save("delta") == changed / 200
    # It speaks for the rows that it leaves out, as they have not changed.
    assert rows.lose(0) == (0, 0)
    assert rows.save("delta") == 0


def test_the_noise_of_a_mean_is_its_standard_error():
    assert Mean(1.2, 0.1).sigmas_from(1.0) == pytest.approx(2)
    assert Mean(0.0, 0.0).sigmas_from(0.0) == 0
    assert Mean(1.0, 0.0).sigmas_from(2.0) == math.inf
