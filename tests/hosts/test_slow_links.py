"""Links of 100 Mbit/s: training and switching are slower, and nobody is taken for dead."""

from __future__ import annotations

from pathlib import Path

import pytest
from gba_hvd_tools.virtual_hosts import VirtualHosts

from .job import hosts_job

pytestmark = [pytest.mark.processes]
EPOCHS, SAMPLES = 4, 1000


@pytest.mark.variant
def test_slow_links_make_nobody_dead(lab: VirtualHosts, tmp_path: Path) -> None:
    lab.limit("100mbit")
    there_and_back = {"mode": "allreduce", "switch_at": {3: "gba", 20: "allreduce"}}
    environ = {"GBA_HVD_ALIVE_S": "2"}
    # Nobody dies, so nobody needs to be given up soon.
    with hosts_job(
        tmp_path / "job", lab, environ, gloo_timeout_s=60, gba=there_and_back, epochs=EPOCHS, global_batch=192
    ) as job:
        job.start()
        assert job.wait(300) == 0, job.log()
        job.assert_nothing_left()
        job.assert_samples(EPOCHS, SAMPLES)
        switches = [(line["from"], line["to"]) for line in job.events("switch")]
        assert switches.count(("allreduce", "gba")) == switches.count(("gba", "allreduce")) == 2, (
            "each worker, each way"
        )
        assert not job.events("membership") and job.result()["restarts"] == 0
        sent = {name: lab.sent_bytes(name) for name in job.hosts}
        assert all(n_bytes > 100_000 for n_bytes in sent.values()), "the job was to go through these links"
