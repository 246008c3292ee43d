"""The closed forms of CPR: what recovery costs, what it loses, and how often to save. No decision is made here.

Maeng et al., "CPR: Understanding and Improving Failure Tolerant Training for Deep Learning Recommendation with Partial
Recovery" (MLSys 2021, arXiv 2011.02999). First order: they count neither failures during a recovery nor during the work
that is done again, so they are too low once overheads reach tens of per cent.

Every argument is in seconds. `save_s` is O_save, `load_s` O_load, `reschedule_s` O_res: for how long training stands
still for a save, for loading, and until the lost server has been replaced. `every_s` is T_save, `between_s` T_fail (the
mean time between failures of any one server of the job), `total_s` T_total, `n_servers` N_emb.
"""

from __future__ import annotations

import math


def best_full_interval_s(save_s: float, between_s: float) -> float:
    """The interval at which full recovery costs least: T_save* = sqrt(2 * O_save * T_fail).

    Saving and failures cost O_save * T_total / T_save + (O_load + T_save / 2 + O_res) * T_total / T_fail seconds.
    """
    return math.sqrt(2 * save_s * between_s)


def interval_for_pls_s(target_pls: float, n_servers: int, between_s: float) -> float:
    """The interval at which `expected_pls` is the target: T_save = 2 * PLS * N_emb * T_fail."""
    return 2 * target_pls * n_servers * between_s


def expected_pls(every_s: float, between_s: float, n_servers: int) -> float:
    """Portion of lost samples to expect of partial recovery: E[PLS] = 0.5 * T_save / (T_fail * N_emb)."""
    return 0.5 * every_s / (between_s * n_servers)


def expected_pls_of_job(every_s: float, between_s: float, n_servers: int, total_s: float) -> float:
    """`expected_pls` of a job that begins with all rows saved and need not end with an interval, exactly.

    E[PLS] = (n T_save^2 + rest^2) / (2 T_total T_fail N_emb) with T_total = n T_save + rest. Failures are as likely at
    any moment; servers are lost one at a time.
    """
    n, rest_s = divmod(total_s, every_s)
    return (n * every_s**2 + rest_s**2) / (2 * total_s * between_s * n_servers)


def least_saves_for_pls(target_pls: float, between_s: float, n_servers: int, total_s: float) -> float:
    """How often a row must be saved in a job at the least, in the mean over the rows, for an expected PLS of at most
    `target_pls`, by any policy.

    All rows are saved at the start. A row saved k times more, at best evenly, has an expected age of T_total / 2(k + 1)
    when its server fails, so E[PLS] = T_total / (2 T_fail N_emb) * mean of 1 / (k + 1) over the rows. That is convex in
    k: with the same number of saves in all it is least when the k differ by at most one, and then linear between two
    whole numbers. Saving rows because they are important cannot be below it, as it loses accesses, not PLS.
    """
    if not target_pls > 0:
        return math.inf
    share = target_pls * 2 * between_s * n_servers / total_s  # of 1 / (k + 1), in the mean
    if share >= 1:
        return 0.0
    below = math.floor(1 / share) - 1  # k: 1 / (k + 1) >= share
    at, after = 1 / (below + 1), 1 / (below + 2)
    return below + (at - share) / (at - after)


def least_partial_overhead_s(
    save_s: float, load_s: float, reschedule_s: float, target_pls: float, between_s: float, n_servers: int,
    total_s: float,
) -> float:  # fmt: skip
    """The seconds that partial recovery costs at the least, by any policy that keeps E[PLS] within the target.

    `least_saves_for_pls` times O_save, as a save of a part of the rows costs its part, and O_load + O_res for each of
    T_total / T_fail failures. First order, as all here.
    """
    saves = least_saves_for_pls(target_pls, between_s, n_servers, total_s)
    return saves * save_s + (load_s + reschedule_s) * total_s / between_s


def lost_portion(samples_since_save: float, samples_total: float, n_servers: int) -> float:
    """What one failure adds to the PLS: (S_i - S_last_save) / (S_total * N_emb)."""
    return samples_since_save / (samples_total * n_servers)
