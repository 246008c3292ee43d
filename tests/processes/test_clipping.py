"""Clipping and loss scaling of global steps in running jobs: plain torch with the global batch; what kills leave."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import numpy as np
import pytest

from gba_hvd import kernels
from gba_hvd.ps.messages import Ok, PushDone

from . import fuzz_server
from .alone import train_alone
from .cluster import Cluster, assert_same_parameters, cluster, wait_for
from .fuzz_server import GENERATION, LR, ROW_LR, WORKER, Host
from .plain import Plain, assert_trained_as, train_plain
from .test_server import BEGIN, finish_with, replace_by_one_that_dies, restarted

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
LIMIT = 0.5


OVERFLOWS = [[0, 14], [0, 15], [0, 30], [1, 0]]  # (epoch, micro-batch): in steps 3, 6 (a short one) and 7 of 12
BOTH = {
    "samples": 480 + 40, "max_norm": 0.1, "scaler": {"init_scale": 1024.0, "growth_interval": 2}, "overflows": OVERFLOWS
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    trained = train_plain(tmp_path_factory.mktemp("plain") / "torch", BOTH)
    assert max(trained.norms) > 0.2, "some steps were to be clipped by much"
    assert trained.scaler["scale"] != 1024.0
    return trained


def check_job(job: Cluster, plain: Plain) -> None:
    assert_trained_as(job.arrays(), plain)
    result, scales = job.result(), [line["scaler"] for line in job.notes("scaler") if line["of_epoch"] == 1]
    assert result["scaler"] == plain.scaler
    assert scales and all(scale == plain.scaler for scale in scales), "the same on every worker"
    assert (result["dropped"], result["applied"], result["lost"]) == (plain.skipped, 1040 - plain.skipped, 0)
    assert (result["total"], result["steps_skipped"], result["step"]) == (1040, 3, 12)
    assert result["hooked"] == 12 - 3, "as often as a scheduler would step"


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.variant)])
def test_allreduce_scales_and_clips_as_plain_torch(tmp_path: Path, plain: Plain, workers: int) -> None:
    with cluster(tmp_path, **BOTH) as job:
        job.run(lambda: job.start_static(workers))
        check_job(job, plain)
        reported = [line["message"] for line in job.notes("event") if line["event"] == "overflow"]
        assert len(reported) == 3 * workers
        assert "step 3 overflowed at loss scale 2048: skipped on all workers" in reported[0]


@pytest.mark.parametrize("servers", [1, 2])
def test_gba_in_lock_step_scales_and_clips_as_plain_torch(tmp_path: Path, plain: Plain, servers: int) -> None:
    with cluster(tmp_path, gba={"mode": "gba", "lookahead": 0, "servers_per_host": servers}, **BOTH) as job:
        job.run(lambda: job.start_static(2))
        check_job(job, plain)
        refused = [(line["epoch"], line["push"]) for line in job.pushes() if line["refused"]]
        assert sorted(refused) == [tuple(one) for one in OVERFLOWS]
        assert {line["rank"] for line in job.pushes()} == {0, 1}


def test_the_scale_goes_with_the_job_from_mode_to_mode(tmp_path: Path, plain: Plain) -> None:
    modes = {"mode": "allreduce", "switch_at": {2: "gba", 4: "allreduce", 8: "gba"}, "lookahead": 0}
    result = train_alone(tmp_path / "job", BOTH, **modes)
    assert [(before, after) for before, after, _ in result.switches] == [
        ("allreduce", "gba"), ("gba", "allreduce"), ("allreduce", "gba")
    ]  # fmt: skip
    assert_trained_as(result.arrays, plain)
    assert result.scaler == plain.scaler
    not_skipped = [norm for norm in plain.norms if math.isfinite(norm)]
    assert len(not_skipped) == 12 - 3
    assert list(result.norms) == pytest.approx(not_skipped, rel=1e-4), "callbacks receive the norm of every step"


@pytest.mark.parametrize("mode", ["async", "shadow"])
def test_where_every_push_is_a_step_an_overflow_costs_that_push(tmp_path: Path, mode: str) -> None:
    result = train_alone(tmp_path / "job", {**BOTH, "max_norm": None}, mode=mode)
    assert result.modes == {mode}
    assert (result.samples["dropped"], result.samples["steps_skipped"]) == (4 * 16, 4)
    assert result.samples["total"] == 1040 == result.samples["applied"] + 4 * 16
    assert all(np.isfinite(value).all() for value in result.arrays.values())
    assert result.scaler is not None
    assert result.scaler["scale"] > 2.0**20, "62 pushes in which it was to double about every second time"


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.variant), 2])
def test_servers_in_lock_step_clip_as_allreduce_does(tmp_path: Path, servers: int) -> None:
    plan = {"max_norm": 0.03, "samples": 480, "dense_optimizer": "momentum", "row_average": "contributors"}
    reference = train_alone(tmp_path / "allreduce", plan)
    result = train_alone(tmp_path / "gba", plan, mode="gba", lookahead=0, servers_per_host=servers)
    not_clipped = train_alone(tmp_path / "not clipped", {**plan, "max_norm": None})
    assert result.modes == {"gba"}
    assert_same_parameters(result.arrays, reference.arrays)
    assert result.samples == reference.samples
    assert not np.allclose(not_clipped.arrays["user.weights"], reference.arrays["user.weights"], atol=1e-3)


@pytest.mark.parametrize(
    ("dies", "point", "squares"),
    [
        (0, "before it is measured", 12.0),
        pytest.param(0, "measured", 12.0, marks=pytest.mark.variant),
        pytest.param(0, "before the step", 44.0, marks=pytest.mark.variant),
        (1, "before the step", 44.0),
    ],
    ids=str,
)
def test_a_server_killed_between_decision_and_apply_leaves_one_factor_everywhere(
    tmp_path: Path, dies: int, point: str, squares: float
) -> None:
    """Every element of a step's gradient is 1: 8 of the dense part and 24 of rows at server 0, 12 at server 1.

    squares: of what the killed step is clipped by. If the ledger has no factors, what server 0 had is gone, and
    the step is measured again without it.
    """
    owner = [0, 1, 0]
    host = Host(tmp_path, job="clipped", n_servers=2)
    try:
        began = row_zero_of_each_shard(host)
        dying = replace_by_one_that_dies(host, point, dies)
        peers = [host.peer(i) for i in (0, 1)]
        for me, peer in enumerate(peers):
            assert peer.ask(*fuzz_server.enter(host.endpoints, me, owner, max_norm=LIMIT))[0] == Ok()
        peers[0].send(fuzz_server.a_beat())
        leases = [fuzz_server.lease(peers[0], request) for request in (1, 2)]
        for given in leases:
            for peer, frames in zip(peers, fuzz_server.gradients(host.layout, owner), strict=True):
                assert fuzz_server.push(peer, given, frames) == Ok()
            peers[0].send(PushDone(WORKER, GENERATION, given.micro, given.serial))
        assert dying.wait() == -signal.SIGKILL
        restarted(host, dying.pid, dies)
        wait_for(lambda: host.memory.marks().finished.min() == 1, "step 1, or that it was missed, at both servers")
        account = finish_with([host.peer(i) for i in (0, 1)], host.layout, owner, 10)
        wait_for(lambda: host.memory.marks().finished.min() == 4, "all steps at both servers")
        assert account["total"] == 64 == account["applied"] + account["lost"]
        assert account["lost"] == (16 if dies == 1 else 0)
        assert account["shard_steps_missed"] == (3 if dies == 0 else 0)
        killed, whole = LIMIT / (math.sqrt(squares) + 1e-6), LIMIT / (math.sqrt(44.0) + 1e-6)
        at_0 = 3 * whole + (killed if dies == 1 else 0.0)
        at_1 = 3 * whole + (killed if dies == 0 else 0.0)
        moved = np.array([at_0, at_1, at_0])[:, None]
        np.testing.assert_allclose(began - row_zero_of_each_shard(host), ROW_LR * moved * np.ones((1, 4)), rtol=1e-4)
        np.testing.assert_allclose(BEGIN - host.dense(0)[1], LR * at_0 * np.ones(8), rtol=1e-4)
    finally:
        host.close()


def row_zero_of_each_shard(host: Host) -> np.ndarray:
    """float32 [3, 4], of the tables of dimension 4."""
    out = np.empty((3, 4), np.float32)
    group = host.layout.groups[0]
    assert group.dim == 4
    kernels.gather_rows(host.memory.flat, host.layout.record_starts(np.arange(3), group), 0, out)
    return out
