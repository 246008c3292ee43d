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


def full_overhead_s(
    save_s: float, load_s: float, reschedule_s: float, every_s: float, between_s: float, total_s: float
) -> float:
    """Seconds lost to saving and failures when everything goes back to the last save.

    O = O_save * T_total / T_save + (O_load + T_save / 2 + O_res) * T_total / T_fail
    """
    return save_s * total_s / every_s + (load_s + every_s / 2 + reschedule_s) * total_s / between_s


def partial_overhead_s(
    save_s: float, load_s: float, reschedule_s: float, every_s: float, between_s: float, total_s: float
) -> float:
    """Seconds lost to saving and failures when only the lost server goes back to the last save.

    O = O_save * T_total / T_save + (O_load + O_res) * T_total / T_fail
    """
    return save_s * total_s / every_s + (load_s + reschedule_s) * total_s / between_s


def best_full_interval_s(save_s: float, between_s: float) -> float:
    """The interval at which `full_overhead_s` is least: T_save* = sqrt(2 * O_save * T_fail)."""
    return math.sqrt(2 * save_s * between_s)


def interval_for_pls_s(target_pls: float, n_servers: int, between_s: float) -> float:
    """The interval at which `expected_pls` is the target: T_save = 2 * PLS * N_emb * T_fail."""
    return 2 * target_pls * n_servers * between_s


def expected_pls(every_s: float, between_s: float, n_servers: int) -> float:
    """Portion of lost samples to expect of partial recovery: E[PLS] = 0.5 * T_save / (T_fail * N_emb)."""
    return 0.5 * every_s / (between_s * n_servers)


def lost_portion(samples_since_save: float, samples_total: float, n_servers: int) -> float:
    """What one failure adds to the PLS: (S_i - S_last_save) / (S_total * N_emb)."""
    return samples_since_save / (samples_total * n_servers)
